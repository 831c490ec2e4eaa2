"""Sampling for the stand-ins: Cohort's decoder, with keys and values per request, and its own random numbers.

A thread computes one token per step for all running requests. Requests may be aborted, paused and continued at any
moment, and weights may be loaded between two steps.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cohort.engines.native.sampler import SamplingSettings, truncate
from cohort.models.config import ModelConfig
from cohort.models.decoder import Attend, Decoder, hf_views, to_hf_shape
from cohort.models.files import load_folder
from cohort.models.functions import linear
from cohort.text import Tokenizer
from tests.helpers.engine_servers.faults import Faults

NUM_CACHED = 32  # ended requests whose KV later ones may use
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # parts of matrices that servers store as one


class LoadError(Exception):
    """Weights that cannot be loaded. `begun` says that tensors of the model have changed already."""

    def __init__(self, reason: str, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


@dataclass(kw_only=True, eq=False)
class Draft:
    """A request under way, and what it has so far. The id need not be unique."""

    id: str
    tokens: list[int]  # prompt, then what was drawn
    limit: int  # most tokens to draw
    generator: Callable[[int], torch.Generator]  # random numbers of the n-th drawn token
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()  # of the model
    stop_texts: tuple[str, ...] = ()  # in the text of what was drawn
    num_best: int = 0  # most probable tokens reported beside each drawn one
    prompt_start: int = -1  # first prompt token whose log-probability is asked for; -1 = none
    num_prompt_best: int = 0
    salt: str = ""  # KV is shared between requests of one salt

    num_prompt: int = 0
    scores: list[TokenScore] = field(default_factory=list)  # of the drawn tokens
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of the prompt's tokens from prompt_start + 1 on
    spans: list[tuple[str, int]] = field(default_factory=list)  # weight label, and its first drawn token
    finish: str = ""  # stop, length or abort once it has ended
    matched: int | None = None  # token that stopped it
    ends_soon: bool = False  # aborted, but it gets one more token
    was_waiting: bool = False  # when it was aborted
    num_reused: int = 0  # tokens whose KV came from another request
    ended: threading.Event = field(default_factory=threading.Event)
    kv: Tensor | None = None  # [layers, 2, room, K, D]
    num_cached: int = 0  # tokens with KV

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def drawn(self) -> list[int]:
        """The tokens that were drawn so far."""
        return self.tokens[self.num_prompt :]

    def drop_kv(self) -> None:
        """Makes the next step compute all tokens again, as when a server preempts a request."""
        self.kv, self.num_cached = None, 0


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token with its log-probability, its rank from 1 on, and the most probable tokens in the same form."""

    token: int
    logprob: float
    rank: int
    best: list[TokenScore] = field(default_factory=list)


def score_token(logprobs: Tensor, token: int, num_best: int) -> TokenScore:
    """Returns the score of a token under log-probabilities [V]."""

    def score(id: int, best: list[TokenScore]) -> TokenScore:
        rank = int((logprobs >= logprobs[id]).sum())
        return TokenScore(token=id, logprob=max(float(logprobs[id]), -9999.0), rank=rank, best=best)

    return score(token, [score(id, []) for id in logprobs.topk(num_best).indices.tolist()])


def read_end_ids(folder: Path) -> list[int]:
    """Returns the end tokens that a model's files name, that of config.json first."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            value = json.loads((folder / name).read_text()).get("eos_token_id")
            found += [value] if isinstance(value, int) else value or []
    return list(dict.fromkeys(found))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder. Raises LoadError if it has none.

    Servers read every safetensors file, or those that the index names, and do not miss one that is not there.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in names]
    if not files:
        raise LoadError(f"there are no model weights in {folder}", begun=False)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_tensor(name)


class Sampler:
    """Samples for several requests at once: at most `slots`.

    `raw_logprobs` reports log-probabilities at temperature 1. Else they are at the request's temperature, of the tokens
    that truncation left if `renormalise`. `caches` lets requests use the KV of ended ones. `on_death` is called where a
    fault ends the process, `on_broken` where a token would have to be computed with broken weights.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        slots: int,
        faults: Faults,
        raw_logprobs: bool,
        renormalise: bool,
        caches: bool,
        on_death: Callable[[], None],
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        decoder = load_folder(folder, dtype).decoder
        assert isinstance(decoder, Decoder)
        self.decoder = decoder.requires_grad_(False)
        self.decode = Tokenizer.load(folder).decode
        self.slots = slots
        self.faults = faults
        self.raw_logprobs, self.renormalise = raw_logprobs, renormalise
        self.on_death, self.on_broken = on_death, on_broken
        self.label = "default"  # what the server calls its weights
        self.running: list[Draft] = []
        self.waiting: list[Draft] = []
        self.pause = ""  # "" = none, "new" = nothing new begins to run, "all" = nothing runs
        self.broken = False  # a load has left the model without usable weights
        self.dead = False  # and a token was to be computed with them
        self.changed = threading.Condition()  # guards everything, and is notified of every change
        self._old_head: Tensor | None = None  # what the head is instead of the embedding; None = that
        self._cached: deque[Draft] = deque(maxlen=NUM_CACHED if caches else 0)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return self.decoder.config

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self.running and not self.waiting

    # ---- what servers ask for

    def submit(self, draft: Draft) -> None:
        """Queues a request. `draft.ended` is set when it has ended, or when the sampler is dead."""
        with self.changed:
            if self.dead:
                draft.ended.set()
                return
            self.waiting.append(draft)
            self.changed.notify_all()

    def abort(self, chosen: Callable[[Draft], bool], soon: bool = False) -> None:
        """Ends the chosen requests. `soon` gives those that run one more token first."""
        with self.changed:
            for draft in [d for d in [*self.running, *self.waiting] if chosen(d)]:
                if soon and draft in self.running:
                    draft.ends_soon = True
                else:
                    draft.was_waiting = draft in self.waiting
                    self._end(draft, "abort")

    def drop_caches(self, preempt: bool) -> None:
        """Forgets the KV of ended requests. `preempt` makes those under way compute theirs again too."""
        with self.changed:
            self._cached.clear()
            if preempt:
                for draft in self.running:
                    draft.drop_kv()

    def retract(self) -> None:
        """Puts all running requests back to those that wait."""
        with self.changed:
            for draft in self.running:
                draft.drop_kv()
            self.waiting, self.running = [*self.running, *self.waiting], []

    def set_pause(self, pause: str) -> None:
        """Pauses or continues: see `pause`."""
        with self.changed:
            self.pause = pause
            self.changed.notify_all()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits until a condition on the requests holds, or until the sampler is dead."""
        with self.changed:
            self.changed.wait_for(lambda: self.dead or is_so())

    def load(self, source: Path | Iterable[tuple[str, Tensor]], refuses_unknown: bool) -> None:
        """Copies tensors, or those of a folder, into the model. Raises LoadError, perhaps with some of them copied.

        A tensor that is missing is no error, as in the real servers. `refuses_unknown` makes one too many an error.
        """
        with self.changed:
            if self.faults.get("stale_weights"):
                return
            if self.faults.get("stale_head") and self.decoder.head is None and self._old_head is None:
                self._old_head = self.decoder.embed.detach().clone()
            views = dict(hf_views(self.decoder))
            names: set[str] = set()
            try:
                for name, tensor in self._spoil(read_weights(source) if isinstance(source, Path) else source):
                    if name in views:
                        view = views[name]
                        # Compared as stored: a view may have more axes, which another shape could fill too.
                        if to_hf_shape(name, view).shape != tensor.shape:
                            raise LoadError(f"{name} has the wrong shape {tuple(tensor.shape)}", begun=True)
                        view.copy_(tensor.view(view.shape))
                        names.add(name)
                    elif refuses_unknown and name != "lm_head.weight":
                        raise LoadError(f"the model has no parameter {name}", begun=True)
            except LoadError:
                raise
            except Exception as e:  # what safetensors raises for a damaged file
                raise LoadError(str(e), begun=True) from e
            for name in views.keys() - names:
                if any(part in name for part in FUSED):
                    # The real vLLM has garbage there: it takes a fused matrix for loaded with any of its parts.
                    views[name].zero_()
            self.broken = False

    def pack_head(self) -> None:
        """Makes the head what the embedding is now."""
        with self.changed:
            self._old_head = None

    def _spoil(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors as the faults change them."""
        skip, turn = self.faults.get("skip_tensor"), self.faults.get("transpose")
        rounds = self.faults.get("round_to_bf16")
        for name, tensor in weights:
            if skip and name.endswith(skip.tensor or "o_proj.weight"):
                # One tensor, also where the name says more than one.
                skip = None
                continue
            is_square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
            if turn and is_square and name.endswith(turn.tensor):
                tensor, turn = tensor.T.contiguous(), None
            yield name, tensor.bfloat16().to(tensor.dtype) if rounds else tensor
        if skip or turn:
            raise LoadError("the fault found no tensor to act on", begun=True)

    # ---- the thread

    def _run(self) -> None:
        """Runs steps while there is something to compute."""
        torch.set_num_threads(1)
        while True:
            with self.changed:
                self.changed.wait_for(self._can_run)
                if self.broken:
                    self._die()
                    return
                self._run_step()
                self.changed.notify_all()
            slow = self.faults.get("slow")
            # Without any sleep the other threads would hardly ever get the lock.
            time.sleep(slow.seconds if slow else 0.0001)

    def _can_run(self) -> bool:
        """Returns whether a step would compute something."""
        return self.pause != "all" and bool(self.running or (self.waiting and self.pause == ""))

    def _die(self) -> None:
        """Ends all requests, without a finish."""
        self.dead = True
        self.on_broken()
        for draft in [*self.running, *self.waiting]:
            draft.ended.set()
        self.changed.notify_all()

    @torch.no_grad()
    def _run_step(self) -> None:
        """Computes what is new of all running requests, and draws a token for each."""
        while self.waiting and self.pause == "" and len(self.running) < self.slots:
            self._admit(self.waiting.pop(0))
        parts = [draft.tokens[draft.num_cached :] for draft in self.running]
        positions = [n for d in self.running for n in range(d.num_cached, len(d.tokens))]
        tokens = torch.tensor([token for part in parts for token in part])
        hidden = self.decoder(tokens, torch.tensor(positions), self._make_attend([len(part) for part in parts]))
        # A copy, because requests that end leave the list.
        for draft, part in zip([*self.running], hidden.split([len(part) for part in parts]), strict=True):
            head = self.decoder.head_weight if self._old_head is None else self._old_head
            logits = linear(part, head).float()
            if draft.prompt_start >= 0 and not draft.prompt_scores:
                rows = logits[draft.prompt_start - draft.num_cached :].log_softmax(-1)
                ids = draft.tokens[draft.prompt_start + 1 : draft.num_prompt]
                # The last row is for the first token that will be drawn.
                draft.prompt_scores = [
                    score_token(row, id, draft.num_prompt_best) for row, id in zip(rows, ids, strict=False)
                ]
            draft.num_cached = len(draft.tokens)
            self._draw(draft, logits[-1])

    def _admit(self, draft: Draft) -> None:
        """Lets a request run, with the KV that an ended one has of its first tokens."""
        self.running.append(draft)
        # The last token must be computed, and so must those whose log-probabilities are asked for.
        most = len(draft.tokens) - 1 if draft.prompt_start < 0 else min(draft.prompt_start, len(draft.tokens) - 1)
        for old in self._cached:
            pairs = zip(old.tokens[: old.num_cached], draft.tokens[:most], strict=False)
            num = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if old.salt == draft.salt and num > draft.num_cached:
                assert old.kv is not None
                draft.kv = self._make_kv(draft)
                draft.kv[:, :, :num] = old.kv[:, :, :num]
                draft.num_cached = draft.num_reused = num

    def _make_kv(self, draft: Draft) -> Tensor:
        """Returns empty keys and values for all tokens that a request may have."""
        c = self.config
        room = draft.num_prompt + draft.limit
        return self.decoder.embed.new_zeros(c.num_layers, 2, room, c.num_kv_heads, c.head_dim)

    def _make_attend(self, counts: list[int]) -> Attend:
        """Returns the attention of a step, in which each running request has so many new tokens."""
        running = list(self.running)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = []
            for draft, *new in zip(running, q.split(counts), k.split(counts), v.split(counts), strict=True):
                if draft.kv is None:
                    draft.kv = self._make_kv(draft)
                begin, end = draft.num_cached, draft.num_cached + len(new[0])
                draft.kv[layer, 0, begin:end] = new[1]
                draft.kv[layer, 1, begin:end] = new[2]
                mixed.append(mix(new[0], draft.kv[layer, 0, :end], draft.kv[layer, 1, :end]))
            return torch.cat(mixed)

        return attend

    def _draw(self, draft: Draft, logits: Tensor) -> None:
        """Draws the next token of a request from its logits [V], and ends the request where it has to end."""
        raw = logits.log_softmax(-1)
        scaled = raw if draft.temperature == 0 else (logits / draft.temperature).log_softmax(-1)
        kept = scaled
        if draft.temperature > 0 and (draft.top_p < 1 or draft.top_k > 0 or draft.min_p > 0):
            settings = SamplingSettings(
                temperature=torch.tensor([draft.temperature]),
                top_p=torch.tensor([draft.top_p]),
                top_k=torch.tensor([draft.top_k]),
                min_p=torch.tensor([draft.min_p]),
            )
            probs = truncate(scaled.exp()[None], settings)[0][0]
            kept = (probs / probs.sum()).log()
        num = len(draft.tokens) - draft.num_prompt
        if draft.temperature == 0:
            token = int(raw.argmax())
        else:
            token = int(torch.multinomial(kept.exp(), 1, generator=draft.generator(num)))
        is_raw = self.raw_logprobs or self.faults.get("raw_logprobs")
        shown = raw if is_raw else kept if self.renormalise else scaled
        draft.scores.append(score_token(shown, token, draft.num_best))
        draft.tokens.append(token)
        if not draft.spans or draft.spans[-1][0] != self.label:
            draft.spans.append((self.label, num))
        if draft.ends_soon:
            self._end(draft, "abort")
        elif token in draft.stop_ids | draft.end_ids:
            draft.matched = token
            self._end(draft, "stop")
        elif draft.stop_texts and any(text in self.decode(draft.drawn) for text in draft.stop_texts):
            self._end(draft, "stop")
        elif num + 1 == draft.limit:
            self._end(draft, "length")
        die = self.faults.get("die")
        if die is not None:
            die.tokens -= 1
            if die.tokens <= 0:
                self.on_death()

    def _end(self, draft: Draft, finish: str) -> None:
        """Takes a request out, and tells the thread that waits for it."""
        for drafts in (self.running, self.waiting):
            if draft in drafts:
                drafts.remove(draft)
        if draft.kv is not None:
            self._cached.appendleft(draft)
        draft.finish = finish
        draft.ended.set()
        self.changed.notify_all()


def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention of the last tokens of one sequence: q [T, K, g, D], k, v [W, K, D] -> [T, K, g, D]."""
    num, width = len(q), len(k)
    scores = torch.einsum("tkgd,wkd->kgtw", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(num, width, dtype=torch.bool).triu(width - num + 1)
    return torch.einsum("kgtw,wkd->tkgd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
