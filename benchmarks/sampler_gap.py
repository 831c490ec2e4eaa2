"""The difference between log-probabilities of sampler and learner in bf16: Cohort, and vLLM with transformers.

    PYTHONPATH=src python3 benchmarks/sampler_gap.py qwen2.5-0.5b FOLDER --vllm-pythonpath FOLDER

A model is a folder in Hugging Face format, or the name of a shape with random weights (normal, 0.02). The prompts
are questions in the chat format of the model, or random tokens for a shape. Each has 8 samples of 128 tokens at
temperature 1. Cohort uses its own engine and `LocalLearner`. For vLLM the learner is a forward pass of transformers in
bf16 over prompt and completion, with log-softmax in fp32, as in trainers that are built on these two. Each side samples
its own tokens in its own process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import run_side, send_answer

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "Why is the sky blue?",
    "List the first ten prime numbers.",
    "How do I make a good vegetable soup?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "Who walked on the Moon in 1969?",
    "Give me three tips for learning a language.",
    "What is the difference between a virus and a bacterium?",
)
# Samples per prompt, and tokens per sample.
SAMPLES = 8
LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a side measures: the folder of a model, its name in the table, and the prompts as token ids."""

    name: str
    folder: str
    prompts: list[list[int]]


def choose_device() -> str:
    """Returns "cuda" if torch finds a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def measure_cohort(job: Job) -> list[float]:
    """Returns the absolute difference of the log-probabilities of each sampled token, with Cohort's own parts."""
    import torch

    from cohort.config.schema import LearnerConfig, OptimConfig
    from cohort.engines.base import Request, sample
    from cohort.engines.native import make_native_engine
    from cohort.learner.local import LocalLearner
    from cohort.loops.learning import annotate
    from cohort.models.files import load_folder
    from cohort.types import Group, Key, Prompt, Provenance, Sampling

    decoder = load_folder(job.folder, torch.bfloat16).decoder.to(choose_device())
    engine = make_native_engine(decoder, lambda ids: "", slots=64, max_context=512)
    requests = [
        Request(
            id=f"{p}/{i}",
            tokens=tokens,
            sampling=Sampling(max_tokens=LENGTH),
            key=Key(seed=0, purpose="bench", task="gap", prompt_id=str(p), visit=0, sample=i),
        )
        for p, tokens in enumerate(job.prompts)
        for i in range(SAMPLES)
    ]
    samples = sample(engine, requests)
    groups = [
        Group(
            prompt=Prompt(
                task="gap",
                id=str(p),
                visit=0,
                row={},
                messages=[],
                tokens=tokens,
                provenance=[int(Provenance.PROMPT)] * len(tokens),
            ),
            samples=[samples[f"{p}/{i}"] for i in range(SAMPLES)],
        )
        for p, tokens in enumerate(job.prompts)
    ]
    # The learner's log-probabilities, computed as before an update.
    learner = LocalLearner(decoder, LearnerConfig(token_budget=4096), OptimConfig(), num_updates=1)
    annotate(learner, groups, ["old"])
    return [
        abs(a - b)
        for group in groups
        for s in group.samples
        for a, b in zip(s.sampler_logprobs, s.old_logprobs, strict=True)
    ]


def measure_vllm(job: Job) -> list[float]:
    """Returns the absolute difference of the log-probabilities of each token, with vLLM and transformers."""
    import torch
    import transformers
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=job.folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512, gpu_memory_utilization=0.3
    )
    params = SamplingParams(n=SAMPLES, max_tokens=LENGTH, logprobs=0, ignore_eos=True, detokenize=False, seed=0)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=t) for t in job.prompts], params, use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.bfloat16).to("cuda").eval()
    gaps: list[float] = []
    for tokens, output in zip(job.prompts, outputs, strict=True):
        for completion in output.outputs:
            drawn = list(completion.token_ids)
            theirs = [step[token].logprob for step, token in zip(completion.logprobs, drawn, strict=True)]
            with torch.no_grad():
                # The logits of a token are at the position before it.
                logits = model(torch.tensor([tokens + drawn], device="cuda")).logits[0, len(tokens) - 1 : -1]
            ours = logits.float().log_softmax(-1).gather(1, torch.tensor(drawn, device="cuda")[:, None])[:, 0]
            gaps += (ours.cpu() - torch.tensor(theirs)).abs().tolist()
    return gaps


def measure_in_process(side: str, job: Job, path: str | None) -> list[float]:
    """Measures one side ("cohort" or "vllm") in its own process, with `path` as its PYTHONPATH."""
    gaps: list[float] | None = next(iter(run_side(__file__, side, job, path)), None)
    if gaps is None:
        raise SystemExit(f"{side}, {job.name}: the process sent no answer; see its output above.")
    return gaps


def make_job(model: str, room: Path) -> Job:
    """Returns the job for a folder, or for the name of a shape, whose random model is written to the folder `room`."""
    import torch

    from cohort.models.files import save_folder
    from cohort.models.shapes import find_shape, make_random_decoder
    from cohort.text import Tokenizer

    if Path(model).is_dir():
        tokenizer = Tokenizer.load(model)
        prompts = [tokenizer.render([{"role": "user", "content": q}]).tokens for q in QUESTIONS]
        return Job(name=Path(model).name, folder=str(Path(model).resolve()), prompts=prompts)
    config = find_shape(model)
    save_folder(make_random_decoder(config, torch.bfloat16, choose_device()), None, None, room / model)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size, (len(QUESTIONS), 128), generator=generator).tolist()
    return Job(name=f"{model}, random", folder=str(room / model), prompts=prompts)


def main(argv: list[str] | None = None) -> None:
    """Measures both sides for every model and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--only", choices=("cohort", "vllm"))
    parser.add_argument("--vllm-pythonpath", metavar="FOLDER")
    a = parser.parse_args(argv)
    print(
        "| model | sampler and learner | mean gap | 99% below | largest | tokens |\n|---|---|---:|---:|---:|---:|",
        flush=True,
    )
    sides: tuple[tuple[str, str, Any], ...] = (
        ("cohort", "Cohort", str(ROOT / "src")),
        ("vllm", "vLLM, transformers", a.vllm_pythonpath),
    )
    with tempfile.TemporaryDirectory() as room:
        for model in a.models:
            job = make_job(model, Path(room))
            for side, words, path in sides:
                if a.only in (None, side):
                    gaps = sorted(measure_in_process(side, job, path))
                    mean = sum(gaps) / len(gaps)
                    most = gaps[int(0.99 * len(gaps))]
                    print(
                        f"| {job.name} | {words} | {mean:.4f} | {most:.3f} | {gaps[-1]:.2f} | {len(gaps)} |", flush=True
                    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        given = Job(**json.loads(Path(sys.argv[3]).read_text()))
        send_answer(measure_cohort(given) if sys.argv[2] == "cohort" else measure_vllm(given))
    else:
        main()
