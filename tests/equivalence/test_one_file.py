"""The example in one file computes what the library computes: neither can be wrong alone."""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.fates import Fate
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.catalog import resolve_model
from cohort.models.decoder import hf_views, to_hf_shape
from cohort.models.files import load_folder
from cohort.tasks.arithmetic import PHRASINGS, Arithmetic
from cohort.tasks.expression import evaluate
from cohort.text import Tokenizer
from cohort.types import Answer
from tests.helpers.decoders_and_groups import make_group, make_sample, pack_groups

FILE = Path(__file__).resolve().parents[2] / "examples" / "grpo_in_one_file.py"
CLOSE = 1e-10
LR = 2e-5  # moves ratios beyond the clip on both sides in one step, and not to astronomic numbers
LENGTHS = ((5, 1, 9, 3), (2, 2, 2, 2), (7, 12, 4, 1), (3, 6, 1, 8))
REWARDS = ((1.0, 0.0, 0.0, 1.0), (1.0, 0.0, 1.0, 1.0), (0.1, 0.1, 0.1, 0.1), (0.3, 0.1 + 0.2, -1.0, 0.25))


def load_example():
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


one = load_example()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(resolve_model("tiny"))


@pytest.fixture
def both():
    """The example's model and the library's learner, in float64."""
    learner = LocalLearner(
        load_folder(resolve_model("tiny"), torch.float64).decoder, LearnerConfig(), OptimConfig(lr=LR), num_updates=2
    )
    return one.load_model(torch.float64), learner


def batches():
    """Returns the same groups for the example and for the library, with completions of different lengths.

    The completions are invented. One group has equal rewards.
    """
    rng = random.Random(0)
    mine, theirs = [], []
    for i, (lengths, rewards) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 20))]
        completions = [[rng.randrange(7, 512) for _ in range(n - 1)] + [one.END] for n in lengths]
        nothing = torch.zeros(len(lengths), max(lengths))
        mine.append(one.Group(prompt, completions, nothing, list(rewards)))
        samples = [make_sample(c, reward=r) for c, r in zip(completions, rewards, strict=True)]
        theirs.append(make_group(prompt, samples, id=str(i)))
    return mine, theirs


def ragged(rows, completions):
    return [row[: len(c)].tolist() for row, c in zip(rows.detach(), completions, strict=True)]


def assert_same_logprobs(model, learner, mine, theirs):
    """Checks the log-probabilities, and stores the library's in its groups as the old ones."""
    annotate(learner, theirs, {"old"})
    for a, b in zip(mine, theirs, strict=True):
        rows = ragged(one.compute_logprobs(model, a), a.completions)
        for row, s in zip(rows, b.samples, strict=True):
            assert row == pytest.approx(s.old_logprobs, abs=CLOSE, rel=0)


def assert_same_update(model, learner, mine, minibatch, algo):
    """Checks loss and gradients of one update. Returns the library's metrics."""
    model.zero_grad()
    loss = one.add_gradients(model, mine)
    metrics = learner.forward_backward(minibatch, algo).tally.to_metrics()
    assert loss == pytest.approx(metrics["loss"], abs=CLOSE)
    params = dict(model.named_parameters())
    grads = dict(hf_views(learner.decoder, select=lambda p: p.grad))
    assert {name.removeprefix("model.") for name in grads} == params.keys()
    for name, view in grads.items():
        grad, got = to_hf_shape(name, view), params[name.removeprefix("model.")].grad
        assert got.any(), name
        assert (got - grad).abs().max() <= CLOSE * grad.abs().max(), name
    return metrics


def test_both_epochs_are_the_librarys(both):
    """Log-probabilities, advantages, loss, gradients; then AdamW; then the same with ratios beyond the clip."""
    model, learner = both
    mine, theirs = batches()
    algo = build_algorithm(GRPO(), max_tokens=16)
    assert_same_logprobs(model, learner, mine, theirs)
    algo.advantages(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert one.compute_advantages(a.rewards) == [s.advantage for s in b.samples]  # exactly
    assert [g.excluded for g in theirs] == ["", "", Fate.CONSTANT_REWARD, ""]
    minibatch = pack_groups(theirs, learner.token_budget).minibatches[0]

    metrics = assert_same_update(model, learner, mine, minibatch, algo)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert mine[2].old_logprobs is None, "a constant group is not computed"
    assert metrics["advantage/abs"] > 0.1

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert learner.optim_step()["updates/clipped"] == 1.0
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, view in hf_views(learner.decoder):
            moved, p = to_hf_shape(name, view), params[name.removeprefix("model.")]
            assert (p - moved).abs().max() <= 1e-6 * LR, name  # Adam enlarges the rounding of tiny gradients
            p.copy_(moved)

    metrics = assert_same_update(model, learner, mine, minibatch, algo)
    assert metrics["clip/low"] > 0 and metrics["clip/high"] > 0, "nothing was clipped"
    assert 1e-3 < abs(metrics["loss"]) < 10, "nothing to compare, or numbers too large to compare"


def test_what_is_sampled_has_the_log_probabilities_it_is_trained_with(both):
    """One token at a time with a cache, a padded group, and the library: one policy."""
    model, learner = both
    torch.manual_seed(0)
    prompt = one.encode_prompt(one.Tokenizer.from_file(str(one.MODEL / "tokenizer.json")), "What is 12+7*3?")
    completions, logprobs = one.sample_completions(model, prompt, 6, 24)
    assert len({len(c) for c in completions}) > 1, "not ragged"
    for c in completions:
        assert 1 <= len(c) <= 24 and one.END not in c[:-1] and (c[-1] == one.END or len(c) == 24)
    group = one.Group(prompt, completions, logprobs, [0.0] * 6)
    assert (one.compute_logprobs(model, group) - logprobs).abs().max() <= CLOSE
    assert_same_logprobs(model, learner, [group], [make_group(prompt, [make_sample(c) for c in completions])])


def test_prompts_are_rendered_as_the_library_does(tokenizer):
    assert one.PHRASINGS == PHRASINGS
    assert tokenizer.stop_ids == (one.END,)
    plain, rng = one.Tokenizer.from_file(str(one.MODEL / "tokenizer.json")), random.Random(0)
    for _ in range(200):
        question, _ = one.make_problem(rng)
        rendered = tokenizer.render([{"role": "user", "content": question}])
        assert one.encode_prompt(plain, question) == rendered.tokens


def test_problems_have_the_librarys_form_and_the_right_answer():
    rng = random.Random(1)
    around = {p.format("") for p in PHRASINGS}
    for _ in range(300):
        question, answer = one.make_problem(rng)
        expression = "".join(c for c in question if c in "0123456789+-*")
        assert question.replace(expression, "") in around
        assert evaluate(expression).value == answer and abs(answer) <= 999


@pytest.mark.parametrize(
    "text",
    [
        "<think>7*3=21</think><answer>33</answer>",
        "<answer> 33 </answer>",
        "<answer>32</answer><answer>33</answer>",
        "<answer>33</answer><answer>32</answer>",
        "<answer>33",
        "33</answer>",
        "33",
        "",
        "<answer></answer>",
        "<answer>-33</answer>",
        "<answer><answer>33</answer>",
    ],
)
def test_the_grader_agrees_with_the_librarys(text):
    answer = Answer(text=text, full=text, finish="stop", num_tokens=1, conversation=[])
    verdict = Arithmetic().score({"answer": 33}, answer)
    assert one.grade(text, 33) == verdict.parts["correct"]


def test_it_is_one_short_file_of_its_own():
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 360
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    names = {m.partition(".")[0] for m in modules} - sys.stdlib_module_names
    assert names == {"torch", "safetensors", "tokenizers"}


def test_the_loop_runs(capsys):
    rewards = one.train(steps=2, prompts=3, samples=4, max_tokens=16, epochs=2, lr=3e-4, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
    for reward, line in zip(rewards, lines, strict=True):
        assert 0 <= reward <= 1 and f"reward {reward:.3f}" in line


def test_help_works():
    done = subprocess.run([sys.executable, str(FILE), "--help"], capture_output=True, text=True, check=True)
    assert "--steps" in done.stdout
