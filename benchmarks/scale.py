"""Memory and traffic of many ranks, on paper: tables from the formulas that plan memory and count bytes.

    python benchmarks/scale.py --write docs/scale.md

Nothing is run. `tests/equivalence/test_shards.py` holds the formulas of bytes to what two and four ranks really hand to
collectives. The plan of memory for one rank is held to a GPU; for several ranks nobody has measured it yet.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from cohort.errors import ConfigError
from cohort.learner.plan import MemoryDemand, MemoryPlan, choose_shard, plan_memory
from cohort.learner.traffic import collective_bytes, weights_bytes
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder
from cohort.models.shapes import find_shape

MODELS = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")
RANKS = (1, 2, 4, 8, 16, 32, 64)
DEVICES = (80, 141)  # GB
# Every rank samples and trains so many groups.
PROMPTS, SAMPLES, PROMPT, COMPLETION = 8, 8, 512, 1024
# Bytes per second that a GPU sends to others: NVLink within a machine of 8, a 400 Gbit/s card between machines.
WITHIN, BETWEEN = 450e9, 50e9
BEGIN, END = "<!-- begin: scale.py -->\n", "<!-- end: scale.py -->\n"


def make_demand(c: ModelConfig, ranks: int) -> MemoryDemand:
    """Returns what one of so many ranks needs, in bf16."""
    rows = PROMPTS * SAMPLES
    return MemoryDemand(
        model=c,
        bytes_per_number=2,
        longest=PROMPT + COMPLETION,
        batch_tokens=PROMPTS * PROMPT + rows * COMPLETION,
        kv_tokens=PROMPTS * PROMPT + rows * COMPLETION,
        ranks=ranks,
    )


def describe_fit(c: ModelConfig, ranks: int, gigabytes: int) -> str:
    """Returns the first division with which a model fits, and the GiB of its peak; "-" if none does."""
    available = int(gigabytes * 1e9)
    demand = make_demand(c, ranks)
    try:
        shard = choose_shard(demand, available)
        return format_cell(shard, plan_memory(replace(demand, shard=shard), available, demand.longest))
    except ConfigError:
        pass
    for tensor in (2, 4, 8):
        if ranks % tensor == 0 and c.num_kv_heads % tensor == 0:
            try:
                divided = replace(demand, ranks=ranks // tensor, tensor=tensor)
                plan = plan_memory(divided, available, demand.longest)
                return format_cell(f"tensor {tensor}", plan)
            except ConfigError:
                continue
    return "-"


def format_cell(name: str, plan: MemoryPlan) -> str:
    """Returns a cell of the table of memory."""
    return f"{name} {plan.peak / 2**30:.0f}"


def compute_traffic(c: ModelConfig, ranks: int, shard: str, passes: int) -> tuple[float, float]:
    """Returns the bytes that one rank sends per optimizer step with ring collectives, and the seconds, on paper."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Decoder(c).named_parameters()}
    counted = collective_bytes(shapes, ranks=ranks, shard=shard, bytes_per_number=2, bytes_per_master=4, passes=passes)
    if shard == "full":
        # The engines of all ranks get the new weights.
        counted = counted | {"join": weights_bytes(shapes, ranks=ranks, bytes_per_number=2)["join"]}
    share = (ranks - 1) / ranks
    # A ring sends a sum twice, a scattered sum once, and a rank's own part of what is joined to every other rank.
    sent = {
        "sum": 2 * share,
        "sum_scattered": share,
        "reduce_gradients": share,
        "join": ranks - 1,
        "gather_weights": ranks - 1,
    }
    total = sum(num_bytes * sent[kind] for kind, num_bytes in counted.items())
    return total, total / (WITHIN if ranks <= 8 else BETWEEN)


def make_tables() -> str:
    """Returns the tables as Markdown."""
    lines = [
        f"{date.today()}. Each rank has {PROMPTS} prompts of {PROMPT} tokens per step, with {SAMPLES} samples of",
        f"{COMPLETION} tokens. All weights are trained, in bf16 with fp32 masters and moments. There is no reference.",
        "",
        "**Memory per GPU.** The first division that fits, and GiB at the peak of training with one sample at a time.",
        "A run uses what is left for larger microbatches. `-`: nothing fits. Every rank keeps a whole copy to sample.",
        "",
    ]
    for gigabytes in DEVICES:
        lines += [f"| GPUs of {gigabytes} GB | {' | '.join(map(str, RANKS))} |", f"|---|{'---:|' * len(RANKS)}"]
        for name in MODELS:
            cells = [describe_fit(find_shape(name), ranks, gigabytes) for ranks in RANKS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "**Traffic.** GB that one rank of a 7B model sends per optimizer step, and the seconds that takes if nothing",
        f"overlaps: {WITHIN / 1e9:.0f} GB/s up to 8 ranks, {BETWEEN / 1e9:.0f} GB/s beyond, ring collectives, and for",
        "`full` four microbatches per rank.",
        "",
        "| ranks | none | optimizer | full |",
        "|---:|---:|---:|---:|",
    ]
    c = find_shape("qwen2.5-7b")
    for ranks in (1, 2, 4, 8, 16, 64, 256, 1024):
        cells = []
        for shard in ("none", "optimizer", "full"):
            total, seconds = (0.0, 0.0) if ranks == 1 else compute_traffic(c, ranks, shard, passes=4)
            cells.append(f"{total / 1e9:.1f} GB, {seconds:.2f} s")
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the tables, or writes them between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page with marks, which gets the tables")
    args = parser.parse_args()
    tables = make_tables()
    if args.write is None:
        print(tables)
        return
    text = args.write.read_text()
    head, rest = text.split(BEGIN)
    args.write.write_text(f"{head}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
