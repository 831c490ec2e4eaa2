"""Every command as a user runs it: a process of its own, the bundled model, the words it prints."""

from __future__ import annotations

import ctypes
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from cohort.models.files import load_folder
from cohort.run.directory import load_evaluations
from cohort.run.store.reader import Reader
from tests.helpers.command_line import (
    SMALL,
    Done,
    cohort,
    differences,
    next_args,
    no_worker_is_left,
    only_run,
    remains,
    shared_reference,
)
from tests.helpers.decoders_and_groups import plain_attention
from tests.helpers.fork_server import shared_server
from tests.helpers.struck_command import Strike

BENCH = shlex.split("--repeats 1 --prompts 2 --samples 2 --prompt-tokens 16 --completion-tokens 8 --threads 1")
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def refused(done: Done) -> str:
    """The one line of an error the user can mend."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("cohort: ") and done.stderr.count("\n") == 1
    return done.stderr.strip()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Shared: only to be read."""
    return shared_reference(tmp_path_factory)[0]


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    """A finished run of one's own, in `runs/` of the folder the test works in."""
    return Path(shutil.copytree(original, tmp_path / "runs" / original.name))


# ---- train ---------------------------------------------------------------------------------------------------


def test_train_ends_with_the_result_the_place_and_three_commands(original: Path) -> None:
    lines = (original.parents[1] / "output.txt").read_text().splitlines()
    assert lines[0] == "cohort · quickstart · tiny · arithmetic · grpo · 6 prompts x 4 samples · to step 6"
    assert [line.split("  ")[0] for line in lines if line.startswith("step ") and "·" not in line] == [
        f"step {n}/6" for n in range(1, 7)
    ]
    result, interval, place, *commands = lines[-6:]
    assert re.fullmatch(r"held-out accuracy \d\.\d\d -> \d\.\d\d", result)
    assert result in (original / "run.md").read_text()
    assert interval.startswith("95% intervals ")
    assert place == f"run runs/{original.name}"
    assert commands == [
        f"next cohort eval arithmetic --model runs/{original.name}@6"
        " --max-tokens 24 --task.train-size=24 --task.test-size=12",
        f"     cohort export runs/{original.name} {original.name}-model",
        "     cohort train tiny_countdown",
    ]
    assert commands[1].strip() not in (original / "run.md").read_text()


def test_the_commands_that_train_prints_work_as_printed(tmp_path: Path) -> None:
    """Also with a list of columns, a stop text that looks like a flag, and paths with spaces."""
    for split, numbers in (("train", (2, 3)), ("test", (4, 5))):
        lines = [json.dumps({"n": [*numbers, i], "to": i + 5}) for i in range(2, 8)]
        (tmp_path / f"my {split}.jsonl").write_text("\n".join(lines))
    settings = ["--task.data=my {split}.jsonl", "--task.columns", "nums=n", "target=to", "--eval.temperature=0.25"]
    settings += ["--sampling.stop=--seed=7", "it's\n", "--steps=1", "--batch.prompts=2", "--batch.samples=2"]
    settings += ["--sampling.max-tokens=8", "--threads=1", "--eval.problems=0"]
    done = cohort("train", "tiny_countdown", *settings, "--out", "my runs", at=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, evaluate, export, resume = done.stdout.splitlines()
    for line in (evaluate.removeprefix("next "), export, resume):
        words = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
        ).stdout
        assert words.startswith("cohort\0")
        again = cohort(*words.split("\0")[1:-1], at=tmp_path)
        assert again.returncode == 0, again.stderr
    [written] = (tmp_path / "evals").glob("*.json")
    setting = json.loads(written.read_text())["setting"]
    assert setting["knobs"]["columns"] == ["nums=n", "target=to"] and setting["num_problems"] == 6
    assert setting["sampling"]["temperature"] == 0.25


def test_train_writes_json_lines(tmp_path: Path) -> None:
    settings = [s for s in SMALL if not s.startswith(("--steps", "--eval.every"))]
    done = cohort("train", "quickstart", *settings, "--steps=2", "--log", "json", at=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]
    kinds = ["start", "evaluation", "event", "step", "step", "evaluation", "event", "finish"]
    assert [line["kind"] for line in lines] == kinds
    assert "prompts once per group" in lines[2]["text"]
    assert lines[0]["path"] == lines[-1]["path"] == f"runs/{only_run(tmp_path).name}"  # type: ignore[union-attr]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]
    assert all(math.isfinite(line["metrics"]["reward/mean"]) for line in lines if line["kind"] == "step")
    assert lines[-1]["complete"] is True
    assert (lines[-1]["before"], lines[-1]["after"]) == (lines[1]["accuracy"], lines[5]["accuracy"])


MISTAKES = {
    "train quickstart --stepz 3": "unknown flag --stepz. Did you mean --steps?",
    "train quickstart --steps many": "--steps",
    "train quickstarted": 'Did you mean "quickstart"?',
    "train nowhere.py:recipe": 'there is no file "nowhere.py"',
    "train quickstart --model nowhere": '"nowhere"',
    "resume runs/nowhere": "there is no run runs/nowhere",
    "eval arithmetic --model nowhere": '"nowhere"',
    "export runs/nowhere out": "there is no run runs/nowhere",
    "pull nowhere": 'no model "nowhere"',
    "data arithmetic --out missing/file.jsonl": 'there is no folder "missing"',
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(words: str, tmp_path: Path) -> None:
    assert MISTAKES[words] in refused(cohort(*words.split(), at=tmp_path))
    assert list(tmp_path.iterdir()) == []


def _not_above_permissions() -> None:
    """For a child: root loses the right to write where permissions say no, as any other user."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o555)
    done = cohort("train", "quickstart", *SMALL, "--out", "shut", at=tmp_path, preexec_fn=_not_above_permissions)
    assert re.search(
        r"cannot write shut/\S+: permission denied. Make the file and its directory writable", refused(done)
    )
    assert list((tmp_path / "shut").iterdir()) == []


# ---- resume --------------------------------------------------------------------------------------------------


def test_an_extended_run_is_the_run_that_was_longer_from_the_start(original: Path, tmp_path: Path) -> None:
    shorter = [s if not s.startswith("--steps") else "--steps=3" for s in SMALL]
    assert cohort("train", "quickstart", *shorter, at=tmp_path).returncode == 0
    assert cohort(*next_args(tmp_path), "--steps", "6", at=tmp_path).returncode == 0
    run = only_run(tmp_path)
    assert run is not None
    assert differences(remains(run), remains(original)) == ["run.md"]  # which tells the command that was typed
    with Reader(run / "run.db") as reader:
        assert reader.read_events(kind="command")[0].text == shlex.join(["cohort", "train", "quickstart", *shorter])


def test_a_finished_run_says_so(finished: Path, original: Path, tmp_path: Path) -> None:
    done = cohort(*next_args(tmp_path), at=tmp_path)
    assert done.returncode == 0
    assert f"all 6 steps are done; train on with: cohort resume runs/{finished.name} --steps 12" in done.stdout
    assert "held-out accuracy" in done.stdout and "\nstep 1/6" not in done.stdout
    assert differences(remains(finished), remains(original)) == []


def test_a_run_keeps_its_settings(finished: Path, original: Path, tmp_path: Path) -> None:
    again = next_args(tmp_path)
    for flag in ("--seed", "--optim.lr"):
        line = refused(cohort(*again, flag, "1", at=tmp_path))
        assert f"{flag} cannot change: a run keeps its settings, only --steps may grow" in line
    assert "has 6 steps, and --steps is 4: a run can be extended, not shortened" in refused(
        cohort(*again, "--steps", "4", at=tmp_path)
    )
    file = finished / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.0003", "lr: 0.0004"))
    line = refused(cohort(*again, "--steps", "8", at=tmp_path))
    assert "was started with optim.lr = 0.0003, not 0.0004" in line
    file.write_bytes((original / "config.yaml").read_bytes())
    assert differences(remains(finished), remains(original)) == []  # nothing was lost by trying


# ---- Ctrl-C --------------------------------------------------------------------------------------------------


def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(original: Path, tmp_path: Path) -> None:
    done = cohort(*next_args(tmp_path), at=tmp_path, orders=[Strike(signal.SIGINT, "update", 3, 20)])
    assert done.returncode == 130
    run = only_run(tmp_path)
    assert run is not None
    assert "finishing this step, then saving; a second signal stops at once" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"stopped after step 3 of 6; go on with: cohort resume runs/{run.name}" in done.stdout.splitlines()
    assert "step 3/6" in done.stdout and "step 4/6" not in done.stdout
    assert (run / "checkpoints" / "step-000003" / "state.json").is_file()
    assert "stopped after step 3 of 6" in (run / "run.md").read_text()
    done = cohort(*next_args(tmp_path), at=tmp_path)
    assert done.returncode == 0 and "from step 3 to step 6" in done.stdout
    assert differences(remains(run), remains(original)) == []


def test_a_second_ctrl_c_stops_at_once(original: Path, tmp_path: Path) -> None:
    strikes = [Strike(signal.SIGINT, "update", 2, 30), Strike(signal.SIGINT, "update", 2, 200)]
    ended = shared_server().run(*next_args(tmp_path), at=tmp_path, orders=strikes)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr
    run = only_run(tmp_path)
    assert run is not None
    assert f"stopped by KeyboardInterrupt; go on with: cohort resume runs/{run.name}" in ended.stdout
    assert "step 1/6" in ended.stdout and "step 2/6" not in ended.stdout
    assert not list((run / "checkpoints").iterdir())
    assert no_worker_is_left(ended.pid)
    assert cohort(*next_args(tmp_path), at=tmp_path).returncode == 0
    assert differences(remains(run), remains(original)) == []


# ---- the other commands --------------------------------------------------------------------------------------


def test_eval_prints_a_table_and_writes_every_item(original: Path, tmp_path: Path) -> None:
    model = original / "checkpoints" / "step-000006" / "model"
    flags = shlex.split("--limit 8 --samples 2 --max-tokens 24 --threads 1 --task.test-size 12 --out found.json")
    done = cohort("eval", "arithmetic", "--model", model, *flags, at=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    scores = [[answer["correct"] for answer in item["answers"]] for item in found["items"]]
    assert len(scores) == 8 and all(len(row) == 2 for row in scores)
    accuracy = sum(map(sum, scores)) / 16
    both = sum(max(row) for row in scores) / 8
    table = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines()[:-1])
    assert found["accuracy"] == accuracy and table["avg@2"].startswith(f"{accuracy:.3f}, 95% interval ")
    assert table["problems"] == "8 (test), samples of each: 2" and table["pass@2"].startswith(f"{both:.3f}, 95% ")
    assert done.stdout.splitlines()[-1] == "wrote found.json"


def test_a_checkpoint_is_named_by_its_run(original: Path, tmp_path: Path) -> None:
    flags = shlex.split("--limit 2 --max-tokens 4 --threads 1 --task.test-size 12")
    done = cohort("eval", "arithmetic", "--model", f"{original}@best", *flags, "--out", "some/new/x.json", at=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "some/new/x.json").read_text())["setting"]
    evaluations = load_evaluations(original)
    best = max((e.accuracy, -step) for step, e in evaluations.items() if step)[1]
    assert (found["run"], found["step"], found["chosen_on"]) == (original.name, -best, "arithmetic/test")
    assert "was chosen as the best of its run on the test problems of arithmetic, so this result" in done.stderr
    done = cohort("eval", "arithmetic", "--model", original, *flags, "--split", "train", at=tmp_path)
    assert done.returncode == 0 and "chosen" not in done.stderr + done.stdout
    assert f"{original}@6" in done.stdout
    assert "of these steps: 4, 6" in refused(cohort("eval", "arithmetic", "--model", f"{original}@5", at=tmp_path))
    done = cohort("export", f"{original}@4", "four", at=tmp_path)
    saved = original / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    assert done.returncode == 0 and (tmp_path / "four/model.safetensors").read_bytes() == saved.read_bytes()
    small = shlex.split("--steps 1 --batch.prompts 2 --batch.samples 2 --eval.problems 1 --sampling.max-tokens 4")
    done = cohort("train", "quickstart", "--model", "four", *small, at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None and f"model: {tmp_path}/four\n" in (run / "config.yaml").read_text()


def test_every_command_takes_a_run_by_its_name(finished: Path, tmp_path: Path) -> None:
    words = shlex.split("--steps 1 --eval.problems 8 --batch.prompts 4 --threads 1 --log plain --name second-try")
    done = cohort("train", "quickstart", *words, at=tmp_path)
    assert done.returncode == 0 and "run runs/second-try" in done.stdout.splitlines(), done
    again = cohort("train", "quickstart", *words, at=tmp_path)
    assert "runs/second-try exists already" in refused(again)
    part = finished.name[-4:]
    # A folder with a plan is a sweep.
    shutil.copytree(tmp_path / "runs" / "second-try", tmp_path / "runs" / "grid" / "001-x")
    (tmp_path / "runs" / "grid" / "sweep.yaml").touch()
    for command in (
        "explain cond --step 1",
        "replay cond --step 1",
        "resume cond",
        "export cond@1 exported",
        "eval arithmetic --model cond --limit 4 --max-tokens 8 --threads 1 --out cond.json",
        f"compare {part}@0 {part}",
        "compare grid/001@0 cond@1",
        "eval arithmetic --model grid/001@best --limit 4 --max-tokens 8 --threads 1 --out grid.json",
        "plot grid --text",
    ):
        done = cohort(*shlex.split(command), at=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "exported" / "config.json").is_file()
    assert json.loads((tmp_path / "cond.json").read_text())["setting"]["model"].endswith("runs/second-try@1")
    shutil.copytree(tmp_path / "runs" / "second-try", tmp_path / "runs" / "second")
    for command in ("chat grid", "eval arithmetic --model grid", "export grid out", "explain grid"):
        line = refused(cohort(*command.split(), at=tmp_path))
        assert "grid is a sweep: name one of its 1 runs, such as grid/001." in line
    for command in ("resume sceond", "chat sceond", "export sceond@1 out", "compare sceond cond"):
        assert "Did you mean" in (line := refused(cohort(*command.split(), at=tmp_path))) and " second" in line
    line = refused(cohort("resume", "secon", at=tmp_path))
    assert '"secon" is part of the names of 2 runs: runs/second, runs/second-try. Give more of the name.' in line


def test_eval_of_a_checkpoint_repeats_the_evaluation_of_its_run(original: Path, tmp_path: Path) -> None:
    """Same problems, same keys, same weights: the same answers, in the run and outside it."""
    model = original / "checkpoints" / "step-000006" / "model"
    flags = shlex.split("--limit 12 --max-tokens 24 --threads 1 --task.test-size 12 --out e.json")
    assert cohort("eval", "arithmetic", "--model", model, *flags, at=tmp_path).returncode == 0
    outside = json.loads((tmp_path / "e.json").read_text())
    inside = json.loads((original / "eval" / "step-000006.json").read_text())
    assert outside["items"] == inside["items"]


def test_data_writes_a_line_a_prompt(tmp_path: Path) -> None:
    done = cohort("data", "arithmetic", "--out", "d.jsonl", "--n", "3", "--task.train-size", "5", at=tmp_path)
    assert done.returncode == 0 and done.stdout == "wrote 3 arithmetic prompts (train) to d.jsonl\n"
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 3
    assert all(row["messages"][0]["role"] == "user" and "answer" in row["row"] for row in rows)


def test_models_lists_the_bundled_one(tmp_path: Path) -> None:
    done = cohort("models", at=tmp_path)
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][0] == "model" and ["tiny", "ready"] in [line[:2] for line in lines]


def test_an_exported_model_is_the_same_in_transformers(original: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = cohort("export", original, "out", at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote out: the model of {original} after step 6\ntalk to it with: cohort chat ./out\n"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_folder(tmp_path / "out").decoder
    text = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        [{"role": "user", "content": "What is 17 + 4?"}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor(AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"])
    with torch.no_grad():
        hidden = ours(ids, torch.arange(len(ids)), plain_attention())
        mine, reference = ours.logits(hidden), theirs(ids[None]).logits[0]
    assert torch.allclose(mine, reference, atol=1e-5 * float(reference.abs().max()), rtol=0)
    trained = original / "checkpoints" / "step-000006" / "model" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == trained.read_bytes()
    assert "exists already" in refused(cohort("export", original, "out", at=tmp_path))
    assert "of these steps: 4, 6" in refused(cohort("export", original, "other", "--step", "5", at=tmp_path))


@pytest.mark.parametrize("what", ["engine", "learner", "step"])
def test_bench_measures(what: str, tmp_path: Path) -> None:
    done = cohort("bench", what, *BENCH, at=tmp_path)
    assert done.returncode == 0, done.stderr
    table = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert table["bench"] == what and table["shape"] == "2 x 2 samples, 16+8 tokens"
    assert float(table["tokens/s"]) > 0
    assert 0 < int(re.match(r"(\d+)%", table["of the limit"])[1]) <= 100  # type: ignore[index]


def test_bench_engine_with_random_weights(tmp_path: Path) -> None:
    def bench(*more: str) -> Done:
        return cohort("bench", "engine", *BENCH, "--weights", "random", "--lengths", "lognormal", *more, at=tmp_path)

    done = bench("--model", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    assert "2 x 2 samples, 16+8 tokens at most, log-normal" in done.stdout
    assert re.search(r"^start-up s +\d", done.stdout, re.MULTILINE)
    assert "use one of: llama-2-7b, " in refused(bench("--model", "qwen"))
