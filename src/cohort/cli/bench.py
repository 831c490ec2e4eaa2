"""`cohort bench engine|learner|step [--model M] [--prompts N --samples N ...]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cohort.cli.arguments import read
from cohort.cli.output import table
from cohort.config import flags
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.errors import ConfigError, nearest

WHAT: dict[str, tuple[str, BenchOptions]] = {
    "engine": ("Sampling throughput of the native engine.", EngineBenchOptions()),
    "learner": ("Training throughput: forward, backward, optimizer step.", LearnerBenchOptions()),
    "step": ("A whole step: sample, score, train, load.", BenchOptions()),
}
HELP = """usage: cohort bench engine|learner|step [--flags]

{lines}

cohort bench WHAT --help lists the flags."""


def run(args: list[str]) -> None:
    if not args or args[0].startswith("-"):
        if flags.wants_help(args):
            print(HELP.format(lines="\n".join(f"  {name:<8} {about}" for name, (about, _) in WHAT.items())))
            return
        raise ConfigError(f"say what to measure: cohort bench {'|'.join(WHAT)} [--flags].")
    what, *rest = args
    if what not in WHAT:
        raise ConfigError(f'unknown benchmark "{what}".{nearest(what, WHAT)}')
    about, default = WHAT[what]
    _, options = read(f"bench {what}", [], about, default, rest)
    options.check()
    from cohort.inspect.bench import run as bench

    measures: dict[str, Callable[[Any], BenchResult]] = {
        "engine": bench.bench_engine,
        "learner": bench.bench_learner,
        "step": bench.bench_step,
    }
    print(report(measures[what](options), options))


def report(result: BenchResult, options: BenchOptions) -> str:
    """The measurement as a table."""
    rows = [
        ["model", options.model],
        *([["device", result.setting]] if result.setting != "cpu, float32" else []),
        ["shape", f"{options.prompts} x {options.samples} samples, {_lengths(options)}"],
        ["seconds", f"{result.seconds:.3f}"],
        ["tokens/s", f"{result.tokens_per_second:.0f}"],
        ["of the limit", f"{100 * result.fraction:.0f}% ({result.limit})"],
        *([label, f"{value:.4g}"] for label, value in result.details.items()),
    ]
    return table(["bench", result.what], rows)


def _lengths(options: BenchOptions) -> str:
    tokens = f"{options.prompt_tokens}+{options.completion_tokens} tokens"
    own = isinstance(options, EngineBenchOptions) and options.lengths == "lognormal"
    return tokens + (" at most, log-normal" if own else "")
