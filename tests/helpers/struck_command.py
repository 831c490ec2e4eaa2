"""The command line, with signals at chosen lines of code. A chosen moment would be another line on a busy machine.

python -m tests.helpers.struck_command SIGKILL@checkpoint#2+17 -- train quickstart ...
    sends SIGKILL at the 17th line that the second call of checkpoint.save executes, or when a shorter call returns
python -m tests.helpers.struck_command census=FILE -- train quickstart ...
    runs to the end; FILE gets, per place, the number of lines that each of its calls executed, as JSON
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cohort

PACKAGE = Path(cohort.__file__).parent
WATCHED = (str(PACKAGE), shutil.__file__)  # shutil: where folders are removed file by file

# Places by name: file below src/cohort, and qualified name of a function.
PLACES = {
    "anywhere": ("cli/main.py", "main"),
    "creation": ("run/directory.py", "RunDirectory.create"),
    "recovery": ("run/life.py", "Run._recover"),
    "rollout": ("engines/native/engine.py", "NativeEngine.poll"),
    "scoring": ("scoring/pool.py", "ScoringPool.poll"),
    "update": ("learner/local.py", "LocalLearner.update"),
    "held_out": ("learner/local.py", "LocalLearner.measure"),  # of given answers, not in reinforcement learning
    "rollout_file": ("run/store/rollouts.py", "save_rollouts"),
    "database": ("run/store/db.py", "Store.write_step"),
    "evaluation": ("evaluation/evaluate.py", "evaluate"),
    "evaluation_rows": ("run/store/db.py", "Store.write_evaluation"),
    "evaluation_file": ("run/directory.py", "RunDirectory.save_evaluation"),
    "checkpoint": ("run/checkpoint.py", "save"),
    "prune": ("run/checkpoint.py", "prune"),
    "finish": ("run/life.py", "Run.finish"),
}


@dataclass(frozen=True)
class Strike:
    """A signal at the `line`-th line executed within the `call`-th call of a place."""

    signal: signal.Signals
    place: str
    call: int = 1
    line: int = 1

    def __str__(self) -> str:
        return f"{self.signal.name}@{self.place}#{self.call}+{self.line}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Returns the strike that a text like SIGKILL@checkpoint#2+17 describes."""
        match = re.fullmatch(r"(\w+)@(\w+)#(\d+)\+(\d+)", text)
        assert match and match[2] in PLACES, f"{text} is not SIGNAL@PLACE#CALL+LINE"
        return cls(signal.Signals[match[1]], match[2], int(match[3]), int(match[4]))


@dataclass
class Watch:
    """Counts the calls of one place and the lines of each, and sends the signals that are due."""

    strikes: list[Strike] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # lines of each call
    depth: int = 0  # calls of the place that are under way; above 1 in a recursion

    def enter(self) -> None:
        """Counts a call of the place."""
        self.depth += 1
        if self.depth == 1:
            self.lengths.append(0)

    def leave(self) -> None:
        """Ends a call. A strike at a line that the call did not reach happens now."""
        self.depth -= 1
        if self.depth == 0:
            self._strike(lambda s: s.line > self.lengths[-1])

    def line(self) -> None:
        """Counts a line of the call under way."""
        self.lengths[-1] += 1
        if self.strikes:
            self._strike(lambda s: s.line == self.lengths[-1])

    def _strike(self, due: Any) -> None:
        """Sends the signals of this call for whose strike `due` is true."""
        for strike in [s for s in self.strikes if s.call == len(self.lengths) and due(s)]:
            self.strikes.remove(strike)
            os.kill(os.getpid(), strike.signal)


class Tracer:
    """A trace function (sys.settrace) that follows calls and, inside a watched place, lines. It patches nothing."""

    def __init__(self, watches: dict[str, Watch]) -> None:
        self.watches = watches
        self._places = {(str(PACKAGE / PLACES[n][0]), PLACES[n][1]): watch for n, watch in watches.items()}
        self._known: dict[CodeType, tuple[bool, Watch | None]] = {}

    def call(self, frame: FrameType, what: str, _: Any) -> Any:
        code = frame.f_code
        if code not in self._known:
            place = (code.co_filename, code.co_qualname)
            self._known[code] = (code.co_filename.startswith(WATCHED), self._places.get(place))
        ours, watch = self._known[code]
        if watch is not None:
            watch.enter()
        return self.line if ours and any(w.depth for w in self.watches.values()) else None

    def line(self, frame: FrameType, what: str, _: Any) -> Any:
        if what == "line":
            for watch in self.watches.values():
                if watch.depth:
                    watch.line()
        elif what == "return":
            watch = self._known[frame.f_code][1]
            if watch is not None:
                watch.leave()
        return self.line


def main(args: list[str]) -> int:
    cut = args.index("--")
    orders, command = args[:cut], args[cut + 1 :]
    census = next((o.removeprefix("census=") for o in orders if o.startswith("census=")), "")
    strikes = [Strike.parse(o) for o in orders if not o.startswith("census=")]
    places = PLACES if census else {s.place for s in strikes}
    watches = {name: Watch([s for s in strikes if s.place == name]) for name in places}

    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the command line does, before torch is there
    import cohort.jobs.build  # noqa: F401  (what torch does while it is imported is not watched)
    from cohort.cli.main import main as cohort_main

    sys.argv = ["cohort", *command]
    if orders:
        sys.settrace(Tracer(watches).call)
    try:
        return cohort_main(command)
    finally:
        sys.settrace(None)
        if census:
            Path(census).write_text(json.dumps({name: watch.lengths for name, watch in watches.items()}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
