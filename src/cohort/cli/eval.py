"""`cohort eval TASK --model M [--samples n --problems n --temperature t --task.x v] [--out FILE]`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.output import table
from cohort.cli.tasks import read_task
from cohort.config.options import EvalOptions
from cohort.errors import ConfigError

if TYPE_CHECKING:
    from cohort.store.records import Evaluation


@dataclass(frozen=True, kw_only=True)
class Options(EvalOptions):
    """How to sample and score."""

    model: str = "tiny"
    """A bundled or pulled name (see `cohort models`), or a folder in Hugging Face format."""
    out: str = ""
    """Write the evaluation with per-item results to this JSON file."""


def run(args: list[str]) -> None:
    about = "Measure a model's accuracy on a task's held-out problems."
    task, options = read_task("eval", about, Options(), args)
    options.check()
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f'there is no folder "{out.parent}" for --out; make it first.')
    from cohort import build

    names = [f.name for f in dataclasses.fields(EvalOptions)]
    plain = EvalOptions(**{name: getattr(options, name) for name in names})
    evaluation = build.evaluate(task, options.model, plain)
    print(report(options.model, evaluation, passes(evaluation)))
    if out is not None:
        out.write_text(json.dumps(evaluation.to_json(), indent=1), encoding="utf-8")
        print(f"wrote {out}")


def passes(evaluation: Evaluation) -> dict[int, float]:
    """pass@k for k = 2, 4, 8, ... up to the number of samples."""
    from cohort.evaluate import pass_at_k

    scores = [item.correct for item in evaluation.items]
    ks = [k for k in (2**i for i in range(1, 20)) if k <= evaluation.num_samples]
    return {k: pass_at_k(scores, k) for k in ks}


def report(model: str, evaluation: Evaluation, passes: dict[int, float]) -> str:
    """An evaluation as a table."""
    total = sum(evaluation.finishes.values())
    finishes = ", ".join(f"{name} {100 * n / total:.0f}%" for name, n in sorted(evaluation.finishes.items()))
    scored = sum(len(item.correct) for item in evaluation.items)
    rows = [
        ["model", model],
        [
            "problems",
            f"{evaluation.num_problems} ({evaluation.split}), samples of each: {evaluation.num_samples}",
        ],
        [
            "accuracy",
            f"{evaluation.accuracy:.3f}, 95% interval {evaluation.low:.3f} to {evaluation.high:.3f}",
        ],
        *([f"pass@{k}", f"{value:.3f}"] for k, value in passes.items()),
        ["mean tokens", f"{evaluation.mean_tokens:.1f}"],
        ["finish", finishes],
    ]
    if scored < total:
        rows.append(["not scored", f"{total - scored} samples: the grader failed"])
    return table(["task", evaluation.task], rows)
