"""Models of the Hugging Face hub, by `owner/name`: found in its own cache, fetched on request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cohort.errors import ModelError

# What a model folder needs here: no pickled weights, no code.
WANTED = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json", "*.jinja"),
)


def is_hub_name(name: str) -> bool:
    """`owner/name`, as the hub writes it.

    >>> is_hub_name("Qwen/Qwen2.5-3B"), is_hub_name("./models/x"), is_hub_name("runs/a/b"), is_hub_name("tiny")
    (True, False, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def cached(name: str) -> Path | None:
    """The folder of a model that was fetched before; None where it was not."""
    hub = _hub()
    if hub is None:
        return None
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(WANTED), local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if _is_whole(folder) else None


def fetch(name: str) -> Path:
    """Fetch a model; what is there already is not fetched again."""
    hub = _hub()
    if hub is None:
        raise ModelError(f"to fetch {name} from the Hugging Face hub: pip install 'cohort[hub]'")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(WANTED)))
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub: {why}; check the name and the network, and for a "
            "gated model log in with `hf auth login`"
        ) from error
    if not _is_whole(folder):
        raise ModelError(f"{name} has no config.json with safetensors weights: it cannot be loaded here")
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        return None
    return huggingface_hub
