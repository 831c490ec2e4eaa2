"""Remedies for names that do not exist: settings and commands that a user may have meant.

Some are typing errors, some belong to another algorithm, task or command, and some are words of other tools.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cohort.config import foreign
from cohort.config.kinds import KINDS, VARIANTS
from cohort.errors import CohortError

# What stands before the name in words such as steps=3, +steps=3, ++steps=3, ~steps and -n.
_MISPLACED = re.compile(r"(?P<mark>[+~]{0,2}|-)(?P<name>[A-Za-z_][\w.-]*)(?P<sign>[=:]?)(?P<value>.*)", re.DOTALL)
_TRAIN_FLAGS = ("name", "out", "log", "sinks")
_KIND_NAMES = {"rl": "reinforcement learning", "sft": "supervised fine-tuning", "dpo": "preference optimisation"}


def find_remedy(name: str, valid: Mapping[str, Any], spell: Callable[[str], str]) -> str:
    """Returns what to do about a setting that does not exist, in one or two sentences.

    `name` is its full name as the user wrote it, with underscores. `valid` has the settings that exist, by full name,
    with their present values. `spell` writes a full name as the user would, such as `--optim.lr`. In this order: a
    section, a setting of a variant that is not chosen, a word of another tool, a setting of another kind of run or
    command, a similar name in the same section, a name with the same last word, a similar name, all settings of the
    same section, and `--help`.
    """
    key = name.lower().replace("-", "_")
    if key in valid:
        return f"Did you mean {spell(key)}?"
    if section := [spell(v) for v in valid if v.startswith(key + ".")]:
        return f"It is a section of settings: {', '.join(section)}."
    last = key.rpartition(".")[2]
    same_last = [v for v in valid if v.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
    # The settings of a run are known exactly. The few options of another command have other names for some of them.
    elsewhere = (_find_elsewhere(key, valid, "It"), _translate_elsewhere(key, valid, spell))
    # A name of the same section comes first: learner.lora.target is learner.lora.targets, not algo.kl.target.
    inside = [v for v in valid if v.rpartition(".")[0] == key.rpartition(".")[0] and "." in key]
    near = difflib.get_close_matches(key, inside, n=1, cutoff=0.9)
    similar = (_suggest(near, spell), _suggest(same_last, spell), _suggest(close, spell))
    translated = _translate(key, valid, spell)
    for found in (
        # Both may be right: algo.beta belongs to other algorithms, and elsewhere it is the weight of the KL.
        " ".join(part for part in (_find_variants(key, valid, "It", spell), translated) if part),
        *(elsewhere + similar if _is_training(valid) else similar + elsewhere),
        _suggest(_find_similar(key, valid), spell),
    ):
        if found:
            return found
    # All settings of the same section, if the name has one.
    siblings = [spell(v) for v in valid if "." in key and v.startswith(key.partition(".")[0] + ".")]
    return f"Valid: {', '.join(siblings)}." if siblings else "Add --help to see every flag."


def read_misplaced_setting(word: str, valid: Mapping[str, Any], spell: Callable[[str], str]) -> str:
    """Returns the remedy for a word of a command line that looks like a setting but has not two dashes; "" if not so.

    Such words are steps=3, +steps=3, steps:3 and -n. A word with a colon is one only if its name means something here,
    because a path may have a colon.
    """
    match = _MISPLACED.fullmatch(word)
    if match is None or not (match["mark"] or match["sign"]):
        return ""
    key = match["name"].lower().replace("-", "_")
    if key in valid:
        value = match["value"] if match["sign"] else "VALUE"
        return f"Flags have two dashes: {spell(key)} {value}."
    if match["sign"] == ":" and not _translate(key, valid, spell):
        return ""
    return f"Flags have two dashes. {find_remedy(key, valid, spell)}"


def find_command_remedy(command: str) -> str:
    """Returns what to write in place of a command of another tool, or of a recipe without a command; "" if unknown."""
    key = command.lower().replace("-", "_")
    for words, remedy in foreign.COMMANDS.items():
        if key in words.split():
            return remedy
    if remedy := find_algorithm_remedy(key):
        return remedy
    if key in VARIANTS["algo"].list_names():
        return f"An algorithm is a setting: cohort train RECIPE --algo {key}."
    # Imported here because the help of all commands must not wait for the recipes.
    from cohort.recipes import RECIPES

    if command in RECIPES or re.search(r"\.py(:|$)|\.yaml$", command):
        return f"Did you mean cohort train {command}?"
    return ""


def find_recipe_remedy(spec: str) -> str:
    """Returns what to write in place of an algorithm or a task that is given as a recipe; "" if `spec` is none."""
    key = spec.lower().replace("-", "_")
    if remedy := find_algorithm_remedy(key):
        return remedy
    for field, words in (("algo", "an algorithm"), ("task", "a task")):
        if key in VARIANTS[field].list_names():
            return f"It is {words}, not a recipe: cohort train RECIPE --{field} {key}."
    return ""


def find_algorithm_remedy(name: str) -> str:
    """Returns what to use in place of an algorithm that only other tools have; "" if `name` is none."""
    for words, remedy in foreign.ALGORITHMS.items():
        if name.lower() in words.split():
            return remedy
    return ""


def _suggest(names: Collection[str], spell: Callable[[str], str]) -> str:
    """Returns a question that suggests the first three of `names`; "" if there are none."""
    return f"Did you mean {' or '.join(spell(name) for name in list(names)[:3])}?" if names else ""


def _find_similar(key: str, valid: Collection[str]) -> list[str]:
    """Returns the name in `valid` that is most similar to `key`, or else names with a similar last word."""
    last = key.rpartition(".")[2]
    return difflib.get_close_matches(key, valid, n=1) or [
        v for v in valid if difflib.get_close_matches(last, [v.rpartition(".")[2]], n=1, cutoff=0.75)
    ]


def _translate(key: str, valid: Collection[str], spell: Callable[[str], str]) -> str:
    """Returns what the word of another tool is called here; "" if the word is not known.

    The whole name is looked for first, then its end: `actor.optim.lr`, `optim.lr`, `lr`.
    """
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for entry in _list_entries(end):
            ours = [name for name in entry.settings.split() if name in valid]
            if ours or not entry.settings:
                note = re.sub(r"\{([\w.]+)\}", lambda match: spell(match[1]), entry.note)
                return " ".join(part for part in (_suggest(ours, spell), note) if part)
    return ""


def _list_entries(word: str) -> list[foreign.ForeignEntry]:
    """Returns the entries about a word of other tools, in the order of the table."""
    return [entry for entry in foreign.SETTINGS if word in entry.words.split()]


def _translate_elsewhere(key: str, valid: Mapping[str, Any], spell: Callable[[str], str]) -> str:
    """Returns where the setting is that other tools call by the last word of `key`; "" if the word is not known.

    It is a setting of a variant that is not chosen, of another kind of run or of another command.
    """
    for entry in _list_entries(key.rpartition(".")[2]):
        for ours in entry.settings.split():
            if found := _find_variants(ours, valid, spell(ours), spell) or _find_elsewhere(ours, valid, spell(ours)):
                return found
    return ""


def _find_variants(key: str, valid: Mapping[str, Any], subject: str, spell: Callable[[str], str]) -> str:
    """Returns a text that names the variants (algorithms, tasks, engines, turns) with the setting `key`; "" if none.

    Only where `valid` has settings of a variant. `subject` begins the text.
    """
    field, _, setting = key.partition(".")
    if not setting or not any(name.startswith(field) for name in valid):
        return ""
    owners = [name for name, cls in _list_variants(field).items() if _has_setting(cls, setting)]
    if not owners:
        return ""
    # `cohort eval` has settings of a task, but its task is no setting.
    if field not in valid:
        return f"{subject} is a setting of the {field} {', '.join(owners)}. Remove it."
    if valid[field].value in owners:
        return f"{subject} is a setting of training, and not of this command. Remove it."
    return (
        f"{subject} is a setting of {spell(field)} {', '.join(owners)}, but this run has {valid[field].value}. "
        "Choose another, or remove it."
    )


def _list_variants(field: str) -> dict[str, type]:
    """Returns the classes that can be chosen for a field such as "algo" or "task", by name.

    A task whose module cannot be imported is left out.
    """
    found = {}
    registry = VARIANTS.get(field)
    for name in registry.list_names() if registry else ():
        try:
            found[name] = VARIANTS[field].find(name)
        except (CohortError, ImportError):
            continue
    return found


def _find_elsewhere(key: str, valid: Collection[str], subject: str) -> str:
    """Returns a text that says which kind of run or which command has the setting `key`; "" if there is none.

    `subject` begins the text.
    """
    if key in _TRAIN_FLAGS:
        return f"{subject} is a flag of cohort train, and an argument {key}= of cohort.train. Remove it here."
    first, _, rest = key.partition(".")
    owners = [
        kind
        for kind, cls in KINDS.items()
        if _has_setting(cls, key)
        or (first in cls.variants and (not rest or any(_has_setting(v, rest) for v in _list_variants(first).values())))
    ]
    if not owners:
        return ""
    if _is_training(valid):
        return f"{subject} is a setting of {_KIND_NAMES[owners[0]]}, and this recipe is of another kind. Remove it."
    return f"{subject} is a setting of cohort train, and this command does not train. Remove it."


def _is_training(valid: Collection[str]) -> bool:
    """Returns whether the settings `valid` are those of a run, not the options of another command."""
    return "optim.lr" in valid


def _has_setting(cls: Any, path: str) -> bool:
    """Returns whether a dataclass has a setting, by its full name such as `kl.weight`; a section is none."""
    first, _, rest = path.partition(".")
    if first not in {field.name for field in dataclasses.fields(cls)}:
        return False
    hint = typing.get_type_hints(cls)[first]
    if not rest:
        return not dataclasses.is_dataclass(hint)
    return dataclasses.is_dataclass(hint) and _has_setting(hint, rest)
