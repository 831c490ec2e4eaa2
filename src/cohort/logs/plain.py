"""Plain view of a run: one compact line per step, for log files and pipes."""

from __future__ import annotations

from typing import TextIO

from cohort.evaluation.records import Evaluation
from cohort.logs.escape import escape_line
from cohort.logs.legend import STEP_LINE, list_task_rewards
from cohort.logs.numbers import format_compact, format_duration, format_tokens_per_second
from cohort.logs.view import Header, StepReport, Summary


class PlainView:
    """Prints lines without colours or control characters and flushes each one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, header: Header) -> None:
        """Prints two lines: recipe, model, task, algorithm, batch and steps; then the run directory."""
        names = " · ".join(escape_line(n) for n in (header.recipe, header.model, header.task, header.algo) if n)
        where = f"from step {header.first_step} " if header.first_step else ""
        self._write(f"cohort · {names} · {header.batch} · {where}to step {header.num_steps}")
        self._write(f"run {escape_line(header.path)}")

    def show_phase(self, name: str) -> None:
        """Does nothing: phases are not printed."""

    def show_step(self, report: StepReport) -> None:
        """Prints one line with the step's number, its main metrics, its speed and the remaining time."""
        width = len(str(report.num_steps))
        fields = [f"step {report.step:{width}d}/{report.num_steps}"]
        fields += [
            f"{label} {format_compact(report.metrics[name])}"
            for name, (label, _) in STEP_LINE.items()
            if name in report.metrics
        ]
        fields += [f"{label} {format_compact(value)}" for label, value in list_task_rewards(report.metrics)]
        if speed := format_tokens_per_second(report.metrics):
            fields.append(f"{speed} tok/s")
        if "time/step" in report.metrics:
            fields.append(f"{report.metrics['time/step']:.2f} s")
        fields.append(f"eta {format_duration(report.eta)}")
        self._write("  ".join(fields))

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Prints one line with the held-out accuracy or reward and its 95% interval."""
        values = evaluation.list_own_values()
        # Where all tasks are measured alike, the beginning of the line says how.
        is_alike = {measure for _, measure, _ in values} <= {evaluation.measure}
        own = ", ".join(f"{label} {'' if is_alike else f'{measure} '}{value:.3f}" for label, measure, value in values)
        self._write(
            f"{evaluation.title} {evaluation.value:.3f} ({evaluation.format_interval()})"
            f" at step {evaluation.step}, {evaluation.setting.num_problems} problems{own and f': {own}'}"
        )

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Prints one line with step, kind of event and text, escaped."""
        self._write(f"step {step} · {escape_line(kind)} · {escape_line(text, 500)}")

    def finish(self, summary: Summary) -> None:
        """Prints the closing lines and the commands to try next."""
        for line in summary.format_lines():
            self._write(escape_line(line, 1000))
        for number, command in enumerate(summary.next_commands):
            self._write(("     " if number else "next ") + escape_line(command, len(command)))

    def close(self) -> None:
        """Flushes the stream. Does not close it."""
        self._stream.flush()

    def _write(self, line: str) -> None:
        """Prints one line and flushes it. Characters that the stream's encoding lacks become escape sequences."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()
