"""Weights on the way to engines in other processes: files in a private folder, in shared memory where there is room.

The folder has one version at a time. An engine that is started again later finds the current weights there, whatever
the learner has by then.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from cohort.engines.base import Weights
from cohort.engines.fleet.base import LoadedWeights, Replica
from cohort.engines.fleet.checksum import compute_checksum
from cohort.errors import EngineError
from cohort.models.files import find_weight_files, read_tensors
from cohort.models.shards import ShardWriter, TensorSpec
from cohort.models.sizes import read_specs
from cohort.system.private_folder import PrivateFolder

# Tensors in one file. Servers read several files side by side.
FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights in the files of a folder, as an engine loads them. They are read one tensor at a time."""

    folder: Path
    module: Any = None  # no decoder in this process has them

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every tensor, by name."""
        return read_specs(find_weight_files(self.folder))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file, names in find_weight_files(self.folder).items():
            yield from read_tensors(file, names)


@dataclass(kw_only=True, slots=True)
class WeightFolder:
    """A private folder with the current weights. `side_files` are copied there once, beside the weights.

    `parent` is where the folder is made; None = in shared memory if the weights fit there, else among temporary files.
    Nothing is made before the first write.
    """

    side_files: Mapping[str, Path] = field(default_factory=dict)  # by their names in the folder
    parent: Path | None = None
    version: int = -1  # of the weights in the folder; -1 = it has none
    checksums: dict[str, int] = field(default_factory=dict)  # of the tensors as the learner has them, by name
    _specs: dict[str, TensorSpec] = field(default_factory=dict)
    _folder: PrivateFolder | None = None

    @property
    def path(self) -> Path:
        """Where the weights are. There must have been a write."""
        assert self._folder is not None
        return self._folder.path

    @property
    def num_bytes(self) -> int:
        """The size of the weights; 0 before the first write."""
        return sum(spec.num_bytes for spec in self._specs.values())

    def write(self, weights: Weights, version: int) -> None:
        """Replaces the weights in the folder, one tensor after the other. Raises EngineError if there is no room."""
        if not self._specs:
            self._specs = dict(weights.specs)
        try:
            if self._folder is None:
                self._make_folder()
            self.version = -1
            # No replica reads now, and there may be no room for two versions.
            for file in self.path.glob("*.safetensors*"):
                file.unlink()
            checksums: dict[str, int] = {}
            with ShardWriter(self.path, self._specs, FILE_BYTES) as writer:
                for name, tensor in weights:
                    # Of the tensor where the learner has it: whatever happens on the way is noticed.
                    checksums[name] = compute_checksum(tensor)
                    writer.write(name, 0, tensor.detach().to("cpu").contiguous())
        except OSError as e:
            raise EngineError(
                f"the weights for engines in other processes cannot be written: {e}. They need "
                f"{self.num_bytes / 2**30:.2f} GiB {self._describe_place()}. Make room there, then continue: "
                "cohort resume RUN."
            ) from e
        self.checksums = checksums
        self.version = version

    def _describe_place(self) -> str:
        """Returns where the folder is made, for a message."""
        if self.parent is not None:
            return f"in {self.parent} (--engine.folder)"
        return "in shared memory or in the folder of temporary files, which the environment variable TMPDIR names"

    def _make_folder(self) -> None:
        """Makes the private folder, and copies the side files into it."""
        self._folder = PrivateFolder.create("weights", self.num_bytes, self.parent)
        for name, source in self.side_files.items():
            if source.is_file():
                shutil.copyfile(source, self.path / name)

    def offer(self, weights: Weights, version: int) -> None:
        """Makes these weights the current ones. See `Transfer`."""
        self.write(weights, version)

    def load_into(self, replica: Replica) -> LoadedWeights:
        """Makes a replica load the weights in the folder, and returns what it has then."""
        return replica.load(self.path, self.version)

    def keep(self) -> None:
        """Does nothing: the folder has the current weights until the next ones."""

    def close(self) -> None:
        """Removes the folder. A second call does nothing."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None
            self.version = -1
