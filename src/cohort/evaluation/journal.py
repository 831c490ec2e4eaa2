"""An evaluation while it is made: every finished item is on disk, so that a killed one goes on where it was.

The journal of `X.json` is `X.json.part`: one JSON object a line, the setting first, then an item each. It is removed
once the evaluation itself is written.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from cohort.errors import RunError
from cohort.evaluation.records import EvalItem, EvalSetting, Evaluation
from cohort.system.disk import disk_errors, write_atomic


class Journal:
    """Use as a context: `items` are those of an interrupted evaluation with the same setting."""

    def __init__(self, path: Path, setting: EvalSetting) -> None:
        self.path, self.setting = path, setting
        self.part = path.with_name(path.name + ".part")
        self.items: dict[str, EvalItem] = {}
        self._size = 0  # bytes of the journal that are whole lines

    def __enter__(self) -> Journal:
        with disk_errors(self.part):
            self.part.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.part.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel, however this process ends
        except BlockingIOError:
            self._file.close()
            raise RunError(f"{self.path} is being made by another process: wait for it, or stop it.") from None
        try:
            self._read()
            with disk_errors(self.part):
                self._file.truncate(self._size)  # a line that a kill cut off is not there
            if not self._size:
                self._write(asdict(self.setting))
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what could not be written has been said, and flushing it again would hide that
            self._file.close()

    def add(self, item: EvalItem) -> None:
        """One whose grader failed is not kept: the next call tries it again."""
        self.items[item.id] = item
        if not item.failed:
            self._write(asdict(item))

    def finish(self, evaluation: Evaluation) -> None:
        """Write the evaluation; the journal has done its work."""
        write_atomic(self.path, json.dumps(evaluation.to_json(), indent=1))
        self.part.unlink(missing_ok=True)

    def _write(self, record: dict[str, object]) -> None:
        with disk_errors(self.part):
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self) -> None:
        whole, _, _ = self.part.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        try:
            records = [json.loads(line) for line in lines]
            found = EvalSetting(**records[0]) if records else None
            items = [EvalItem.from_json(record) for record in records[1:]]
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self.part} is damaged ({error}); delete it and evaluate again.") from error
        if found is None:
            return
        if json.loads(json.dumps(asdict(self.setting))) != asdict(found):
            raise RunError(
                f"{self.part} holds an unfinished evaluation with other settings; delete it or choose another --out."
            )
        self.items = {item.id: item for item in items}
        self._size = len(whole) + 1
