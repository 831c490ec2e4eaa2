r"""Slow tools: how long the engine is idle while a turn is ready, wall time in both orders, and prefilled tokens.

    PYTHONPATH=src python3 benchmarks/slow_tools.py [--episodes 64] [--workers 16] [--seconds 0.3] [--json]

The bundled model plays conversations of five turns on a CPU. After each turn but the last, an environment takes
`--seconds` and answers, as a slow tool does. A turn is ready from the moment at which the scoring pool hands over the
environment's reply until the engine is given the next request. The engine is idle when it has no request. Both are
recorded at every call; "idle while ready" is the time during which both were so. In rounds this waiting is by design.

The last lines compare the tokens that the engine computed before it drew any (prefilled) with those that are new: each
prompt once, then per further turn the reply and the last token before it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass

import torch

import cohort
from cohort.config.schema import Conversation
from cohort.jobs.sampler import load_on_device, make_sampler
from cohort.models.catalog import BUNDLED
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Order, Producer
from cohort.rollout.settings import make_conversation_rules, make_conversation_turns
from cohort.scoring.pool import ScoringPool
from cohort.scoring.start import start_scorer
from cohort.tasks.stream import TaskStream
from cohort.text import Tokenizer
from cohort.types import Answer, Group, Outcome, Provenance, Row, Sampling

NUM_TURNS = 5
MAX_TOKENS = 24  # of a turn
SECONDS = "SLOW_TOOLS_SECONDS"  # variable of the environment by which scoring workers know the time


class SlowGame:
    """An episode of NUM_TURNS turns. Each reply takes a while."""

    def start(self, row: Row, draws: object) -> str:
        """Returns the question of a row."""
        self.left = NUM_TURNS
        return str(row["question"])

    def step(self, answer: Answer) -> str | cohort.Step:
        """Replies after a while, or ends the episode."""
        self.left -= 1
        if not self.left:
            return cohort.Step(parts={"correct": 1.0})
        time.sleep(float(os.environ.get(SECONDS, "0.3")))
        return "What is 12 + 30?"


@cohort.task("slow_tools")
class SlowTools:
    """Sums that are asked again and again."""

    def rows(self, split: str) -> list[Row]:
        """Returns the questions."""
        return [{"id": f"{split}{n}", "question": f"What is {n} + 17?"} for n in range(256)]

    def environment(self) -> SlowGame:
        """Returns a new episode."""
        return SlowGame()


class Watch:
    """Adds up the time during which an engine is idle while turns are ready."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.idle = True
        self.seconds = 0.0
        self.longest = 0.0
        self.since = 0.0  # when both became so

    def note(self, idle: bool) -> None:
        """Records a change of the engine or of the turns that are ready."""
        now = time.perf_counter()
        if self.ready and self.idle and self.since:
            self.seconds += now - self.since
            self.longest = max(self.longest, now - self.since)
        self.idle = idle
        self.since = now if self.ready and idle else 0.0


class WatchedPool:
    """A scoring pool that tells a watch which turns become ready."""

    def __init__(self, pool: ScoringPool, watch: Watch, engine: object) -> None:
        self._pool, self._watch, self._engine = pool, watch, engine
        self.submit, self.drop = pool.submit, pool.drop

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Polls the pool and records the replies."""
        found = self._pool.poll(timeout)
        self._watch.ready |= {id for id, outcome in found if outcome.replies}
        self._watch.note(self._engine.idle)  # type: ignore[attr-defined]
        return found


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one order took."""

    order: str
    seconds: float
    idle_while_ready: float
    longest: float  # of the moments that are added up there
    num_turns: int
    num_prefilled: int
    num_new: int
    num_whole: int  # tokens of all requests together: what an engine prefills that keeps nothing


def count_new_tokens(groups: list[Group]) -> int:
    """Returns the tokens that must be computed before tokens are drawn: prompts, and per further turn what is new."""
    samples = [sample for group in groups for sample in group.samples]
    later = sum(s.provenance.count(Provenance.ENVIRONMENT) + s.num_turns - 1 for s in samples)
    return later + sum(len(group.prompt.tokens) for group in groups)


def measure(order: Order, options: argparse.Namespace) -> Result:
    """Plays all episodes in one order of work and returns what was measured."""
    folder = BUNDLED["tiny"]
    tokenizer = Tokenizer.load(folder)
    engine = make_sampler(load_on_device(folder, "float32", torch.device("cpu")), tokenizer, slots=256)
    turns = Conversation(max_turns=NUM_TURNS)
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_ids=tokenizer.stop_ids, temperature=0.0)
    settings = EpisodeSettings(
        sampling=sampling,
        group_size=1,
        seed=0,
        coefficients={},
        later_turns=make_conversation_turns(turns, sampling, tokenizer),
        context=1024,
    )
    task = SlowTools()
    stream = TaskStream(task, tokenizer, 0)
    watch = Watch()
    submit, whole = engine.submit, []

    def submit_watched(request: object) -> None:
        whole.append(len(request.tokens))  # type: ignore[attr-defined]
        submit(request)  # type: ignore[arg-type]
        watch.note(engine.idle)
        watch.ready.discard(request.id)  # type: ignore[attr-defined]

    engine.submit = submit_watched  # type: ignore[method-assign]
    rules = make_conversation_rules(turns, tokenizer)
    with start_scorer(task, rules=rules, num_workers=options.workers) as pool:
        # Workers that are still starting would be measured too.
        pool.score([({"id": "warm-up", "question": "x"}, make_warm_up())])
        made = Producer(engine, WatchedPool(pool, watch, engine), stream, settings, order)
        begin = time.perf_counter()
        groups = made.roll_out(stream.next_prompts(options.episodes))
        seconds = time.perf_counter() - begin
    return Result(
        order=order,
        seconds=seconds,
        idle_while_ready=watch.seconds,
        longest=watch.longest,
        num_turns=sum(s.num_turns for g in groups for s in g.samples),
        num_prefilled=engine.work.num_prompt_tokens,  # type: ignore[attr-defined]
        num_new=count_new_tokens(groups),
        num_whole=sum(whole),
    )


def make_warm_up() -> Answer:
    """Returns an answer that the environment accepts."""
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    return Answer(text="", full="", finish="length", num_tokens=1, conversation=talk)


def main() -> None:
    """Measures both orders and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=16, help="calls that are under way at once")
    parser.add_argument("--seconds", type=float, default=0.3, help="time of one reply")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    os.environ[SECONDS] = str(options.seconds)
    torch.set_num_threads(1)
    orders: tuple[Order, ...] = ("rounds", "continuous")
    results = [measure(order, options) for order in orders]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, 1 thread")
    least = options.episodes * (NUM_TURNS - 1) * options.seconds / options.workers
    print(f"{options.episodes} episodes of {NUM_TURNS} turns; the replies alone need {least:.2f} s\n")
    print("| order | wall s | idle while ready, s | longest, ms | prefilled tokens | new ones | all of every request |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for r in results:
        idle = f"{r.idle_while_ready:.3f} | {1000 * r.longest:.1f}"
        print(f"| {r.order} | {r.seconds:.2f} | {idle} | {r.num_prefilled} | {r.num_new} | {r.num_whole} |")


if __name__ == "__main__":
    main()
