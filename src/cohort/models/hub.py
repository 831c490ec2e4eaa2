"""Models of the Hugging Face hub, named `owner/name`: lookup in the hub's own cache, and fetching."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cohort.errors import ModelError
from cohort.system.json_text import read_json_file

# The files of a model that are used here. Pickled weights and code are left out.
WANTED_PATTERNS = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json", "*.jinja"),
)


def is_hub_name(name: str) -> bool:
    """Returns whether `name` has the form `owner/name`. A relative path such as "runs/a" has it too.

    >>> is_hub_name("Qwen/Qwen2.5-3B"), is_hub_name("./models/x"), is_hub_name("runs/a/b"), is_hub_name("tiny")
    (True, False, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def find_cached(name: str) -> Path | None:
    """Returns the folder of the hub model `owner/name` in the hub's own cache. Uses no network.

    Returns None if it is not there, if it lacks config.json or a safetensors file, or if the package huggingface_hub is
    not installed.
    """
    hub = _import_hub()
    if hub is None:
        return None
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(WANTED_PATTERNS), local_files_only=True))
    except (OSError, ValueError):
        # Not in the cache, or not a valid name.
        return None
    # An interrupted download can leave a folder without weights.
    return folder if _is_complete(folder) else None


def locate_download(folder: Path) -> Path:
    """Returns the folder to delete before a model in `folder` can be fetched again: mostly `folder` itself.

    In the hub's cache, where `folder` is a snapshot or has the blobs, it is the folder that holds both: a snapshot
    consists of links, and a damaged blob would stay.

    >>> locate_download(Path("models/some")), locate_download(Path("hub/models--a--b/snapshots/1"))
    (PosixPath('models/some'), PosixPath('hub/models--a--b'))
    """
    if folder.parent.name == "snapshots":
        return folder.parent.parent
    return folder.parent if folder.name == "blobs" else folder


def fetch_model(name: str, *, force: bool = False) -> Path:
    """Fetches the model `owner/name` from the hub into the hub's own cache and returns its folder there.

    Only config, tokenizer and safetensors files are fetched; without `force`, none that is in the cache already. Raises
    ModelError if the model cannot be fetched or used, or if the package huggingface_hub is not installed.
    """
    hub = _import_hub()
    if hub is None:
        raise ModelError(
            f"{name} cannot be fetched without the package huggingface_hub: install it with pip install 'cohort[hub]'"
        )
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(WANTED_PATTERNS), force_download=force))
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub: {why}; check the name and the network, and for a "
            "gated model log in with `hf auth login`"
        ) from error
    if not _is_complete(folder):
        raise ModelError(
            f"{name} has no config.json with safetensors weights on the Hugging Face hub, so it cannot be loaded: "
            "choose a model that is published as safetensors"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """Returns whether the folder has a config.json and at least one safetensors file, and all that its index names.

    Without an index that can be read, one file is enough: the loader tells what is wrong with the index.
    """
    try:
        shards = set(read_json_file(folder / "model.safetensors.index.json")["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        shards = set()
    return (
        (folder / "config.json").is_file()
        and any(folder.glob("*.safetensors"))
        and all((folder / str(name)).is_file() for name in shards)
    )


def _import_hub() -> Any:
    """Returns the module huggingface_hub, or None if it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        return None
    return huggingface_hub
