"""`cohort pull MODEL`."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.cli.arguments import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(args: list[str]) -> None:
    about = (
        "Fetch MODEL, a name that `cohort models` lists or owner/name on the Hugging Face hub, or convert a .gguf file."
    )
    (name,), _ = read("pull", ["MODEL"], about, Options(), args)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from cohort.models.catalog import pull

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    console = Console(stderr=True)  # stdout stays clean for the result
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=1.0)
        folder = pull(name, lambda what, share: bar.update(line, description=f"{name}: {what}", completed=share))
    print(f"{name} is in {folder}")
