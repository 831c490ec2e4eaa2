"""`cohort bench engine|learner|step [--model M] [--prompts N --samples N ...]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cohort.cli.arguments import read_arguments
from cohort.cli.output import format_table
from cohort.config import flags
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.errors import ConfigError, suggest_name
from cohort.logs.printing import print_result

BENCHMARKS: dict[str, tuple[str, BenchOptions]] = {
    "engine": ("Sampling throughput of the native engine.", EngineBenchOptions()),
    "learner": ("Training throughput: forward, backward, optimizer step.", LearnerBenchOptions()),
    "step": ("A whole step: sampling, training and loading the new weights. Nothing is scored.", BenchOptions()),
}
HELP = """usage: cohort bench engine|learner|step [--flags]

Measure throughput and compare it with the limit of this hardware.

{lines}

cohort bench WHAT --help lists the flags."""


def run(args: list[str]) -> None:
    """Runs `cohort bench` with `args`, the words after it: measures and prints a table, or prints help.

    Raises ConfigError for an unknown benchmark and wrong flags.
    """
    if not args or args[0].startswith("-"):
        if flags.wants_help(args):
            print_result(
                HELP.format(lines="\n".join(f"  {name:<8} {about}" for name, (about, _) in BENCHMARKS.items()))
            )
            return
        raise ConfigError("the benchmark is missing; name it first: cohort bench engine|learner|step [--flags].")
    what, *rest = args
    if what not in BENCHMARKS:
        raise ConfigError(
            f'unknown benchmark "{what}".{suggest_name(what, BENCHMARKS)} Write: cohort bench engine|learner|step.'
        )
    about, default = BENCHMARKS[what]
    _, options = read_arguments(f"bench {what}", [], about, default, rest)
    options.check()
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect.bench import run as bench

    measures: dict[str, Callable[[Any], BenchResult]] = {
        "engine": bench.bench_engine,
        "learner": bench.bench_learner,
        "step": bench.bench_step,
    }
    print_result(format_result(measures[what](options), options))


def format_result(result: BenchResult, options: BenchOptions) -> str:
    """Returns the measurement as a table: model, sizes, seconds, tokens per second, fraction of the limit, details.

    Device and dtype have a row unless they are cpu and float32.
    """
    rows = [
        ["model", options.model],
        *([["device", result.setting]] if result.setting != "cpu, float32" else []),
        ["shape", f"{options.prompts} x {options.samples} samples, {_describe_lengths(options)}"],
        ["seconds", f"{result.seconds:.3f}"],
        ["tokens/s", f"{result.tokens_per_second:.0f}"],
        ["of the limit", f"{100 * result.fraction:.0f}% ({result.limit})"],
        *([label, f"{value:.4g}"] for label, value in result.details.items()),
    ]
    return format_table(["bench", result.what], rows)


def _describe_lengths(options: BenchOptions) -> str:
    """Returns the tokens per prompt and completion as text, such as "64+64 tokens".

    " at most, log-normal" follows if the completions have different lengths.
    """
    tokens = f"{options.prompt_tokens}+{options.completion_tokens} tokens"
    has_own_lengths = isinstance(options, EngineBenchOptions) and options.lengths == "lognormal"
    return tokens + (" at most, log-normal" if has_own_lengths else "")
