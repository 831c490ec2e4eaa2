"""The models of a chat: every way to name one, memory, and swaps that fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cohort.chat import models as chat_models
from cohort.chat.models import ChatModels
from cohort.chat.options import ChatOptions
from cohort.errors import ConfigError, ModelError
from cohort.models.catalog import BUNDLED, pull
from tests.helpers.fake_screen import FakeScreen
from tests.helpers.foreign_models import write_foreign_folder
from tests.helpers.gguf_file import write_gguf


@pytest.fixture
def make_models():
    """Returns a function that makes the models of a chat, without any loaded yet."""
    made = []

    def make(fetch=lambda name: None, report=lambda text: None, **options):
        made.append(ChatModels(ChatOptions(threads=1, device="cpu", **options), fetch, report))
        return made[-1]

    yield make
    for models in made:
        models.close()


def answer(models, **options):
    """Returns what the models answer to a question."""
    from cohort.chat.session import ChatSession

    session = ChatSession(models, ChatOptions(threads=1, max_tokens=8, **options), FakeScreen())
    session.handle_line("What is 2 + 3?")
    session.handle_line("Again?")
    return session.screen.answers


def test_a_gguf_file_is_converted_once(make_models, tmp_path, monkeypatch):
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    write_gguf(file)
    fetched = []

    def fetch(name):
        fetched.append(name)
        return pull(name)

    models = make_models(fetch)
    models.swap([str(file)])
    models.swap([str(file), "tiny"])
    assert fetched == [str(file)]
    assert [member.label for member in models.members] == ["small.gguf", "tiny"]


def test_models_of_transformers_take_part(make_models, tmp_path):
    folder = write_foreign_folder(tmp_path / "foreign")
    models = make_models()
    models.swap(["tiny", str(folder)])
    assert models.members[1].engine.name == "transformers" and models.members[1].demand.weights > 0
    assert all(set(texts) == {"tiny", "foreign"} for texts in answer(models))


def test_models_that_do_not_fit_together_are_refused_before_they_are_loaded(make_models, tmp_path, monkeypatch):
    other = str(shutil.copytree(BUNDLED["tiny"], tmp_path / "other"))
    third = str(shutil.copytree(BUNDLED["tiny"], tmp_path / "third"))
    models = make_models()
    models.swap(["tiny"])
    need = models.members[0].demand.total
    loaded = []
    load = chat_models.load_on_device
    monkeypatch.setattr(chat_models, "load_on_device", lambda *args: loaded.append(args[0]) or load(*args))
    monkeypatch.setattr(chat_models, "measure_free_bytes", lambda device: int(1.5 * need))
    with pytest.raises(ConfigError, match=r"^these models need 0\.01 \+ 0\.01 GB, and 0\.02 GB are free on this"):
        models.swap(["tiny", other, third])
    assert not loaded and [member.label for member in models.members] == ["tiny"]
    assert answer(models)
    # What leaves makes room for what comes.
    models.swap([other, third])
    assert [member.label for member in models.members] == ["other", "third"] and len(loaded) == 2
    assert answer(models)


def test_a_damaged_model_leaves_the_present_ones(make_models, tmp_path):
    broken = shutil.copytree(BUNDLED["tiny"], tmp_path / "broken")
    models = make_models()
    models.swap(["tiny"])
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        models.swap([str(broken)])
    shutil.copy(BUNDLED["tiny"] / "tokenizer.json", broken)
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace('"intermediate_size": 704', '"intermediate_size": 700'))
    with pytest.raises(ModelError, match="they are of different models"):
        models.swap(["tiny", str(broken)])
    assert answer(models)


def test_labels_are_short_different_and_harmless():
    names = ["a/b", "c/b/", "x\x1b[2J", "runs/r@best"]
    assert chat_models.make_labels(names) == ["b (1)", "b (2)", "x\\x1b[2J", "r@best"]


def test_a_model_without_a_template_names_the_remedy(make_models, tmp_path):
    base = shutil.copytree(BUNDLED["tiny"], tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="--template text"):
        make_models().swap([str(base)])
    models = make_models(template="text")
    models.swap([str(base)])
    assert answer(models, template="text")


def test_what_takes_long_is_reported(make_models, monkeypatch):
    lines = []
    monkeypatch.setattr(chat_models, "SLOW_BYTES", 1000)
    models = make_models(report=lines.append)
    models.swap(["tiny"])
    models.swap(["tiny", "tiny"])
    assert lines == ["loading tiny, 0.01 GB ..."]


@pytest.mark.parametrize("max_tokens", [1, 50])
def test_an_engine_is_ready_after_its_warm_up(make_models, max_tokens):
    models = make_models()
    models.swap(["tiny"])
    before = answer(models)
    chat_models.warm_up(models.members[0].engine, max_tokens)
    assert models.members[0].engine.idle
    assert answer(models) == before


def test_runs_their_steps_and_exported_folders_are_models(make_models, tmp_path):
    run = Path(__file__).parents[2] / "data" / "run-format-1" / "run"
    exported = shutil.copytree(run / "checkpoints" / "step-000002" / "model", tmp_path / "exported")
    models = make_models()
    models.swap([str(run), f"{run}@2", f"{run}@best", str(exported)])
    assert [member.label for member in models.members] == ["run@2 (1)", "run@2 (2)", "run@2 (3)", "exported"]
    # Three names of one folder are one model in memory.
    assert len(models._loaded) == 2
