"""Evaluation outside a run: the split, what survives a kill, and that nothing is evaluated twice."""

from __future__ import annotations

import json
import re
import resource
import shutil
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from cohort.cli.eval import format_evaluation
from cohort.config.options import EvalOptions
from cohort.errors import ConfigError, RunError, TaskError
from cohort.evaluation.compare import compare
from cohort.evaluation.journal import Journal
from cohort.evaluation.standalone import EvaluationResult, ModelEvaluator, make_file_name
from cohort.models.catalog import resolve_model
from cohort.scoring.pool import ScoringPool
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.countdown import Countdown
from cohort.tasks.gsm8k import GSM8K
from cohort.types import Outcome
from tests.helpers.evaluations import eval_item, eval_setting, evaluation
from tests.helpers.fake_server import chat, serving
from tests.helpers.foreign_models import write_foreign_folder
from tests.helpers.small_runs import keep_torch_settings

SMALL = EvalOptions(limit=3, max_tokens=8, threads=1, device="cpu")
TASK = Countdown(train_size=20, test_size=20)


@pytest.fixture(scope="module", autouse=True)
def torch_settings():
    with keep_torch_settings():
        yield


def evaluate_tiny(options: EvalOptions, task, out: Path, progress=lambda task, done, of: None):
    """Evaluates the bundled model on a task, and returns the evaluation and its file."""
    evaluator = ModelEvaluator("tiny", options)
    result = evaluator.run(evaluator.prepare(task), out, progress)
    return result.evaluation, result.path


def evaluate_model(model: str, out: Path) -> EvaluationResult:
    """Evaluates a model on one problem."""
    evaluator = ModelEvaluator(model, replace(SMALL, limit=1, max_tokens=2))
    return evaluator.run(evaluator.prepare(TASK), out)


@pytest.mark.parametrize("split", ["test", "train"])
def test_an_evaluation_is_on_the_split_it_names(split, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found, path = evaluate_tiny(replace(SMALL, split=split), TASK, tmp_path)
    rows = [str(row["id"]) for row in TASK.rows(split)]
    assert [item.id for item in found.items] == rows[:3] and found.setting.split == split
    assert json.loads(path.read_text())["setting"]["split"] == split
    few = replace(TASK, train_size=2, test_size=2)
    assert len(evaluate_tiny(replace(SMALL, split=split), few, tmp_path)[0].items) == 2
    assert caplog.text.count(f"all 2 {split} rows are used, because there are not 3") == 1


def test_completions_as_long_as_the_task_needs_and_the_context_allows(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"max-tokens 1024 .* has 1024 tokens"):
        evaluate_tiny(replace(SMALL, max_tokens=1024), TASK, tmp_path)
    longest = evaluate_tiny(replace(SMALL, max_tokens=0, limit=1), Arithmetic(test_size=5), tmp_path)[0].setting
    assert longest.sampling["max_tokens"] == 256
    longest = evaluate_tiny(replace(SMALL, max_tokens=0, limit=1), TASK, tmp_path)[0].setting
    assert longest.sampling["max_tokens"] == 1024


def test_the_same_setting_is_not_evaluated_twice_and_another_has_its_own_file(tmp_path: Path):
    first, path = evaluate_tiny(SMALL, TASK, tmp_path)
    before = path.stat().st_mtime_ns
    told: list[int] = []
    again, same = evaluate_tiny(SMALL, TASK, tmp_path, lambda task, done, of: told.append(done))
    assert again == first and same == path and path.stat().st_mtime_ns == before and not told
    _, other = evaluate_tiny(replace(SMALL, seed=1), TASK, tmp_path)
    assert other != path and path.exists()
    with pytest.raises(RunError, match=r"other settings \(seed\); move it away"):
        evaluate_tiny(replace(SMALL, seed=1), TASK, path)
    assert path.stat().st_mtime_ns == before


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path):
    whole, path = evaluate_tiny(replace(SMALL, limit=6), TASK, tmp_path / "whole")
    out = tmp_path / "cut"

    class Killed(Exception):
        pass

    def kill(task: str, done: int, of: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        evaluate_tiny(replace(SMALL, limit=6), TASK, out, kill)
    part = out / (path.name + ".part")
    assert len(part.read_text().splitlines()) == 1 + 4 and not (out / path.name).exists()
    with part.open("a") as file:
        file.write('{"id": "half a li')  # as a kill in the middle of a write leaves it
    told: list[int] = []
    found, where = evaluate_tiny(replace(SMALL, limit=6), TASK, out, lambda task, done, of: told.append(done))
    assert told == [4, 5, 6] and found == whole and where.read_text() == path.read_text() and not part.exists()


def test_a_disk_that_is_full_from_the_start_is_told_in_plain_words(tmp_path: Path):
    """The limit on the size of files makes every write fail, also the one that closing the journal repeats."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with (
            pytest.raises(RunError, match=r"cannot write .*e.json.part: "),
            Journal(tmp_path / "e.json", eval_setting()),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "e.json").exists()


def test_a_journal_of_other_settings_or_a_damaged_one_is_not_touched(tmp_path: Path):
    out = tmp_path / "x.json"
    with Journal(out, eval_setting()) as journal:
        journal.add(eval_item("a", [1.0]))
    before = journal.part_path.read_bytes()
    with (
        pytest.raises(RunError, match=r"other settings \(seed\); delete it and repeat"),
        Journal(out, eval_setting(seed=1)),
    ):
        pass
    assert journal.part_path.read_bytes() == before
    journal.part_path.write_bytes(before + b"not json\n")
    with pytest.raises(RunError, match="cannot be read"), Journal(out, eval_setting()):
        pass
    journal.part_path.write_bytes(b"")
    with Journal(out, eval_setting()) as journal:
        assert journal.items == {}
        journal.finish(evaluation({"a": [1.0]}))
    assert out.exists() and not journal.part_path.exists()


def test_raw_text_is_recorded_and_asked_without_a_template(tmp_path: Path):
    found, _ = evaluate_tiny(replace(SMALL, template="text"), Arithmetic(test_size=5), tmp_path)
    assert found.setting.template == "text"
    assert all("<|im_start|>" not in item.prompt for item in found.items)
    assert found.items[0].prompt == found.items[0].messages[0]["content"] + "\n\n"


def test_a_file_is_named_after_everything_that_decides_the_result():
    names = {
        make_file_name(eval_setting(**c))
        for c in (
            {},
            {"seed": 1},
            {"grader": "g-2"},
            {"knobs": {"x": 1}},
            {"rows": "q"},
            {"weights": "v"},
            {"place": "cuda"},
        )
    }
    assert len(names) == 7 and all(name.startswith("arithmetic-m-") for name in names)


def test_an_item_whose_grader_failed_is_tried_again(tmp_path: Path):
    out = tmp_path / "x.json"
    with Journal(out, eval_setting()) as journal:
        journal.add(eval_item("a", [1.0]))
        journal.add(eval_item("b", [None]))
        assert set(journal.items) == {"a", "b"}
    with Journal(out, eval_setting()) as journal:
        assert set(journal.items) == {"a"}


def test_what_could_not_be_scored_is_tried_again_when_the_rest_is_there(tmp_path: Path, monkeypatch):
    """With the grader completed, it alone is sampled."""
    options = replace(SMALL, limit=0)
    monkeypatch.setattr("cohort.rollout.producer.MAX_FAILED_SHARE", 0.1)
    whole, _ = evaluate_tiny(options, TASK, tmp_path / "whole")
    with monkeypatch.context() as broken:
        poll = ScoringPool.poll

        def fail_one(pool: ScoringPool, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
            return [
                (id, Outcome(failure="died") if id.startswith("3/") else found) for id, found in poll(pool, timeout)
            ]

        broken.setattr(ScoringPool, "poll", fail_one)
        damaged, path = evaluate_tiny(options, TASK, tmp_path)
    assert damaged.num_failed == 1
    told: list[int] = []
    completed, same = evaluate_tiny(options, TASK, tmp_path, lambda task, done, of: told.append(done))
    assert told == [19, 20] and same == path and completed == whole


def test_one_evaluation_is_made_by_one_process(tmp_path: Path):
    out = tmp_path / "x.json"
    with Journal(out, eval_setting()) as journal:
        journal.add(eval_item("a", [1.0]))
        with (
            pytest.raises(RunError, match=r"another process is writing the evaluation .*x.json"),
            Journal(out, eval_setting()),
        ):
            pass
        journal.add(eval_item("b", [1.0]))
    with Journal(out, eval_setting()) as journal:
        assert set(journal.items) == {"a", "b"}


def test_a_model_that_was_changed_anywhere_is_evaluated_again(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    out = tmp_path / "evals"
    before = evaluate_model(str(folder), out)
    assert before.is_new and not evaluate_model(str(folder), out).is_new
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    # Far from beginning, middle and end of the file.
    content[len(content) // 4] ^= 1
    weights.write_bytes(content)
    after = evaluate_model(str(folder), out)
    assert after.is_new and after.path != before.path
    with pytest.raises(RunError, match=r"other settings \(weights\); move it away"):
        evaluate_model(str(folder), before.path)


def test_one_long_prompt_shortens_no_others_completion(tmp_path: Path):
    file = tmp_path / "numbers.jsonl"
    rows = [{"question": "Count. " * n, "answer": "#### 1"} for n in (1, 150)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = evaluate_tiny(replace(SMALL, limit=0, max_tokens=0, temperature=1.0), GSM8K(data=str(file)), tmp_path)
    assert found.setting.sampling["max_tokens"] == 1024 and len(found.items) == 2


def test_prompts_that_do_not_fit_are_refused_or_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "numbers.jsonl"
    rows = [{"question": f"{n}. " + "Count. " * n, "answer": "#### 1"} for n in (1, 2, 900)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options, task = replace(SMALL, limit=0), GSM8K(data=str(file))
    with pytest.raises(TaskError, match=r"more than the 1016 that fit .* --too-long skip"):
        evaluate_tiny(options, task, tmp_path)
    found, _ = evaluate_tiny(replace(options, too_long="skip"), task, tmp_path)
    assert len(found.items) == found.setting.num_problems == 2 and found.setting.num_left_out == 1
    assert "gsm8k: test prompts left out, over 1016 tokens: 1" in caplog.text
    assert "left out     1 problems whose prompts do not fit" in " ".join(format_evaluation(found).split("\n")).replace(
        "|", " "
    )
    file.write_text(json.dumps(rows[2]) + "\n")
    with pytest.raises(TaskError, match="every test prompt is longer than 1016 tokens"):
        evaluate_tiny(replace(options, too_long="skip"), task, tmp_path)


@pytest.mark.parametrize("template", ["chat", "text"])
def test_a_server_is_asked_if_it_is_named(template: str, tmp_path: Path):
    def right(h, body) -> None:
        asked = body["messages"][-1]["content"] if template == "chat" else body["prompt"]
        a, b = map(int, re.findall(r"\d+", asked)[:2])
        text = f"<answer>{a + b}</answer>"
        h.reply(chat(text) if template == "chat" else {"choices": [{"text": text, "finish_reason": "stop"}]})

    with serving() as server:
        server.behaviours = [right]
        options = EvalOptions(engine="server", url=server.url, limit=4, template=template)
        with closing(ModelEvaluator("small", options)) as evaluator:
            prepared = evaluator.prepare(Arithmetic(min_terms=2, max_terms=2, operators="+", test_size=5))
            found = evaluator.run(prepared, tmp_path).evaluation
    assert found.accuracy == 1.0 and len(server.asked) == 4
    assert (found.setting.engine, found.setting.place, found.setting.template) == ("server", server.url, template)
    asked = found.items[0].messages[0]["content"]
    assert found.items[0].prompt == ("" if template == "chat" else asked + "\n\n")


def test_a_model_outside_the_native_family_is_recorded_as_such(tmp_path: Path):
    evaluator = ModelEvaluator(str(write_foreign_folder(tmp_path / "neo")), SMALL)
    assert evaluator.prepare(Arithmetic(test_size=5)).setting.engine == "transformers"


def test_tokens_that_a_server_does_not_count_are_not_shown_as_none():
    counted = evaluation({"a": [1.0]}, engine="server")
    assert "mean tokens  5.0\n" in format_evaluation(counted)
    uncounted = replace(counted, mean_tokens=0.0)
    assert "mean tokens  not known: the server does not count them\n" in format_evaluation(uncounted)
    native = replace(uncounted, setting=eval_setting(engine="native"))
    assert "mean tokens  0.0\n" in format_evaluation(native)


@pytest.fixture
def dated_model(tmp_path: Path) -> str:
    """A copy of the bundled model whose chat template puts the date into prompts."""
    folder = tmp_path / "dated"
    shutil.copytree(resolve_model("tiny"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + template)
    return str(folder)


def test_the_date_in_prompts_is_recorded_and_kept_by_what_is_continued(dated_model: str, tmp_path: Path, monkeypatch):
    class Killed(Exception):
        pass

    def kill(task: str, done: int, of: int) -> None:
        if done == 1:
            raise Killed

    def evaluate_on(day: str, progress=lambda task, done, of: None, **changes) -> EvaluationResult:
        """Evaluates the model as if today were another day."""
        monkeypatch.setattr("cohort.jobs.inputs.date", SimpleNamespace(today=lambda: date.fromisoformat(day)))
        evaluator = ModelEvaluator(dated_model, replace(SMALL, **changes))
        return evaluator.run(evaluator.prepare(TASK), tmp_path / "evals", progress)

    with pytest.raises(Killed):
        evaluate_on("2026-01-31", kill)
    done = evaluate_on("2026-02-01")
    assert done.evaluation.setting.date == "2026-01-31"
    assert all(item.prompt.startswith("31 Jan 2026") for item in done.evaluation.items)
    assert "2026-01-31, as today in the prompts" in format_evaluation(done.evaluation)
    later = evaluate_on("2026-02-02")
    assert not later.is_new and later.evaluation == done.evaluation
    asked = evaluate_on("2026-02-03", date="2026-02-01")
    assert asked.is_new and asked.path != done.path
    assert all(item.prompt.startswith("01 Feb 2026") for item in asked.evaluation.items)
    assert any("asked the same questions in different prompts (3 of 3" in note for note in compare_notes(done, asked))


def compare_notes(first: EvaluationResult, second: EvaluationResult) -> list[str]:
    """Returns what a comparison notes besides the numbers."""
    return compare(first.evaluation, second.evaluation).notes


def test_a_date_that_no_prompt_contains_is_refused_and_not_recorded(dated_model: str):
    with pytest.raises(ConfigError, match="--date 2026-01-31 has no effect, because the prompts of this model do not"):
        ModelEvaluator("tiny", replace(SMALL, date="2026-01-31"))
    assert ModelEvaluator("tiny", SMALL).date == ModelEvaluator(dated_model, replace(SMALL, template="text")).date == ""
