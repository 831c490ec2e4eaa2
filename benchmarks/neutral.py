"""A proof that two trees of this repository train the same, bit for bit.

    python benchmarks/neutral.py --base COMMIT [--new COMMIT] [--cases NAME ...] [--keep DIR]

Each case is a `cohort` command on the CPU. It runs once in the tree of `--base` (default: the commit before HEAD) and
once in the tree of `--new` (default: the files of this checkout). It compares every metric of every step except times
and file sizes, the tensors of the last checkpoint's model, and the evaluations with the text of every answer. It prints
a table and exits with 1 if anything differs.

A metric with another name counts as a difference, unless `--renamed old=new` or the table `METRICS` in the new tree's
`cohort/config/names.py` contains the new name. The flags of the new tree are translated in the same way with
`--flags old=new` and the table `SETTINGS`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config.algos import ALGOS

ROOT = Path(__file__).resolve().parents[1]
NAMES = Path("src/cohort/config/names.py")
# Eight steps are enough where the quickstart itself is not the case.
SHORT = ("--steps", "8")


def make_quickstart_command(*flags: str) -> tuple[str, ...]:
    """Returns the arguments of `cohort` that train the quickstart."""
    return ("train", "quickstart", *flags)


CASES: dict[str, tuple[str, ...]] = {
    **{f"quickstart-{seed}": make_quickstart_command("--seed", str(seed)) for seed in range(3)},
    # With two updates per batch, so that ratios, clips and gates have an effect.
    **{name: make_quickstart_command("--algo", name, "--learner.minibatches", "2", *SHORT) for name in ALGOS},
    "lora": ("train", "tiny_lora", *SHORT),
    "think_again": make_quickstart_command("--turns", "think_again", *SHORT),
    "replay": make_quickstart_command("--replay.prompts", "8", "--algo.correction.kind", "truncate", *SHORT),
    "kl_entropy": make_quickstart_command(
        *("--algo.kl.weight", "0.01", "--algo.kl.target", "0.005"),
        *("--algo.entropy", "0.01", "--algo.entropy-target", "0.6"),
        *SHORT,
    ),
    "refill": make_quickstart_command("--algo", "dapo", "--algo.dead", "refill", *SHORT),
    "eval": ("eval", "arithmetic", "--model", "tiny", "--limit", "64"),
}


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One side of the comparison. `settings` maps names of settings or sections in `CASES` to those of this tree."""

    folder: Path
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of a case. `difference` is the first difference in words; empty = there is none."""

    case: str
    difference: str
    seconds: float


def is_compared(metric: str) -> bool:
    """Returns whether a metric must be equal: all but times and the size of the rollout files."""
    return not metric.startswith("time/") and metric != "rollouts/bytes"


def read_metrics(run: Path) -> dict[int, dict[str, str]]:
    """Returns the metrics of each step as texts that differ if any bit differs. NaN equals NaN."""
    steps: dict[int, dict[str, str]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        values = {name: repr(float(value)) for name, value in record["metrics"].items() if is_compared(name)}
        steps.setdefault(record["step"], {}).update(values)
    return steps


def read_tensor_digests(file: Path) -> dict[str, str]:
    """Returns type, shape and digest of each tensor in a safetensors file, as a text by name."""
    # The file begins with the length of its JSON header in 8 bytes; the tensors follow the header.
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    described = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        digest = hashlib.sha256(content[begin + first : begin + last]).hexdigest()[:16]
        described[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return described


def read_weight_digests(run: Path) -> dict[str, str]:
    """Returns the digests of all tensors of the last checkpoint's model and adapters, and the checkpoint's name."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if not checkpoints:
        return {}
    last = checkpoints[-1]
    files = sorted((last / "model").rglob("*.safetensors"))
    digests = {"checkpoint": last.name}
    for file in files:
        for name, digest in read_tensor_digests(file).items():
            digests[f"{file.relative_to(last)}: {name}"] = digest
    return digests


def read_answers(file: Path) -> dict[str, str]:
    """Returns the accuracy of an evaluation, and text and score of each answer, by problem and number of the answer."""
    evaluation = json.loads(file.read_text(encoding="utf-8"))
    answers = {"accuracy": repr(evaluation["accuracy"])}
    for number, item in enumerate(evaluation["items"]):
        for sample, answer in enumerate(item["answers"]):
            answers[f"problem {number} ({item['id']}), answer {sample}"] = repr((answer["text"], answer["correct"]))
    return answers


def find_first_difference(base: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Returns the first key whose values differ or that one side does not have, in words; "" if there is none.

    >>> find_first_difference({"loss": "0.1"}, {"loss": "0.1"})
    ''
    >>> find_first_difference({"loss": "0.1", "lr": "1.0"}, {"loss": "0.1", "lr": "2.0"})
    'lr: 1.0 became 2.0'
    >>> find_first_difference({"loss": "0.1"}, {"loss": "0.1", "lr": "2.0"})
    'lr: only the new tree has it (2.0)'
    """
    # The order of the base, then what only the new tree has.
    for key in [*base, *(key for key in new if key not in base)]:
        if key not in new:
            return f"{key}: only the base has it ({base[key]})"
        if key not in base:
            return f"{key}: only the new tree has it ({new[key]})"
        if base[key] != new[key]:
            return f"{key}: {base[key]} became {new[key]}"
    return ""


def compare_metrics(base: Path, new: Path, renamed: Mapping[str, str]) -> str:
    """Returns the first step and metric that differ between two run folders; "" if none does.

    `renamed` maps names of metrics in the base to those in the new tree.
    """
    old_steps = read_metrics(base)
    new_steps = read_metrics(new)
    if not old_steps:
        return "the base has no metrics"
    for step in sorted(old_steps.keys() | new_steps.keys()):
        if step not in old_steps or step not in new_steps:
            return f"step {step}: only the {'base' if step in old_steps else 'new tree'} has it"
        expected = {renamed.get(name, name): value for name, value in old_steps[step].items()}
        difference = find_first_difference(expected, new_steps[step])
        if difference:
            return f"step {step}, {difference}"
    return ""


def compare_evaluations(base: Path, new: Path) -> str:
    """Returns the first evaluation, problem and answer that differ between two folders; "" if none does."""
    old_files, new_files = (sorted(p.name for p in folder.glob("*.json")) for folder in (base, new))
    # Two empty folders prove nothing.
    if old_files != new_files or not old_files:
        return f"evaluations of the base: {old_files}, of the new tree: {new_files}"
    for name in old_files:
        difference = find_first_difference(read_answers(base / name), read_answers(new / name))
        if difference:
            return f"evaluation {name}, {difference}"
    return ""


def compare_runs(base: Path, new: Path, renamed: Mapping[str, str]) -> str:
    """Returns the first difference between two run folders: in metrics, weights or evaluations; "" if there is none."""
    # Metrics first: they name the step at which two runs diverge.
    difference = compare_metrics(base, new, renamed)
    if difference:
        return difference
    old_weights = read_weight_digests(base)
    new_weights = read_weight_digests(new)
    if not old_weights:
        return "the base has no checkpoint"
    return find_first_difference(old_weights, new_weights) or compare_evaluations(base / "eval", new / "eval")


def translate_flag(word: str, settings: Mapping[str, str]) -> str:
    """Returns a word of a command line with the name that its setting has in a tree; other words unchanged.

    >>> translate_flag("--replay.max-age", {"replay": "reuse"})
    '--reuse.max-age'
    >>> translate_flag("--algo.entropy-target", {"algo.entropy": "x"})
    '--algo.entropy-target'
    """
    if not word.startswith("--"):
        return word
    name = word.removeprefix("--").replace("-", "_")
    for old, new in settings.items():
        if name == old or name.startswith(old + "."):
            return "--" + (new + name.removeprefix(old)).replace("_", "-")
    return word


def run_case(command: tuple[str, ...], tree: Tree, out: Path, threads: int) -> str:
    """Runs a case in one tree with its files below `out`. Returns why it failed; "" if it did not."""
    here = [translate_flag(word, tree.settings) for word in command]
    here += ["--device", "cpu", "--threads", str(threads)]
    # Without --out, `cohort eval` puts a digest of the grader's code into the name of its file.
    here += ["--log", "plain", "--out", str(out)] if command[0] == "train" else ["--out", str(out / "evaluation.json")]
    environment = os.environ | {"PYTHONPATH": str(tree.folder / "src"), "OMP_NUM_THREADS": str(threads)}
    out.mkdir(parents=True)
    log_file = out.with_name(f"{out.name}.log")
    with log_file.open("w") as log:
        program = [sys.executable, "-m", "cohort", *here]
        done = subprocess.run(program, cwd=out, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode == 0:
        return ""
    last = log_file.read_text().strip().splitlines()[-1:]
    return f"exit status {done.returncode}: {''.join(last)}"


def compare_case(
    name: str, trees: tuple[Tree, Tree], folder: Path, renamed: Mapping[str, str], threads: int
) -> CaseResult:
    """Runs a case in both trees, one after the other, and compares their files."""
    begin = time.monotonic()
    command = CASES[name]
    outs = folder / name / "base", folder / name / "new"
    difference = ""
    for side, tree, out in zip(("base", "new tree"), trees, outs, strict=True):
        failure = run_case(command, tree, out, threads)
        if failure:
            difference = f"the {side} failed: {failure}"
            break
    if not difference and command[0] == "eval":
        difference = compare_evaluations(*outs)
    elif not difference:
        base, new = (next(path for path in out.iterdir() if path.is_dir()) for out in outs)
        difference = compare_runs(base, new, renamed)
    return CaseResult(case=name, difference=difference, seconds=time.monotonic() - begin)


def unpack_commit(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into `folder` and returns `folder`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def read_renamed(tree: Path, table: str) -> dict[str, str]:
    """Returns the table METRICS or SETTINGS of old to new names from the tree's module; empty if it has none."""
    file = tree / NAMES
    return dict(runpy.run_path(str(file)).get(table, {})) if file.is_file() else {}


def parse_pairs(texts: list[str]) -> dict[str, str]:
    """Returns `{"old": "new"}` for `["old=new"]`."""
    for pair in texts:
        if "=" not in pair:
            sys.exit(f"{pair} is no pair of names; write old=new.")
    return {old: new for old, _, new in (pair.partition("=") for pair in texts)}


def print_rows(results: Iterator[CaseResult]) -> Iterator[CaseResult]:
    """Prints each result as a row of a table as soon as it comes, and yields it."""
    print("| case | verdict | seconds |\n|---|---|---:|", flush=True)
    for result in results:
        print(f"| `{result.case}` | {result.difference or 'equal'} | {result.seconds:.0f} |", flush=True)
        yield result


def main() -> None:
    """Runs the cases in both trees, prints the table and exits with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", metavar="COMMIT")
    parser.add_argument("--new", metavar="COMMIT", help="default: the files of this checkout")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics with a new name")
    parser.add_argument("--flags", nargs="+", default=[], metavar="OLD=NEW", help="settings with a new name")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="CPU threads per run (default: all cores)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder in which the runs are kept")
    a = parser.parse_args()
    if a.keep and a.keep.exists():
        sys.exit(f"{a.keep} exists already; name a new folder with --keep.")
    with tempfile.TemporaryDirectory() as temporary:
        # The cases name settings as the base does.
        trees = Path(temporary) / "trees"
        base = Tree(folder=unpack_commit(a.base, trees / "base"), settings={})
        here = unpack_commit(a.new, trees / "new") if a.new else ROOT
        new = Tree(folder=here, settings=read_renamed(here, "SETTINGS") | parse_pairs(a.flags))
        metrics = read_renamed(here, "METRICS") | parse_pairs(a.renamed)
        folder = (a.keep or Path(temporary) / "runs").resolve()
        results = list(print_rows(compare_case(case, (base, new), folder, metrics, a.threads) for case in a.cases))
    sys.exit(1 if any(result.difference for result in results) else 0)


if __name__ == "__main__":
    main()
