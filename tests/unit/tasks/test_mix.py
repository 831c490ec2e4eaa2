"""Mixtures of tasks: shares, cursors, rows, parts, scores, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.config.document import dump_config, keep_recorded, parse_config, reuse_variants
from cohort.config.kinds import RL, list_reward_parts
from cohort.config.load import load_config
from cohort.config.recorded import get_recorded_name
from cohort.config.schema import Conversation, SingleTurn
from cohort.errors import ConfigError, TaskError, UserCodeError
from cohort.inspect.replay import TrustedFiles
from cohort.recipes.tiny import tiny_mix
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Verdict, has_conversations, load_rows, make_plain_answer, task
from cohort.tasks.calls import compute_summary, get_gold, make_messages
from cohort.tasks.conversation import ConversationEnvironment, ConversationRules, make_opening
from cohort.tasks.countdown import Countdown
from cohort.tasks.environment import KeyedDraws, Step
from cohort.tasks.grading import grade, grade_group, scores_groups
from cohort.tasks.mix import Mix
from cohort.tasks.order import make_pattern, make_weights
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.rows import Rows
from cohort.tasks.self_check import run_self_check
from cohort.tasks.stream import TaskStream
from cohort.types import Answer, Finish, Key
from tests.unit.tasks.test_stream import Letters


class Numbers:
    """Rows with a number, which is the right answer."""

    def rows(self: Any, split: str) -> Iterator[dict]:
        for i in range(self.size):
            yield {"id": f"{split}-{i}", "n": i}

    def prompt(self, row: dict) -> str:
        return f"a{row['n']}" * getattr(self, "length", 1)

    def score(self, row: dict, answer: Any) -> dict:
        return {"correct": float(answer.text == str(row["n"]))}

    def gold(self, row: dict) -> str:
        return str(row["n"])


@task("mixed-a")
class Plain(Numbers):
    size: int = 7
    length: int = 1


@task("mixed-b")
class Solved(Numbers):
    """Its accuracy has another name, and it has a part and a summary of its own."""

    size: int = 3
    parts = ("solved", "style")
    accuracy = "solved"
    max_tokens = 99

    def prompt(self, row: dict) -> str:
        return f"b{row['n']}"

    def score(self, row: dict, answer: Any) -> Verdict:
        return Verdict({"solved": float(answer.text == str(row["n"])), "style": 0.0}, "read")

    def summary(self, rows: list, parts: list) -> dict:
        return {"total": sum(p["solved"] + row["n"] for row, p in zip(rows, parts, strict=True))}


@task("mixed-c")
class Judged(Numbers):
    """It has no accuracy, and scores groups."""

    size: int = 7
    parts = ("taste",)
    accuracy = None
    service = True

    score = None

    def score_group(self, row: dict, answers: list) -> list:
        return [len(answers) + float(len(a.text)) for a in answers]


@task("mixed-d")
class Game(Numbers):
    """It has an environment."""

    size: int = 7
    parts = ("won",)
    accuracy = "won"

    def environment(self) -> Any:
        class Guess:
            def start(self, row: dict, draws: KeyedDraws) -> str:
                self.number = row["n"]
                return f"guess {draws.for_group('x').below(1000)}"

            def step(self, answer: Answer) -> Step:
                return Step(parts={"won": float(answer.text == str(self.number))})

        return Guess()


def stream(mix: Mix, **settings: Any) -> TaskStream:
    return TaskStream(mix, Letters(), **{"seed": 3, **settings})


@pytest.mark.parametrize("shares", [(2.0, 1.0), (1.0, 1.0), (0.7, 0.3), (1.0, 13.0)])
def test_shares_are_exact_at_every_cursor_and_tasks_have_epochs_of_their_own(shares: tuple[float, ...]) -> None:
    mix = Mix(tasks=("mixed-a", "mixed-b"), shares=shares)
    prompts = stream(mix).next_prompts(300)
    counts: Counter[str] = Counter()
    for number, prompt in enumerate(prompts, start=1):
        counts[prompt.task] += 1
        for label, share in zip(("mixed-a", "mixed-b"), shares, strict=True):
            assert abs(counts[label] - number * share / sum(shares)) < 1
    # The rows of a task come in the order, and with the visits, that a stream of this task alone has.
    for own in (Plain(), Solved()):
        mine = [p for p in prompts if p.task == own.name]
        alone = TaskStream(own, Letters(), 3).next_prompts(len(mine))
        assert [(p.id, p.visit, p.messages) for p in mine] == [
            (f"{own.name}/{p.id}", p.visit, p.messages) for p in alone
        ]


def test_patterns_of_many_tasks_keep_every_share_within_one() -> None:
    for weights in [(5, 3, 2), (1, 1, 1, 1), (30, 7, 7, 1, 2), (97, 89, 83, 5, 3, 1)]:
        counts = [0] * len(weights)
        for position, (number, before) in enumerate(make_pattern(weights), start=1):
            assert before == counts[number]
            counts[number] += 1
            assert all(abs(c - position * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))
        assert tuple(counts) == weights
    assert make_weights((0.1, 0.2)) == (1, 2) and make_weights((0.0, 3.0)) == (0, 1)


def test_a_stream_continues_at_any_cursor_and_ranks_share_the_prompts() -> None:
    mix = Mix(tasks=("mixed-a", "mixed-b", "mixed-a"), shares=(3, 2, 1))
    all_ids = [(p.task, p.id, p.visit) for p in stream(mix).next_prompts(60)]
    assert {label for label, *_ in all_ids} == {"mixed-a", "mixed-b", "mixed-a-2"}
    for cursor in (1, 5, 17, 42):
        moved = stream(mix)
        moved.seek(cursor)
        assert [(p.task, p.id, p.visit) for p in moved.next_prompts(10)] == all_ids[cursor : cursor + 10]
    # A rank names the prompts of others as they are, without rendering them.
    own = stream(mix).next_prompts(60, lambda i: i % 2 == 1)
    assert [(p.task, p.id, p.visit) for p in own] == all_ids
    found = stream(mix).find_prompt("mixed-b/train-2", 4)
    assert (found.task, found.visit, found.row["row"]["n"]) == ("mixed-b", 4, 2)


def test_rows_take_turns_and_a_share_of_0_is_for_evaluations_only() -> None:
    mix = Mix(tasks=("mixed-a", "mixed-b"), shares=(1, 0))
    assert [row["id"] for row in load_rows(mix, "test", limit=4)] == [
        "mixed-a/test-0",
        "mixed-b/test-0",
        "mixed-a/test-1",
        "mixed-b/test-1",
    ]
    assert {row["task"] for row in load_rows(mix, "train")} == {"mixed-a"}
    made = stream(mix)
    assert {p.task for p in made.next_prompts(20)} == {"mixed-a"}
    assert Counter(p.task for p in made.render_held_out()) == {"mixed-a": 7, "mixed-b": 3}


def test_validation_rows_are_disjoint_of_those_that_are_trained_on() -> None:
    mix = Mix(tasks=('mixed-a{"size": 200}', 'mixed-b{"size": 100}'))
    made = stream(mix, validation_share=0.2)
    held = {p.id for p in made.render_held_out(split="validation")}
    trained = {p.id for p in made.next_prompts(1000)}
    assert not held & trained and len(held | trained) == 300
    assert {id.partition("/")[0] for id in held} == {"mixed-a", "mixed-b"}


def test_a_step_that_would_take_a_row_twice_is_refused_by_the_task() -> None:
    stream(Mix(tasks=("mixed-a", "mixed-b"), shares=(2, 1))).check_enough_rows(9)
    with pytest.raises(ConfigError, match=r'task "mixed-b" has 3 train rows, fewer than the 4 that a step .*shares'):
        stream(Mix(tasks=("mixed-a", "mixed-b"), shares=(2, 1))).check_enough_rows(10)
    long = Mix(tasks=("mixed-b", 'mixed-a{"length": 9}'))
    skipping = stream(long, max_prompt_tokens=4, too_long="skip")
    with pytest.raises(TaskError, match='task "mixed-a": every train prompt is longer than 4'):
        skipping.check_enough_rows(2)
    with pytest.raises(TaskError, match='task "mixed-a": every train prompt is longer than 4'):
        skipping.next_prompts(20)


def test_parts_are_those_of_all_tasks_and_the_accuracy_has_one_name() -> None:
    mix: Any = Mix(tasks=("mixed-a", "mixed-b"))
    assert (mix.parts, mix.accuracy, mix.optional_parts, mix.max_tokens) == (("correct", "style"), "correct", True, 256)
    assert list_reward_parts(mix) == ("correct", "style")
    rows = {row["id"]: row for row in load_rows(mix, "test")}
    right = grade(mix, rows["mixed-b/test-2"], make_plain_answer("2"))
    assert (right.parts, right.reason) == ({"correct": 1.0, "style": 0.0}, "read")
    assert grade(mix, rows["mixed-a/test-5"], make_plain_answer("2")).parts == {"correct": 0.0}
    assert mix.score(rows["mixed-a/test-5"], make_plain_answer("5")).parts == {"correct": 1.0}
    assert get_gold(mix, rows["mixed-b/test-1"]) == "1" == mix.gold(rows["mixed-b/test-1"])
    assert make_messages(mix, rows["mixed-b/test-1"])[0]["content"] == "b1"
    assert run_self_check(mix, 5).num_gold == 8 + 2
    same: Any = Mix(tasks=("mixed-a", "mixed-a"))
    assert (same.parts, same.optional_parts) == (("correct",), False)


def test_without_an_accuracy_of_every_task_the_mean_reward_is_measured() -> None:
    mix: Any = Mix(tasks=("mixed-b", "mixed-c"))
    assert (mix.parts, mix.accuracy, mix.service) == (("solved", "style", "taste"), None, True)
    assert scores_groups(mix) and not scores_groups(Mix(tasks=("mixed-a",)))
    rows = load_rows(mix, "test")
    answers = [make_plain_answer(text) for text in ("0", "abc")]
    assert [o.parts for o in grade_group(mix, rows[0], answers)] == [
        {"solved": 1.0, "style": 0.0},
        {"solved": 0.0, "style": 0.0},
    ]
    assert [o.parts for o in grade_group(mix, rows[1], answers)] == [{"taste": 3.0}, {"taste": 5.0}]


def test_the_summary_has_the_accuracy_and_the_own_numbers_of_each_task() -> None:
    mix: Any = Mix(tasks=("mixed-a", "mixed-b"))
    rows = load_rows(mix, "test")[:4]
    parts = [{"correct": 1.0}, {"correct": 1.0, "style": 0.0}, {"correct": 0.0}, {"correct": 1.0, "style": 0.0}]
    assert compute_summary(mix, rows, parts) == {
        "accuracy/mixed-a": 0.5,
        "problems/mixed-a": 2.0,
        "accuracy/mixed-b": 1.0,
        "total/mixed-b": 3.0,
        "problems/mixed-b": 2.0,
    }


def test_conversations_are_those_of_the_rows_own_task() -> None:
    mix: Any = Mix(tasks=("mixed-a", "mixed-d"))
    assert has_conversations(mix) and not has_conversations(Mix(tasks=("mixed-a",)))
    rules = ConversationRules(max_turns=3, max_calls=3, format="tags", seconds=1, characters=100)
    made = stream(mix)
    for prompt in made.next_prompts(4):
        key = Key(seed=3, purpose="train", task=prompt.task, prompt_id=prompt.id, visit=prompt.visit, sample=0)
        episode = ConversationEnvironment(mix, rules)
        # The worker draws the same opening as the stream did.
        assert episode.start(prompt.row, KeyedDraws(key)).messages == prompt.messages
        answer = replace(make_plain_answer(str(prompt.row["row"]["n"])), conversation=prompt.messages)
        assert episode.step(answer).parts == {"correct": 1.0}
        if prompt.task == "mixed-a":
            assert episode.close(answer, Finish.LENGTH).parts == {"correct": 1.0}
    rows = load_rows(mix, "test", limit=2)
    assert [make_opening(mix, row).messages[0]["content"][:2] for row in rows] == ["a0", "gu"]


def test_tasks_are_given_as_objects_or_texts_and_come_back_in_another_process() -> None:
    mix = Mix(tasks=(Arithmetic(max_terms=4), Countdown()), shares=(2, 1))  # type: ignore[arg-type]
    assert mix.tasks == ('arithmetic{"max_terms": 4}', "countdown")
    assert mix.own_tasks == {"arithmetic": Arithmetic(max_terms=4), "countdown": Countdown()}
    assert TaskRef.from_task(mix).load() == mix  # type: ignore[arg-type]
    config = replace(tiny_mix(), task=mix, reward={})
    assert parse_config(dump_config(config), find=keep_recorded) == config


def test_the_digest_of_the_grader_covers_every_task(tmp_path: Path) -> None:
    file = tmp_path / "own_digest.py"
    code = Path(__file__).read_text(encoding="utf-8")
    own = code[code.index("class Numbers") : code.index('@task("mixed-b")')].replace("mixed-a", "digested")
    head = "from cohort.tasks.base import task\nfrom typing import Any, Iterator\n"
    file.write_text(head + own)
    one: Any = Mix(tasks=("mixed-a",))
    both: Any = Mix(tasks=("mixed-a", f"{file}:digested"))
    digests = [compute_grader_digest(one), compute_grader_digest(both)]
    assert digests[0] != digests[1] and all(digest.startswith("mix-") for digest in digests)
    file.write_text(head + own + "# changed\n")
    assert compute_grader_digest(both) != digests[1]


def test_opening_a_recorded_mixture_runs_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trap.py"
    file.write_text("raise SystemExit('the file was run')\n")
    mix = Mix(tasks=("arithmetic", f"{file}:trap"))
    settings = json.loads(json.dumps({"tasks": list(mix.tasks), "shares": []}))
    recorded = keep_recorded("task", "mix", settings)
    assert get_recorded_name(recorded()) == "mix" and recorded().tasks == list(mix.tasks)
    assert keep_recorded("task", "mix", {"tasks": ["arithmetic"], "shares": []}) is Mix
    with pytest.raises(ConfigError, match=r"mixture with Python code in a file \(.*trap\.py:trap\).*--trust"):
        TrustedFiles([], trust=False).find("task", "mix", settings)
    assert TrustedFiles([], trust=True).find("task", "mix", settings) is Mix
    # A checkpoint may not name a file that the config does not name.
    other = parse_config(dump_config(replace(tiny_mix(), steps=3)), find=reuse_variants(tiny_mix()))
    assert type(other.task) is Mix
    assert get_recorded_name(reuse_variants(tiny_mix())("task", "mix", settings)()) == "mix"
    with pytest.raises(UserCodeError, match=r"trap\.py raised SystemExit"):
        _ = mix.own_tasks


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Mix(tasks=('own.py:x{"a": 1}',)).tasks == (f'{tmp_path}/own.py:x{{"a": 1}}',)


@pytest.mark.parametrize(
    ("entry", "spec", "settings"),
    [
        ('rows{"data": "/x/q.jsonl", "rewards": ["/x/fs.py:f"]}', "rows", {"rewards": ["/x/fs.py:f"]}),
        ('rows {"rewards": ["/x/{y}/fs.py:f", "/x/g.py:g"]}', "rows", {"rewards": ["/x/{y}/fs.py:f", "/x/g.py:g"]}),
        ('/a{b}/own.py:x{"c": {"d": 1}}', "/a{b}/own.py:x", {"c": {"d": 1}}),
        ("/a{b}/own.py:x", "/a{b}/own.py:x", {}),
        ('/a.py:/own.py:x{"c": "e.py:f{"}', "/a.py:/own.py:x", {"c": "e.py:f{"}),
    ],
)
def test_settings_may_name_files_and_paths_may_have_braces(entry: str, spec: str, settings: dict[str, Any]) -> None:
    assert Mix.list_specs({"tasks": [entry]}) == [spec]
    read = json.loads(Mix(tasks=(entry,)).tasks[0].removeprefix(spec) or "{}")
    assert settings.items() <= read.items()


def test_rows_of_a_file_with_reward_functions_are_a_part_of_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text("def brief(row, answer):\n    return -float(len(answer.text))\n")
    (tmp_path / "q.jsonl").write_text('{"prompt": "Hi"}\n')
    rows = Rows(data=f"{tmp_path}/q.jsonl", rewards=(f"{tmp_path}/functions.py:brief",))
    mix: Any = Mix(tasks=("mixed-a", rows))  # type: ignore[arg-type]
    assert mix.own_tasks["rows"] == rows and TaskRef.from_task(mix).load() == mix
    row = next(row for row in mix.rows("train") if row["task"] == "rows")
    [outcome] = grade_group(mix, row, [make_plain_answer("four")])
    assert outcome.parts == {"brief": -4.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ()}, "one task or more"),
        ({"tasks": ("mixed-a",), "shares": (1, 2)}, "there are 1 tasks and 2 shares"),
        ({"tasks": ("mixed-a", "mixed-b"), "shares": (1, -1)}, "at least 0, not 1 -1"),
        ({"tasks": ("mixed-a", "mixed-b"), "shares": (1, float("nan"))}, "finite"),
        ({"tasks": ("mixed-a",), "shares": (0,)}, "a share above 0"),
        (
            {"tasks": ("mixed-a", "mixed-b"), "shares": (1, 3.14159)},
            r"such as 2 1 or 0.25 0.75; 1 3.14159 has 414,159, so round them",
        ),
        ({"tasks": ('mixed-a{"size": }',)}, r"settings in the entry mixed-a\{.* are no JSON"),
        ({"tasks": ("{}",)}, "is no task"),
        ({"tasks": ('rows{"rewards": ["/x/f.py:g"], "b": {"c": 1}',)}, "settings in the entry rows.* are no JSON"),
        ({"tasks": ('mixed-a{"size": 1} x',)}, "is no task"),
    ],
)
def test_settings_that_are_not_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Mix(**settings)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("mixed", r'entry mixed of --task.tasks: unknown task "mixed"'),
        ('mixed-a{"sizes": 1}', 'has no setting "sizes"'),
        ('arithmetic{"max_terms": -1}', r"entry arithmetic\{.*setting that is not allowed"),
        ("mix", "is a mixture itself"),
        ('arithmetic{"max_terms": "x"}', r'max_terms cannot be "x"; write it as in \{"max_terms": 3\}'),
        ('arithmetic{"parentheses": 1}', r"parentheses cannot be 1; write it as in"),
        ('arithmetic{"keep": 1}', r"keep cannot be 1; write it as in"),
        ("no_such.py:x", "there is no file"),
    ],
)
def test_tasks_that_cannot_be_loaded_name_their_entry(entry: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        _ = Mix(tasks=("mixed-a", entry)).own_tasks


def test_tasks_without_test_rows_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    task("mixed-untested")(
        type("Untested", (Plain,), {"rows": lambda self, split: iter([{"n": 0}] * (split == "train"))})
    )

    def read(tasks: tuple[str, ...], shares: tuple[float, ...]) -> list[str]:
        """Reads the test rows twice and returns what was said."""
        caplog.clear()
        mix = Mix(tasks=tasks, shares=shares)
        for _ in range(2):
            list(mix.rows("test"))
        return caplog.messages

    both = ("mixed-a", "mixed-untested")
    assert read(both, ()) == ["mix: the task mixed-untested has no test rows: it is not evaluated"]
    assert read(both, (1, 0)) == ["mix: the task mixed-untested has no test rows: with the share 0 it is never used"]
    assert read(("mixed-a", "mixed-b"), ()) == read(("mixed-untested",), ()) == []


def test_a_trained_task_needs_rows_and_a_name_for_its_accuracy() -> None:
    with pytest.raises(TaskError, match=r"the task mixed-a has no rows .*share 0"):
        load_rows(Mix(tasks=("mixed-b", 'mixed-a{"size": 0}')), "train")  # type: ignore[arg-type]
    task("mixed-e")(type("Two", (Plain,), {"parts": ("correct", "solved"), "accuracy": "solved"}))
    with pytest.raises(TaskError, match=r'mixed-e is "solved".*another part of that name'):
        _ = Mix(tasks=("mixed-a", "mixed-e")).parts
    assert Mix(tasks=("mixed-c", "mixed-e")).parts == ("taste", "correct", "solved")


def test_flags_of_the_mixture_decide_which_reward_flags_exist() -> None:
    config = load_config(
        "quickstart", ["--task", "mix", "--task.tasks", "arithmetic", "mixed-b", "--reward.style", "0.5"]
    )
    assert isinstance(config, RL) and config.reward == {"correct": 1.0, "format": 1.0, "style": 0.5}
    kept = load_config("tiny_mix", ["--task.tasks", "arithmetic", "mixed-b"])
    assert isinstance(kept, RL) and kept.reward == {"correct": 1.0, "format": 0.0, "style": 1.0}
    assert isinstance(kept.turns, SingleTurn)
    talks = load_config("tiny_mix", ["--task.tasks", "arithmetic", "calculator", "--turns.max-turns", "2"])
    assert isinstance(talks, RL) and talks.turns == Conversation(max_turns=2)
    with pytest.raises(ConfigError, match=r"unknown flag --reward\.style"):
        load_config("tiny_mix", ["--reward.style", "0.5"])


def test_a_secret_in_the_settings_of_a_task_is_not_written() -> None:
    task("mixed-f")(type("Keyed", (Numbers,), {"__annotations__": {"api_key": str}, "api_key": "", "size": 3}))
    config = replace(tiny_mix(), task=Mix(tasks=("arithmetic", 'mixed-f{"api_key": "x"}')))
    with pytest.raises(ConfigError, match=r'"api_key" of a task in task\.tasks looks like a secret'):
        dump_config(config)
