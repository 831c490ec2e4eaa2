"""The process of one side of a comparison. It gets a job as JSON and sends its answers as marked lines of stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The beginning of a line that is an answer. All other lines are output of the libraries.
MARK = "@result "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def send_answer(value: Any) -> None:
    """Sends `value` to the process that called `run_side`. Only the process of a side calls it."""
    print(MARK + json.dumps(value), flush=True)


def run_side(
    script: str, side: str, job: Any, path: str | None, python: str = sys.executable, seconds: float | None = None
) -> Iterator[Any]:
    """Runs `script --worker side JOB` in a process of its own and yields its answers as they come.

    `job` is a dataclass, and `path` the PYTHONPATH of the process; None = that of this process. The process is ended
    after `seconds`; None = never. If it fails or is ended, a line on stderr says so, and there are no more answers.
    """
    environment = os.environ | ENVIRONMENT | ({} if path is None else {"PYTHONPATH": path})
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(asdict(job)))
        command = [python, str(Path(script).resolve()), "--worker", side, str(job_file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            alarm = threading.Timer(seconds or 0.0, process.kill)
            if seconds is not None:
                alarm.start()
            try:
                for line in process.stdout:
                    if line.startswith(MARK):
                        yield json.loads(line.removeprefix(MARK))
                    else:
                        print(line, end="", file=sys.stderr)
            finally:
                alarm.cancel()
    if process.returncode:
        print(f"{side}, {job}: exit status {process.returncode}"[:500], file=sys.stderr, flush=True)
