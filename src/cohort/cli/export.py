"""`cohort export RUN OUT [--step N|best|last] [--adapters]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read
from cohort.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which checkpoint, and what of it."""

    step: str = "last"
    """A step number, best (held-out accuracy) or last."""
    adapters: bool = False
    """Only the adapters, in PEFT format, instead of the model they are merged into."""


def run(args: list[str]) -> None:
    about = "Write a checkpoint of the run in RUN as a Hugging Face folder OUT (config, safetensors, tokenizer)."
    (where, out), options = read("export", ["RUN", "OUT"], about, Options(), args)
    if options.step not in ("best", "last") and not options.step.isdecimal():
        raise ConfigError(f'--step must be a step number, best or last, not "{options.step}".')
    from cohort.inspect import export

    (export.export_adapters if options.adapters else export.export)(Path(where), Path(out), options.step)
    print(f"wrote {out}")
