"""YAML texts of configs: writes them, and reads them without trusting them.

A reader of YAML can be made to work for hours by a few lines of anchors and aliases, or to take a second value of a key
in silence. `read_yaml` refuses both, and texts that are larger or deeper than a config can be.
"""

from __future__ import annotations

from typing import Any

import yaml

from cohort.errors import ConfigError

MAX_SIZE = 1 << 18  # characters of a config file; those of the recipes have less than 8,000
MAX_DEPTH = 50  # levels of sections and lists


class _PlainReader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors and aliases, with at most MAX_DEPTH levels, and with each key once."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Returns the next node of the text. Raises YAMLError for anchors, aliases and nodes that are too deep."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "it has an anchor (&) or an alias (*), which a config must not have", event.start_mark
            )
        if self.depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"it has more than {MAX_DEPTH} levels", event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Returns the dict of a mapping. Raises YAMLError if a key occurs twice."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node.value, str):
                raise yaml.constructor.ConstructorError(
                    None, None, "it has a key that is a list or a mapping", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key_node.value}" occurs twice', key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """Returns the value of a YAML text: nested dicts, lists, texts, numbers, truth values, dates and None.

    `source` is the name of the file in messages. Raises a ConfigError if the text is not valid YAML, has anchors,
    aliases or a key twice, or is larger or deeper than a config can be.
    """
    if len(text) > MAX_SIZE:
        raise ConfigError(
            f"{source} has {len(text)} characters, more than the {MAX_SIZE} that a config may have; restore the file "
            "from a copy."
        )
    try:
        return yaml.load(text, _PlainReader)
    # ValueError: a number or a date that Python cannot hold.
    except (yaml.YAMLError, ValueError) as error:
        # Errors about characters that YAML does not allow have no mark.
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None)
        why = f": {' '.join(str(problem).split())[:200]}" if problem else ""
        raise ConfigError(
            f"{source} is not valid YAML{place}{why}; correct it, or restore the file from a copy."
        ) from None


def dump_yaml(tree: dict[str, Any]) -> str:
    """Returns nested dicts and lists as YAML text, keys in their order.

    Raises a ConfigError if the text is larger than `read_yaml` accepts.
    """
    # Without allow_unicode: with it PyYAML writes some control characters raw and reads them back as spaces.
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=110)
    if len(text) > MAX_SIZE:
        raise ConfigError(
            f"the settings of this run take {len(text)} characters, more than the {MAX_SIZE} that config.yaml may "
            "have. Put long values of the task into a file of their own, and its path into a setting."
        )
    return text
