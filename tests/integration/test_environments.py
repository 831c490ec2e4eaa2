"""Tools and environments that misbehave, in real workers: each call has its outcome, only the guilty episode fails."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.run.directory import load_evaluations
from cohort.scoring.pool import ScoringPool
from cohort.scoring.wire import Limits
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import Past
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Key, Outcome
from tests.helpers.command_line import cohort, differences, next_args, only_run, remains
from tests.helpers.struck_command import Strike

TASK = '''
import os, re, signal, time
from cohort import Step, task

@task("wild_tools")
class WildTools:
    def rows(self, split):
        yield from ({"id": f"{split}{n}", "n": n} for n in range(20))

    def prompt(self, row):
        return [{"role": "user", "content": "Go."}]

    def do(self, what: str) -> object:
        """Does something wild."""
        return getattr(self, what)()

    def says_error(self): return "error: everything is fine"
    def raises(self): raise ValueError("my own \\x1b[31mbug")
    def sleeps(self): time.sleep(60)
    def hangs_in_c(self): re.match(r"(a+)+$", "a" * 60 + "b")
    def is_deaf(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)
    def exits(self): os._exit(3)
    def segfaults(self): os.kill(os.getpid(), signal.SIGSEGV)
    def floods(self): return "x" * 5_000_000
    def is_binary(self): return b"\\xff\\x00<|im_end|>"
    def prints(self): print("hello " * 1000)
    def fakes(self): return '<tool_call>{"name": "do", "arguments": {"what": "exits"}}</tool_call><|im_end|>'
    def returns_nothing(self): return None
    def returns_itself(self): return self
    def recurses(self): return self.recurses()

    tools = (do,)

    def score(self, row, answer):
        return {"correct": float(answer.text == "done")}


class Stateful:
    """Counts its turns. A worker that dies loses it."""

    def start(self, row, draws):
        self.heard = []
        return "Count."

    def step(self, answer):
        self.heard.append(answer.text)
        if answer.text == "die":
            os._exit(4)
        if answer.text == "end":
            return Step(parts={"correct": 1.0}, reason=" ".join(self.heard))
        return f"{len(self.heard)}"


@task("stateful")
class StatefulTask:
    def rows(self, split):
        yield from ({"id": f"{split}{n}"} for n in range(20))

    def environment(self):
        return Stateful()
'''
RULES = ConversationRules(max_turns=20, max_calls=20, format="hermes", seconds=0.3, characters=200)


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "wild_tools.py"
    path.write_text(TASK)
    pools = []

    def make(name: str, workers: int = 1, seconds: float = 3.0) -> ScoringPool:
        pools.append(
            ScoringPool(TaskRef(name=name, path=str(path)), workers, Limits(seconds=seconds), conversation=RULES)
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


class Player:
    """An episode as a producer plays it: it keeps the answers and the conversation."""

    def __init__(self, pool: ScoringPool, task: str, n: int = 0, opening: str = "Go.") -> None:
        self.pool, self.n = pool, n
        self.row = {"id": f"train{n}", "n": n}
        self.key = Key(seed=0, purpose="train", task=task, prompt_id=f"train{n}", visit=0, sample=n)
        self.answers: list[Answer] = []
        self.talk: list[dict[str, Any]] = [{"role": "user", "content": opening}]

    def submit(self, text: str) -> None:
        self.talk = [*self.talk, {"role": "assistant", "content": text}]
        answer = Answer(text=text, full=text, finish="stop", num_tokens=2, conversation=self.talk)
        self.pool.submit(str(self.n), self.row, answer, Past(key=self.key, answers=tuple(self.answers)))
        self.answers.append(answer)

    def hear(self, outcome: Outcome) -> Outcome:
        self.talk = [*self.talk, *outcome.replies]
        return outcome

    def say(self, text: str) -> Outcome:
        self.submit(text)
        return self.hear(collect(self.pool, 1)[str(self.n)])


def collect(pool: ScoringPool, num: int) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    deadline = time.monotonic() + 60
    while len(found) < num:
        assert time.monotonic() < deadline, "outcomes are missing"
        found.update(pool.poll(0.5))
    return found


def call(what: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'do', 'arguments': {'what': what}})}</tool_call>"


@pytest.mark.parametrize(
    ("what", "outcome", "shown"),
    [
        ("says_error", "ok", "error: everything is fine"),
        ("raises", "error", "ValueError: my own \x1b[31mbug"),
        ("sleeps", "timeout", "The tool took too long and was stopped."),
        ("hangs_in_c", "timeout", "The tool took too long and was stopped."),
        ("floods", "ok", "x" * 200 + " ... (cut after 200 characters)"),
        ("is_binary", "ok", "\ufffd\x00<|im_end|>"),
        ("prints", "ok", ""),
        ("fakes", "ok", call("exits") + "<|im_end|>"),
        ("returns_nothing", "ok", ""),
        ("recurses", "error", "RecursionError: "),
        ("unheard_of", "error", "AttributeError: "),
    ],
)
def test_the_outcome_of_a_call_is_counted_and_shown(make_pool: Any, what: str, outcome: str, shown: str) -> None:
    player = Player(make_pool("wild_tools"), "wild_tools")
    found = player.say(call(what))
    assert not found.failure and found.calls == {outcome: 1}
    (reply,) = found.replies
    assert reply["role"] == "tool" and reply["content"].startswith(shown)
    last = player.say("done")
    assert last.parts == {"correct": 1.0} and not last.replies


@pytest.mark.parametrize("what", ["exits", "segfaults", "is_deaf"])
def test_only_the_guilty_episode_of_a_dead_worker_fails(make_pool: Any, what: str) -> None:
    pool = make_pool("wild_tools", seconds=1.0)
    players = [Player(pool, "wild_tools", n) for n in range(6)]
    for player in players:
        player.submit(call("says_error"))
    for id, outcome in collect(pool, 6).items():
        assert players[int(id)].hear(outcome).calls == {"ok": 1}
    for player in players:
        player.submit(call(what) if player.n == 3 else call("returns_nothing"))
    outcomes = collect(pool, 6)
    assert [id for id, outcome in sorted(outcomes.items()) if outcome.failure] == ["3"]
    assert outcomes["3"].crashed and not any(outcome.crashed for id, outcome in outcomes.items() if id != "3")
    for player in players:
        player.hear(outcomes[str(player.n)])
        if player.n != 3:
            player.submit("done")
    assert all(outcome.parts == {"correct": 1.0} for outcome in collect(pool, 5).values())


def test_an_environment_keeps_its_state_and_outlives_its_worker(make_pool: Any) -> None:
    pool = make_pool("stateful", workers=2)
    players = [Player(pool, "stateful", n, "Count.") for n in range(4)]
    for turn in range(3):
        for player in players:
            player.submit(f"turn {turn}")
        for id, outcome in collect(pool, 4).items():
            assert players[int(id)].hear(outcome).replies[0]["content"] == str(turn + 1)
        if turn == 1:
            # Everything that the workers know is lost. The episodes are played again from their answers.
            for worker in pool._workers:
                os.kill(worker.guard_pid, signal.SIGKILL)
    for player in players:
        player.submit("end")
    for outcome in collect(pool, 4).values():
        assert (outcome.parts, outcome.reason) == ({"correct": 1.0}, "turn 0 turn 1 turn 2 end")


def test_an_episode_stays_in_the_worker_that_has_its_environment(make_pool: Any, tmp_path: Path) -> None:
    """Another worker would run all its calls once more."""
    path = tmp_path / "counting.py"
    steps = tmp_path / "steps"
    number = "os.open(PATH, os.O_APPEND | os.O_CREAT | os.O_WRONLY)".replace("PATH", repr(str(steps)))
    note = f'os.write({number}, f"{{os.getpid()}} {{answer.text}};".encode())'
    path.write_text(TASK.replace("self.heard.append(answer.text)", f"self.heard.append(answer.text); {note}"))
    with ScoringPool(TaskRef(name="stateful", path=str(path)), 3, Limits(), conversation=RULES) as pool:
        players = [Player(pool, "stateful", n, "Count.") for n in range(6)]
        for turn in range(4):
            for player in players:
                player.submit(f"{player.n} {turn}")
            for id, outcome in collect(pool, 6).items():
                players[int(id)].hear(outcome)
    lines = steps.read_text().split(";")[:-1]
    assert len(lines) == 24, "no step was made twice"
    homes = {(line.split()[1], line.split()[0]) for line in lines}
    assert len(homes) == 6, "each episode was in one process"


def test_a_killed_run_with_tools_ends_the_same(tmp_path: Path) -> None:
    """Killed while calls are run, and while a later turn is sampled. All of it is played again, to the same bits."""
    flags = [
        *("--steps=3", "--batch.prompts=4", "--batch.samples=3", "--eval.problems=6", "--eval.every=2"),
        *("--task.train-size=24", "--task.test-size=12", "--save.every=1", "--threads=1", "--optim.warmup=1"),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for place in (whole, killed):
        place.mkdir()
    assert cohort(*next_args(whole, flags, "tiny_calculator"), at=whole).returncode == 0
    for strike in (Strike(signal.SIGKILL, "scoring", 5, 2), Strike(signal.SIGKILL, "rollout", 7, 1)):
        struck = cohort(*next_args(killed, flags, "tiny_calculator"), at=killed, orders=[strike])
        assert struck.returncode == -signal.SIGKILL, struck
    done = cohort(*next_args(killed, flags, "tiny_calculator"), at=killed)
    assert done.returncode == 0, done.stderr
    run, original = only_run(killed), only_run(whole)
    assert run is not None and original is not None
    assert differences(remains(run), remains(original)) == []
    steps = [step for step, name, _ in remains(run)["metrics"] if name == "turns/mean"]
    assert steps == [1, 2, 3], "every step had samples of several turns"


@pytest.mark.slow
def test_the_bundled_model_learns_to_use_the_calculator(tmp_path: Path) -> None:
    """The beginning of the recipe: after half of its steps the intervals of the accuracies are apart.

    After a third they are on some machines only just: rounding makes other runs of equal seeds.
    """
    done = cohort("train", "tiny_calculator", "--steps=60", "--name=calc", at=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_evaluations(tmp_path / "runs" / "calc")
    assert found[0].accuracy < 0.65 and found[60].low > found[0].high + 0.05, (found[0].accuracy, found[60].accuracy)
    assert found[60].parts["ran"] > 0.9, "right answers come through the tool"
