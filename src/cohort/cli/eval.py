"""`cohort eval TASK [TASK ...] --model M [--samples n --limit n --temperature t --task.x v] [--out PATH]`.

Measures a model's accuracy, or mean reward, on the held-out problems of tasks.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.output import format_table
from cohort.cli.ranks import Ranks, start_ranks
from cohort.cli.tasks import read_tasks
from cohort.config.options import EvalOptions
from cohort.errors import ConfigError
from cohort.logs.printing import EscapingFormatter, print_note, print_result, show_grader_output
from cohort.tasks.base import OVER_LIMIT, check_packages

if TYPE_CHECKING:
    from cohort.evaluation.records import Evaluation
    from cohort.evaluation.standalone import Progress

PLAIN_STEPS = 10  # lines of progress per task where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Options(EvalOptions):
    """How to sample and score."""

    model: str = "tiny"
    """A bundled or pulled name (see `cohort models`), a folder in Hugging Face format, a run (its last checkpoint),
    RUN@STEP, RUN@best, or the server's name for it."""
    ranks: Ranks = None
    """Processes on this machine that divide the problems among them; 0 = one per GPU."""
    out: str = "evals"
    """Where the evaluation is written, with every prompt, completion and verdict: a folder, or a .json file."""


def run(args: list[str]) -> None:
    """Runs `cohort eval` with `args`, the words after it: evaluates, writes and prints each task's result.

    Finished evaluations are read and not made again. Raises ConfigError for wrong flags, before the model is loaded.
    """
    about = (
        "Measure a model's accuracy (or mean reward, if a task has none) on the held-out problems of tasks. The same "
        "command continues an interrupted evaluation. A finished one is shown and not made again; only samples that "
        "could not be scored are tried again."
    )
    tasks, options = read_tasks("eval", about, Options(), args)
    options.check()
    out = Path(options.out)
    # A path with a suffix is a file, unless a folder of that name exists.
    is_file = out.suffix != "" and not out.is_dir()
    if is_file and len(tasks) > 1:
        raise ConfigError(
            f"--out {out} names one file, but there are {len(tasks)} tasks; name a folder, for example --out evals."
        )
    if is_file and out.suffix != ".json":
        raise ConfigError(
            f"--out {out} must be a folder or end in .json. Write a file name that ends in .json, or a folder name "
            "without a dot."
        )
    for task in tasks:
        check_packages(task)
        options.scoring.require_keys(task)
    # Imported here because it takes longer. A wrong name is found before torch is imported.
    from cohort.jobs.models import find_model

    if options.engine != "server":
        find_model(options.model)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.evaluation.standalone import ModelEvaluator
    from cohort.ranks.agree import agree_on_errors
    from cohort.ranks.join import closing_ranks, join_ranks

    # The evaluator takes the options without those of the command itself (model, out).
    names = [f.name for f in dataclasses.fields(EvalOptions)]
    plain = EvalOptions(**{name: getattr(options, name) for name in names})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if options.ranks is not None and start_ranks(["eval", *args], options.ranks):
        return
    world = join_ranks(options.device)
    evaluator = agree_on_errors(world, lambda: ModelEvaluator(options.model, plain, world))
    with show_grader_output(), closing(evaluator), closing_ranks():
        # All tasks are prepared first, so that errors in their rows show before anything is sampled.
        prepared = agree_on_errors(world, lambda: [evaluator.prepare(task) for task in tasks])
        try:
            for n, prepared_task in enumerate(prepared):
                with show_progress() if world.is_first else nullcontext(_show_nothing) as progress:
                    done = evaluator.run(prepared_task, out, progress)
                if done is None:
                    continue
                prefix = "wrote" if done.is_new else "this evaluation existed already:"
                print_result(f"{chr(10) * (n > 0)}{format_evaluation(done.evaluation)}\n{prefix} {done.path}")
        except KeyboardInterrupt:
            print_note("cohort: stopped; finished problems are kept, and the same command continues the evaluation")
            raise


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yields a function that shows progress: a bar on a terminal, elsewhere at most about twenty lines per task.

    It is called with the name of the task, the number of finished problems and the number of all problems. It prints to
    stderr, because standard output is for the result.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from cohort.logs.console import make_console

    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _print_progress
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("", total=None)
        yield lambda task, done, total: bar.update(line, description=task, completed=done, total=total)


def _show_nothing(task: str, done: int, total: int) -> None:
    """Shows no progress: the first rank shows that of all."""


def _print_progress(task: str, done: int, total: int) -> None:
    """Prints "task: done of total problems" to stderr at every tenth of the problems and at the last one, else nothing.

    With fewer than 20 problems, every problem gets a line.
    """
    part = max(1, total // PLAIN_STEPS)
    if done == total or done % part == 0:
        print_note(f"{task}: {done} of {total} problems")


def _format_mean_tokens(evaluation: Evaluation) -> str:
    """Returns the mean number of tokens of the answers as text, which says so if a server did not count them."""
    if evaluation.setting.engine == "server" and evaluation.mean_tokens == 0:
        return "not known: the server does not count them"
    return f"{evaluation.mean_tokens:.1f}"


def format_evaluation(evaluation: Evaluation) -> str:
    """Returns an evaluation as a table: setting, accuracy or mean reward, reward parts, lengths, and what went wrong.

    The task's own summary, if there is one, takes the place of the reward parts. Parts with the mean 0 are left out.
    """
    from cohort.evaluation.coefficients import format_coefficients

    e, s = evaluation, evaluation.setting
    # At least 1, so that an evaluation without answers can be printed.
    total = max(1, sum(e.finishes.values()))
    finishes = ", ".join(f"{name} {100 * n / total:.0f}%" for name, n in sorted(e.finishes.items()))
    drawn = "greedy" if s.sampling["temperature"] == 0 else f"temperature {s.sampling['temperature']:g}"
    how = f"{s.engine} engine, {s.template} template, {drawn}, at most {s.sampling['max_tokens']:g} tokens"
    measure = e.measure if s.num_samples == 1 or e.accuracy is None else f"avg@{s.num_samples}"
    interval = "" if e.low is None else "95% interval "
    rows = [
        ["model", s.model],
        ["problems", f"{s.num_problems} ({s.split}), samples of each: {s.num_samples}"],
        ["how", how],
        *([["system", " ".join(s.system.split())]] if s.system else []),
        [measure, f"{e.value:.3f}, {interval}{e.format_interval()}"],
        *([f"pass@{p.k}", f"{p.value:.3f}, 95% interval {p.low:.3f} to {p.high:.3f}"] for p in e.passes),
        *([f"mean {name}", f"{value:.3f}"] for name, value in e.parts.items() if value and not e.summary),
        *([name, f"{value:.3f}"] for name, value in e.summary.items()),
        ["mean tokens", _format_mean_tokens(e)],
        ["finish", finishes],
    ]
    if calls := sum((Counter(answer.calls) for item in e.items for answer in item.answers), Counter()):
        rows.append(["calls", ", ".join(f"{outcome} {num}" for outcome, num in sorted(calls.items()))])
    if any(value != 1.0 for value in s.reward.values()):
        rows.append(["coefficients", format_coefficients(s.reward)])
    if s.date:
        rows.append(["date", f"{s.date}, as today in the prompts"])
    if s.num_left_out:
        rows.append(["left out", f"{s.num_left_out} problems whose prompts do not fit the model's context"])
    if s.chosen_on == f"{s.task}/{s.split}":
        rows.append(["chosen", "as the best of its run on these problems, so this result flatters it"])
    if cut := e.finishes.get("length"):
        rows.append(["cut off", f"{cut} of {total} answers at the limit of tokens"])
    if over := sum(OVER_LIMIT in answer.reason for item in e.items for answer in item.answers):
        rows.append(["over limit", f"{over} answers were more work than the grader does, and count as wrong"])
    if e.num_failed:
        rows.append(["not scored", f"{e.num_failed} samples: the grader failed"])
    return format_table(["task", s.task], rows)
