"""The gain of continuous order where groups are rejected and lengths vary: rollouts alone, with random weights.

    PYTHONPATH=src python3 benchmarks/refill.py --shape qwen2.5-0.5b --base OTHER/src --out refill.json

Every step needs `--prompts` accepted groups. A share of all groups is rejected, as DAPO rejects groups of equal
rewards, and replaced by a group of the next prompt. Which groups are rejected, and how long every completion is
(log-normal, as in `cohort bench engine --lengths lognormal`), depends only on the prompt, so all sides sample the same.
There are three sides: an older tree (`--base`, which has only rounds), this tree in rounds, and this tree in continuous
order. Each runs in its own process, in turns, `--repeats` times. The first `--warm` steps of a process capture CUDA
graphs and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "src"
# The program of a measurement. It runs with this tree and with an older one, hence the imports under several names.
PROGRAM = r"""
import hashlib, json, random, sys, time
from dataclasses import replace
import torch
from cohort.engines import native
try:
    from cohort.models.limits import draw_lognormal_lengths
    from cohort.models.shapes import find_shape, make_random_decoder
except ImportError:  # an earlier tree, with other names
    from cohort.models.shapes import named_shape as find_shape, random_decoder as make_random_decoder
    try:
        from cohort.models.limits import lognormal_lengths as draw_lognormal_lengths
    except ImportError:
        from cohort.limits import lognormal_lengths as draw_lognormal_lengths
from cohort.types import Outcome, Prompt, Provenance, Sampling

o = json.loads(sys.argv[1])
dtype = torch.bfloat16 if o["device"] == "cuda" else torch.float32
decoder = make_random_decoder(find_shape(o["shape"]), dtype, o["device"])
lengths = draw_lognormal_lengths(4096, o["completion"])


# A number from 0 to 1 that depends only on the words.
def share(*words):
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big") / 2**64


# An endless stream of prompts with random tokens.
class Stream:
    cursor = 0

    def next_prompts(self, num):
        made = []
        for _ in range(num):
            rng = random.Random(self.cursor)
            tokens = [rng.randrange(decoder.config.vocab_size) for _ in range(o["prompt"])]
            made.append(Prompt(task="t", id=str(self.cursor), visit=0, row={}, messages=[], tokens=tokens,
                               provenance=[int(Provenance.PROMPT)] * len(tokens)))
            self.cursor += 1
        return made

    # Its name in earlier trees.
    next = next_prompts


# A scorer that gives every answer the score 1 at the next poll.
class Grader:
    waiting = ()
    scores_groups = False

    def submit(self, id, *rest):
        self.waiting = (*self.waiting, id)

    def poll(self, timeout=0.0):
        done, self.waiting = self.waiting, ()
        return [(id, Outcome(parts={"correct": 1.0})) for id in done]


# The engine, with a length of its own for every completion.
class Lengths:
    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        length = lengths[int(share("length", request.key.prompt_id, request.key.sample) * len(lengths))]
        self.engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=length)))


rows = o["prompts"] * o["samples"]
# Earlier trees call it native_engine.
make_engine = getattr(native, "make_native_engine", None) or native.native_engine
made = make_engine(decoder, lambda ids: "", slots=rows, max_context=o["prompt"] + o["completion"])
engine, sampling = Lengths(made), Sampling(max_tokens=o["completion"])
accept = lambda group: share("accept", group.prompt.id) >= o["rejected"]
if o["order"] == "before":
    from cohort.engines.rollout import Tasks, collect as gather
    tasks = Tasks(stream=Stream(), scorer=Grader(), sampling=sampling, weights={}, seed=0)
    collect = lambda: gather(engine, tasks, o["prompts"], o["samples"], accept)
else:
    from cohort.rollout.episode import EpisodeSettings
    from cohort.rollout.producer import Producer
    settings = EpisodeSettings(sampling=sampling, group_size=o["samples"], seed=0, coefficients={})
    producer = Producer(engine, Grader(), Stream(), settings, o["order"])
    def collect():
        groups = producer.collect(o["prompts"], accept)
        producer.close_groups(groups)
        return groups
times = []
tokens = 0
num = 0
for step in range(o["warm"] + o["steps"]):
    made.load(type("Same", (), {"module": decoder})(), step)
    begin = time.perf_counter()
    groups = collect()
    if step >= o["warm"]:
        times.append(time.perf_counter() - begin)
        tokens += sum(len(s.tokens) for g in groups for s in g.samples)
        num += len(groups)
print("FOUND", json.dumps({"seconds": sum(times), "steps": times, "tokens": tokens, "groups": num}), flush=True)
"""


def measure_in_process(source: Path, options: dict[str, object]) -> dict[str, float]:
    """Returns seconds, seconds of each step, tokens and groups of one side, measured in its own process.

    `source` is the folder with the package.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{options} with {source} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    measurements: dict[str, float] = json.loads(line.partition(" ")[2])
    return measurements


def main() -> None:
    """Measures all sides in turns and prints the table."""
    parser = argparse.ArgumentParser(description="Rollouts with rejected groups: rounds against continuous order.")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--base", type=Path, help="the src folder of a tree that knows rounds only")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--completion", type=int, default=1024, help="most tokens; a third of it on average")
    parser.add_argument("--rejected", type=float, default=0.3, help="share of the groups")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["before", "rounds", "continuous"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = ("shape", "device", "prompts", "samples", "prompt", "completion", "rejected", "warm", "steps")
    options = {name: getattr(args, name) for name in names}
    sources = {"before": args.base} if args.base else {}
    sources |= {"rounds": HERE, "continuous": HERE}
    sources = {side: source for side, source in sources.items() if side in args.sides}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sources}
    # Sides take turns, so that a slow change of the machine affects all of them.
    for _ in range(args.repeats):
        for side, source in sources.items():
            found[side].append(measure_in_process(source, {**options, "order": side}))
            print(side, {name: found[side][-1][name] for name in ("seconds", "tokens", "groups")}, flush=True)
    print(f"{'side':<11} {'seconds':>9} {'smallest':>9} {'largest':>9} {'tokens/s':>9} {'groups':>7}")
    for side, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        rate = statistics.median(run["tokens"] / run["seconds"] for run in runs)
        middle, groups = statistics.median(seconds), runs[0]["groups"]
        print(f"{side:<11} {middle:>9.2f} {min(seconds):>9.2f} {max(seconds):>9.2f} {rate:>9.0f} {groups:>7.0f}")
    if args.out:
        args.out.write_text(json.dumps({"options": options, "found": found}, indent=1))


if __name__ == "__main__":
    main()
