"""Models outside the native family: packed, padded, cached and alone are one policy, and the gradient is autograd's."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cohort.algos.algorithm import build_algorithm
from cohort.config.algos import KLConfig
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.auto import AutoEngine
from cohort.engines.base import Request, sample
from cohort.engines.native import native_engine
from cohort.fates import Fate
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.auto import AnyDecoder, AutoDecoder, foreign_decoder
from cohort.models.catalog import resolve
from cohort.models.decoder import Decoder, hf_shaped, hf_views
from cohort.models.files import load_folder, read_config, stored_tensors
from cohort.types import Group, Key, Sample, Sampling
from tests.helpers.decoders_and_groups import TOLERANCE, make_group, make_sample, packed, random_groups
from tests.helpers.engine_conformance import Same, spell
from tests.helpers.foreign_models import FAMILIES, folder_of, foreign, plain_logprobs

DTYPES = [torch.float64, torch.float32]
# transformers computes Gemma's norm and GPT-NeoX's softmax in fp32 whatever the model's type
EXACT = ["gpt_neo", "gpt2", "opt"]
CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES if dtype == torch.float32 or family in EXACT]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("foreign")
    return {family: folder_of(root / family, family) for family in FAMILIES}


def learner_of(decoder: AnyDecoder, budget: int = 1000, share: bool = True, **values) -> LocalLearner:
    config = LearnerConfig(token_budget=budget, prefix_sharing=share)
    return LocalLearner(decoder, config, OptimConfig(lr=1e-2), num_updates=10, **values)


def groups_of(longest: int = 9) -> list[Group]:
    """Siblings of unequal lengths, some of one token: it is predicted by the prompt alone."""
    groups = random_groups(num_groups=4, longest=longest)
    groups.append(make_group([9, 8, 7, 6, 5, 4], [make_sample([n], advantage=n - 2.0) for n in (1, 2, 3)], id="one"))
    return groups


def gradient(learner: LocalLearner, groups: list[Group], algo) -> dict[str, Tensor]:
    annotate(learner, groups, algo.needs() | {"old"})
    batch = packed(groups, learner.token_budget, share=learner.config.prefix_sharing)
    learner.forward_backward(batch.minibatches[0], algo)
    return {n: m.grad.clone() for n, m in learner.optimizer.masters.items() if m.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():  # a bias of keys has none: softmax does not see it
        assert (got[name] - g).abs().max() <= tolerance * max(float(g.abs().max()), 1e-2 * largest), name


def load_requests(seed: int = 0, **sampling) -> list[Request]:
    """Siblings and lonely ones, prompts of 1 to 30 tokens, unequal ends."""
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


def run(decoder: AutoDecoder, requests: list[Request], slots: int = 64, window: int = 8) -> dict[str, Sample]:
    return sample(AutoEngine(decoder, spell, slots=slots, max_context=200, window=window), requests)


# ---- the learner


@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.no_grad()
def test_4_3_packed_padded_shared_and_alone_have_the_same_logprobs(folders, family, dtype):
    decoder, groups = foreign(folders[family], dtype), groups_of()
    expected = [plain_logprobs(decoder.model, g.prompt.tokens, s.tokens) for g in groups for s in g.samples]
    for budget, share in ((1000, True), (1000, False), (40, True), (17, False)):
        annotate(learner_of(decoder, budget, share), groups, {"old"})
        for s, logprobs in zip((s for g in groups for s in g.samples), expected, strict=True):
            gap = (torch.tensor(s.old_logprobs, dtype=dtype) - logprobs).abs()
            assert gap.max() <= TOLERANCE[dtype], (budget, share, len(s.tokens))
            assert gap[0] <= TOLERANCE[dtype]  # every sibling's first token, predicted at the end of their prompt


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_4_4_the_gradient_is_autograds_through_transformers_own_forward(folders, family, dtype):
    """The token mean of -A log p, a dead group in the denominator, one sequence at a time."""
    decoder, groups = foreign(folders[family], dtype), groups_of()
    for g in groups:  # the pad token has a test of its own
        g.prompt.tokens[:] = [t or 5 for t in g.prompt.tokens]
        for s in g.samples:
            s.tokens[:] = [t or 5 for t in s.tokens]
    groups[1].excluded = Fate.CONSTANT_REWARD
    got = gradient(learner_of(decoder), copy.deepcopy(groups), build_algorithm(GRPO(aggregate="token"), 16))
    num_tokens = sum(len(s.tokens) for g in groups for s in g.samples)
    decoder.zero_grad()
    alive = [(g.prompt.tokens, s) for g in groups for s in g.samples if not g.excluded]
    total = sum(s.advantage * plain_logprobs(decoder.model, prompt, s.tokens).sum() for prompt, s in alive)
    (-total / num_tokens).backward()
    expected = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    assert len(expected) == len(list(decoder.parameters()))
    assert_same(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_4_4_gradient_independent_of_microbatch_order_and_sharing(folders, tmp_path, dtype):
    decoder = foreign(folders["gpt_neo"], dtype)
    reference = foreign(folder_of(tmp_path / "reference", seed=1), dtype)
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.1), entropy=0.01), 16)
    expected = gradient(learner_of(decoder, reference=reference), groups_of(), algo)
    for budget, share in ((40, True), (1000, False), (17, False)):
        got = gradient(learner_of(decoder, budget, share, reference=reference), groups_of(), algo)
        assert_same(got, expected, TOLERANCE[dtype])
    shuffled = groups_of()
    random.Random(1).shuffle(shuffled)
    assert_same(gradient(learner_of(decoder, 40, reference=reference), shuffled, algo), expected, TOLERANCE[dtype])


def test_4_5_ratio_is_exactly_one_before_the_first_update(folders):
    """No dropout, in training too: GPT-Neo's config is asked for some, and nothing is random."""
    decoder = foreign(folders["gpt_neo"])
    assert decoder.train().training is False and not any(m.training for m in decoder.modules())
    algo, learner = build_algorithm(GRPO(), 16), learner_of(decoder)
    groups = groups_of()
    annotate(learner, groups, {"old"})
    metrics = learner.forward_backward(packed(groups, 1000).minibatches[0], algo).tally.to_metrics()
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def through_transformers(name: str) -> AutoDecoder:
    folder = resolve(name)
    return foreign_decoder(
        folder, read_config(folder), stored_tensors(folder / "model.safetensors", None), torch.float32
    )


def test_the_native_family_through_transformers_is_the_native_decoder():
    """`tiny` both ways: the same log-probabilities and the same gradient, of the pad token's embedding too."""
    native, other = load_folder(resolve("tiny")).decoder, through_transformers("tiny")
    assert isinstance(native, Decoder)
    algo, logprobs = build_algorithm(GRPO(aggregate="token"), 16), []
    for decoder in (native, other):
        groups = groups_of()
        groups[0].prompt.tokens[:1] = [0]  # what the config calls padding, as a token like any other
        gradient(learner_of(decoder), groups, algo)
        logprobs.append(torch.tensor([x for g in groups for s in g.samples for x in s.old_logprobs or []]))
    gap = (logprobs[0] - logprobs[1]).abs()
    assert gap.mean() <= 1e-5 and gap.max() <= 2e-4
    views = {name: hf_shaped(name, g) for name, g in hf_views(native, of=lambda p: p.grad)}
    assert views["model.embed_tokens.weight"][0].abs().max() > 0.01 * views["model.embed_tokens.weight"].abs().max()
    assert_same({name: p.grad for name, p in other.model.named_parameters()}, views, 1e-5)


def test_the_window_of_the_test_model_matters(folders, tmp_path):
    """Or a test that passes would say little about windows."""
    wide = foreign(folder_of(tmp_path / "wide", window_size=200))
    with torch.no_grad():
        a, b = (plain_logprobs(d.model, [5, 6, 7, 8, 9], [10, 11]) for d in (foreign(folders["gpt_neo"]), wide))
    assert (a - b).abs().max() > 0.01


# ---- the engine


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("slots", [64, 4])
@torch.no_grad()
def test_sampler_logprobs_are_transformers_own(folders, family, dtype, slots):
    decoder, requests = foreign(folders[family], dtype), load_requests(temperature=0.7)
    samples = run(decoder, requests, slots)
    assert len({tuple(s.tokens) for s in samples.values()}) > 8
    for r in requests:
        s = samples[r.id]
        gap = torch.tensor(s.sampler_logprobs, dtype=dtype) - plain_logprobs(decoder.model, r.tokens, s.tokens, 0.7)
        assert gap.abs().max() <= TOLERANCE[dtype], r.id


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree(folders, family):
    decoder, requests = foreign(folders[family]), load_requests()
    samples = run(decoder, requests, slots=7)
    groups = [make_group(r.tokens, [samples[r.id]], id=r.id) for r in requests]
    annotate(learner_of(decoder, budget=200), groups, {"old"})
    drawn = [s for g in groups for s in g.samples]
    a = torch.tensor([x for s in drawn for x in s.sampler_logprobs])
    b = torch.tensor([x for s in drawn for x in s.old_logprobs or []])
    assert (a - b).abs().mean() <= 1e-5 and (a - b).abs().max() <= 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_gives(folders, family):
    decoder, requests = foreign(folders[family]), load_requests(temperature=0.0)
    samples = run(decoder, requests)
    for r in requests:
        stops = list(r.sampling.stop_ids)
        given = {"attention_mask": torch.ones(1, len(r.tokens), dtype=torch.long), "eos_token_id": stops}
        limits = {"max_new_tokens": r.sampling.max_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            said = decoder.model.generate(input_ids=torch.tensor([r.tokens]), **given, **limits)[0].tolist()
        assert samples[r.id].tokens == said[len(r.tokens) :], r.id


@pytest.mark.parametrize("family", ["gpt_neo", "gemma3_text"])
def test_4_6_samples_do_not_depend_on_slots_order_or_company(folders, family):
    decoder, requests = foreign(folders[family]), load_requests()
    reference = {k: s.tokens for k, s in run(decoder, requests).items()}
    shuffled = random.Random(5).sample(requests, len(requests))
    for others, slots, window in ((shuffled, 64, 8), (requests[::-1], 3, 1), (shuffled, 7, 5), (shuffled[:6], 1, 8)):
        for id, s in run(decoder, others, slots, window).items():
            assert s.tokens == reference[id]


def test_4_6_the_draws_are_the_native_engines():
    """`tiny` both ways: the same keys draw the same tokens."""
    other = through_transformers("tiny")
    native = native_engine(load_folder(resolve("tiny")).decoder, spell, slots=8, max_context=200)
    for values in ({}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 5, "min_p": 0.02}):
        requests = load_requests(**values)
        a, b = run(other, requests), sample(native, requests)
        assert {k: s.tokens for k, s in a.items()} == {k: s.tokens for k, s in b.items()}
        for k, s in a.items():
            assert s.kept_mass == pytest.approx(b[k].kept_mass, abs=1e-4)


@pytest.mark.parametrize("cut", [1, 5])
def test_continuing_a_partial_sample_gives_the_rest(folders, cut):
    decoder, requests = foreign(folders["gpt_neo"]), load_requests()
    whole = run(decoder, requests)
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
    for id, s in run(decoder, rest, slots=4).items():
        assert s.tokens == whole[id].tokens[cut:]


@torch.no_grad()
def test_an_optimizer_step_is_seen_by_the_next_sample_and_load_drops_the_cache(folders, tmp_path):
    """After the load every token is drawn as the new weights alone would, given what was drawn before."""
    decoder, old = foreign(folders["gpt_neo"], torch.float64), foreign(folders["gpt_neo"], torch.float64)
    new = foreign(folder_of(tmp_path / "new", seed=1), torch.float64)
    engine = AutoEngine(decoder, spell, slots=8, max_context=200, window=4)
    requests, done = load_requests(), {}
    for r in requests:
        engine.submit(r)

    def poll() -> bool:
        events = engine.poll()
        done.update({e.id: e.sample for e in events if e.sample is not None})
        return bool(events)

    poll()
    for mine, theirs in zip(decoder.parameters(), new.parameters(), strict=True):
        mine.copy_(theirs)  # what an optimizer does to the shared storage
    engine.load(Same(decoder), version=1)
    while poll():
        pass
    mixed = 0
    for r in requests:
        s = done[r.id]
        change = {v: k for k, v in s.versions}.get(1, len(s.tokens))
        mixed += 0 < change < len(s.tokens)
        for model, part in ((old, slice(0, change)), (new, slice(change, None))):
            expected = plain_logprobs(model.model, r.tokens, s.tokens)[part].tolist()
            assert s.sampler_logprobs[part] == pytest.approx(expected, abs=1e-10)
    assert mixed >= 5


def test_used_engine_samples_bit_for_bit_as_a_fresh_one(folders):
    """A resumed run starts with a fresh engine."""
    decoder, requests = foreign(folders["gpt_neo"]), load_requests()
    used = AutoEngine(decoder, spell, slots=7, max_context=200)
    sample(used, load_requests(seed=3, top_p=0.9))
    assert sample(used, requests) == run(decoder, requests, slots=7)


# ---- both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_raises_the_probability_of_a_rewarded_token(folders, dtype):
    """Engine, grader, learner, ten times: the first token is right if it is even."""
    decoder = foreign(folders["gpt_neo"], dtype)
    engine = AutoEngine(decoder, spell, slots=64, max_context=40)
    learner, algo = learner_of(decoder), build_algorithm(GRPO(), 4)
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
    assert {t.dtype for t in learner.optimizer.state().values()} == {torch.float32}
