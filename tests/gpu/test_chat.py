"""A chat with two models that share a GPU: answers, history, an interrupt, other models, and memory."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace

import pytest

from tests.gpu.device import only_gpu

pytest.importorskip("tyro")

# isort: split

from cohort.chat import models as chat_models
from cohort.chat.answering import stream_answers
from cohort.chat.models import ChatModels
from cohort.chat.options import ChatOptions
from cohort.chat.session import ChatSession
from cohort.errors import ConfigError
from cohort.models.catalog import BUNDLED
from tests.helpers.command_line import ENV
from tests.helpers.fake_screen import FakeScreen
from tests.helpers.terminal import Terminal

pytestmark = only_gpu


def test_two_models_share_the_gpu(tmp_path, monkeypatch):
    other = str(shutil.copytree(BUNDLED["tiny"], tmp_path / "other"))
    options = ChatOptions(device="cuda", max_tokens=300)
    models = ChatModels(options, lambda name: None)
    models.swap(["tiny", other])
    assert models.place == "cuda, bfloat16"
    assert [type(m.engine).__name__ for m in models.members] == ["GraphEngine"] * 2
    session = ChatSession(models, options, FakeScreen())
    session.handle_line("What is 3 + 4?")
    session.handle_line("And 5 more?")
    assert all(text for answer in session.screen.answers for text in answer.values())
    # The same weights and random numbers give the same answers.
    assert all(len(set(answer.values())) == 1 for answer in session.screen.answers)
    # An answer that is stopped leaves the engine ready for the next one.
    request = _ask(session, "Count to a hundred.")
    requests = {0: replace(request, sampling=replace(request.sampling, stop_ids=()))}
    pieces = list(stream_answers(models.members, requests, lambda: True))
    assert pieces[-1].sample.finish == "abort" and models.members[0].engine.idle
    session.handle_line("/reset")
    session.handle_line("What is 3 + 4?")
    assert session.screen.answers[-1] == session.screen.answers[0]
    monkeypatch.setattr(chat_models, "measure_free_bytes", lambda device: 10_000_000)
    third = shutil.copytree(BUNDLED["tiny"], tmp_path / "third")
    fourth = shutil.copytree(BUNDLED["tiny"], tmp_path / "fourth")
    with pytest.raises(ConfigError, match=r"these models need 0\.01 \+ 0\.01 GB, and 0\.0\d GB are free on the GPU"):
        session.handle_line(f"/model tiny {other} {third} {fourth}")
    session.handle_line("Still there?")
    models.close()


def _ask(session, words):
    from cohort.chat.answering import prepare_request
    from cohort.types import Key

    key = Key(seed=0, purpose="chat", task="chat", prompt_id="x", visit=0, sample=0)
    messages = [{"role": "user", "content": words}]
    model = session.models.members[0]
    return prepare_request(model, 0, session.conversation, messages, session.options, key).request


def test_the_first_token_comes_at_once(tmp_path):
    words = [sys.executable, "-m", "cohort", "chat", "tiny", "--device", "cuda"]
    with Terminal(words, at=tmp_path, env={**ENV, "COHORT_CACHE": str(tmp_path)}) as terminal:
        terminal.wait_for_prompt(1)
        seconds = []
        for number in range(5):
            question = f"What is 3 + {number}?"
            terminal.type(question)
            terminal.wait_for(question)
            begin = time.monotonic()
            terminal.type("\n")
            terminal.wait_for(lambda text, q=question: text.rpartition(q)[2].strip(" \n>"))
            seconds.append(time.monotonic() - begin)
            terminal.wait_for_prompt(number + 2)
    print("seconds to the first token:", [f"{s:.3f}" for s in seconds])
    assert min(seconds) < 0.3
