"""A server that samples, vLLM's or SGLang's, as the fleet that uses it sees it.

Cohort starts the server itself (`Starter`), or is given the address of one that the user has started. One that is given
is never ended: if it is lost, the fleet waits until it is back, and gives it the current weights.
"""

from __future__ import annotations

import logging
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from cohort.engines.base import Request, WorkCounters
from cohort.engines.fleet.base import LoadedWeights, News, NewsQueue, OfferedWeights, Order, ReplicaLost
from cohort.engines.fleet.calls import Address, FailedCall, ServerCalls
from cohort.engines.fleet.dialect import Dialect, Question, ServerSettings, warn_untried
from cohort.engines.fleet.program import ServerProgram
from cohort.engines.fleet.session import Session
from cohort.engines.fleet.vllm_server import VllmDialect
from cohort.errors import CohortError, ConfigError
from cohort.system.private_folder import PrivateFolder
from cohort.types import Sample, Sampling

log = logging.getLogger(__name__)

EXIT_SECONDS = 0.5  # a connection is lost a moment before its program has ended
MAX_SOCKET_PATH = 100  # characters; the kernel allows a few more
# The check that drawn tokens have log-probabilities at the request's temperature: far from 1, so that it shows.
PROBE_TEMPERATURE = 2.0
PROBE_TOKENS = 16
# In nats per token. Log-probabilities at temperature 1 differ from these by far more, rounding is far less.
PROBE_DIFFERENCE = 1e-3
# In nats per token. More than rounding in bfloat16, between tokens that are drawn and the same tokens in a prompt.
PROBE_AGREEMENT = 0.5


@dataclass(kw_only=True, slots=True)
class Starter:
    """Starts a server program, and knows what belongs to it while it runs."""

    dialect: Dialect
    settings: ServerSettings
    environment: dict[str, str]  # besides that of the dialect, such as the GPUs that it sees
    program: ServerProgram | None = None
    folder: PrivateFolder | None = None  # of its socket

    def start(self) -> Address:
        """Starts the program and returns where it will listen: on a socket that only this user has, or on loopback."""
        if self.dialect.has_sockets:
            self.folder = PrivateFolder.create("server", 0, Path(tempfile.gettempdir()))
            path = self.folder.path / "socket"
            if len(str(path)) > MAX_SOCKET_PATH:
                raise ConfigError(
                    f"{path} is too long for the socket of a server: set the environment variable TMPDIR to a folder "
                    "with a shorter path, such as /tmp."
                )
            address = Address(url="http://localhost", socket_path=path)
            listen = ["--uds", str(path)]
        else:
            port = find_free_port()
            address = Address(url=f"http://127.0.0.1:{port}")
            listen = ["--host", "127.0.0.1", "--port", str(port)]
        command = self.dialect.make_command(self.settings, listen)
        self.program = ServerProgram.start(
            command, {**self.dialect.make_environment(self.settings), **self.environment}
        )
        return address

    def describe_end(self, seconds: float = 0.0) -> str:
        """Returns how the program ended; "" = it runs, and does not end within `seconds`."""
        return self.program.describe_end() if self.program is not None and self.program.has_ended(seconds) else ""

    def end(self) -> None:
        """Ends the program, and removes its socket. What it has printed stays if it had ended by itself."""
        if self.program is not None:
            self.program.end(keep_printed=self.program.has_ended())
            self.program = None
        if self.folder is not None:
            self.folder.close()
            self.folder = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What the sessions of a replica need to know of the run."""

    context: int  # most tokens of a prompt and its completion
    slots: int  # requests that a server is sent at the same time
    patience: float  # seconds that may be waited for anything
    decode: Callable[[list[int]], str]
    key: str = field(default="", repr=False)  # API key of servers that are given


class ServerReplica:
    """A server, number `number` of its fleet. `source` starts it, or is its address."""

    def __init__(
        self, number: int, dialect: Dialect, source: Starter | Address, settings: SessionSettings, news: NewsQueue
    ) -> None:
        self.number = number
        self.dialect = dialect
        self.source = source
        self.settings = settings
        self.where = (
            f"the server {source}" if isinstance(source, Address) else f"server {number + 1} of {dialect.title}"
        )
        self.is_ours = isinstance(source, Starter)
        self.serial = 0
        self.work = WorkCounters()
        self._news = news
        self._session: Session | None = None
        self._end_words: str | None = None  # how the program ended, asked for when a connection is lost

    def start(self) -> None:
        """Starts the server, or finds it, waits until it is ready, and checks that it can be trained with.

        Raises ReplicaLost if it does not become ready, and ConfigError, with what to change, if it cannot do what is
        needed.
        """
        self.serial += 1
        self._end_words = None
        source, settings = self.source, self.settings
        if isinstance(source, Address):
            address = source
        else:
            log.info("%s starts", self.where)
            address = source.start()
        calls = ServerCalls(address, settings.key if isinstance(source, Address) else "")
        session = self._session = Session(
            self.dialect, calls, settings.slots, settings.patience, settings.decode, self._make_report(self.serial)
        )
        session.run(session.wait_until_ready(self._find_end, self._notify))
        facts = session.run(self.dialect.inspect(calls, settings.patience))
        warn_untried(self.dialect.title, facts.version, self.dialect.tried_versions)
        if facts.context and facts.context < settings.context:
            raise ConfigError(
                f"{self.where} has a context of {facts.context} tokens, and prompt and completion of this run may have "
                f"{settings.context}: start it with as many (vLLM: --max-model-len {settings.context}), or set "
                f"--learner.token-budget {facts.context}, which refuses longer prompts."
            )
        session.run(self._check_logprobs(calls))
        session.watch()

    def send(self, orders: Sequence[Order]) -> None:
        """Hands over requests. Servers find equal first tokens in their own cache: nothing is kept or forgotten."""
        self._require_session().begin([order for order in orders if isinstance(order, Request)])

    def abort(self, id: str) -> Sample | None:
        """Stops a request and returns its partial sample. None = it has ended, and its news are in the queue."""
        session = self._require_session()
        return session.run(session.abort(id))

    def load(self, folder: Path, version: int) -> LoadedWeights:
        """Loads the weights in a folder. Servers compute no checksums that could be compared."""
        return self._load(partial(self.dialect.load, folder=folder), version)

    def load_offered(self, offered: OfferedWeights, version: int) -> LoadedWeights:
        """Loads weights from memory of the GPU, which only servers of vLLM can that Cohort has started."""
        assert isinstance(self.dialect, VllmDialect)
        return self._load(partial(self.dialect.load_offered, offered=offered), version)

    def _load(self, load: Callable[..., Awaitable[str]], version: int) -> LoadedWeights:
        """Loads weights by a call of the dialect, which is given what it still needs."""
        session = self._require_session()
        order = partial(load, session.calls, seconds=self.settings.patience)
        return LoadedWeights(version=session.run(session.load(lambda label: order(label=label), version)))

    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1, with the current weights."""
        session = self._require_session()
        return session.run(session.compute_logprobs(tokens))

    def find_fault(self, is_busy: bool) -> str:
        """Returns why the server counts as lost: its program has ended, or it gives no sign of life; "" = it is well.

        A busy and an idle server are asked for signs of life alike.
        """
        if words := self._find_end():
            return words
        session = self._session
        if session is None:
            return "was ended"
        self.work = WorkCounters(num_drawn=session.num_drawn)
        return session.fault

    def end(self) -> None:
        """Gives up what is under way, and ends the server if Cohort has started it. A second call does nothing."""
        session, self._session = self._session, None
        self.serial += 1
        if session is not None:
            session.close()
        if isinstance(self.source, Starter):
            self.source.end()

    def _require_session(self) -> Session:
        """Returns the session. Raises ReplicaLost if there is none."""
        if self._session is None:
            raise ReplicaLost("was ended")
        return self._session

    def _find_end(self, seconds: float = 0.0) -> str:
        """Returns how the server program ended; "" = it runs, and does not end in `seconds`, or it is not Cohort's."""
        return self.source.describe_end(seconds) if isinstance(self.source, Starter) else ""

    def _explain(self, lost: ReplicaLost) -> ReplicaLost:
        """Returns the error for a server that is lost to one request: its program has ended, if that is why."""
        if isinstance(lost, FailedCall):
            return lost
        if self._end_words is None:
            # Asked once: all requests under way lose their connections together.
            self._end_words = self._find_end(EXIT_SECONDS)
        return ReplicaLost(self._end_words) if self._end_words else lost

    def _notify(self, words: str, seconds: float) -> None:
        """Logs that a start takes long. Until a server that Cohort starts has loaded its model, nothing answers."""
        words = "is starting" if isinstance(self.source, Starter) else words
        log.info("waiting for %s, which %s; at most %.0f s more (--engine.patience)", self.where, words, seconds)

    def _make_report(self, serial: int) -> Callable[[str, Sample | CohortError], None]:
        """Returns the function by which a session reports, as news of the start number `serial`."""

        def report(id: str, result: Sample | CohortError) -> None:
            if isinstance(result, Sample):
                self._news.put(News(replica=self.number, serial=serial, id=id, sample=result))
                return
            error = self._explain(result) if isinstance(result, ReplicaLost) else result
            self._news.put(News(replica=self.number, serial=serial, id=id, error=error))

        return report

    async def _check_logprobs(self, calls: ServerCalls) -> None:
        """Raises ConfigError if the server gives drawn tokens other log-probabilities than those of the request.

        At temperature 1 they must be those of the same tokens in a prompt, which the canary compares later. At another
        one they must differ: a run at temperature 1 would not notice, any other would train on wrong ratios.
        """
        gap = await self._probe(calls, 1.0)
        if not gap <= PROBE_AGREEMENT:
            raise ConfigError(
                f"{self.where} reports log-probabilities of tokens that it draws which differ by {gap:.3g} nats from "
                "those of the same tokens in a prompt. It cannot be trained with."
            )
        if await self._probe(calls, PROBE_TEMPERATURE) < PROBE_DIFFERENCE:
            raise ConfigError(
                f"{self.where} reports log-probabilities at temperature 1, and not at that of the request: start "
                "vLLM's with --logprobs-mode processed_logprobs, and SGLang's without SGLANG_RETURN_ORIGINAL_LOGPROB."
            )

    async def _probe(self, calls: ServerCalls, temperature: float) -> float:
        """Returns how much log-probabilities of drawn tokens differ from those of a prompt, in nats per token."""
        begin = [1, 2, 3]
        question = Question(
            id=secrets.token_hex(16),
            tokens=begin,
            max_tokens=PROBE_TOKENS,
            sampling=Sampling(temperature=temperature, max_tokens=PROBE_TOKENS),
            seed=1,
            label="probe",
        )
        part = await self.dialect.continue_tokens(calls, question, self.settings.patience)
        if not part.tokens:
            raise ConfigError(f"{self.where} draws no token when it is asked for {PROBE_TOKENS}. Is its model whole?")
        tokens = [*begin, *part.tokens]
        plain = await self.dialect.compute_logprobs(calls, tokens, "probe", self.settings.patience)
        return fmean(abs(x - y) for x, y in zip(plain[len(begin) - 1 :], part.logprobs, strict=True))


def find_free_port() -> int:
    """Returns the number of a TCP port on loopback that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
