"""Tests that foreign models give equal numbers packed, padded, cached and alone, and the gradients of autograd."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.auto import AutoEngine
from cohort.engines.base import Request, sample
from cohort.engines.native import make_native_engine
from cohort.fates import Fate
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.auto import AnyDecoder, AutoDecoder, load_foreign_decoder
from cohort.models.catalog import resolve_model
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.files import load_folder, read_config, read_tensors
from cohort.types import Group, Key, Sample, Sampling
from tests.helpers.decoders_and_groups import TOLERANCE, make_group, make_sample, pack_groups, random_groups
from tests.helpers.engine_conformance import SameWeights, spell
from tests.helpers.foreign_models import FAMILIES, compute_plain_logprobs, load_foreign, write_foreign_folder

DTYPES = [torch.float64, torch.float32]
# Families that can be tested in float64. transformers computes Gemma's norm and GPT-NeoX's softmax in fp32.
EXACT = ["gpt_neo", "gpt2", "opt"]
CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES if dtype == torch.float32 or family in EXACT]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per family."""
    root = tmp_path_factory.mktemp("foreign")
    return {family: write_foreign_folder(root / family, family) for family in FAMILIES}


def make_learner(decoder: AnyDecoder, budget: int = 1000, share: bool = True, **values) -> LocalLearner:
    config = LearnerConfig(token_budget=budget, prefix_sharing=share)
    return LocalLearner(decoder, config, OptimConfig(lr=1e-2), num_updates=10, **values)


def make_groups(longest: int = 9) -> list[Group]:
    """Returns groups with samples of unequal lengths. Some have one token, which the prompt alone predicts."""
    groups = random_groups(num_groups=4, longest=longest)
    groups.append(make_group([9, 8, 7, 6, 5, 4], [make_sample([n], advantage=n - 2.0) for n in (1, 2, 3)], id="one"))
    return groups


def compute_gradient(learner: LocalLearner, groups: list[Group], algo) -> dict[str, Tensor]:
    annotate(learner, groups, algo.needs() | {"old"})
    batch = pack_groups(groups, learner.token_budget, share=learner.config.prefix_sharing)
    learner.forward_backward(batch.minibatches[0], algo)
    return {n: m.grad.clone() for n, m in learner.optimizer.masters.items() if m.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    # The bias of keys has no gradient but rounding errors, because softmax ignores it. Hence the second bound.
    for name, g in expected.items():
        assert (got[name] - g).abs().max() <= tolerance * max(float(g.abs().max()), 1e-2 * largest), name


def make_requests(seed: int = 0, **sampling) -> list[Request]:
    """Returns requests with and without siblings, with prompts of 1 to 30 tokens and unequal completion lengths."""
    rng = random.Random(seed)
    requests = []
    for p, (length, siblings, longest) in enumerate([(1, 3, 20), (5, 6, 12), (30, 1, 25), (12, 4, 9), (3, 1, 1)]):
        prompt = [rng.randrange(512) for _ in range(length)]
        for i in range(siblings):
            requests.append(
                Request(
                    id=f"{p}/{i}",
                    tokens=prompt,
                    sampling=Sampling(max_tokens=max(1, longest - 2 * i), stop_ids=(7 + i, 8 + p), **sampling),
                    key=Key(seed=seed, purpose="train", task="t", prompt_id=str(p), visit=0, sample=i),
                )
            )
    return requests


def run_engine(decoder: AutoDecoder, requests: list[Request], slots: int = 64, window: int = 8) -> dict[str, Sample]:
    return sample(AutoEngine(decoder, spell, slots=slots, max_context=200, window=window), requests)


# ---- the learner


@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.no_grad()
def test_4_3_packed_padded_shared_and_alone_have_the_same_logprobs(folders, family, dtype):
    decoder, groups = load_foreign(folders[family], dtype), make_groups()
    expected = [compute_plain_logprobs(decoder.model, g.prompt.tokens, s.tokens) for g in groups for s in g.samples]
    for budget, share in ((1000, True), (1000, False), (40, True), (17, False)):
        annotate(make_learner(decoder, budget, share), groups, {"old"})
        for s, logprobs in zip((s for g in groups for s in g.samples), expected, strict=True):
            gap = (torch.tensor(s.old_logprobs, dtype=dtype) - logprobs).abs()
            assert gap.max() <= TOLERANCE[dtype], (budget, share, len(s.tokens))
            assert gap[0] <= TOLERANCE[dtype]  # every sibling's first token, predicted at the end of their prompt


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_4_4_the_gradient_is_autograds_through_transformers_own_forward(folders, family, dtype):
    """The loss is the token mean of -A log p, one sequence at a time. A dead group counts in the denominator."""
    decoder, groups = load_foreign(folders[family], dtype), make_groups()
    for g in groups:  # the pad token has a test of its own
        g.prompt.tokens[:] = [t or 5 for t in g.prompt.tokens]
        for s in g.samples:
            s.tokens[:] = [t or 5 for t in s.tokens]
    groups[1].excluded = Fate.CONSTANT_REWARD
    got = compute_gradient(make_learner(decoder), copy.deepcopy(groups), build_algorithm(GRPO(aggregate="token"), 16))
    num_tokens = sum(len(s.tokens) for g in groups for s in g.samples)
    decoder.zero_grad()
    alive = [(g.prompt.tokens, s) for g in groups for s in g.samples if not g.excluded]
    total = sum(s.advantage * compute_plain_logprobs(decoder.model, prompt, s.tokens).sum() for prompt, s in alive)
    (-total / num_tokens).backward()
    expected = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    assert len(expected) == len(list(decoder.parameters()))
    assert_same(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_4_4_gradient_independent_of_microbatch_order_and_sharing(folders, tmp_path, dtype):
    decoder = load_foreign(folders["gpt_neo"], dtype)
    reference = load_foreign(write_foreign_folder(tmp_path / "reference", seed=1), dtype)
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.1), entropy=0.01), 16)
    expected = compute_gradient(make_learner(decoder, reference=reference), make_groups(), algo)
    for budget, share in ((40, True), (1000, False), (17, False)):
        got = compute_gradient(make_learner(decoder, budget, share, reference=reference), make_groups(), algo)
        assert_same(got, expected, TOLERANCE[dtype])
    shuffled = make_groups()
    random.Random(1).shuffle(shuffled)
    assert_same(
        compute_gradient(make_learner(decoder, 40, reference=reference), shuffled, algo), expected, TOLERANCE[dtype]
    )


def test_4_5_ratio_is_exactly_one_before_the_first_update(folders):
    """The model stays in evaluation mode in training too, so dropout makes nothing random."""
    decoder = load_foreign(folders["gpt_neo"])
    assert decoder.train().training is False and not any(m.training for m in decoder.modules())
    algo, learner = build_algorithm(GRPO(), 16), make_learner(decoder)
    groups = make_groups()
    annotate(learner, groups, {"old"})
    metrics = learner.forward_backward(pack_groups(groups, 1000).minibatches[0], algo).tally.to_metrics()
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def load_through_transformers(name: str) -> AutoDecoder:
    folder = resolve_model(name)
    return load_foreign_decoder(
        folder, read_config(folder), read_tensors(folder / "model.safetensors", None), torch.float32
    )


def test_the_native_family_through_transformers_is_the_native_decoder():
    """Both decoders of `tiny` have the same log-probabilities and gradient, that of the pad token's embedding too."""
    native, other = load_folder(resolve_model("tiny")).decoder, load_through_transformers("tiny")
    assert isinstance(native, Decoder)
    algo, logprobs = build_algorithm(GRPO(aggregate="token"), 16), []
    for decoder in (native, other):
        groups = make_groups()
        groups[0].prompt.tokens[:1] = [0]  # what the config calls padding, as a token like any other
        compute_gradient(make_learner(decoder), groups, algo)
        logprobs.append(torch.tensor([x for g in groups for s in g.samples for x in s.old_logprobs or []]))
    gap = (logprobs[0] - logprobs[1]).abs()
    assert gap.mean() <= 1e-5 and gap.max() <= 2e-4
    views = {name: to_hf_shape(name, g) for name, g in hf_views(native, select=lambda p: p.grad)}
    assert views["model.embed_tokens.weight"][0].abs().max() > 0.01 * views["model.embed_tokens.weight"].abs().max()
    assert_same({name: p.grad for name, p in other.model.named_parameters()}, views, 1e-5)


def test_the_window_of_the_test_model_changes_its_logprobs(folders, tmp_path):
    """Otherwise the tests above would prove nothing about windows."""
    wide = load_foreign(write_foreign_folder(tmp_path / "wide", window_size=200))
    with torch.no_grad():
        a, b = (
            compute_plain_logprobs(d.model, [5, 6, 7, 8, 9], [10, 11]) for d in (load_foreign(folders["gpt_neo"]), wide)
        )
    assert (a - b).abs().max() > 0.01


# ---- the engine


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("slots", [64, 4])
@torch.no_grad()
def test_sampler_logprobs_are_transformers_own(folders, family, dtype, slots):
    decoder, requests = load_foreign(folders[family], dtype), make_requests(temperature=0.7)
    samples = run_engine(decoder, requests, slots)
    assert len({tuple(s.tokens) for s in samples.values()}) > 8
    for r in requests:
        s = samples[r.id]
        gap = torch.tensor(s.sampler_logprobs, dtype=dtype) - compute_plain_logprobs(
            decoder.model, r.tokens, s.tokens, 0.7
        )
        assert gap.abs().max() <= TOLERANCE[dtype], r.id


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree(folders, family):
    decoder, requests = load_foreign(folders[family]), make_requests()
    samples = run_engine(decoder, requests, slots=7)
    groups = [make_group(r.tokens, [samples[r.id]], id=r.id) for r in requests]
    annotate(make_learner(decoder, budget=200), groups, {"old"})
    drawn = [s for g in groups for s in g.samples]
    a = torch.tensor([x for s in drawn for x in s.sampler_logprobs])
    b = torch.tensor([x for s in drawn for x in s.old_logprobs or []])
    assert (a - b).abs().mean() <= 1e-5 and (a - b).abs().max() <= 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_sampling_gives_the_tokens_of_generate(folders, family):
    decoder, requests = load_foreign(folders[family]), make_requests(temperature=0.0)
    samples = run_engine(decoder, requests)
    for r in requests:
        stops = list(r.sampling.stop_ids)
        given = {"attention_mask": torch.ones(1, len(r.tokens), dtype=torch.long), "eos_token_id": stops}
        limits = {"max_new_tokens": r.sampling.max_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            said = decoder.model.generate(input_ids=torch.tensor([r.tokens]), **given, **limits)[0].tolist()
        assert samples[r.id].tokens == said[len(r.tokens) :], r.id


@pytest.mark.parametrize("family", ["gpt_neo", "gemma3_text"])
def test_4_6_samples_do_not_depend_on_slots_order_or_company(folders, family):
    decoder, requests = load_foreign(folders[family]), make_requests()
    reference = {k: s.tokens for k, s in run_engine(decoder, requests).items()}
    shuffled = random.Random(5).sample(requests, len(requests))
    for others, slots, window in ((shuffled, 64, 8), (requests[::-1], 3, 1), (shuffled, 7, 5), (shuffled[:6], 1, 8)):
        for id, s in run_engine(decoder, others, slots, window).items():
            assert s.tokens == reference[id]


def test_4_6_the_draws_are_the_native_engines():
    """With both decoders of `tiny`, the same keys draw the same tokens."""
    other = load_through_transformers("tiny")
    native = make_native_engine(load_folder(resolve_model("tiny")).decoder, spell, slots=8, max_context=200)
    for values in ({}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 5, "min_p": 0.02}):
        requests = make_requests(**values)
        a, b = run_engine(other, requests), sample(native, requests)
        assert {k: s.tokens for k, s in a.items()} == {k: s.tokens for k, s in b.items()}
        for k, s in a.items():
            assert s.kept_mass == pytest.approx(b[k].kept_mass, abs=1e-4)


@pytest.mark.parametrize("cut", [1, 5])
def test_continuing_a_partial_sample_gives_the_rest(folders, cut):
    decoder, requests = load_foreign(folders["gpt_neo"]), make_requests()
    whole = run_engine(decoder, requests)
    rest = [
        Request(
            id=r.id,
            tokens=r.tokens + whole[r.id].tokens[:cut],
            sampling=Sampling(max_tokens=r.sampling.max_tokens - cut, stop_ids=r.sampling.stop_ids),
            key=r.key,
            start=cut,
        )
        for r in requests
        if len(whole[r.id].tokens) > cut
    ]
    assert len(rest) >= 5
    for id, s in run_engine(decoder, rest, slots=4).items():
        assert s.tokens == whole[id].tokens[cut:]


@torch.no_grad()
def test_an_optimizer_step_is_seen_by_the_next_sample_and_load_drops_the_cache(folders, tmp_path):
    """After the load every token is drawn as the new weights alone would, given what was drawn before."""
    decoder, old = load_foreign(folders["gpt_neo"], torch.float64), load_foreign(folders["gpt_neo"], torch.float64)
    new = load_foreign(write_foreign_folder(tmp_path / "new", seed=1), torch.float64)
    engine = AutoEngine(decoder, spell, slots=8, max_context=200, window=4)
    requests, done = make_requests(), {}
    for r in requests:
        engine.submit(r)

    def poll() -> bool:
        events = engine.poll()
        done.update({e.id: e.sample for e in events if e.sample is not None})
        return bool(events)

    poll()
    for mine, theirs in zip(decoder.parameters(), new.parameters(), strict=True):
        mine.copy_(theirs)  # what an optimizer does to the shared storage
    engine.load(SameWeights(decoder), version=1)
    while poll():
        pass
    mixed = 0
    for r in requests:
        s = done[r.id]
        change = {v: k for k, v in s.versions}.get(1, len(s.tokens))
        mixed += 0 < change < len(s.tokens)
        for model, part in ((old, slice(0, change)), (new, slice(change, None))):
            expected = compute_plain_logprobs(model.model, r.tokens, s.tokens)[part].tolist()
            assert s.sampler_logprobs[part] == pytest.approx(expected, abs=1e-10)
    assert mixed >= 5


def test_used_engine_samples_bit_for_bit_as_a_fresh_one(folders):
    """A resumed run starts with a fresh engine."""
    decoder, requests = load_foreign(folders["gpt_neo"]), make_requests()
    used = AutoEngine(decoder, spell, slots=7, max_context=200)
    sample(used, make_requests(seed=3, top_p=0.9))
    assert sample(used, requests) == run_engine(decoder, requests, slots=7)


# ---- both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_raises_the_probability_of_a_rewarded_token(folders, dtype):
    """Runs up to twelve steps of sampling, scoring and learning. A first token that is even gets reward 1."""
    decoder = load_foreign(folders["gpt_neo"], dtype)
    engine = AutoEngine(decoder, spell, slots=64, max_context=40)
    learner, algo = make_learner(decoder), build_algorithm(GRPO(), 4)
    rewards = []
    while len(rewards) < 12 and sum(rewards[-1:]) < 1:
        step = len(rewards)
        keys = [Key(seed=0, purpose="train", task="t", prompt_id=str(step), visit=0, sample=i) for i in range(64)]
        asked = Sampling(max_tokens=3)
        requests = [Request(id=str(k.sample), tokens=[5, 6, 7], sampling=asked, key=k) for k in keys]
        samples = list(sample(engine, requests).values())
        for s in samples:
            s.reward = float(s.tokens[0] % 2 == 0)
        rewards.append(sum(s.reward for s in samples) / 64)
        groups = algo.advantages([make_group([5, 6, 7], samples)])
        learner.update(make_batch(groups), algo)
        engine.load(learner.weights(), version=step + 1)
    assert rewards[0] < 0.7 and rewards[-1] > 0.95, rewards
    assert {entry.dtype for entry in learner.optimizer.state().values()} == {torch.float32}
