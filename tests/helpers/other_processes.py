"""An engine and a learner in processes of their own. Only bytes of the one serialisation go to and fro.

The processes are spawned, so they share nothing with this one; the pipe carries bytes and never an object.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from cohort.algos.algorithm import Algorithm, from_plain
from cohort.config.document import dump, parse
from cohort.config.kinds import RL
from cohort.data.batch import Batch
from cohort.data.tensors import as_plain, as_tensors
from cohort.engines.base import Abilities, Event, Request, Work
from cohort.engines.sync import WeightSync
from cohort.jobs.build import Parts, assemble
from cohort.learner.base import Annotations, Update
from cohort.serialize import dumps, loads
from cohort.types import Group, Sample
from cohort.world import ONE_PROCESS

PATIENCE = 120.0  # seconds a call may take


@dataclass(frozen=True)
class Sent:
    """Weights that came from another process: there is no module to share."""

    tensors: Mapping[str, Tensor]
    module: None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class Elsewhere:
    """A process with one role, called by name."""

    def __init__(self, role: str, config: RL) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(role, dump(config), there), daemon=True)
        self._process.start()
        there.close()
        self.num_bytes = 0

    def call(self, name: str, *arguments: Any) -> Any:
        data = dumps([name, list(arguments)])
        self._here.send_bytes(data)
        assert self._here.poll(PATIENCE), f"{name} was not answered"
        answer = self._here.recv_bytes()
        self.num_bytes += len(data) + len(answer)
        kind, value = loads(answer)
        assert kind == "result", value
        return value

    def close(self) -> None:
        self._here.close()
        self._process.join(10)
        self._process.kill()


def serve(role: str, config: str, pipe: Connection) -> None:
    """Answer calls until the pipe is closed."""
    parts = assemble(parse(config))  # type: ignore[arg-type]
    parts.scorer.close()
    target = {"engine": EngineThere, "learner": LearnerThere}[role](parts)
    while True:
        try:
            name, arguments = loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ["result", getattr(target, name)(*arguments)]
        except Exception as error:
            answer = ["error", f"{type(error).__name__}: {error}"]
        pipe.send_bytes(dumps(answer))


class EngineThere:
    def __init__(self, parts: Parts) -> None:
        self.engine = parts.engine

    def submit(self, request: Request) -> None:
        self.engine.submit(request)

    def poll(self, timeout: float) -> list[Event]:
        return self.engine.poll(timeout)

    def idle(self) -> bool:
        return self.engine.idle

    def abort(self, id: str) -> Sample:
        return self.engine.abort(id)

    def version(self) -> int:
        return self.engine.version

    def load(self, weights: dict[str, Any], version: int) -> None:
        self.engine.load(Sent(as_tensors(weights)), version)


class LearnerThere:
    def __init__(self, parts: Parts) -> None:
        self.learner = parts.learner

    def annotate(self, groups: list[Group], needs: list[str]) -> Annotations:
        return self.learner.annotate(groups, needs)

    def update(self, batch: Batch, algo: Any) -> Update:
        return self.learner.update(batch, from_plain(algo))

    def weights(self) -> dict[str, Any]:
        return as_plain(self.learner.weights())

    def state(self) -> list[Any]:
        tensors, numbers = self.learner.state()
        return [as_plain(tensors.items()), numbers]


class RemoteEngine:
    name, abilities = "native", Abilities()

    def __init__(self, there: Elsewhere) -> None:
        self.there, self.work = there, Work()

    @property
    def version(self) -> int:
        return self.there.call("version")

    @property
    def idle(self) -> bool:
        return self.there.call("idle")

    def submit(self, request: Request) -> None:
        self.there.call("submit", request)

    def poll(self, timeout: float = 0.0) -> list[Event]:
        return self.there.call("poll", timeout)

    def abort(self, id: str) -> Sample:
        return self.there.call("abort", id)

    def load(self, weights: Any, version: int) -> None:
        self.there.call("load", as_plain(weights), version)

    def close(self) -> None:
        self.there.close()


class RemoteLearner:
    adapters, world = None, ONE_PROCESS

    def __init__(self, there: Elsewhere) -> None:
        self.there = there

    def annotate(self, groups: Sequence[Group], needs: Collection[str]) -> Annotations:
        return self.there.call("annotate", list(groups), sorted(needs))

    def update(self, batch: Batch, algo: Algorithm) -> Update:
        return self.there.call("update", batch, algo.plain())

    def weights(self) -> Sent:
        return Sent(as_tensors(self.there.call("weights")))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = self.there.call("state")
        return as_tensors(tensors), numbers


class ApartParts(Parts):
    """The parts of a run whose engine and learner are elsewhere."""

    def close(self) -> None:
        super().close()
        self.learner.there.close()  # type: ignore[attr-defined]


def assemble_apart(config: RL) -> ApartParts:
    """As `build.assemble`, with the engine in one spawned process and the learner in another."""
    parts = assemble(config)
    with torch.no_grad():
        for p in parts.model.decoder.parameters():
            p.fill_(float("nan"))  # whoever used the weights of this process would notice
    engine = RemoteEngine(Elsewhere("engine", parts.config))
    learner = RemoteLearner(Elsewhere("learner", parts.config))
    for producer in (parts.producer, parts.eval_producer):
        producer.engine = engine
    values = {name: getattr(parts, name) for name in Parts.__dataclass_fields__}
    values |= {"engine": engine, "learner": learner, "sync": WeightSync(weights=learner.weights, engine=engine)}
    return ApartParts(**values)
