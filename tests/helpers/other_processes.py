"""An engine and a learner in separate processes, which exchange only bytes of `cohort.serialize` with this one.

The processes are spawned, so they share nothing with this one. The pipe carries bytes, never an object.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from cohort.algos.algorithm import Algorithm, algorithm_from_record
from cohort.config.document import dump_config, parse_config
from cohort.config.kinds import RL
from cohort.data.batch import Batch
from cohort.data.tensors import tensors_from_records, tensors_to_records
from cohort.engines.base import Abilities, Event, Request, WorkCounters
from cohort.engines.sync import WeightSync
from cohort.jobs.build import RLJob, build_rl_job
from cohort.learner.base import Annotations, StateStream, Update
from cohort.models.shards import TensorSpec
from cohort.serialize import dumps, loads
from cohort.types import Group, Provenance, Sample
from cohort.world import ONE_PROCESS, World

PATIENCE = 120.0  # seconds that a call may take


@dataclass(frozen=True)
class ReceivedWeights:
    """Weights received from another process. There is no module that an engine could share."""

    tensors: Mapping[str, Tensor]
    module: None = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every tensor by name."""
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class OtherProcess:
    """A process that plays one role, "engine" or "learner". Its methods are called by name."""

    def __init__(self, role: str, config: RL) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._own_end, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(role, dump_config(config), there), daemon=True)
        self._process.start()
        there.close()
        self.num_bytes = 0

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the method `name` in the other process and returns its result. Fails where that raises."""
        data = dumps([name, list(arguments)])
        self._own_end.send_bytes(data)
        assert self._own_end.poll(PATIENCE), f"{name} was not answered"
        answer = self._own_end.recv_bytes()
        self.num_bytes += len(data) + len(answer)
        kind, value = loads(answer)
        assert kind == "result", value
        return value

    def close(self) -> None:
        """Closes the pipe, which ends the other process. Kills it if it does not end within 10 seconds."""
        self._own_end.close()
        self._process.join(10)
        self._process.kill()


def serve(role: str, config: str, pipe: Connection) -> None:
    """Answers calls until the pipe is closed. Runs in the other process."""
    parts = build_rl_job(parse_config(config))  # type: ignore[arg-type]
    parts.scorer.close()
    target = {"engine": EngineServer, "learner": LearnerServer}[role](parts)
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


class EngineServer:
    """The engine in the other process. Its methods take and return records."""

    def __init__(self, parts: RLJob) -> None:
        self.engine = parts.engine

    def submit(self, request: Request) -> None:
        self.engine.submit(request)

    def poll(self, timeout: float) -> list[Event]:
        return self.engine.poll(timeout)

    def idle(self) -> bool:
        return self.engine.idle

    def abort(self, id: str) -> Sample:
        return self.engine.abort(id)

    def forget(self, id: str) -> None:
        self.engine.forget(id)

    def version(self) -> int:
        return self.engine.version

    def load(self, weights: dict[str, Any], version: int) -> None:
        self.engine.load(ReceivedWeights(tensors_from_records(weights)), version)


class LearnerServer:
    """The learner in the other process. Its methods take and return records."""

    def __init__(self, parts: RLJob) -> None:
        self.learner = parts.learner

    def annotate(self, groups: list[Group], needs: list[str], loss_on: int) -> Annotations:
        return self.learner.annotate(groups, needs, Provenance(loss_on))

    def update(self, batch: Batch, algo: Any) -> Update:
        return self.learner.update(batch, algorithm_from_record(algo))

    def weights(self) -> dict[str, Any]:
        return tensors_to_records(self.learner.weights())

    def state(self) -> list[Any]:
        state = self.learner.state()
        return [tensors_to_records(state.collect().items()), state.numbers]


class RemoteEngine:
    """An `Engine` in this process that passes every call on to an `EngineServer`."""

    name, abilities = "native", Abilities()

    def __init__(self, there: OtherProcess) -> None:
        self.there, self.work = there, WorkCounters()

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

    def forget(self, id: str) -> None:
        self.there.call("forget", id)

    def load(self, weights: Any, version: int) -> None:
        self.there.call("load", tensors_to_records(weights), version)

    def close(self) -> None:
        self.there.close()


class RemoteLearner:
    """A `Learner` in this process that passes every call on to a `LearnerServer`."""

    adapters, world, grid = None, ONE_PROCESS, ONE_PROCESS.split(1)

    def __init__(self, there: OtherProcess) -> None:
        self.there = there

    def annotate(
        self, groups: Sequence[Group], needs: Collection[str], loss_on: Provenance = Provenance.SAMPLED
    ) -> Annotations:
        return self.there.call("annotate", list(groups), sorted(needs), int(loss_on))

    def update(self, batch: Batch, algo: Algorithm) -> Update:
        return self.there.call("update", batch, algo.to_record())

    def weights(self) -> ReceivedWeights:
        return ReceivedWeights(tensors_from_records(self.there.call("weights")))

    def state(self) -> StateStream:
        tensors, numbers = self.there.call("state")
        return StateStream.wrap(tensors_from_records(tensors), numbers)


class SeparateJob(RLJob):
    """A job whose engine and learner are in other processes."""

    def close(self) -> None:
        super().close()
        self.learner.there.close()  # type: ignore[attr-defined]


def build_separate_job(config: RL, world: World = ONE_PROCESS) -> SeparateJob:
    """Returns the job of a config, with the engine in one spawned process and the learner in another."""
    parts = build_rl_job(config)
    with torch.no_grad():
        for p in parts.model.decoder.parameters():
            # If any code used the weights of this process, its results would be NaN.
            p.fill_(float("nan"))
    engine = RemoteEngine(OtherProcess("engine", parts.config))
    learner = RemoteLearner(OtherProcess("learner", parts.config))
    for producer in (parts.producer, parts.eval_producer):
        producer.engine = engine
    values = {name: getattr(parts, name) for name in RLJob.__dataclass_fields__}
    values |= {"engine": engine, "learner": learner, "sync": WeightSync(get_weights=learner.weights, engine=engine)}
    return SeparateJob(**values)
