"""Finding runs: a run is named by its path, or by its name or a unique part of it.

A run of a sweep may be named SWEEP/PART. Nothing of a run is read or locked, and torch is not imported.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cohort.errors import ConfigError, RunError
from cohort.system.json_text import read_json_file
from cohort.system.paths import expand_home

_RUNS = Path("runs")  # where runs are, unless --out says otherwise
_MAX_SHOWN = 5  # runs that a message names
_MAX_NAME_BYTES = 200  # of a run's name: file systems allow 255
_MAX_PIECES = 8  # of a name, between dashes, that are compared with a mistyped one


def is_run(path: Path) -> bool:
    """Returns whether `path` is the directory of a run, which is whether it has a config.yaml."""
    return (path / "config.yaml").is_file()


def list_runs(folder: Path) -> list[Path]:
    """Returns the runs in `folder`, and those in the folders directly in it (a sweep has its runs so), by name.

    [] if there is no such folder. Folders that cannot be read are left out.
    """
    found: list[Path] = []
    for path in _list_folders(folder):
        found += [path] if is_run(path) else filter(is_run, _list_folders(path))
    return sorted(found)


def _list_folders(folder: Path) -> list[Path]:
    """Returns the folders directly in `folder`; [] if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []


def is_sweep(path: Path) -> bool:
    """Returns whether `path` is the folder of a sweep, which is whether it has a sweep.yaml."""
    return (path / "sweep.yaml").is_file()


def find_run(name: str | Path, *, or_sweep: bool = False) -> Path:
    """Returns the directory of the run that `name` means: a path, or the name of a run or a unique part of it.

    A path that exists is returned as it is; a bare word that is a folder or file here, but no run, sweep or model, also
    names a run of exactly this name in the folder runs. Else runs in the folder that the path begins with (such as
    runs/) are searched, or in the folder runs and in the working directory if it is a bare word. That folder may also
    be named as in the folder runs: SWEEP/PART is a run of a sweep. A run of exactly this name comes before those whose
    name contains it, and so does the number of a run in a sweep. A sweep is found in the same way, if no run fits; with
    `or_sweep` runs and sweeps whose names contain `name` are equals. Returns the path as it is if nothing fits, so that
    the caller's error names it. Raises RunError if several fit.
    """
    path = expand_home(name)
    word = path.name
    exists = path.exists()
    if not word or (exists and (str(path) != word or _is_known_folder(path))):
        return path
    runs, sweeps = _list_candidates(path)
    if exists:
        return next((run for run in runs if run.name == word), path)
    fitting = [run for run in runs if run.name == word] or [sweep for sweep in sweeps if sweep.name == word]
    # 001 is the first run of a sweep, also if a learning rate is 0.001.
    fitting = fitting or [run for run in runs if word.isdecimal() and run.name.startswith(f"{word}-")]
    if not fitting:
        runs, sweeps = ([one for one in known if word in one.name] for known in (runs, sweeps))
        fitting = runs + sweeps if or_sweep else runs or sweeps
    if len(fitting) > 1:
        shown = ", ".join(map(str, fitting[:_MAX_SHOWN]))
        more = f" and {len(fitting) - _MAX_SHOWN} more" if len(fitting) > _MAX_SHOWN else ""
        kinds = " and ".join(["runs"] * any(map(is_run, fitting)) + ["sweeps"] * any(map(is_sweep, fitting)))
        raise RunError(
            f'"{name}" is part of the names of {len(fitting)} {kinds}: {shown}{more}. Give more of the name.'
        )
    return fitting[0] if fitting else path


def _is_known_folder(path: Path) -> bool:
    """Returns whether `path` is the folder of a run, a sweep or a model."""
    return is_run(path) or is_sweep(path) or (path / "config.json").is_file()


def _list_candidates(path: Path) -> tuple[list[Path], list[Path]]:
    """Returns the runs and the sweeps among which that is looked for which `path`, which does not exist, names."""
    folder = path.parent
    if str(path) == path.name:
        beside = sorted(filter(is_run, _list_folders(folder)))
        return list_runs(_RUNS) + beside, _list_sweeps(_RUNS) + _list_sweeps(folder)
    # An absolute folder is not below the folder runs: then both are the same.
    runs = list_runs(folder) or list_runs(_RUNS / folder)
    if not runs and not folder.is_dir():
        sweeps = {*_list_sweeps(folder.parent), *_list_sweeps(_RUNS / folder.parent)}
        runs = [run for sweep in sorted(sweeps) if folder.name in sweep.name for run in list_runs(sweep)]
    return runs, _list_sweeps(folder)


def _list_sweeps(folder: Path) -> list[Path]:
    """Returns the sweeps directly in `folder`, by name."""
    return sorted(filter(is_sweep, _list_folders(folder)))


def require_run(path: Path) -> None:
    """Raises RunError, which says what to name instead, if `path` is not the directory of a run."""
    if is_run(path):
        return
    if not path.is_dir():
        raise RunError(f"there is no run {path}. {_suggest_run(path)}")
    runs = list_runs(path)
    kind = "a sweep" if is_sweep(path) else "a folder of runs"
    if runs:
        shown = ", ".join(map(_abbreviate, runs[:3]))
        best = _read_best_run(path)
        with_best = f" (with the best settings: {_abbreviate(best)})" if best else ""
        raise RunError(
            f"{_shorten(path)} is {kind}: name one of its {len(runs)} runs, such as {shown}{with_best}. "
            f"`{_make_list_command(path)}` lists all."
        )
    if is_sweep(path):
        raise RunError(
            f"{_shorten(path)} is a sweep, and none of its runs has begun: `cohort resume {_shorten(path)}` continues "
            "it. Name a run; `cohort runs` lists all."
        )
    raise RunError(f"{path} is not a run: it has no config.yaml. Give the directory that `cohort train` printed.")


def _read_best_run(sweep: Path) -> Path | None:
    """Returns a run with the best settings of a sweep, by its sweep.json; None if that is not known."""
    try:
        table = read_json_file(sweep / "sweep.json")
        best = next(row["settings"] for row in table["combinations"] if row["is_best"])
        run = sweep / next(row["name"] for row in table["runs"] if row["settings"] == best)
    # The sweep has not ended, or the file is damaged.
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    return run if is_run(run) else None


def _shorten(run: Path) -> str:
    """Returns the name of a run or sweep as `find_run` takes it: without the folder runs."""
    return str(run.relative_to(_RUNS)) if run.is_relative_to(_RUNS) and run != _RUNS else str(run)


def _make_list_command(folder: Path) -> str:
    """Returns the command that lists the runs in a folder."""
    return "cohort runs" if folder == _RUNS else f"cohort runs {_shorten(folder)}"


def _abbreviate(run: Path) -> str:
    """Returns the name of a run as `find_run` takes it, SWEEP/NUMBER for a run of a sweep."""
    number = run.name.partition("-")[0]
    return _shorten(run.with_name(number) if is_sweep(run.parent) and number.isdecimal() else run)


def _suggest_run(path: Path) -> str:
    """Returns sentences that suggest a run in place of `path`, which does not exist."""
    before = str(path).rpartition("@")[0]
    if before and is_run(find_run(before)):
        return f"This command takes the run itself: write {before} without the @."
    if similar := find_similar_run(path):
        return f"Did you mean {similar}? `cohort runs` lists all."
    is_bare = str(path) == path.name
    for folder in (_RUNS, path.parent) if is_bare else (path.parent, _RUNS / path.parent, _RUNS):
        if count := len(list_runs(folder)):
            return f"Name one of the {count} runs in the folder {folder}: `{_make_list_command(folder)}` lists all."
    where = "this folder" if is_bare else f"the folder {path.parent}"
    return f"Give the directory that `cohort train` printed: {where} has no runs. `cohort train RECIPE` starts one."


def find_similar_run(path: Path) -> str:
    """Returns the name of the run or sweep that is most similar to `path`, which does not exist; "" if none is.

    It may also be similar to a part of the name, between dashes. Of equally similar ones the last by name is taken.
    """
    runs, sweeps = _list_candidates(path)
    if runs or sweeps:
        word = path.name
        known = {run.name: run for run in sweeps + runs}
    else:
        # The name of the sweep may be mistyped.
        word = f"{path.parent.name}/{path.name}"
        known = {f"{run.parent.name}/{run.name}": run for run in list_runs(_RUNS)}
    # Names may be long, with a date and settings: a user types a part.
    parts = {part: run for name, run in known.items() for part in _list_parts(name)}
    for found in (known, parts):
        if close := difflib.get_close_matches(word, found, n=1, cutoff=0.7):
            run = found[close[0]]
            return str(run) if path.parent.is_dir() and path.parent != Path() else _shorten(run)
    return ""


def _list_parts(name: str) -> Iterator[str]:
    """Yields the parts of a run's name between dashes, with its sweep before each if `name` has it."""
    sweep, slash, own = name.rpartition("/")
    pieces = own.split("-")[:_MAX_PIECES]
    for start in range(len(pieces)):
        for end in range(start + 1, len(pieces) + 1):
            yield sweep + slash + "-".join(pieces[start:end])


def require_new_name(folder: Path, name: str) -> None:
    """Raises ConfigError if `name` cannot be that of a new run in `folder`: it has a wrong form or is in use."""
    if not re.fullmatch(r"[^\W_][\w.=+,-]{0,99}", name) or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ConfigError(
            f'--name "{name}" cannot be the name of a run: it must begin with a letter or digit, and may have letters, '
            "digits and any of . = + , _ - after it, 100 characters in all. Change it; its folder is --out."
        )
    path = folder / name
    if path.exists() or path.is_symlink():
        again = f"continue that run with `cohort resume {path}`" if is_run(path) else "move it away"
        raise ConfigError(
            f"{path} exists already, so no new run can have this name: choose another --name, or {again}."
        )
