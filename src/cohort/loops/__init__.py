"""Training loops: `rl` and `sft`, the update that a step does, reuse of earlier groups, and statistics of a step."""
