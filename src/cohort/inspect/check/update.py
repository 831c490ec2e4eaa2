"""Checks that the update trains exactly the sampled tokens, however the batch is divided.

Every check goes through the run's own engine, packer, algorithm and learner. It compares them with a definition that
uses none of these: one sequence at a time, one rank, the tokens in the engine's events.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cohort.inspect.check.findings import Finding, fail, ok, warn
from cohort.inspect.check.trial import BackwardPass, Trial, UpdateTrial, compare_gradients
from cohort.learner.base import MicrobatchOptions
from cohort.loops.learning import annotate
from cohort.models.functions import multiply_wide
from cohort.text import Tokenizer
from cohort.types import Finish, Group, Provenance, Sample
from cohort.world import World

# Allowed (mean, largest) differences of gradients and of log-probabilities. They are ten times those of the numerics
# contract, because a user's model may be deeper than the models that are tested there; real faults are thousands of
# times larger. In low precision every sum is rounded, so two orders of the same sum differ much more.
TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 2e-3)}
GPU_TOLERANCE = (1e-3, 1e-2)  # float32 on a GPU
LOW_PRECISION_TOLERANCE = (0.1, 2.0)
DIVISION_REMEDY = "Denominators must be counted over the whole step, before the batch is divided."
NUM_SPECIAL = 8  # special tokens that are put into the probe


def check_update(trial: Trial) -> Iterator[Finding]:
    """Runs all checks of the update and yields their findings. `give_distinct_rewards` must have set `trial.groups`."""
    base = trial.run_backward(trial.groups)
    probe = _make_probe(trial)
    probe_pass = trial.run_backward([probe])
    yield check_sampled_tokens(trial, base)
    yield check_end_token(trial)
    yield check_special_tokens(probe, probe_pass)
    yield check_unsampled_tokens(trial, probe)
    yield check_constant_rewards(trial)
    yield check_ratio(base)
    yield check_direction(base)
    yield from check_single_sequences(trial, base, probe, probe_pass)
    yield check_sampler_gap(trial, base)
    yield from check_batch_cuts(trial, base)


def get_tolerance(trial: UpdateTrial) -> tuple[float, float]:
    """Returns the (mean, largest) difference that is allowed for the model's dtype and device."""
    embed = trial.job.model.decoder.embed
    if embed.is_cuda and embed.dtype == torch.float32:
        return GPU_TOLERANCE
    return TOLERANCES.get(embed.dtype, LOW_PRECISION_TOLERANCE)


# ---- which tokens are trained


def check_sampled_tokens(trial: Trial, base: BackwardPass) -> Finding:
    """Returns FAIL if the token ids that are trained are not exactly the ids that the engine drew, else ok.

    `base` is a backward pass over `trial.groups`. Samples that the algorithm left out of the update are skipped.
    """
    name = "update/sampled-tokens"
    count = 0
    targets = trial.collect_trained_tokens()
    for n, group, i in trial.enumerate_samples():
        # The algorithm may have masked the sample or excluded its group.
        if n not in targets:
            continue
        drawn = trial.drawn_tokens.get((group.prompt.id, i), [])
        in_loss = sum(t.weight != 0.0 for t in base.tokens.get(n, []))
        if targets[n] != drawn or in_loss != len(drawn):
            pairs = enumerate(zip(targets[n], drawn, strict=False))
            differing = next((k for k, (a, b) in pairs if a != b), None)
            where = f"{in_loss} are in the loss" if differing is None else f"they differ first at token {differing}"
            text = f"the engine drew {len(drawn)} tokens for sample {i} of a prompt, {len(targets[n])} are trained"
            return fail(name, f"{text}: {where}. Train the ids that were drawn; never tokenise text again.")
        count += len(drawn)
    return ok(name, f"the {count} ids the engine drew are the {count} ids in the loss", tokens=count)


def check_end_token(trial: Trial) -> Finding:
    """Returns FAIL if a sample that stopped is trained without its end token, warn if no sample stopped, else ok.

    Samples that a stop string ended, and samples that are not trained, do not count as stopped.
    """
    name = "update/end-token"
    sampling = trial.job.producer.settings.sampling
    stops = set(sampling.stop_ids)
    targets = trial.collect_trained_tokens()
    num_ended = 0
    num_lost = 0
    finishes = [s.finish for g in trial.sampled for s in g.samples]
    for n, group, i in trial.enumerate_samples():
        drawn = trial.drawn_tokens.get((group.prompt.id, i), [])
        # A sample that a stop string ended has no end token to train.
        ended_by_token = bool(drawn) and drawn[-1] in stops
        # A conversation that a limit of turns or calls ended has turns that stopped.
        has_stopped = finishes[n] in (Finish.STOP, Finish.TURNS, Finish.CALLS)
        if n in targets and has_stopped and (ended_by_token or not sampling.stop_strings):
            num_ended += 1
            num_lost += not targets[n] or targets[n][-1] not in stops
    if num_lost:
        text = f"{num_lost} of {num_ended} samples that stopped are trained without their end token"
        return fail(name, f"{text}: the policy would never learn to stop.", lost=num_lost, ended=num_ended)
    if not num_ended:
        text = f"none of {len(finishes)} samples ended within sampling.max_tokens = {sampling.max_tokens}"
        return warn(
            name, f"{text}. Raise it; if that does not help, the model may not know this chat template.", ended=0
        )
    text = f"{num_ended} of {len(finishes)} samples stopped, and all of these are trained with their end token"
    return ok(name, text, ended=num_ended)


def check_special_tokens(probe: Group, probe_pass: BackwardPass) -> Finding:
    """Returns FAIL if sampled tokens of the probe's second sample are missing in the loss, else ok.

    `probe` is made by `_make_probe`, which put special tokens there; `probe_pass` is a backward pass over it alone. A
    mask that is made from token ids instead of provenance leaves out a pad or end token that the policy drew.
    """
    name = "update/special-tokens"
    sample = probe.samples[1]
    in_loss = sum(t.weight != 0.0 for t in probe_pass.tokens.get(1, []))
    if in_loss == sample.num_sampled:
        return ok(name, "pad, end and other special ids count like any token the policy drew")
    text = f"of {sample.num_sampled} sampled tokens, special ids among them, only {in_loss} are in the loss"
    return fail(name, f"{text}. The mask must come from provenance, not from ids.", in_loss=in_loss)


def check_unsampled_tokens(trial: Trial, probe: Group) -> Finding:
    """Returns FAIL if a token of the prompt, of the environment or a forced token has a gradient, else ok.

    Computes the gradient of the probe's first sample alone, or of as many as the loss compares. Returns FAIL also if
    the loss lacks a sampled token of it, or if nothing has a gradient.
    """
    name = "update/unsampled-tokens"
    # Few samples, each with its prompt: then the position that predicts each token is known without the packer.
    samples = probe.samples[: trial.job.config.algo.num_compared]
    signed = [replace(s, advantage=1.0 - 2 * i, token_advantages=None) for i, s in enumerate(samples)]
    alone = [Group(prompt=probe.prompt, samples=signed)]
    kept: list[Tensor] = []

    def keep_hidden(module: object, inputs: object, hidden: Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    handle = trial.job.model.decoder.register_forward_hook(keep_hidden)
    try:
        result = trial.run_backward(alone, MicrobatchOptions(share=False))
    finally:
        handle.remove()
    # Positions whose hidden state has a gradient, and those that predict a sampled token: the two must be equal.
    touched = {i for h in kept if h.grad is not None for i in h.grad.abs().sum(-1).nonzero()[:, 0].tolist()}
    places: set[int] = set()
    first = len(probe.prompt.tokens) - 1
    for sample in samples:
        places |= {first + i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED}
        # The last token of a sample predicts nothing, so it is no input.
        first += len(probe.prompt.tokens) + len(sample.tokens) - 1
    wrong = len(touched - places)
    in_loss = sum(len(row) for row in result.tokens.values())
    if wrong or in_loss != len(places) or not touched:
        text = f"{wrong} tokens the policy did not draw have a gradient; it drew {len(places)}, the loss has {in_loss}"
        return fail(name, f"{text}. Only tokens with the provenance SAMPLED may be trained.", wrong=wrong)
    return ok(name, "prompt, environment and forced tokens have a gradient of exactly zero")


# ---- what the loss does with these tokens


def check_constant_rewards(trial: Trial) -> Finding:
    """Computes advantages and gradient of two groups of equal samples. Changes neither weights nor the trial's groups.

    Returns FAIL if some advantage is not exactly 0, or if both groups are excluded and there is a gradient, else ok. If
    the algorithm's baseline is "batch" or "none", returns ok without computing anything.
    """
    name = "update/constant-rewards"
    group = trial.groups[0]
    # Copies of one sample, because an algorithm may treat samples of equal reward but other length differently. The
    # reward 0.1 + 0.2 is not exact in binary: a mean or a deviation computed from it need not be exact either.
    one = replace(group.samples[0], reward=0.1 + 0.2, turn_rewards=[])
    prompts = [replace(group.prompt, visit=visit) for visit in range(2)]
    groups = [Group(prompt=p, samples=[copy.deepcopy(one) for _ in group.samples]) for p in prompts]
    if getattr(trial.job.config.algo, "baseline", "mean") in ("batch", "none"):
        return ok(name, "does not apply: this baseline is not the group's")
    trial.compute_advantages(groups)
    gradient = trial.run_backward(groups).gradient
    has_moved = any(bool(g.any()) for g in gradient.values())
    # A group that is not excluded may have a gradient from the KL or entropy term.
    if any(s.advantage != 0.0 for g in groups for s in g.samples) or (has_moved and all(g.excluded for g in groups)):
        text = "a group of equal rewards has a gradient"
        return fail(
            name, f"{text}: its advantages must be exactly 0. Compare max with min; do not compute a deviation."
        )
    return ok(name, "advantages exactly 0" + (", only the KL or entropy term trains" if has_moved else ", no gradient"))


def check_ratio(base: BackwardPass) -> Finding:
    """Returns FAIL if some ratio of new to old policy is not exactly 1 although nothing has been updated yet.

    Returns ok otherwise, and for an algorithm that reports no ratio.
    """
    name = "update/ratio"
    low = base.metrics.get("ratio/min")
    high = base.metrics.get("ratio/max")
    if low is None or high is None:
        return ok(name, "this algorithm reports no ratio")
    if low == high == 1.0:
        return ok(name, "exactly 1 before the first update")
    text = f"from {low:.6g} to {high:.6g} before the first update, not exactly 1"
    return fail(
        name, f"{text}: old log-probabilities must be the learner's own, of the same weights.", low=low, high=high
    )


def check_direction(base: BackwardPass) -> Finding:
    """Returns FAIL unless the gradient makes tokens of better samples more likely than those of worse samples.

    The sum of advantage x gradient over all tokens decides, so single tokens may go the wrong way. A gradient of 0
    fails.
    """
    name = "update/direction"
    # A gradient step moves a log-probability against its gradient, so this product must be below 0.
    terms = [t.advantage * t.gradient for row in base.tokens.values() for t in row]
    wrong = sum(x > 0 for x in terms)
    if not any(bool(g.any()) for g in base.gradient.values()):
        return fail(name, "rewards that differ give no gradient at all: nothing would be learned.")
    if not sum(terms) < 0:
        text = f"better answers become less likely (at {wrong} of {len(terms)} tokens)"
        return fail(name, f"{text}: a sign or a ratio is inverted.", wrong=wrong)
    return ok(name, "better answers become more likely, worse ones less likely", wrong=wrong)


# ---- compared with one sequence at a time


def check_single_sequences(
    trial: UpdateTrial, base: BackwardPass, probe: Group | None = None, probe_pass: BackwardPass | None = None
) -> Iterator[Finding]:
    """Compares log-probabilities of samples packed into one sequence with those of each sample computed alone.

    Yields one finding about all tokens, and one about the first token of each sample, which is predicted from a prompt
    that the samples of a group may share. Each is FAIL if the differences are above the tolerance, else ok. A further
    group, the `probe`, is compared too, if it is given with its pass. Samples without all of their tokens in the loss
    are left out; if no sample remains, yields nothing.
    """
    rows = [(g, g.samples[i], base.tokens.get(n, [])) for n, g, i in trial.enumerate_samples()]
    if probe is not None and probe_pass is not None:
        rows += [(probe, s, probe_pass.tokens.get(i, [])) for i, s in enumerate(probe.samples)]
    # A sample whose number of tokens is wrong is reported by other checks.
    usable = [row for row in rows if row[2] and len(row[2]) == row[1].provenance.count(trial.loss_on)]
    gaps = [
        (compute_logprobs_alone(trial, g, s) - torch.tensor([t.logprob for t in tokens], dtype=torch.float64)).abs()
        for g, s, tokens in usable
    ]
    if not gaps:
        return
    good = "log-probabilities are the same packed with other samples and alone"
    bad = "log-probabilities packed with other samples differ from those computed alone"
    yield _judge_logprob_gaps(trial, "update/log-probs", torch.cat(gaps), good, bad)
    firsts = torch.stack([gap[0] for gap in gaps])
    good = "every sample's first token is predicted from its prompt"
    bad = "first tokens are predicted from a wrong place"
    yield _judge_logprob_gaps(trial, "update/sibling-context", firsts, good, bad)


@torch.no_grad()
def compute_logprobs_alone(trial: UpdateTrial, group: Group, sample: Sample) -> Tensor:
    """Returns the log-probabilities of the tokens in the loss, by a forward pass over this one sequence alone.

    They are at the sampling temperature. Uses causal attention without packing. The tensor is float64, on the host,
    with one entry per token in the loss.
    """
    decoder = trial.job.model.decoder
    first = len(group.prompt.tokens) - 1
    tokens = torch.tensor([*group.prompt.tokens, *sample.tokens], device=decoder.embed.device)
    places = [i for i, p in enumerate(sample.provenance) if p == trial.loss_on]
    sampled = torch.tensor(places, device=tokens.device)
    hidden = decoder.forward_one_sequence(tokens).index_select(0, first + sampled)
    logits = multiply_wide(hidden, decoder.head_weight) / trial.job.learner.temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[first + 1 + sampled, None])[:, 0]
    return logprobs.double().cpu()


def check_sampler_gap(trial: Trial, base: BackwardPass) -> Finding:
    """Returns FAIL if engine and learner give the sampled tokens log-probabilities that differ too much, else ok.

    Allowed is the tolerance of the model's dtype and device, or that of low precision if the engine has fp16 copies.
    """
    gaps = [0.0]
    for n, group, i in trial.enumerate_samples():
        sample = group.samples[i]
        row = base.tokens.get(n, [])
        marked = zip(sample.sampler_logprobs, sample.provenance, strict=True)
        reported = [x for x, p in marked if p == Provenance.SAMPLED]
        gaps += [abs(t.logprob - x) for t, x in zip(row, reported, strict=False)]
    # An engine with fp16 copies of the weights rounds, so it gets the tolerance of low precision.
    has_fp16_copies = getattr(trial.job.config.engine, "weights", "shared") == "fp16"
    return _judge_logprob_gaps(
        trial,
        "update/sampler-gap",
        torch.tensor(gaps, dtype=torch.float64),
        "engine and learner give a token the same probability",
        "engine and learner disagree",
        LOW_PRECISION_TOLERANCE if has_fp16_copies else None,
    )


def _judge_logprob_gaps(
    trial: UpdateTrial, name: str, gaps: Tensor, good: str, bad: str, limits: tuple[float, float] | None = None
) -> Finding:
    """Returns ok if both mean and largest of the absolute differences `gaps` are within `limits`, else FAIL.

    The text begins with `good` for ok, with `bad` for FAIL. `name` is that of the check. `limits` are (mean, largest);
    None = the tolerance of the model's dtype and device.
    """
    mean, most = limits or get_tolerance(trial)
    details = {"mean": float(gaps.mean()), "most": float(gaps.max())}
    numbers = f"mean {details['mean']:.1e}, largest {details['most']:.1e} nats"
    if details["mean"] <= mean and details["most"] <= most:
        return ok(name, f"{good} ({numbers})", **details)
    text = f"{bad}: {numbers}, allowed {mean:g} and {most:g}"
    return fail(name, f"{text}. The policy that is trained is not the policy that acted.", **details)


# ---- however the batch is divided


def check_batch_cuts(trial: UpdateTrial, base: BackwardPass) -> Iterator[Finding]:
    """Yields one finding per way to divide, order, pack or share out the same groups.

    The ways: other microbatches, reverse accumulation, reverse packing, no prefix sharing (where groups have several
    samples), two ranks. A finding is FAIL if the gradient differs from that of `base` by more than the tolerance, else
    ok.
    """
    groups = trial.groups
    longest = trial.longest_sequence
    ways = {
        "microbatches": [
            (groups, MicrobatchOptions(token_budget=longest)),
            (groups, MicrobatchOptions(token_budget=3 * longest)),
        ],
        "accumulation-order": [(groups, MicrobatchOptions(token_budget=longest, backwards=True))],
        "packing-order": [(trial.turn_groups(), MicrobatchOptions(token_budget=longest))],
        "prefix-sharing": [(groups, MicrobatchOptions(share=False))],
    }
    if all(len(g.samples) == 1 for g in groups):
        del ways["prefix-sharing"]
    for what, cuts in ways.items():
        passes = [trial.run_backward(*way) for way in cuts]
        yield judge_gradient_gaps(trial, what, [compare_gradients(p.gradient, base.gradient) for p in passes])
    yield check_ranks(trial, base)


def judge_gradient_gaps(
    trial: UpdateTrial, what: str, gaps: list[tuple[float, float]], remedy: str = DIVISION_REMEDY
) -> Finding:
    """Returns ok if all (mean, largest) differences are within the tolerance, else FAIL with `remedy`.

    `what` names what was changed, such as the division into microbatches.
    """
    mean, most = get_tolerance(trial)
    subject = what.replace("-", " ")
    numbers = {"mean": max(gap[0] for gap in gaps), "most": max(gap[1] for gap in gaps)}
    words = f"mean {numbers['mean']:.1e}, largest {numbers['most']:.1e} of the largest entry"
    if all(gap[0] <= mean and gap[1] <= most for gap in gaps):
        return ok(f"update/{what}", f"the gradient does not depend on {subject} ({words})", **numbers)
    text = f"the gradient changes with {subject}: {words}, allowed {mean:g} and {most:g}"
    return fail(f"update/{what}", f"{text}. {remedy}", **numbers)


class _SimulatedRank(World):
    """One of two ranks that run one after the other in this process.

    The n-th call of `sum` returns the n-th of `totals`, which were added up from both ranks in an earlier round. Calls
    beyond these return their own argument. `seen` records all arguments.
    """

    size = 2

    def __init__(self, rank: int, totals: list[Tensor]) -> None:
        self.rank = rank
        self.totals = totals
        self.seen = list[Tensor]()

    def sum(self, x: Tensor) -> Tensor:
        """Records `x`, then replaces it in place by the total of this call, if one is known, and returns it."""
        self.seen.append(x.detach().clone())
        return x.copy_(self.totals[len(self.seen) - 1]) if len(self.seen) <= len(self.totals) else x


def check_ranks(trial: UpdateTrial, base: BackwardPass) -> Finding:
    """Computes the gradient on two simulated ranks: one has the first group, the other has the rest.

    Returns FAIL if it differs from that of `base` by more than the tolerance, else ok.
    """
    groups = trial.groups
    totals = list[Tensor]()
    gradient = base.gradient
    # What a rank sums late depends on totals of what it summed early. The first round learns the token counts, the
    # second, with correct counts, the gradients, and the third has both.
    for _ in range(3):
        worlds = [_SimulatedRank(rank, totals) for rank in (1, 0)]
        for world, share in zip(worlds, (groups[1:], groups[:1]), strict=True):
            gradient = trial.run_backward(share, world=world).gradient
        totals = [a + b for a, b in zip(*(w.seen for w in worlds), strict=True)]
    return judge_gradient_gaps(trial, "ranks", [compare_gradients(gradient, base.gradient)])


# ---- helpers


def _make_probe(trial: Trial) -> Group:
    """Returns a copy of the trial's first group with tokens inserted that a trial may lack, and with new advantages.

    The first sample gets environment and forced tokens in its middle, the second gets sampled special tokens there. All
    rewards differ. With a sampler correction, the learner's log-probabilities replace the sampler's. Needs two samples.
    """
    group = copy.deepcopy(trial.groups[0])
    # Where a loss compares two samples, only those two are in it.
    if trial.whole_groups:
        group.samples = group.samples[: trial.job.config.algo.num_compared]
    tokenizer = Tokenizer.load(trial.job.model.folder)
    special = sorted({*tokenizer.stop_ids, *tokenizer.special_ids})[:NUM_SPECIAL]
    given = group.prompt.tokens[:3]
    marks = [Provenance.ENVIRONMENT, Provenance.ENVIRONMENT, Provenance.FORCED][: len(given)]
    _insert_tokens(group.samples[0], given, [int(m) for m in marks])
    _insert_tokens(group.samples[1], special, [int(Provenance.SAMPLED)] * len(special))
    if trial.job.config.algo.correction.kind != "none":
        # The log-probabilities of inserted tokens are made up, and a sampler correction would leave these tokens out.
        # With the learner's own log-probabilities it is as if the engine had drawn all of them.
        annotate(trial.job.learner, [group], {"old"})
        for s in group.samples:
            s.sampler_logprobs, s.old_logprobs = s.old_logprobs or s.sampler_logprobs, None
    for i, s in enumerate(group.samples):
        s.reward = 1.0 - i / len(group.samples)
    return trial.compute_advantages([group])[0]


def _insert_tokens(sample: Sample, tokens: list[int], marks: list[int]) -> None:
    """Inserts tokens with their provenance `marks` into the middle of a sample, in place.

    The inserted sampler log-probabilities are made up: -1 for sampled tokens, 0 for others. Other lists per token, such
    as old log-probabilities, are not changed.
    """
    middle = len(sample.tokens) // 2
    sample.tokens[middle:middle] = tokens
    sample.provenance[middle:middle] = marks
    sample.sampler_logprobs[middle:middle] = [-1.0 if m == Provenance.SAMPLED else 0.0 for m in marks]
