"""`cohort pull MODEL`: fetches a model, or converts a .gguf file."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.cli.arguments import read_arguments


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(args: list[str]) -> None:
    """Runs `cohort pull` with `args`, the words after it: fetches or converts a model and prints its folder."""
    about = (
        "Fetch MODEL, a name that `cohort models` lists or owner/name on the Hugging Face hub, or convert a .gguf file."
    )
    (name,), _ = read_arguments("pull", ["MODEL"], about, Options(), args)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from cohort.models.catalog import pull

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    # Progress goes to stderr, because standard output is for the result.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=1.0)
        folder = pull(name, lambda what, share: bar.update(line, description=f"{name}: {what}", completed=share))
    print(f"{name} is in {folder}")
