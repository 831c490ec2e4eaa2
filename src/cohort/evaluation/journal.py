"""The journal of an evaluation: each finished item is written to disk, so that a killed evaluation can continue.

The journal of `X.json` is `X.json.part`: one JSON object per line, first the setting, then one item per line. It is
removed when the evaluation itself is written.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from cohort.errors import RunError
from cohort.evaluation.records import EvalItem, EvalSetting, Evaluation, list_differences
from cohort.system.disk import explain_disk_errors, sync_file, write_atomically
from cohort.system.json_text import make_record, parse_json


def read_journal_setting(path: Path) -> EvalSetting | None:
    """Returns the setting in the journal of the evaluation in `path`; None if there is none that can be read."""
    try:
        with _locate_journal(path).open("rb") as file:
            setting: EvalSetting = make_record(EvalSetting, parse_json(file.readline()))
            return setting
    except (OSError, ValueError):
        return None


def _locate_journal(path: Path) -> Path:
    """Returns the path of the journal of the evaluation in `path`."""
    return path.with_name(path.name + ".part")


class Journal:
    """The journal of the evaluation in `path`, locked and open for writing inside `with`.

    `items` has the finished items by problem id; at the start they are those of an interrupted evaluation with the same
    setting. Entering raises RunError if another process writes the journal, or if it is damaged or belongs to another
    setting.
    """

    def __init__(self, path: Path, setting: EvalSetting) -> None:
        self.path = path
        self.setting = setting
        self.part_path = _locate_journal(path)
        self.items: dict[str, EvalItem] = {}
        self._size = 0  # bytes of the journal up to the end of its last complete line

    def __enter__(self) -> Journal:
        with explain_disk_errors(self.part_path):
            self.part_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.part_path.open("a+b")
        try:
            # The kernel frees this lock, however the process ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunError(
                f"another process is writing the evaluation {self.path}. Wait until it ends, or stop it; then repeat "
                "the command."
            ) from None
        try:
            self._load_items()
            with explain_disk_errors(self.part_path):
                # Removes a last line that a kill cut off.
                self._file.truncate(self._size)
            if not self._size:
                self._append_line(asdict(self.setting))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """Closes the journal's file, which frees its lock."""
        # Closing flushes again. Its error would hide the first one, which has been raised already.
        with suppress(OSError):
            self._file.close()

    def add(self, item: EvalItem) -> None:
        """Adds a finished item (a problem with its answers) to `items` and to the journal on disk.

        One with an answer that could not be scored is not written to disk, so that the next attempt answers it again.
        """
        self.items[item.id] = item
        if not item.has_failures:
            self._append_line(asdict(item))

    def finish(self, evaluation: Evaluation) -> None:
        """Writes the complete evaluation to `path` as JSON, and removes the journal."""
        write_atomically(self.path, json.dumps(evaluation.to_json(), indent=1))
        self.part_path.unlink(missing_ok=True)

    def _append_line(self, record: dict[str, object]) -> None:
        """Appends a record to the journal as one line of JSON. The line survives a power cut once this returns."""
        with explain_disk_errors(self.part_path):
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            sync_file(self._file.fileno())

    def _load_items(self) -> None:
        """Reads the items that an interrupted evaluation has finished into `items`; none if the journal is empty.

        Also notes how many bytes of the journal are complete lines. Raises RunError if the journal is damaged or
        belongs to an evaluation with other settings.
        """
        # What follows the last line break is a line that a kill cut off.
        complete, _, _ = self.part_path.read_bytes().rpartition(b"\n")
        lines = complete.split(b"\n") if complete else []
        try:
            records = [parse_json(line) for line in lines]
            setting = make_record(EvalSetting, records[0], "the setting") if records else None
            items = make_record(list[EvalItem], records[1:], "items")
        except ValueError as error:
            raise RunError(
                f"{self.part_path}, the file of an unfinished evaluation, cannot be read ({error}). Delete it and "
                "repeat the command, which then evaluates from the first problem."
            ) from error
        if setting is None:
            return
        # Through JSON and back, because tuples become lists there.
        own = EvalSetting(**json.loads(json.dumps(asdict(self.setting))))
        if differing := list_differences(setting, own):
            raise RunError(
                f"{self.part_path} holds an unfinished evaluation with other settings ({', '.join(differing)}); "
                "delete it and repeat the command, or choose another --out."
            )
        self.items = {item.id: item for item in items}
        self._size = len(complete) + 1
