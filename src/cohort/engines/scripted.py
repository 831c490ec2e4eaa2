"""An engine that answers with prepared tokens, for tests of the code that drives engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.draft import Draft
from cohort.engines.requests import check_request, closed_engine_error, unknown_request_error
from cohort.errors import ConfigError, EngineError
from cohort.types import Finish, Sample

DEFAULT_LOGPROB = -1.0  # of every token whose script has no log-probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The tokens that answer one request. Stop ids, stop strings and max_tokens still apply."""

    tokens: list[int]
    logprobs: list[float] | None = None  # one per token; None = DEFAULT_LOGPROB for all


ScriptSource = Callable[[Request], Script] | Mapping[str, Script]
"""A function from a request to its script, or scripts by request id."""


class ScriptedEngine:
    """An engine that takes its tokens from scripts.

    Up to `slots` requests run together and get `window` tokens per poll, so that partial samples, refills and loads
    under way happen as in a real engine. A script that ends before its request does is an error. To imitate an engine
    in another process, `silent_polls` polls report nothing before each poll that reports something, and the engine
    dies after `polls_before_death` polls (None = never).
    """

    name = "scripted"
    abilities = Abilities()

    def __init__(
        self,
        scripts: ScriptSource,
        tokenizer_decode: Callable[[list[int]], str],
        max_context: int = 4096,
        vocab_size: int = 1 << 20,
        slots: int = 64,
        window: int = 4,
        silent_polls: int = 0,
        polls_before_death: int | None = None,
    ) -> None:
        self.scripts, self.decode = scripts, tokenizer_decode
        self.max_context, self.vocab_size = max_context, vocab_size
        self.num_slots, self.window = slots, window
        self.silent_polls, self.polls_before_death = silent_polls, polls_before_death
        self.num_polls = 0
        self.version = 0
        self._closed = False
        self.work = WorkCounters()
        self.drafts: dict[str, tuple[Draft, Script]] = {}  # by request id, in the order of submission

    def submit(self, request: Request) -> None:
        """Queues a request and looks up its script. Raises ConfigError for a request that can never be served.

        Raises KeyError if scripts are given by id and this one has none, EngineError if the engine is closed or dead.
        """
        self._check_alive()
        if self._closed:
            raise closed_engine_error(self.name)
        check_request(request, self.max_context, self.vocab_size, self.drafts)
        script = self.scripts(request) if callable(self.scripts) else self.scripts[request.id]
        self.drafts[request.id] = (Draft(request=request), script)

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self.drafts

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Gives each of the oldest `slots` requests up to `window` tokens of its script and returns one event for each.

        An event of a request that ended has its sample. Returns [] in a silent poll. `timeout` is ignored. Raises
        ConfigError if a script is too short, EngineError if the engine is dead.
        """
        self._check_alive()
        self.num_polls += 1
        # With silent_polls = 2, polls 3, 6, 9 ... report something.
        if self.num_polls % (self.silent_polls + 1):
            return []
        events = []
        for draft, script in list(self.drafts.values())[: self.num_slots]:
            before = len(draft.tokens)
            draft.set_version(self.version)
            while len(draft.tokens) < before + self.window and draft.finish is None:
                self._add_next_token(draft, script)
            event = Event(id=draft.request.id, tokens=draft.tokens[before:], logprobs=draft.logprobs[before:])
            if draft.finish is not None:
                event.sample = draft.to_sample(self.decode)
                del self.drafts[draft.request.id]
            events.append(event)
        return events

    def _add_next_token(self, draft: Draft, script: Script) -> None:
        """Appends the next token of `script`, with kept mass 1, to the draft, which may end by it.

        Raises ConfigError if the script has no more tokens.
        """
        index = len(draft.tokens)
        if index == len(script.tokens):
            raise ConfigError(
                f'the script of request "{draft.request.id}" ends after {index} tokens, but nothing has ended the '
                "request; make the script longer, or end it with a stop id."
            )
        logprob = DEFAULT_LOGPROB if script.logprobs is None else script.logprobs[index]
        draft.add_tokens([script.tokens[index]], [logprob], [1.0], self.decode)

    def abort(self, id: str) -> Sample:
        """Stops a request and returns its sample so far, with finish = abort. Raises CohortError for an unknown id."""
        if id not in self.drafts:
            raise unknown_request_error(id)
        draft, _ = self.drafts.pop(id)
        draft.finish = Finish.ABORT
        return draft.to_sample(self.decode)

    def forget(self, id: str) -> None:
        """Does nothing: scripts have no KV."""

    def load(self, weights: Weights, version: int) -> None:
        """Sets the version that new tokens get. The weights have no effect: scripts decide the tokens.

        Raises EngineError if the engine is dead.
        """
        self._check_alive()
        self.version = version

    def close(self) -> None:
        """Drops every request. A later `submit` raises EngineError."""
        self.drafts.clear()
        self._closed = True

    def _check_alive(self) -> None:
        """Raises EngineError if `polls_before_death` is set and so many polls, silent ones included, have been made."""
        if self.polls_before_death is not None and self.num_polls >= self.polls_before_death:
            raise EngineError(
                f"the scripted engine died with {len(self.drafts)} requests under way: "
                f"its argument polls_before_death = {self.polls_before_death} is reached. Raise it, or set it to None."
            )
