"""One compact line a step, for log files and pipes."""

from __future__ import annotations

from typing import TextIO

from cohort.evaluation.records import Evaluation
from cohort.logs.escape import one_line
from cohort.logs.numbers import compact, duration, tokens_per_second
from cohort.logs.view import Header, StepReport, Summary

_SHOWN = {
    "reward/mean": "reward",
    "length/mean": "length",
    "groups/dead": "dead",
    "loss": "loss",
    "perplexity": "perplexity",
    "grad_norm": "grad",
    "entropy": "entropy",
    "lr": "lr",
    "sampler_gap/max": "gap",
}


class PlainView:
    """Lines without colours or control characters, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, header: Header) -> None:
        names = " · ".join(one_line(n) for n in (header.recipe, header.model, header.task, header.algo) if n)
        where = f"from step {header.first_step} " if header.first_step else ""
        self._write(f"cohort · {names} · {header.batch} · {where}to step {header.num_steps}")
        self._write(f"run {one_line(header.path)}")

    def phase(self, name: str) -> None:
        pass

    def step(self, report: StepReport) -> None:
        width = len(str(report.num_steps))
        fields = [f"step {report.step:{width}d}/{report.num_steps}"]
        fields += [f"{label} {compact(report.metrics[n])}" for n, label in _SHOWN.items() if n in report.metrics]
        if speed := tokens_per_second(report.metrics):
            fields.append(f"{speed} tok/s")
        if "time/step" in report.metrics:
            fields.append(f"{report.metrics['time/step']:.2f} s")
        fields.append(f"eta {duration(report.eta)}")
        self._write("  ".join(fields))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(
            f"held-out accuracy {evaluation.accuracy:.3f} ({evaluation.low:.3f} to {evaluation.high:.3f})"
            f" at step {evaluation.step}, {evaluation.setting.num_problems} problems"
        )

    def event(self, step: int, kind: str, text: str) -> None:
        self._write(f"step {step} · {one_line(kind)} · {one_line(text)}")

    def finish(self, summary: Summary) -> None:
        for line in summary.lines():
            self._write(one_line(line, 1000))
        for number, command in enumerate(summary.next_commands):
            self._write(("     " if number else "next ") + one_line(command, 1000))

    def close(self) -> None:
        self._stream.flush()

    def _write(self, line: str) -> None:
        # A log file in an old encoding gets escapes instead of an error.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()
