"""Whether the update trains what was sampled, all of it and nothing else, however the batch is cut.

Every check goes through the run's own engine, packer, algorithm and learner, and is held to a definition that does not:
one sequence at a time, one rank, the tokens the engine told.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cohort.inspect.check.findings import Finding, fail, ok, warn
from cohort.inspect.check.trial import Seen, Trial, difference
from cohort.learner.base import Cut
from cohort.loops.learning import annotate
from cohort.models.functions import wide_product
from cohort.text import Tokenizer
from cohort.types import Finish, Group, Provenance, Sample
from cohort.world import World

# (mean, most) of gradients and of log-probabilities: ten times the numerics contract's, because a user's model may be
# deeper than those it is tested on; faults are thousands of times larger. Low precision rounds every sum anew.
EXACT = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 2e-3)}
ON_GPU, ROUNDED = (1e-3, 1e-2), (0.1, 2.0)
NUM_SPECIAL = 8


def check_update(trial: Trial) -> Iterator[Finding]:
    base = trial.backward(trial.groups)
    probe = _probe(trial)
    probed = trial.backward([probe])
    yield sampled_tokens(trial, base)
    yield end_token(trial)
    yield special_tokens(probe, probed)
    yield unsampled_tokens(trial, probe)
    yield constant_rewards(trial)
    yield ratio(base)
    yield direction(base)
    yield from one_at_a_time(trial, base, probe, probed)
    yield sampler_gap(trial, base)
    yield from cuts(trial, base)


def bound(trial: Trial) -> tuple[float, float]:
    like = trial.parts.model.decoder.embed
    return ON_GPU if like.is_cuda and like.dtype == torch.float32 else EXACT.get(like.dtype, ROUNDED)


# ---- which tokens


def sampled_tokens(trial: Trial, base: Seen) -> Finding:
    name, count = "update/sampled-tokens", 0
    targets = trial.trained()
    for n, group, i in trial.samples():
        if n not in targets:
            continue  # masked or excluded by the algorithm
        drawn = trial.drawn.get((group.prompt.id, i), [])
        in_loss = sum(t.weight != 0.0 for t in base.tokens.get(n, []))
        if targets[n] != drawn or in_loss != len(drawn):
            at = next((k for k, (a, b) in enumerate(zip(targets[n], drawn, strict=False)) if a != b), None)
            where = f"they differ first at token {at}" if at is not None else f"{in_loss} are in the loss"
            text = f"the engine drew {len(drawn)} tokens for sample {i} of a prompt, {len(targets[n])} are trained"
            return fail(name, f"{text}: {where}. Train the ids that were drawn; never tokenise text again.")
        count += len(drawn)
    return ok(name, f"the {count} ids the engine drew are the {count} ids in the loss", tokens=count)


def end_token(trial: Trial) -> Finding:
    name, sampling = "update/end-token", trial.parts.producer.drawing.sampling
    stops, targets, ended, lost = set(sampling.stop_ids), trial.trained(), 0, 0
    finishes = [s.finish for g in trial.rolled for s in g.samples]
    for n, group, i in trial.samples():
        drawn = trial.drawn.get((group.prompt.id, i), [])
        by_token = bool(drawn) and drawn[-1] in stops
        if n in targets and finishes[n] == Finish.STOP and (by_token or not sampling.stop_strings):
            ended += 1
            lost += not targets[n] or targets[n][-1] not in stops
    if lost:
        text = f"{lost} of {ended} samples that ended by themselves are trained without their end token"
        return fail(name, f"{text}: the policy would never learn to stop.", lost=lost, ended=ended)
    if not ended:
        text = f"none of {len(finishes)} samples ended within sampling.max_tokens = {sampling.max_tokens}"
        return warn(name, f"{text}; raise it, or the model may not know this chat template.", ended=0)
    return ok(name, f"trained in all {ended} samples of {len(finishes)} that ended by themselves", ended=ended)


def special_tokens(probe: Group, probed: Seen) -> Finding:
    """A mask made from ids instead of provenance leaves out a pad or end token that the policy did draw."""
    name, sample = "update/special-tokens", probe.samples[1]
    in_loss = sum(t.weight != 0.0 for t in probed.tokens.get(1, []))
    if in_loss == sample.num_sampled:
        return ok(name, "pad, end and other special ids count like any token the policy drew")
    text = f"of {sample.num_sampled} sampled tokens, special ids among them, {in_loss} are in the loss"
    return fail(name, f"{text}. The mask must come from provenance, not from ids.", in_loss=in_loss)


def unsampled_tokens(trial: Trial, probe: Group) -> Finding:
    """One sample alone, so that where each token is predicted is known without asking the packer."""
    name, sample, first = "update/unsampled-tokens", probe.samples[0], len(probe.prompt.tokens) - 1
    alone = [Group(prompt=probe.prompt, samples=[replace(sample, advantage=1.0)])]
    kept: list[Tensor] = []

    def keep(module: object, inputs: object, hidden: Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    handle = trial.parts.model.decoder.register_forward_hook(keep)
    try:
        seen = trial.backward(alone)
    finally:
        handle.remove()
    touched = {i for h in kept if h.grad is not None for i in h.grad.abs().sum(-1).nonzero()[:, 0].tolist()}
    places = {first + i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED}
    wrong, in_loss = len(touched - places), len(seen.tokens.get(0, []))
    if wrong or in_loss != len(places) or not touched:
        text = f"{wrong} tokens the policy did not draw have a gradient; it drew {len(places)}, the loss has {in_loss}"
        return fail(name, f"{text}. Only sampled tokens may be trained: see their provenance.", wrong=wrong)
    return ok(name, "prompt, environment and forced tokens have a gradient of exactly zero")


# ---- what the loss does with them


def constant_rewards(trial: Trial) -> Finding:
    """Copies of one sample: equal rewards, and equal whatever an algorithm makes of lengths and ends."""
    name, group = "update/constant-rewards", trial.groups[0]
    one = replace(group.samples[0], reward=0.1 + 0.2)
    prompts = [replace(group.prompt, visit=visit) for visit in range(2)]
    groups = [Group(prompt=p, samples=[copy.deepcopy(one) for _ in group.samples]) for p in prompts]
    if getattr(trial.parts.config.algo, "baseline", "mean") in ("batch", "none"):
        return ok(name, "does not apply: this baseline is not the group's")
    trial.graded(groups)
    gradient = trial.backward(groups).gradient
    moved = any(bool(g.any()) for g in gradient.values())
    if any(s.advantage != 0.0 for g in groups for s in g.samples) or (moved and all(g.excluded for g in groups)):
        text = "a group of equal rewards has a gradient"
        return fail(name, f"{text}: its advantages must be exactly 0, by comparison and not by a computed deviation.")
    return ok(name, "advantages exactly 0" + (", the KL or entropy term alone trains" if moved else ", no gradient"))


def ratio(base: Seen) -> Finding:
    name, low, high = "update/ratio", base.metrics.get("ratio/min"), base.metrics.get("ratio/max")
    if low is None or high is None:
        return ok(name, "this algorithm reports no ratio")
    if low == high == 1.0:
        return ok(name, "exactly 1 before the first update")
    text = f"from {low:.6g} to {high:.6g} before the first update, not exactly 1"
    return fail(
        name, f"{text}: old log-probabilities must be the learner's own, of the same weights.", low=low, high=high
    )


def direction(base: Seen) -> Finding:
    """Along the gradient step, log-probabilities must move with the advantages."""
    name = "update/direction"
    terms = [t.advantage * t.slope for row in base.tokens.values() for t in row]
    wrong = sum(x > 0 for x in terms)
    if not any(bool(g.any()) for g in base.gradient.values()):
        return fail(name, "rewards that differ give no gradient at all: nothing would be learned.")
    if not sum(terms) < 0:
        text = f"better answers become less likely (at {wrong} of {len(terms)} tokens)"
        return fail(name, f"{text}: a sign or a ratio is inverted.", wrong=wrong)
    return ok(name, "better answers become likelier, worse ones less likely", wrong=wrong)


# ---- against one sequence at a time


def one_at_a_time(trial: Trial, base: Seen, probe: Group, probed: Seen) -> Iterator[Finding]:
    rows = [(g, g.samples[i], base.tokens.get(n, [])) for n, g, i in trial.samples()]
    rows += [(probe, s, probed.tokens.get(i, [])) for i, s in enumerate(probe.samples)]
    usable = [row for row in rows if row[2] and len(row[2]) == row[1].num_sampled]  # of others another check speaks
    gaps = [
        (_alone(trial, g, s) - torch.tensor([t.logprob for t in seen], dtype=torch.float64)).abs()
        for g, s, seen in usable
    ]
    if not gaps:
        return
    where = "packed with its siblings and alone"
    yield _close(trial, "update/log-probs", torch.cat(gaps), f"the same {where}", f"differ {where}")
    firsts = torch.stack([gap[0] for gap in gaps])
    good, bad = (
        "every sibling's first token is predicted from its prompt",
        "first tokens are predicted from a wrong place",
    )
    yield _close(trial, "update/sibling-context", firsts, good, bad)


@torch.no_grad()
def _alone(trial: Trial, group: Group, sample: Sample) -> Tensor:
    """Log-probabilities of the sampled tokens by definition: the whole sequence, plain causal attention."""
    decoder, first = trial.parts.model.decoder, len(group.prompt.tokens) - 1
    tokens = torch.tensor([*group.prompt.tokens, *sample.tokens], device=decoder.embed.device)
    at = torch.tensor([i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED], device=tokens.device)
    hidden = decoder.one_sequence(tokens).index_select(0, first + at)
    logits = wide_product(hidden, decoder.head_weight) / trial.parts.config.sampling.temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[first + 1 + at, None])[:, 0]
    return logprobs.double().cpu()


def sampler_gap(trial: Trial, base: Seen) -> Finding:
    gaps = [0.0]
    for n, group, i in trial.samples():
        sample, row = group.samples[i], base.tokens.get(n, [])
        told = [x for x, p in zip(sample.sampler_logprobs, sample.provenance, strict=True) if p == Provenance.SAMPLED]
        gaps += [abs(t.logprob - x) for t, x in zip(row, told, strict=False)]
    good, bad = "engine and learner give a token the same probability", "engine and learner disagree"
    half = getattr(trial.parts.config.engine, "weights", "shared") == "fp16"
    return _close(
        trial,
        "update/sampler-gap",
        torch.tensor(gaps, dtype=torch.float64),
        good,
        bad,
        ROUNDED if half else None,
    )


def _close(
    trial: Trial, name: str, gaps: Tensor, good: str, bad: str, limits: tuple[float, float] | None = None
) -> Finding:
    mean, most = limits or bound(trial)
    found = {"mean": float(gaps.mean()), "most": float(gaps.max())}
    numbers = f"mean {found['mean']:.1e}, largest {found['most']:.1e} nats"
    if found["mean"] <= mean and found["most"] <= most:
        return ok(name, f"{good} ({numbers})", **found)
    return fail(name, f"{bad}: {numbers}, allowed {mean:g} and {most:g}. What is trained is not what acted.", **found)


# ---- however the batch is cut


def cuts(trial: Trial, base: Seen) -> Iterator[Finding]:
    groups, longest = trial.groups, trial.longest
    turned = [replace(g, samples=g.samples[::-1]) for g in groups[::-1]]
    ways = {
        "microbatches": [(groups, Cut(token_budget=longest)), (groups, Cut(token_budget=3 * longest))],
        "accumulation-order": [(groups, Cut(token_budget=longest, backwards=True))],
        "packing-order": [(turned, Cut(token_budget=longest))],
        "prefix-sharing": [(groups, Cut(share=False))],
    }
    for what, cut in ways.items():
        seen = [trial.backward(*way) for way in cut]
        yield _equal(trial, what, [difference(s.gradient, base.gradient) for s in seen])
    yield ranks(trial, base)


def _equal(trial: Trial, what: str, found: list[tuple[float, float]]) -> Finding:
    mean, most = bound(trial)
    numbers = {"mean": max(f[0] for f in found), "most": max(f[1] for f in found)}
    words = f"mean {numbers['mean']:.1e}, largest {numbers['most']:.1e} of the largest entry"
    if all(f[0] <= mean and f[1] <= most for f in found):
        return ok(f"update/{what}", f"the gradient does not depend on it ({words})", **numbers)
    text = f"the gradient changes with it: {words}, allowed {mean:g} and {most:g}"
    return fail(
        f"update/{what}", f"{text}. Denominators must be counted over the whole step, before it is cut.", **numbers
    )


class _Rank(World):
    """One of two ranks, run one after the other: a sum is what both were seen to give before."""

    size = 2

    def __init__(self, rank: int, totals: list[Tensor]) -> None:
        self.rank, self.totals, self.seen = rank, totals, list[Tensor]()

    def sum(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return x.copy_(self.totals[len(self.seen) - 1]) if len(self.seen) <= len(self.totals) else x


def ranks(trial: Trial, base: Seen) -> Finding:
    """Unequal shares. The first round learns the counts, the second with them the gradients, the third has both."""
    groups, totals, gradient = trial.groups, list[Tensor](), base.gradient
    for _ in range(3):
        worlds = [_Rank(rank, totals) for rank in (1, 0)]
        for world, share in zip(worlds, (groups[1:], groups[:1]), strict=True):
            gradient = trial.backward(share, world=world).gradient
        totals = [a + b for a, b in zip(*(w.seen for w in worlds), strict=True)]
    return _equal(trial, "ranks", [difference(gradient, base.gradient)])


# ---- helpers


def _probe(trial: Trial) -> Group:
    """A group whose first sample holds tokens of an environment and forced ones, and whose second special ids."""
    group = copy.deepcopy(trial.groups[0])
    tokenizer = Tokenizer.load(trial.parts.model.folder)
    special = sorted({*tokenizer.stop_ids, *tokenizer.special_ids})[:NUM_SPECIAL]
    given = group.prompt.tokens[:3]
    marks = [Provenance.ENVIRONMENT, Provenance.ENVIRONMENT, Provenance.FORCED][: len(given)]
    _insert(group.samples[0], given, [int(m) for m in marks])
    _insert(group.samples[1], special, [int(Provenance.SAMPLED)] * len(special))
    if trial.parts.config.algo.correction.kind != "none":
        # as if the engine had drawn it all: a correction would otherwise leave out what was put in
        annotate(trial.parts.learner, [group], {"old"})
        for s in group.samples:
            s.sampler_logprobs, s.old_logprobs = s.old_logprobs or s.sampler_logprobs, None
    for i, s in enumerate(group.samples):
        s.reward = 1.0 - i / len(group.samples)
    return trial.graded([group])[0]


def _insert(sample: Sample, tokens: list[int], marks: list[int]) -> None:
    at = len(sample.tokens) // 2
    sample.tokens[at:at] = tokens
    sample.provenance[at:at] = marks
    sample.sampler_logprobs[at:at] = [-1.0 if m == Provenance.SAMPLED else 0.0 for m in marks]
