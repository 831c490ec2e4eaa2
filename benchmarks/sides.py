"""One side of a comparison in a process of its own: the job goes in as JSON, answers come back as marked lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

MARK = "@result "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def answer(value: Any) -> None:
    """In the side's process: something for the one who started it."""
    print(MARK + json.dumps(value), flush=True)


def answers(script: str, side: str, job: Any, path: str | None, python: str = sys.executable) -> Iterator[Any]:
    """Run `script --worker side JOB`; its answers as they come. A side that fails is told, and gives no more.

    `path` is its PYTHONPATH; None = as here.
    """
    environment = os.environ | ENVIRONMENT | ({} if path is None else {"PYTHONPATH": path})
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "job.json"
        given.write_text(json.dumps(asdict(job)))
        command = [python, str(Path(script).resolve()), "--worker", side, str(given)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
                else:
                    print(line, end="", file=sys.stderr)
    if process.returncode:
        print(f"{side}, {job}: exit status {process.returncode}"[:500], file=sys.stderr, flush=True)
