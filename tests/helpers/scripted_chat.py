"""`python -m tests.helpers.scripted_chat FILE chat ...`: the command `cohort`, with models that answer prepared texts.

FILE has a list of texts as JSON: the n-th answer of every model is the n-th text, and the last one is repeated. A text
that begins with "slow:" is written without end, a word every 20 ms, as by a large model. Everything else is real. The
token ids of every request are appended to FILE.requests as JSON lines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from cohort.engines.base import Event, Request
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.text import Tokenizer

PACE = 0.02


class PreparedEngine(ScriptedEngine):
    """A scripted engine whose answers come from a file, at the pace of a large model if they are slow."""

    def __init__(self, file: Path, tokenizer: Tokenizer, context: int) -> None:
        super().__init__(self._write_script, tokenizer.decode, max_context=context, window=1)
        self._texts = json.loads(file.read_text())
        self._log = Path(f"{file}.requests")
        self._tokenizer = tokenizer
        self._num = 0
        self._is_slow = False

    def _write_script(self, request: Request) -> Script:
        with self._log.open("a") as log:
            print(json.dumps(request.tokens), file=log)
        text = self._texts[min(self._num, len(self._texts) - 1)]
        self._num += 1
        self._is_slow = text.startswith("slow:")
        if self._is_slow:
            words = self._tokenizer.encode(text)
            return Script(tokens=(words * request.sampling.max_tokens)[: request.sampling.max_tokens])
        return Script(tokens=[*self._tokenizer.encode(text), self._tokenizer.end_of_turn])

    def poll(self, timeout: float = 0.0) -> list[Event]:
        if self._is_slow and self.drafts:
            time.sleep(PACE)
        return super().poll(timeout)


def main() -> int:
    """Runs the command with prepared answers."""
    from cohort.chat import models
    from cohort.cli.main import main as run

    file = Path(sys.argv[1])

    def make_sampler(model: Any, tokenizer: Tokenizer, **_: object) -> PreparedEngine:
        return PreparedEngine(file, tokenizer, model.config.context)

    models.make_sampler = make_sampler  # type: ignore[assignment]
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
