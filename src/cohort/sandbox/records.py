"""What a program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["finished", "raised", "killed", "time", "memory", "output"]
"""How a program ended: with exit code 0, with another one, by a signal, or because it used more than it may."""
MAX_SOURCE = 1 << 20  # bytes of a program
MAX_THREADS = 32  # of a program, all its processes together


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """What a program may use. More ends it."""

    cpu_seconds: float = 4.0
    """Processor time, rounded up to whole seconds. The load of the machine does not count."""
    wall_seconds: float = 12.0
    """Time by the clock, for programs that sleep or wait."""
    memory_mb: int = 256
    """Address space of each process. The interpreter itself needs about 20."""
    output_bytes: int = 1 << 17
    """Bytes of stdout, of stderr, and of results, each."""
    disk_mb: int = 8
    """Size of each of the two folders that can be written, and of the largest file."""
    files: int = 64
    """Open files."""
    processes: int = 0
    """Further processes that the program may start; 0 = it cannot start any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What became of a program. Nothing in it is to be trusted: the program wrote it."""

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None  # below 0: minus the signal that ended it; None = it was ended from outside
    seconds: float  # by the clock, the start of the sandbox included
    cpu_seconds: float = 0.0  # 0 for a program that was ended from outside
    results: list[Any] = field(default_factory=list)  # of calls, in their order; those that are missing are None
    """One dict per call: {"value": ...} as `driver.encode_value` writes it, or {"error": text}."""

    def explain(self) -> str:
        """Returns why the program did not end well, in a few words; "" if it did."""
        last = self.stderr.strip().rpartition("\n")[2][:200]
        return {
            "finished": "",
            "raised": last or f"the program ended with exit code {self.exit_code}",
            "killed": f"the program was ended by signal {-(self.exit_code or 0)}",
            "time": "the program ran longer than it may",
            "memory": "the program used more memory than it may",
            "output": "the program wrote more than it may",
        }[self.outcome]
