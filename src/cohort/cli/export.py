"""`cohort export RUN[@STEP] OUT [--step N|best|last] [--adapters]`: writes a run's model as a Hugging Face folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read_arguments
from cohort.errors import ConfigError
from cohort.logs.printing import print_result
from cohort.run.finding import find_run, require_run


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
    about = (
        "Write a checkpoint of a run as a Hugging Face folder OUT (config, safetensors, tokenizer). "
        "RUN@STEP and RUN@best are checkpoints as well."
    )
    (where, out), options = read_arguments("export", ["RUN", "OUT"], about, Options(), args)
    if options.step not in ("best", "last") and not options.step.isdecimal():
        raise ConfigError(f'--step must be a step number, best or last, not "{options.step}". Correct or remove it.')
    # Imported here because it takes longer. A wrong name is found before torch is imported.
    from cohort.run.naming import choose_checkpoint, split_name

    run, which = split_name(where)
    if which and options.step != Options.step:
        raise ConfigError(f"{where} names a checkpoint and --step {options.step} another one; remove --step.")
    path = find_run(run)
    require_run(path)
    found = choose_checkpoint(path, which or options.step)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect import export

    write = export.export_adapters if options.adapters else export.export_model
    write(path, Path(out), str(found.step))
    what = "the adapters" if options.adapters else "the model"
    print_result(f"wrote {out}: {what} of {path} after step {found.step}")
    # A name without a slash could be one of the catalogue.
    folder = shlex.quote(out if "/" in out else f"./{out}")
    if options.adapters:
        print_result(f"train on with: cohort train RECIPE --model BASE --learner.lora.load {folder}")
    else:
        print_result(f"talk to it with: cohort chat {folder}")
