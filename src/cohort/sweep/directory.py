"""The folder of a sweep.

runs/2026-11-15-sweep-quickstart-k3f9/
  sweep.yaml     the plan; written first, never changed
  001-.../       one run directory per combination and seed
  logs/          what each run printed
  results/       one file per run that has ended
  sweep.md       the table at the end, for people
  sweep.json     the same for programs
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cohort.config.yaml_text import dump_yaml, read_yaml
from cohort.errors import ConfigError, RunError
from cohort.run.lock import Lock
from cohort.sweep.plan import FORMAT, MAX_RUNS, Plan, PlannedRun
from cohort.system.disk import explain_disk_errors, write_atomically
from cohort.system.json_text import make_record, read_json_file

PLAN_FILE = "sweep.yaml"
_LOCK_FILE = ".sweep-lock"  # not .lock: a folder with that is a run
_STATES = ("done", "stopped", "failed")  # of a run that has ended
_PLAN_COMMENT = """\
# The plan of a sweep. `settings` are the user's. `threads`, `split` and `date` are chosen by the sweep for all runs
# (threads: 0 and split: '' = it chose nothing).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run of a sweep ended."""

    state: str  # "done", "stopped" by a rule, or "failed"; in memory also "missing": what it left is gone
    step: int = 0  # completed steps
    why: str = ""  # the rule that stopped it, the last line of its error, or what is missing
    undecided: list[str] = field(default_factory=list)  # rules whose metric the run did not have at their step
    eval_command: list[str] = field(default_factory=list)  # words that evaluate its model; RUN stands for its path


def is_sweep(path: Path) -> bool:
    """Returns whether `path` is the folder of a sweep, which is whether it has a sweep.yaml."""
    return (path / PLAN_FILE).is_file()


def find_sweep(name: str) -> Path | None:
    """Returns the folder of the sweep that `name` means: a path, or the name of one in the folder runs; else None."""
    path = Path(name).expanduser()
    return next((found for found in (path, Path("runs") / name) if is_sweep(found)), None)


def require_free(path: Path) -> None:
    """Raises RunError if the folder `path` exists and has anything in it: then no new sweep can be there.

    If another process is making a sweep there at this moment, the error says so.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, so no sweep can have this name. Choose another --name.")
    if not _list_content(path):
        return
    if (path / _LOCK_FILE).exists():
        lock = _make_lock(path)
        lock.acquire()
        lock.release()
    _require_empty(path)


def _require_empty(path: Path) -> None:
    """Raises RunError if the folder `path` has anything in it."""
    if is_sweep(path):
        raise RunError(f"another process has made the sweep {path} in the meantime. Repeat the command.")
    if others := _list_content(path):
        raise RunError(
            f"{path} exists already and is no sweep (it has {others[0]}). Choose another --name, or move it away."
        )


def _list_content(path: Path) -> list[str]:
    """Returns the names of what the folder `path` has in it, sorted; [] if there is no such folder.

    Hidden files do not count: a kill may have left a folder with nothing but its lock.
    """
    with explain_disk_errors(path):
        return sorted(file.name for file in path.iterdir() if file.name[0] != ".") if path.exists() else []


def _make_lock(path: Path) -> Lock:
    """Returns the lock of the sweep in the folder `path`, which is not taken."""
    return Lock(path / _LOCK_FILE, "sweep")


class SweepDirectory:
    """The folder of a sweep. A process that runs the sweep must hold its lock."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path.resolve()
        self.shown_path = path  # as the user wrote it
        self.plan = plan
        self.logs = self.path / "logs"
        self.results = self.path / "results"
        self._lock = _make_lock(self.path)

    @classmethod
    def create(cls, path: Path, plan: Plan) -> SweepDirectory:
        """Makes the folder of a new sweep with its plan, locks it and returns it.

        Raises RunError if `path` exists and has anything in it, another process makes a sweep there, or the disk fails.
        """
        if not path.is_dir():
            require_free(path)
        with explain_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, plan)
        # Before a look into the folder: what is in it may be of a process that is making the same sweep.
        directory.lock()
        _require_empty(path)
        # The plan is first: a folder that has anything else is a sweep, whenever a kill comes.
        write_atomically(directory.path / PLAN_FILE, _PLAN_COMMENT + dump_yaml(asdict(plan)))
        directory.make_folders()
        return directory

    @classmethod
    def open(cls, path: Path) -> SweepDirectory:
        """Returns the sweep in the folder `path`, not locked.

        Raises RunError if there is none, or its plan cannot be read or is from a later version of Cohort.
        """
        file = path / PLAN_FILE
        try:
            tree = read_yaml(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{file} cannot be read: {error}. Repair it, or restore it from a copy.") from error
        except ConfigError as error:
            raise RunError(str(error)) from error
        if isinstance(tree, dict) and isinstance(tree.get("format"), int) and tree["format"] > FORMAT:
            raise RunError(
                f"{file} has format {tree['format']}, but this version of Cohort reads formats up to {FORMAT}; upgrade "
                "Cohort."
            )
        try:
            plan: Plan = make_record(Plan, tree)
        except ValueError as error:
            raise RunError(f"{file} is damaged: {error}. Restore it from a copy.") from error
        is_whole = plan.combinations and plan.seeds and plan.num_runs <= MAX_RUNS
        if not is_whole or any(len(values) != len(plan.axes) for values in plan.combinations):
            raise RunError(
                f"{file} is damaged: its combinations do not fit its axes and seeds. Restore it from a copy."
            )
        return cls(path, plan)

    def lock(self) -> None:
        """Locks the sweep until the end of the process. Raises RunError if another process holds the lock."""
        self._lock.acquire()

    def make_folders(self) -> None:
        """Makes those of the folders logs and results that are not there."""
        with explain_disk_errors(self.path):
            for folder in (self.logs, self.results):
                folder.mkdir(exist_ok=True)

    def get_run_path(self, run: PlannedRun) -> Path:
        """Returns the directory of a run, which may not exist yet."""
        return self.path / run.name

    def get_log_path(self, run: PlannedRun) -> Path:
        """Returns the file with what a run prints."""
        return self.logs / f"{run.name}.log"

    def save_result(self, run: PlannedRun, result: RunResult) -> None:
        """Writes how a run ended."""
        write_atomically(self._get_result_path(run), json.dumps(asdict(result), indent=1))

    def load_result(self, run: PlannedRun) -> RunResult | None:
        """Returns how a run ended; None if it has not ended, or the file is damaged: then it ends once more.

        So does a run with a state that this version does not know.
        """
        try:
            result: RunResult = make_record(RunResult, read_json_file(self._get_result_path(run)))
        except (OSError, ValueError):
            return None
        # The word of the first sweeps.
        result = replace(result, state="done") if result.state == "finished" else result
        return result if result.state in _STATES else None

    def remove_result(self, run: PlannedRun) -> None:
        """Removes the file that says how a run ended, if there is one."""
        with explain_disk_errors(self.path):
            self._get_result_path(run).unlink(missing_ok=True)

    def _get_result_path(self, run: PlannedRun) -> Path:
        """Returns the file that says how a run ended."""
        return self.results / f"{run.number:03d}.json"
