"""The time to convert a GGUF file to a model folder and to load that folder: seconds per phase.

    PYTHONPATH=src python3 benchmarks/gguf_load.py MODEL.gguf
    PYTHONPATH=src python3 benchmarks/gguf_load.py MODEL.gguf --transformers    # transformers too (needs accelerate)

"unpack" is dequantisation on all cores without writing. "unpack and write" also writes the files, but only to the page
cache; "make durable" waits until the disk has them. The rates count the bytes of the GGUF file for reading and
unpacking, and those of the folder for everything else. The file is read once beforehand, so that it is in memory if it
fits. The measurement of transformers is `from_pretrained(..., gguf_file=...)` with dequantised weights in the type that
is written here, and `save_pretrained`.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.models.files import load_folder
from cohort.models.gguf import convert as gguf
from cohort.models.gguf.reader import read_header
from cohort.models.gguf.tokenizer import make_tokenizer_files
from cohort.models.shards import ShardWriter, TensorSpec
from cohort.system.disk import sync_tree
from cohort.text import Tokenizer


class DiscardingWriter(ShardWriter):
    """A writer that drops everything, to measure unpacking alone."""

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Drops `values`."""


def print_row(what: str, seconds: float, num_bytes: int = 0) -> None:
    """Prints a row of the table: seconds, MB/s (empty without `num_bytes`) and peak memory of the process."""
    rate = f"{num_bytes / seconds / 1e6:.0f}" if num_bytes else ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {what} | {seconds:.2f} | {rate} | {peak:.1f} |", flush=True)


@contextmanager
def print_time(what: str, num_bytes: int = 0) -> Iterator[None]:
    """Prints the row of the table for the time that the block takes."""
    start = time.perf_counter()
    yield
    print_row(what, time.perf_counter() - start, num_bytes)


def time_call(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_conversion(file: Path, scratch: Path, dtype: torch.dtype | None) -> tuple[torch.dtype, Path]:
    """Converts a file phase by phase and then as a whole, and prints a row for each.

    Returns (type of the largest weight in the folder, folder of the whole conversion).
    """
    size = file.stat().st_size
    with print_time("read the head"):
        head = read_header(file)
    with print_time("check names, shapes and places"):
        config, weights = gguf.plan_conversion(file, head, dtype)
    with print_time("rebuild and write the tokenizer"):
        for name, content in make_tokenizer_files(head.metadata, config["vocab_size"]).items():
            gguf._write_json(scratch / name, content)
    specs = {w.name: TensorSpec(shape=w.stored.shape, dtype=w.dtype) for w in weights}
    written = sum(spec.num_bytes for spec in specs.values())
    with DiscardingWriter(scratch, specs, gguf.SHARD_BYTES) as nowhere:
        unpack = time_call(lambda: gguf.write_weights(file, weights, nowhere, lambda share: None))
    print_row("unpack", unpack, size)
    # Removes the files that the discarding writer made.
    for path in scratch.glob("*.safetensors*"):
        path.unlink()
    with ShardWriter(scratch, specs, gguf.SHARD_BYTES) as shards:
        both = time_call(lambda: gguf.write_weights(file, weights, shards, lambda share: None))
    print_row("unpack and write", both, written)
    with print_time("make durable", written):
        sync_tree(scratch)
    for path in scratch.glob("*.safetensors*"):
        path.unlink()
    widest = max(weights, key=lambda w: w.stored.num_weights)
    folder = scratch / "converted"
    with print_time("all of it: cohort.models.gguf.convert", written):
        gguf.convert_gguf(file, folder, dtype=dtype)
    return widest.dtype, folder


def time_loading(folder: Path) -> None:
    """Prints how long the tokenizer and the weights of `folder` take to load, as bfloat16 and as float32."""
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with print_time("load the tokenizer"):
        Tokenizer.load(folder)
    for dtype in (torch.bfloat16, torch.float32):
        with print_time(f"load the folder as {str(dtype).removeprefix('torch.')}", written):
            loaded = load_folder(folder, dtype)
        del loaded
        gc.collect()


def time_transformers(file: Path, out: Path, dtype: torch.dtype) -> None:
    """Prints how long transformers takes to load a GGUF file and to save it to `out`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": file.name}
    with print_time("transformers: load the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    with print_time("transformers: load the model"):
        # Versions without this class always dequantise.
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **options)
    with print_time("transformers: save both"):
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def main() -> None:
    """Measures a file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="what packed weights become")
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary folder unless given")
    parser.add_argument("--transformers", action="store_true")
    a = parser.parse_args()
    # Brings the file into memory.
    with open(a.file, "rb") as f:
        while f.read(1 << 24):
            pass
    if a.scratch:
        Path(a.scratch).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=a.scratch))
    print(
        f"{a.file.name}, {a.file.stat().st_size / 1e9:.2f} GB, {gguf._count_cores()} cores, torch {torch.__version__}\n"
    )
    print("| what | s | MB/s | peak GiB |")
    print("|---|---:|---:|---:|")
    try:
        dtype, folder = time_conversion(a.file, scratch, getattr(torch, a.dtype) if a.dtype else None)
        time_loading(folder)
        shutil.rmtree(folder)
        if a.transformers:
            time_transformers(a.file.absolute(), scratch / "theirs", dtype)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
