"""A model outside the native family from the command line: evaluate, train, kill, resume, check, export."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from cohort.config.schema import LearnerConfig, LoraConfig, NativeEngine
from cohort.errors import ConfigError
from cohort.jobs.build import build_rl_job
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.stream import TaskStream
from cohort.text import Tokenizer
from tests.helpers.command_line import SMALL, cohort, differences, next_args, only_run, remains
from tests.helpers.foreign_models import write_foreign_folder
from tests.helpers.fork_server import shared_server
from tests.helpers.small_runs import keep_torch_settings, small_run
from tests.helpers.struck_command import Strike

# A model with random weights adds no numbers, but about half of its completions have an even length.
RECIPE = """
from dataclasses import replace
import cohort
from cohort.recipes.tiny import quickstart

@cohort.task("even")
class Even:
    train_size: int = 24
    test_size: int = 12

    def rows(self, split):
        for n in range(self.train_size if split == "train" else self.test_size):
            yield {"id": f"{split}-{n}", "n": n}

    def prompt(self, row):
        return [{"role": "user", "content": f"Calculate {row['n']}+1."}]

    def score(self, row, answer):
        return {"correct": float(answer.num_tokens % 2 == 0 and len(answer.text) % 2 == 0)}

def even():
    return replace(quickstart(), task=Even(), reward={})
"""
# The reference is refreshed every 3 steps, so that checkpoints must contain it.
SETTINGS = [*SMALL, "--algo.kl.weight=0.01", "--algo.kl.refresh=3", "--optim.lr=1e-2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreign_folder(tmp_path_factory.mktemp("model") / "neo")


@pytest.fixture(scope="module")
def recipe(model: Path) -> str:
    (model.parent / "even.py").write_text(RECIPE)
    return f"{model.parent / 'even.py'}:even"


@pytest.fixture(scope="module")
def settings(model: Path) -> list[str]:
    return [*SETTINGS, f"--model={model}"]


@pytest.fixture(scope="module")
def undisturbed(recipe: str, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    shared_server().prepare("transformers.models.gpt_neo.modeling_gpt_neo")
    done = cohort("train", recipe, *settings, at=folder)
    assert done.returncode == 0, done.stderr
    run = only_run(folder)
    assert run is not None
    return run


def test_4_10_a_run_that_is_killed_and_resumed_ends_the_same(
    undisturbed: Path, recipe: str, settings: list[str], tmp_path: Path
) -> None:
    # In the fifth update: after the reference was refreshed.
    strike = Strike(signal.SIGKILL, "update", 5, 5)
    struck = cohort(*next_args(tmp_path, settings, recipe), at=tmp_path, orders=[strike])
    assert struck.returncode == -signal.SIGKILL, f"{strike} did not happen: {struck.stdout}{struck.stderr}"
    done = cohort(*next_args(tmp_path, settings, recipe), at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None
    assert differences(remains(run), remains(undisturbed)) == []


def test_every_update_was_done_and_every_weight_changed(undisturbed: Path, model: Path) -> None:
    """Prompts are not shared between samples, and the gap between sampler and learner is rounding."""
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if "loss" in row["metrics"]]
    assert len(steps) == 6 and all(m["sampler_gap/mean"] <= 1e-5 for m in steps)
    assert sum(m.get("updates/done", 0) for m in steps) == 6
    assert "prefix_sharing: false" in (undisturbed / "config.yaml").read_text()
    first, last = (load_file(f / "model.safetensors") for f in (model, undisturbed / "checkpoints/step-000006/model"))
    assert first.keys() == last.keys()
    unchanged = [name for name in first if torch.equal(first[name], last[name])]
    assert unchanged == []


def test_transformers_loads_the_exported_weights(undisturbed: Path, tmp_path: Path) -> None:
    done = cohort("export", undisturbed, "out", at=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    stored = load_file(undisturbed / "checkpoints/step-000006/model/model.safetensors")
    state = theirs.state_dict()
    assert all(torch.equal(state[name], t) for name, t in stored.items())
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert Tokenizer.load(tmp_path / "out").stop_ids == (2,)


def test_eval_writes_the_answers_of_the_model(model: Path, tmp_path: Path) -> None:
    """The greedy answers in the file equal those of transformers' own `generate` to the same prompts."""
    flags = ("--limit=3", "--temperature=0", "--max-tokens=12", "--threads=1", "--out=e.json")
    done = cohort("eval", "arithmetic", f"--model={model}", *flags, at=tmp_path)
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.load(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    stream = TaskStream(Arithmetic(), tokenizer, 0, "test")
    items = json.loads((tmp_path / "e.json").read_text())["items"]
    assert len(items) == 3
    for item, prompt in zip(items, stream.render_held_out(3), strict=True):
        tokens = torch.tensor([prompt.tokens])
        output = theirs.generate(tokens, do_sample=False, max_new_tokens=12, eos_token_id=[2], pad_token_id=0)[0]
        completion = [t for t in output[len(prompt.tokens) :].tolist() if t != 2]
        assert item["id"] == prompt.id and [s["text"] for s in item["answers"]] == [tokenizer.decode(completion)]


def test_check_passes_all_checks_of_the_update(recipe: str, settings: list[str], tmp_path: Path) -> None:
    done = cohort("check", recipe, *settings, at=tmp_path)
    findings = [line.split()[:2] for line in done.stdout.splitlines() if " update/" in line]
    assert len(findings) >= 12 and not [name for verdict, name in findings if verdict == "FAIL"], done.stdout
    for name in ("sampled-tokens", "unsampled-tokens", "sibling-context", "sampler-gap", "prefix-sharing", "ranks"):
        assert ["ok", f"update/{name}"] in findings
    assert "memory" in done.stdout and "runs on transformers' code" in done.stdout


def test_settings_for_native_models_only_are_refused(model: Path) -> None:
    lora = LearnerConfig(lora=LoraConfig(rank=4))
    with (
        keep_torch_settings(),
        pytest.raises(ConfigError, match=r"^learner.lora needs a model .* GPTNeoForCausalLM is not one"),
    ):
        build_rl_job(small_run(model=str(model), learner=lora))
    packed = NativeEngine(weights="packed")
    with (
        keep_torch_settings(),
        pytest.raises(ConfigError, match=r"^engine.weights = packed needs a model .* GPTNeo"),
    ):
        build_rl_job(small_run(model=str(model), engine=packed))
