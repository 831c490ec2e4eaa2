"""`cohort pull MODEL [--force]`: fetches a model, or converts a .gguf file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read_arguments
from cohort.logs.printing import print_result


@dataclass(frozen=True, kw_only=True)
class Options:
    """Whether to fetch what is there already."""

    force: bool = False
    """Fetch or convert the model again, even if it is here."""


def run(args: list[str]) -> None:
    """Runs `cohort pull` with `args`, the words after it: fetches or converts a model and prints its folder."""
    about = (
        "Fetch MODEL, a name that `cohort models` lists or owner/name on the Hugging Face hub, or convert a .gguf file."
    )
    (name,), options = read_arguments("pull", ["MODEL"], about, Options(), args)
    from cohort.models.catalog import find_pulled, has_origin

    if not options.force and (found := find_pulled(name)) is not None:
        again = "; --force makes it anew" if has_origin(name) else ""
        print_result(f"{name} is here already, in {found}{again}")
        return
    print_result(f"{name} is in {pull_with_progress(name, force=options.force)}")


def pull_with_progress(name: str, *, force: bool = False) -> Path:
    """Fetches or converts a model, shows the progress on a terminal, and returns the model's folder."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from cohort.logs.console import make_console
    from cohort.models.catalog import pull

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    # Progress goes to stderr, because standard output is for the result.
    console = make_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=1.0)

        def show(what: str, share: float) -> None:
            """Shows the phase and how much of it is done."""
            bar.update(line, description=f"{name}: {what}", completed=share)

        return pull(name, show, force=force)
