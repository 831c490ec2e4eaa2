"""Tokens per second of each turn of conversations with tools: does an engine go on where the last turn ended?

    PYTHONPATH=src python3 benchmarks/turn_speed.py --model FOLDER --recipe coder_calculator      # on a GPU
    PYTHONPATH=src python3 benchmarks/turn_speed.py --prompts 8 --samples 2                       # `tiny` on a CPU

The conversations are those of a step of the recipe, in the order `rounds`: all first turns are sampled together, then
all second ones, and so on. The seconds of a turn are from its first request until its last token; scoring and tools are
not in them. "Prefilled" are the tokens that the engine computed before it drew any, and "all" those of the requests:
what an engine would compute that keeps nothing. The first pass, which compiles, is not counted.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch

from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.config.schema import Conversation
from cohort.engines.base import Engine, Event, Request
from cohort.jobs.sampler import load_on_device, make_sampler
from cohort.models.catalog import resolve_model
from cohort.models.device import choose_device, choose_dtype
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Producer
from cohort.rollout.settings import make_conversation_rules, make_conversation_turns, make_sampling
from cohort.scoring.start import start_scorer
from cohort.tasks.stream import TaskStream
from cohort.text import PromptRenderer, Tokenizer


@dataclass(kw_only=True)
class Turn:
    """What all conversations did in one of their turns."""

    begin: float = 0.0
    end: float = 0.0
    requests: int = 0
    asked: int = 0  # tokens of the requests
    sampled: int = 0
    prefilled: int = 0  # until the end of the turn, counted from the first turn on


@dataclass(kw_only=True)
class Watch:
    """Notes the requests of an engine and their ends, by turn."""

    engine: Engine
    turns: dict[int, Turn] = field(default_factory=lambda: defaultdict(Turn))
    numbers: Counter[str] = field(default_factory=Counter)  # of the present turn, by conversation

    def __post_init__(self) -> None:
        """Takes the place of the engine's methods."""
        submit, poll = self.engine.submit, self.engine.poll

        def watched_submit(request: Request) -> None:
            """Notes a request."""
            self.note_request(request)
            submit(request)

        def watched_poll(timeout: float = 0.0) -> list[Event]:
            """Notes what has ended."""
            events = poll(timeout)
            for event in events:
                self.note_event(event)
            return events

        self.engine.submit, self.engine.poll = watched_submit, watched_poll  # type: ignore[method-assign]

    def note_request(self, request: Request) -> None:
        """Notes that a turn of a conversation begins."""
        self.numbers[request.id] += 1
        turn = self.turns[self.numbers[request.id]]
        turn.begin = turn.begin or time.perf_counter()
        turn.requests += 1
        turn.asked += len(request.tokens)

    def note_event(self, event: Event) -> None:
        """Notes that a turn of a conversation has ended, if the event says so."""
        if event.sample is not None:
            turn = self.turns[self.numbers[event.id]]
            turn.end = time.perf_counter()
            turn.sampled += len(event.sample.tokens)
            turn.prefilled = self.engine.work.num_prompt_tokens  # type: ignore[attr-defined]


def measure(config: RL, model: str, prompts: int, samples: int, passes: int) -> tuple[list[Turn], str]:
    """Returns the turns of the last pass over so many prompts, and the device."""
    folder = resolve_model(model or config.model)
    device = choose_device(config.device)
    tokenizer = Tokenizer.load(folder)
    loaded = load_on_device(folder, choose_dtype(config.learner.dtype, device), device)
    assert isinstance(config.turns, Conversation), "the recipe has no conversations"
    sampling = make_sampling(config.sampling, tokenizer)
    format = None if config.turns.format == "auto" else config.turns.format
    stream = TaskStream(config.task, PromptRenderer(tokenizer, config.template, config.system, format), config.seed)
    settings = EpisodeSettings(
        sampling=sampling,
        group_size=samples,
        seed=config.seed,
        coefficients=config.reward,
        later_turns=make_conversation_turns(config.turns, sampling, tokenizer),
        context=min(loaded.config.context, 2048),
    )
    rules = make_conversation_rules(config.turns, tokenizer)
    engine = make_sampler(loaded, tokenizer, slots=prompts * samples)
    with closing(start_scorer(config.task, rules=rules)) as pool:
        for _ in range(passes + 1):
            watch = Watch(engine=engine)
            before = engine.work.num_prompt_tokens  # type: ignore[attr-defined]
            Producer(engine, pool, stream, settings, "rounds").roll_out(stream.next_prompts(prompts))
    turns = [replace(turn, prefilled=turn.prefilled - before) for _, turn in sorted(watch.turns.items())]
    return turns, torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"


def make_table(turns: list[Turn]) -> str:
    """Returns the turns as a table in Markdown."""
    lines = ["| turn | conversations | sampled | seconds | tokens/s | prefilled | all |", "|---|" + "---:|" * 6]
    last = 0
    for number, turn in enumerate(turns, start=1):
        seconds = turn.end - turn.begin
        lines.append(
            f"| {number} | {turn.requests} | {turn.sampled} | {seconds:.2f} | {turn.sampled / seconds:,.0f} | "
            f"{turn.prefilled - last} | {turn.asked} |"
        )
        last = turn.prefilled
    return "\n".join(lines)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny_calculator")
    parser.add_argument("--model", default="", help="folder or name; the recipe's by default")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1, help="the last one counts")
    a = parser.parse_args()
    config: Any = load_config(a.recipe, [])
    turns, device = measure(config, a.model, a.prompts, a.samples, a.passes)
    print(f"{date.today()}, {device}, torch {torch.__version__}, {a.recipe}, {a.prompts} x {a.samples} conversations\n")
    print(make_table(turns))


if __name__ == "__main__":
    main()
