"""`cohort export RUN OUT [--step N|best|last] [--adapters]`: writes a run's model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read_arguments
from cohort.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which checkpoint to export, and whether only its adapters."""

    step: str = "last"
    """The checkpoint: a step number, best (highest held-out accuracy) or last."""
    adapters: bool = False
    """Write only the adapters, in PEFT format, instead of the model they are merged into."""


def run(args: list[str]) -> None:
    """Runs `cohort export` with `args`, the words after it: writes the model or the adapters of a checkpoint.

    Raises ConfigError for wrong flags, and what `export_model` and `export_adapters` raise.
    """
    about = "Write a checkpoint of the run in RUN as a Hugging Face folder OUT (config, safetensors, tokenizer)."
    (where, out), options = read_arguments("export", ["RUN", "OUT"], about, Options(), args)
    if options.step not in ("best", "last") and not options.step.isdecimal():
        raise ConfigError(f'--step must be a step number, best or last, not "{options.step}". Correct or remove it.')
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect import export

    (export.export_adapters if options.adapters else export.export_model)(Path(where), Path(out), options.step)
    print(f"wrote {out}")
