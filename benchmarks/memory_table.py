"""The GPU memory that a run needs, per model and way of training: predicted, and measured if there is a GPU.

    PYTHONPATH=src python3 benchmarks/memory_table.py                          # predicted only
    PYTHONPATH=src python3 benchmarks/memory_table.py --measure --models qwen2.5-0.5b qwen2.5-7b

The step has 16 x 8 samples with 256 prompt and 512 completion tokens, in bf16. All numbers are GiB. "least" is the
smallest device that the memory plan accepts; if necessary the plan releases the KV memory between rollouts and computes
activations twice. "at 24" is the plan for a device of 24 GiB. "measured" is the most memory that torch held in two such
steps under that plan, while all memory of the real device beyond 24 GiB was occupied.
"""

from __future__ import annotations

import argparse
import gc

from cohort.errors import ConfigError
from cohort.learner.plan import MemoryDemand, MemoryPlan, plan_memory
from cohort.models.config import ModelConfig
from cohort.models.limits import BatchShape, count_layer_params
from cohort.models.shapes import SHAPES, find_shape

GIB = 2**30
SHAPE = BatchShape(prompts=16, samples=8, prompt_tokens=256, completion_tokens=512)
# The ways of training, and how each stores the frozen matrices; None = nothing is frozen.
WAYS = {"full": None, "LoRA 16": "keep", "QLoRA 16": "nf4"}
# Bytes per number in NF4: 4 bits, an 8-bit scale per 64 numbers, and an fp32 peak per 256 scales.
NF4 = 0.5 + (1 + 4 / 256) / 64


def estimate_demand(c: ModelConfig, base: str | None) -> MemoryDemand:
    """Returns what the step needs of memory. `base` is the storage of frozen matrices: "keep", "nf4" or None."""
    tokens = SHAPE.prompts * SHAPE.prompt_tokens + SHAPE.num_completion_tokens
    load = MemoryDemand(model=c, bytes_per_number=2, longest=768, batch_tokens=tokens, kv_tokens=tokens)
    if base is None:
        return load
    q = c.num_heads * c.head_dim
    kv = c.num_kv_heads * c.head_dim
    # An adapter of a matrix has rank x (rows + columns) numbers. The matrices: q and o, k and v, gate, up and down.
    sides = 2 * (c.hidden + q) + 2 * (c.hidden + kv) + 3 * (c.hidden + c.ff)
    frozen = count_layer_params(c) * (2 if base == "keep" else NF4)
    return MemoryDemand(**{**vars(load), "trained": 16 * c.num_layers * sides, "base": int(frozen)})


def plan_for_device(load: MemoryDemand, gib: float) -> MemoryPlan | None:
    """Returns the plan for a device of `gib` GiB; None if the step does not fit into it."""
    try:
        return plan_memory(load, int(gib * GIB))
    except ConfigError:
        return None


def find_smallest_device(load: MemoryDemand) -> float:
    """Returns the size of the smallest device into which the step fits, in GiB, rounded up to tenths."""
    tenths = next(n for n in range(1, 20_000) if plan_for_device(load, n / 10) is not None)
    return tenths / 10


def describe_plan(plan: MemoryPlan | None) -> str:
    """Returns the cell of the table for a plan."""
    if plan is None:
        return "does not fit"
    extras = ["KV released"] * (not plan.keep_kv) + ["computed twice"] * plan.recompute
    return ", ".join([f"{plan.token_budget} tokens per microbatch", *extras])


def measure_peak(name: str, base: str | None, gib: float) -> str:
    """Returns the peak of memory in GiB, as text, of two steps under the plan for a device of `gib` GiB.

    Meanwhile the memory of the real device beyond that is occupied. Returns "" if the step does not fit.
    """
    import torch

    from cohort.config.schema import LearnerConfig, LoraConfig, OptimConfig
    from cohort.engines.native import make_native_engine
    from cohort.inspect.bench import measure as bench
    from cohort.learner.local import LocalLearner
    from cohort.models.lora import Adapters
    from cohort.models.shapes import make_random_decoder

    plan = plan_for_device(estimate_demand(find_shape(name), base), gib)
    if plan is None:
        return ""
    decoder = make_random_decoder(find_shape(name), torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    # Occupies what a device of `gib` would not have.
    beyond = torch.empty(max(0, torch.cuda.mem_get_info()[1] - int(gib * GIB)), dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    adapters = None if base is None else Adapters(decoder, LoraConfig(rank=16, base="nf4" if base == "nf4" else "keep"))
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(), num_updates=1, adapters=adapters)
    learner.apply_plan(plan)
    context = SHAPE.prompt_tokens + SHAPE.completion_tokens
    reserve = plan.update if plan.keep_kv else 1 << 50
    engine = make_native_engine(decoder, lambda ids: "", slots=128, max_context=context, reserve=reserve)
    for version in (1, 2):
        bench._train_on(learner, bench._sample_groups(engine, decoder, SHAPE), SHAPE)
        engine.load(learner.weights(), version=version)
    peak = (torch.cuda.max_memory_allocated() - beyond.numel()) / GIB
    del engine, learner, adapters, decoder, beyond
    gc.collect()
    torch.cuda.empty_cache()
    return f"{peak:.1f}"


def main() -> None:
    """Prints the table, one row per model and way of training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=sorted(SHAPES))
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--measure", action="store_true")
    a = parser.parse_args()
    names = ["model", "way", "weights and optimizer", "least", f"at {a.gib:g}", "peak there", "measured"]
    print(f"| {' | '.join(names)} |")
    print("|---|---|---:|---:|---|---:|---:|")
    for name in a.models:
        for way, base in WAYS.items():
            load = estimate_demand(find_shape(name), base)
            plan = plan_for_device(load, a.gib)
            smallest = find_smallest_device(load)
            # Weights and optimizer need the same memory in every plan.
            any_plan = plan_for_device(load, smallest) if plan is None else plan
            assert any_plan is not None
            peak = "" if plan is None else f"{plan.peak / GIB:.1f}"
            found = measure_peak(name, base, a.gib) if a.measure else ""
            row = (name, way, f"{any_plan.state / GIB:.1f}", f"{smallest:.1f}", describe_plan(plan), peak, found)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
