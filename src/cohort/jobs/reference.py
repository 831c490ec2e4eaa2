"""Log-probabilities of a reference that are computed once and kept in files (`--reference stored`).

A run keeps them in its directory, so that a resume reads them. The cache keeps them for other runs on the same pairs
with the same model. A file is used only if its digests say that it holds what would be computed here. Any other file
is reported, and the log-probabilities are computed again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cohort.config.imitation import DPO
from cohort.errors import RunError
from cohort.jobs.inputs import InputDigests
from cohort.learner.local import LocalLearner
from cohort.logs.printing import print_note
from cohort.loops.learning import store_logprobs
from cohort.serialize import SerialError, dumps, loads, record
from cohort.system.cache import cache_root
from cohort.system.disk import write_atomically
from cohort.types import Group, Provenance, Sample

FILE_NAME = "reference.safetensors"
# Rises when the log-probabilities of the same pairs are computed otherwise than before.
_VERSION = 1
# Pairs whose log-probabilities are computed at once.
_CHUNK = 256
# Seconds between two notes about how far the computation is.
_NOTE_SECONDS = 5.0

Notice = tuple[str, str]
"""Kind and text of what the user is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceDigests:
    """Digests of all that decides the log-probabilities."""

    # Model, adapters, number type, device, and the tokens of all pairs, which the template decides.
    subject: str
    # What can change their last bits only: how pairs are packed, threads, the version of torch, the processor.
    manner: str

    @property
    def cache_path(self) -> Path:
        """The path of the cache's file. A run that reads it gets the bits that it would have computed."""
        name = hashlib.sha256(f"{self.subject} {self.manner}".encode()).hexdigest()[:32]
        return cache_root() / "references" / f"{name}.safetensors"


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReference:
    """The content of a file."""

    subject: str
    manner: str
    counts: NDArray[np.int64]  # [S] number of targets of each answer
    logprobs: NDArray[np.float64]  # [N] of all targets, in order; float32 where that loses nothing


class ReferenceProblem(ValueError):
    """Why a file cannot be used. The message follows the name of the file."""


def digest_reference(
    config: DPO, inputs: InputDigests, learner: LocalLearner, groups: Sequence[Group]
) -> ReferenceDigests:
    """Returns digests of what decides the log-probabilities of these pairs by the reference of a run."""
    lora = asdict(config.learner.lora) | {"load": inputs.adapters}
    what = [_VERSION, inputs.model, lora, config.learner.dtype, config.device]
    subject = hashlib.sha256(json.dumps(what).encode())
    for group in groups:
        rows = [[len(group.samples), *group.prompt.tokens]]
        rows += [[*sample.tokens, *sample.provenance] for sample in group.samples]
        for row in rows:
            subject.update(np.array([len(row), *row], dtype=np.int64).tobytes())
    processor = torch.backends.cpu.get_cpu_capability()
    if config.device != "cpu":
        processor = torch.cuda.get_device_name(learner.decoder.embed.device)
    how = [learner.token_budget, config.learner.prefix_sharing, torch.get_num_threads(), torch.__version__, processor]
    manner = hashlib.sha256(json.dumps([*how, _CHUNK]).encode())
    return ReferenceDigests(subject=subject.hexdigest()[:32], manner=manner.hexdigest()[:32])


def provide_reference(
    run: Path, learner: LocalLearner, parts: Sequence[list[Group]], digests: ReferenceDigests
) -> list[Notice]:
    """Stores the log-probabilities of the reference in all pairs, in place, and returns what to tell the user.

    `parts` are the training pairs and the held-out ones. They are read from the file in the run directory `run`, or
    from the cache. If neither has them they are computed, with the learner's present weights or, if it has adapters,
    without these; so nothing may be trained yet. Both files have them afterwards. Raises RunError if the file in the
    run directory cannot be written.
    """
    own, cached = run / FILE_NAME, digests.cache_path
    samples = [sample for groups in parts for group in groups for sample in group.samples]
    notices: list[Notice] = []
    # The run's own file is what the run was trained with: on a machine with other threads it is right all the same.
    for path, manner in ((own, None), (cached, digests.manner)):
        try:
            stored = read_reference(path, digests.subject, manner)
            if stored is not None:
                _put_logprobs(samples, stored)
                if path == cached:
                    write_atomically(own, path.read_bytes())
                return [*notices, ("reference", f"its log-probabilities are read from {path}")]
        except (ReferenceProblem, OSError) as problem:
            notices.append(("reference", f"{path} is not used: {problem}. The log-probabilities are computed again"))
    begin = time.perf_counter()
    compute_reference(learner, parts)
    data = dumps(_collect_logprobs(samples, digests))
    write_atomically(own, data)
    # The cache only saves time. RuntimeError: there is no home folder.
    with suppress(OSError, RunError, RuntimeError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, data)
    num, seconds = sum(map(len, parts)), time.perf_counter() - begin
    text = f"its log-probabilities of {num} pairs were computed in {seconds:.1f} s and are kept in {own}"
    return [*notices, ("reference", text)]


def compute_reference(learner: LocalLearner, parts: Sequence[list[Group]]) -> None:
    """Computes the log-probabilities of the reference and stores them in all pairs, in place. Prints how far it is.

    The reference is the model before training: the current one, or with adapters the one that they start from.
    """
    policy = "old" if learner.adapters is None else "ref"
    num, done = sum(map(len, parts)), 0
    begin = noted = time.monotonic()
    # Training and held-out pairs have the same ids, so they are never in one chunk.
    for chunk in (chunk for groups in parts for chunk in _cut(groups)):
        found = learner.annotate(chunk, {policy}, Provenance.TARGET)
        store_logprobs(chunk, "ref_logprobs", found.old or found.ref)
        done += len(chunk)
        now = time.monotonic()
        if now - noted >= _NOTE_SECONDS and done < num:
            noted = now
            left = (now - begin) / done * (num - done)
            print_note(f"log-probabilities of the reference: {done} of {num} pairs, about {left:.0f} s left")


def _cut(groups: list[Group]) -> Iterator[list[Group]]:
    """Yields the groups in chunks."""
    for begin in range(0, len(groups), _CHUNK):
        yield groups[begin : begin + _CHUNK]


def read_reference(path: Path, subject: str, manner: str | None) -> StoredReference | None:
    """Returns what a file holds; None if there is no file.

    Raises ReferenceProblem if it is damaged, or if its digests are not these; `manner` None = any. Raises OSError if
    it cannot be read.
    """
    try:
        stored = loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except SerialError as error:
        raise ReferenceProblem(f"it is damaged ({error})") from error
    if not isinstance(stored, StoredReference) or not isinstance(stored.counts, np.ndarray):
        raise ReferenceProblem("it holds something else")
    if stored.subject != subject or (manner is not None and stored.manner != manner):
        raise ReferenceProblem("it is of another model, of other pairs or of other settings")
    return stored


def _list_targets(sample: Sample) -> list[int]:
    """Returns the places of the tokens that have a log-probability."""
    return [i for i, mark in enumerate(sample.provenance) if mark == Provenance.TARGET]


def _collect_logprobs(samples: Sequence[Sample], digests: ReferenceDigests) -> StoredReference:
    """Returns the log-probabilities that the samples have, as the content of a file."""
    counts, values = [], []
    for sample in samples:
        assert sample.ref_logprobs is not None, "the reference has not seen every answer"
        targets = _list_targets(sample)
        counts.append(len(targets))
        values += [sample.ref_logprobs[i] for i in targets]
    logprobs = np.array(values, dtype=np.float64)
    narrow = logprobs.astype(np.float32)
    if (narrow == logprobs).all():
        logprobs = narrow  # type: ignore[assignment]  # half the size, and no bit is lost
    return StoredReference(
        subject=digests.subject, manner=digests.manner, counts=np.array(counts, dtype=np.int64), logprobs=logprobs
    )


def _put_logprobs(samples: Sequence[Sample], stored: StoredReference) -> None:
    """Stores the log-probabilities of a file in the samples, in place. Raises ReferenceProblem if they do not fit."""
    targets = [_list_targets(sample) for sample in samples]
    values = stored.logprobs.astype(np.float64).tolist()
    if stored.counts.tolist() != list(map(len, targets)) or len(values) != sum(map(len, targets)):
        raise ReferenceProblem("it has other numbers of tokens than the pairs")
    begin = 0
    for sample, places in zip(samples, targets, strict=True):
        sample.ref_logprobs = [0.0] * len(sample.tokens)
        for i, value in zip(places, values[begin : begin + len(places)], strict=True):
            sample.ref_logprobs[i] = value
        begin += len(places)
