"""Makes the small run directory of an old format that the tests read: tests/data/run-format-N.

    git worktree add ../old COMMIT                                   # the last commit that writes format N
    python scripts/old_run.py tests/data/run-format-1 ../old/src     # a run of that tree, of two steps

The model is random and very small, so that the whole directory stays below 300 KB. Its answers are noise and all
rewards are equal, so only the KL and the entropy term give the update a gradient. Nothing in the directory depends on
the machine that made it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from cohort.models.catalog import resolve_model
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder, initialise
from cohort.models.files import save_folder

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
}
SETTINGS = (
    "--model=model --steps=2 --threads=1 --device=cpu --batch.prompts=4 --batch.samples=4 --sampling.max-tokens=8"
    " --task.train-size=24 --task.test-size=8 --eval.problems=8 --algo.entropy=0.01 --algo.kl.weight=0.1"
    " --learner.token-budget=512 --optim.warmup=0 --optim.lr=1e-2 --save.every=1 --save.keep-last=1"
)


def make_run(out: Path, source: Path) -> None:
    """Writes a random model to `out`/model, and to `out`/run a run that the tree `source` makes with it."""
    out.mkdir(parents=True)
    tiny = resolve_model("tiny")
    config = {**json.loads((tiny / "config.json").read_text()), **SHAPE}
    decoder = Decoder(ModelConfig.from_hf(config))
    initialise(decoder, 0)
    save_folder(decoder, config, tiny, out / "model", dtype=torch.bfloat16)
    env = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cohort", "train", "quickstart", *SETTINGS.split(), "--log=plain"]
    subprocess.run(command, cwd=out, env=env, check=True)
    [run] = (out / "runs").iterdir()
    (run / ".lock").unlink()
    # The run card names the processor.
    (run / "run.md").unlink()
    run.rename(out / "run")
    (out / "runs").rmdir()


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), Path(sys.argv[2]))
