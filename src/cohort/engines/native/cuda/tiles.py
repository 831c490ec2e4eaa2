"""Plans one decode step: which rows read which shared prefix together, as tiles of queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cohort.data.transfer import copy_to_device
from cohort.engines.native.cuda.graphs import round_to_bucket
from cohort.engines.native.cuda.step import DecodeState, StepVariant, choose_prefix_splits, choose_tile_size
from cohort.engines.native.draft import NativeDraft
from cohort.models.config import ModelConfig


def plan_step(drafts: Sequence[NativeDraft | None], state: DecodeState, config: ModelConfig, slots: int) -> StepVariant:
    """Plans which rows read which shared prefix together (as tiles) and writes the plan to the device.

    `drafts` are by row, None = an empty row. `slots` is the most rows. Returns the StepVariant that selects the
    captured graph for these rows.
    """
    groups: dict[int, list[int]] = {}  # entry of a prefix -> its rows
    for row, draft in enumerate(drafts):
        if draft is not None and draft.prefix.tokens:
            groups.setdefault(draft.prefix.entry, []).append(row)
    tile_size = choose_tile_size(config.queries_per_kv, max(map(len, groups.values()), default=1))
    each = tile_size // config.queries_per_kv  # rows per tile
    longest = max((len(d.prefix.tokens) for d in drafts if d is not None), default=0)
    tiles = [(entry, rows[i : i + each]) for entry, rows in groups.items() for i in range(0, len(rows), each)]
    rows = round_to_bucket(len(drafts), slots)
    # The number of tiles is rounded up to a power of two, so that few graphs serve all numbers.
    num = min(rows, max(1, 1 << (len(tiles) - 1).bit_length())) if tiles else 1
    entries = [entry for entry, _ in tiles] + [-1] * (num - len(tiles))
    members = [m + [-1] * (each - len(m)) for _, m in tiles] + [[-1] * each] * (num - len(tiles))
    state.tile_prefix[:num] = copy_to_device(entries, state.done.device, torch.int32)
    state.tile_rows[: num * each] = copy_to_device(members, state.done.device, torch.int32).flatten()
    s = state.slots
    return StepVariant(
        rows=rows,
        tile_size=tile_size,
        num_tiles=num,
        prefix_splits=choose_prefix_splits(num, config.num_kv_heads, longest),
        has_truncation=s.has_truncation,
        needs_sorting=s.needs_sorting,
        has_greedy=s.has_greedy,
        # Only the truncating draw depends on it: the other kernel always divides by the temperature.
        has_temperature=s.has_temperature and s.has_truncation,
    )
