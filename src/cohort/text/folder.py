"""The files of a model folder that belong to its text: tokenizer settings, special tokens and chat templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cohort.errors import ModelError
from cohort.system.json_text import read_json_file, show_value

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character in UTF-16, which no text may have alone


def reads_date(folder: Path, template: str = "") -> bool:
    """Returns whether a chat template may put today's date into prompts. Loads no tokenizer.

    It is that of a model folder, or the one with the source `template`, if that is not "".
    """
    sources = [template] if template else read_templates(folder, read_object(folder / "tokenizer_config.json")).values()
    return any("strftime_now" in source for source in sources)


def read_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the sources of a model folder's chat templates by name, such as "default"; {} if it has none.

    The first place that has any is used: the file chat_template.jinja, then `settings` (tokenizer_config.json), then
    chat_template.json. Raises ModelError if a template is not a text, and if the file cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, ValueError) as e:
            raise ModelError(f"{file} cannot be read: {e}; replace it by an intact copy, or delete it") from e
    place, templates = "tokenizer_config.json", settings.get("chat_template")
    if not templates:
        place, templates = "chat_template.json", read_object(folder / "chat_template.json").get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    # Several templates are a list of names with templates.
    pairs = [(t.get("name"), t.get("template")) if isinstance(t, dict) else (None, None) for t in as_list(templates)]
    found = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ModelError(
            f"{place} has {show_value(templates)} as chat_template; it must be a text, or a list of objects with the "
            "texts name and template. Correct it, or add the file chat_template.jinja to the folder"
        )
    return found


def as_list(value: Any) -> list[Any]:
    """Returns a list itself, and any other value as the one item of a list."""
    return value if isinstance(value, list) else [value]


def get_spelling(token: Any) -> str:
    """Returns the spelling of a special token, which is a string or a dict with `content`; "" for anything else.

    A spelling with half a character (a lone surrogate) is no token of any vocabulary, and "" too.
    """
    spelling = token.get("content") if isinstance(token, dict) else token
    return spelling if isinstance(spelling, str) and not SURROGATE.search(spelling) else ""


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no such file.

    Raises ModelError if the file holds anything else or cannot be read.
    """
    if not file.is_file():
        return {}
    try:
        value = read_json_file(file)
    except (OSError, ValueError) as e:
        raise ModelError(
            f"{file} cannot be read as JSON: {e}; replace it by an intact copy. For a pulled model, delete its folder "
            "and run cohort pull MODEL"
        ) from e
    if not isinstance(value, dict):
        raise ModelError(
            f"{file} is not a JSON object; replace it by an intact copy. For a pulled model, delete its folder "
            "and run cohort pull MODEL"
        )
    return value
