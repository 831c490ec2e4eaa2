"""How long a GGUF file takes to become a folder, and the folder a decoder: seconds, by phase.

    PYTHONPATH=src python3 benchmarks/gguf_load.py MODEL.gguf
    PYTHONPATH=src python3 benchmarks/gguf_load.py MODEL.gguf --transformers    # its way too (needs accelerate)

"Unpack" is dequantisation on all cores with nothing written; "write" is what writing adds to it: the pages of the
files go to memory first, and "make durable" waits until the disk has them. The rates are of the GGUF file's bytes
for reading and unpacking and of the folder's for the rest. The file is read once beforehand, so that it is in
memory if it fits. transformers' way is `from_pretrained(..., gguf_file=...)` with the weights dequantised, in the type
that is written here, and `save_pretrained`.
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
from cohort.models.gguf.reader import read_head
from cohort.models.gguf.tokenizer import tokenizer_files
from cohort.models.shards import Shards, Spec
from cohort.system.disk import sync_tree
from cohort.text import Tokenizer


class Nowhere(Shards):
    """Takes what is written and drops it."""

    def write(self, name: str, first: int, values: Tensor) -> None:
        pass


def row(what: str, seconds: float, num_bytes: int = 0) -> None:
    rate = f"{num_bytes / seconds / 1e6:.0f}" if num_bytes else ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {what} | {seconds:.2f} | {rate} | {peak:.1f} |", flush=True)


@contextmanager
def timed(what: str, num_bytes: int = 0) -> Iterator[None]:
    start = time.perf_counter()
    yield
    row(what, time.perf_counter() - start, num_bytes)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def phases(file: Path, scratch: Path, dtype: torch.dtype | None) -> tuple[torch.dtype, Path]:
    """Each part of a conversion by itself; returns what packed weights became and the folder."""
    size = file.stat().st_size
    with timed("read the head"):
        head = read_head(file)
    with timed("check names, shapes and places"):
        config, weights = gguf.read_model(file, head, dtype)
    with timed("rebuild and write the tokenizer"):
        for name, content in tokenizer_files(head.metadata, config["vocab_size"]).items():
            gguf._write_json(scratch / name, content)
    specs = {w.name: Spec(shape=w.stored.shape, dtype=w.dtype) for w in weights}
    written = sum(spec.num_bytes for spec in specs.values())
    with Nowhere(scratch, specs, gguf.SHARD_BYTES) as nowhere:
        unpack = seconds(lambda: gguf.write_weights(file, weights, nowhere, lambda share: None))
    row("unpack", unpack, size)
    for path in scratch.glob("*.safetensors*"):
        path.unlink()
    with Shards(scratch, specs, gguf.SHARD_BYTES) as shards:
        both = seconds(lambda: gguf.write_weights(file, weights, shards, lambda share: None))
    row("unpack and write", both, written)
    with timed("make durable", written):
        sync_tree(scratch)
    for path in scratch.glob("*.safetensors*"):
        path.unlink()
    widest = max(weights, key=lambda w: w.stored.num_weights)
    folder = scratch / "converted"
    with timed("all of it: cohort.models.gguf.convert", written):
        gguf.convert(file, folder, dtype=dtype)
    return widest.dtype, folder


def load(folder: Path) -> None:
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with timed("load the tokenizer"):
        Tokenizer.load(folder)
    for dtype in (torch.bfloat16, torch.float32):
        with timed(f"load the folder as {str(dtype).removeprefix('torch.')}", written):
            loaded = load_folder(folder, dtype)
        del loaded
        gc.collect()


def transformers_way(file: Path, out: Path, dtype: torch.dtype) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": file.name}
    with timed("transformers: load the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    with timed("transformers: load the model"):
        if hasattr(transformers, "GgufConfig"):  # versions before it always dequantise
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **options)
    with timed("transformers: save both"):
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="what packed weights become")
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary folder unless given")
    parser.add_argument("--transformers", action="store_true")
    a = parser.parse_args()
    with open(a.file, "rb") as f:
        while f.read(1 << 24):
            pass
    if a.scratch:
        Path(a.scratch).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=a.scratch))
    print(
        f"{a.file.name}, {a.file.stat().st_size / 1e9:.2f} GB, {gguf._num_cores()} cores, torch {torch.__version__}\n"
    )
    print("| what | s | MB/s | peak GiB |")
    print("|---|---:|---:|---:|")
    try:
        dtype, folder = phases(a.file, scratch, getattr(torch, a.dtype) if a.dtype else None)
        load(folder)
        shutil.rmtree(folder)
        if a.transformers:
            transformers_way(a.file.absolute(), scratch / "theirs", dtype)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
