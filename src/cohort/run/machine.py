"""What a run ran on: named in its card, because numbers without it cannot be compared."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from cohort.system.disk import readable_size

_PACKAGES = ("cohort", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def program() -> str:
    """How to type this program's name: "cohort", or the path it was started by where the shell would not find it."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "cohort" and not shutil.which("cohort") else "cohort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Processor, memory and the versions of what computes."""

    system: str
    processor: str
    num_cores: int
    memory: str
    python: str
    accelerator: str = ""
    packages: dict[str, str] = field(default_factory=dict)


def describe_environment(accelerator: str = "") -> Environment:
    """Ask the system; nothing is imported for it."""
    return Environment(
        system=platform.platform(),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        python=sys.version.split()[0],
        accelerator=accelerator,
        packages={name: version for name in _PACKAGES if (version := _version(name))},
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return readable_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return "unknown"
