"""The judge: settings, and the methods that a task's grader awaits."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, TypeVar

from cohort.errors import ConfigError, ServiceError, TaskError
from cohort.judge.parse import read_better, read_score, read_scores
from cohort.judge.probes import WRONG_ANSWER, Probe, ProbeResult, make_probes
from cohort.judge.prompt import DEFAULT_TEMPLATE, Question, make_content, make_reminder, render_prompt
from cohort.judge.service import Service, ServiceConfig, get_service
from cohort.system.http_text import is_openai, normalise_url
from cohort.tasks.base import Verdict
from cohort.tasks.draws import make_permutation
from cohort.types import Message, Row

T = TypeVar("T")

# Of a request: `extra` cannot have them.
OWN_FIELDS = {"model", "messages", "temperature", "max_tokens", "max_completion_tokens", "response_format", "stream"}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model behind an OpenAI-compatible server that grades answers.

    Use it in `async def score`: `return await judge.score(row["prompt"], answer.text)`. Making a judge reads no key and
    asks nothing. Raises ConfigError for settings that cannot be used.
    """

    url: str
    """Address of the server, such as http://localhost:8000/v1. /chat/completions is added."""
    model: str
    """Name of the model, as the server knows it."""
    question: str
    """The criteria, in words: what makes an answer good."""
    key: str = ""
    """Name of the environment variable that holds the API key, such as OPENAI_API_KEY; "" = the server needs none."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best score that the judge may give. They become 0 and 1."""
    part: str = "score"
    """Name of the reward part in the verdict."""
    template: str = DEFAULT_TEMPLATE
    """What the judge is asked, with {question}, {prompt}, {reference} and {answer}. Fences and the form of the reply
    are added."""
    reference: str = ""
    """Column of the row with a right answer that the judge may compare with; "" = none. `score` then needs the row."""
    json: bool = False
    """Ask for a JSON object (the server's JSON mode) instead of a last line."""
    temperature: float | None = 0.0
    """Temperature of the judge; None leaves it to the server, for models that refuse the setting."""
    max_tokens: int = 512
    """Limit of the judge's reply in tokens, thoughts included."""
    max_characters: int = 30_000
    """Characters of a prompt or answer that the judge sees. The middle of a longer one is left out."""
    retries: int = 4
    """Further tries after one that failed."""
    seconds: float = 50.0
    """Time for one try."""
    requests_per_minute: float = 0.0
    """Requests that may begin per minute in one process, evenly spaced; 0 = no limit."""
    concurrency: int = 64
    """Requests under way at once in one process."""
    cache: bool = True
    """Keep replies in the cache folder (COHORT_CACHE), by the content of their request."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of the request, such as {"reasoning_effort": "low"}."""

    def __post_init__(self) -> None:
        _require(bool(re.fullmatch(r"[A-Z][A-Z0-9_]*", self.key)) or self.key == "", (
            "key must be the name of an environment variable in capitals, such as OPENAI_API_KEY, and never the key "
            "itself. Put the key into a variable and give its name"
        ))  # fmt: skip
        _require(isinstance(self.model, str) and self.model != "", "model must be a name that the server knows")
        _require(self.question.strip() != "", "question is empty; say in words what makes an answer good")
        low, high = self.scale
        _require(math.isfinite(low) and math.isfinite(high) and low < high, f"scale is {self.scale}; give (low, high)")
        for name in ("{question}", "{prompt}", "{answer}"):
            _require(name in self.template, f"the template has no {name}; write it where that belongs")
        _require("{reference}" in self.template or not self.reference, (
            "the template has no {reference}, but the judge has a reference column; write it where the right answer "
            "belongs"
        ))  # fmt: skip
        for name, least in (("max_tokens", 1), ("max_characters", 100), ("retries", 0), ("concurrency", 1)):
            value = getattr(self, name)
            _require(type(value) is int and value >= least, f"{name} is {value!r}; give a whole number from {least}")
        _require(0 < self.seconds < math.inf, f"seconds is {self.seconds!r}; give a number above 0")
        _require(0 <= self.requests_per_minute < math.inf, (
            f"requests_per_minute is {self.requests_per_minute!r}; give a number above 0, or 0 for no limit"
        ))  # fmt: skip
        clash = sorted(OWN_FIELDS & set(self.extra))
        _require(not clash, f"extra has {', '.join(clash)}, which the judge sets itself; use its own settings")
        self._find_place()

    async def score(self, prompt: str | Sequence[Message], answer: str, row: Row | None = None) -> Verdict:
        """Returns the judge's verdict on an answer: the part `score` from 0 to 1, and its words as reason.

        `prompt` is a text or messages. `row` is needed if the judge has a reference column. Raises ServiceError if
        the judge gave no score.
        """
        question = self._make_question()
        content = make_content(question, "score", render_prompt(prompt), [answer], self._find_reference(row))
        value, reason = await self._service.ask(
            self._make_body(content), lambda text: read_score(question, text), make_reminder(question, "score", 1)
        )
        return Verdict(parts={self.part: value}, reason=reason)

    async def compare(
        self,
        prompt: str | Sequence[Message],
        answers: Sequence[str],
        row: Row | None = None,
        by: Literal["scores", "pairs"] = "scores",
    ) -> list[float]:
        """Returns a score from 0 to 1 for each answer of a group, judged against its siblings.

        by = "scores" shows all answers in one request and asks for a score of each. "pairs" asks of every two answers
        which is better; the score is the share of comparisons that an answer wins, and a tie is half a win. The order
        in which the judge sees answers is random, decided by their content. Equal answers are shown once and have
        equal scores; if all are equal, nothing is asked and all get 0.5. Raises ServiceError if the judge gave no
        score.
        """
        if by not in ("scores", "pairs"):
            raise ConfigError(f'judge.compare has no by = {by!r}; use "scores" or "pairs".')
        shown = render_prompt(prompt)
        unique = sorted(set(answers))
        order = make_permutation(len(unique), "judge order", shown, *unique)
        unique = [unique[n] for n in order]
        reference = self._find_reference(row)
        if len(unique) < 2:
            return [0.5] * len(answers)
        if by == "scores":
            scores = await self._ask_scores(shown, unique, reference)
        else:
            scores = await self._ask_pairs(shown, unique, reference)
        by_answer = dict(zip(unique, scores, strict=True))
        return [by_answer[answer] for answer in answers]

    async def rehearse(
        self, prompt: str | Sequence[Message], wrong: str = WRONG_ANSWER, row: Row | None = None
    ) -> list[ProbeResult]:
        """Scores a wrong answer, the same one with injections after it, an empty and a very long one.

        `wrong` is a wrong answer to `prompt`. A judge that can be used gives none of them more than the plain one, the
        first result. What cannot be scored has its failure in the result.
        """

        async def try_probe(probe: Probe) -> ProbeResult:
            """Returns how the judge scores a probe."""
            try:
                verdict = await self.score(prompt, probe.answer, row)
            except ServiceError as error:
                return ProbeResult(name=probe.name, answer=probe.answer, failure=str(error))
            score = verdict.parts[self.part]
            return ProbeResult(name=probe.name, answer=probe.answer, score=score, reason=verdict.reason)

        first, *others = make_probes(wrong, self.scale[1])
        # A server that cannot be used is found out by one request.
        plain = await try_probe(first)
        if plain.failure:
            return [plain]
        return [plain, *await _await_all(map(try_probe, others))]

    async def _ask_scores(self, prompt: str, answers: Sequence[str], reference: str | None) -> list[float]:
        """Returns the scores of different answers, in their order, from one request."""
        question, num = self._make_question(), len(answers)
        content = make_content(question, "scores", prompt, answers, reference)
        return await self._service.ask(
            self._make_body(content),
            lambda text: read_scores(question, text, num),
            make_reminder(question, "scores", num),
        )

    async def _ask_pairs(self, prompt: str, answers: Sequence[str], reference: str | None) -> list[float]:
        """Returns the shares of comparisons that different answers win, in their order, from one request per pair."""
        question = self._make_question()

        async def compare_two(i: int, j: int) -> tuple[int, int, float]:
            """Returns the places of two answers and the points of the first: 1, 0.5 or 0."""
            # Otherwise the answer that the shuffle put first would be shown first in all of its pairs.
            swapped = make_permutation(2, "judge pair", prompt, answers[i], answers[j])[0] == 1
            first, second = (j, i) if swapped else (i, j)
            content = make_content(question, "better", prompt, [answers[first], answers[second]], reference)
            points = await self._service.ask(
                self._make_body(content), lambda text: read_better(question, text), make_reminder(question, "better", 2)
            )
            return first, second, points

        wins = [0.0] * len(answers)
        pairs = combinations(range(len(answers)), 2)
        for first, second, points in await _await_all(compare_two(i, j) for i, j in pairs):
            wins[first] += points
            wins[second] += 1.0 - points
        return [value / (len(answers) - 1) for value in wins]

    def _make_question(self) -> Question:
        """Returns the criteria and the form of the reply."""
        low, high = self.scale
        return Question(
            text=self.question,
            template=self.template,
            low=low,
            high=high,
            json=self.json,
            max_characters=self.max_characters,
        )

    def _make_body(self, content: str) -> dict[str, Any]:
        """Returns the JSON object of a request."""
        # OpenAI's newer models refuse the name that all other servers know.
        limit = "max_completion_tokens" if is_openai(self.url) else "max_tokens"
        body: dict[str, Any] = {**self.extra, "model": self.model, limit: self.max_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.json:
            body["response_format"] = {"type": "json_object"}
        return body | {"messages": [{"role": "user", "content": content}]}

    def _find_reference(self, row: Row | None) -> str | None:
        """Returns the right answer in the row; None if the judge has no reference column. Raises TaskError."""
        if not self.reference:
            return None
        if row is None or self.reference not in row:
            raise TaskError(
                f'the judge compares with the column "{self.reference}", but was given no row that has it. Pass the '
                "row: await judge.score(prompt, answer.text, row)"
            )
        return str(row[self.reference])

    def _find_place(self) -> tuple[str, str]:
        """Returns the server's address, to which /chat/completions is added, and its path. Raises ConfigError."""
        base = normalise_url(self.url, "an environment variable, and name it with key of the judge")
        scheme, _, rest = base.partition("://")
        host, slash, path = rest.partition("/")
        # An address without a path gets the usual one. Others are kept: not all servers have /v1.
        has_version = not path or self.url.strip().rstrip("/").endswith("/v1")
        path = slash + path + ("/v1" if has_version else "")
        return f"{scheme}://{host}{path}", path

    @property
    def _service(self) -> Service:
        """The server, with the limits on requests to it."""
        url, path = self._find_place()
        config = ServiceConfig(
            url=url,
            path=f"{path}/chat/completions",
            key=self.key,
            seconds=self.seconds,
            retries=self.retries,
            requests_per_minute=self.requests_per_minute,
            concurrency=self.concurrency,
            cache=self.cache,
        )
        return get_service(config)


async def _await_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of coroutines that run at the same time. The first that raises ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _require(holds: bool, text: str) -> None:
    """Raises ConfigError with the text unless `holds`."""
    if not holds:
        raise ConfigError(f"cohort.Judge: {text}.")
