r"""Which games of the package textarena the task `textarena` can play: tries all of them, and prints a table.

    python benchmarks/textarena_games.py [--json] > games.md

Needs `pip install 'cohort[textarena]'`. Every game is started by two processes with different hash seeds (a start that
differs between processes cannot be trained on), then a few nonsense moves are made, and the game is played again in the
same process between moves of another episode. A game that takes longer than a minute is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from typing import Any

SECONDS = 60
MOVES = ("[1]", "[A1]", "[up]", "hello", "[0 1]", "[guess]")


def try_game(name: str) -> dict[str, Any]:
    """Starts a game, makes a few moves and returns what was found; `problem` says why it cannot be played."""
    from cohort.errors import TaskError
    from cohort.tasks.textarena import GameEnvironment, describe_problem

    def ring(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    begin = time.perf_counter()
    try:
        row = {"id": "0", "seed": 7}
        opening, first = GameEnvironment(name), GameEnvironment(name)
        text = opening.start(row, None)  # type: ignore[arg-type]
        seconds = time.perf_counter() - begin
        again = first.start(row, None)  # type: ignore[arg-type]
        said = [play(opening, move) for move in MOVES]
        other = GameEnvironment(name)
        other.start({"id": "1", "seed": 8}, None)  # type: ignore[arg-type]
        heard = [(play(other, move), play(first, move))[1] for move in MOVES]
        if text != again or said != heard:
            return {"problem": "does not repeat from its seed"}
        digest = hashlib.sha256(repr((text, said)).encode()).hexdigest()
        return {"problem": "", "seconds": seconds, "digest": digest, "characters": len(text)}
    except TaskError as error:
        return {"problem": str(error).partition("does not start here (")[2].rpartition(");")[0] or "several players"}
    except Exception as error:
        return {"problem": f"a move raises {describe_problem(error)}"}
    finally:
        signal.alarm(0)


def play(game: Any, text: str) -> str:
    """Makes a move, and returns what follows as text; "" if the game is over."""
    from cohort.types import Answer

    if getattr(game, "is_over", False):
        return ""
    step = game.step(Answer(text=text, full=text, finish="stop", num_tokens=1, conversation=[]))
    game.is_over = step.done
    return repr((step.replies, step.parts, step.reason))


def try_all() -> None:
    """Tries all games in this process and prints what was found as JSON."""
    from textarena.envs.registration import ENV_REGISTRY

    from cohort.tasks.textarena import VARIANTS

    found = {}
    for name, spec in ENV_REGISTRY.items():
        if not name.endswith(VARIANTS):
            found[name] = {"family": str(spec.entry_point).split(".")[2], **try_game(name)}
            print(name, found[name]["problem"], file=sys.stderr, flush=True)
    sys.stdout.flush()
    print("\n" + json.dumps(found))


def explain(problem: str) -> str:
    """Returns a problem in short words where it is one of the usual ones."""
    words = {
        "layer": "several players",
        "LookupError": "needs data of NLTK, which is downloaded",
        "FileNotFoundError": "the package lacks a file of it",
        "SyntaxError": "needs Python 3.12",
        "OpenRouter": "asks a model of a web service",
        "OPENROUTER": "asks a model of a web service",
    }
    return next((told for sign, told in words.items() if sign in problem), problem)


def main() -> None:
    """Tries all games in two processes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        try_all()
        return
    runs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, __file__, "--here"], env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    for name, game in runs[0].items():
        if not game["problem"] and game["digest"] != runs[1][name].get("digest"):
            game["problem"] = "differs between processes"
    if options.json:
        print(json.dumps(runs[0], indent=1))
        return
    good: dict[str, list[str]] = defaultdict(list)
    bad: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, game in runs[0].items():
        if game["problem"]:
            bad[game["family"], explain(game["problem"])].append(name)
        else:
            good[game["family"]].append(name)
    print(f"textarena {version('textarena')}, Python {platform.python_version()}\n")
    print("| game | names | start, s |\n|---|---|---:|")
    for family, names in good.items():
        slowest = max(runs[0][name]["seconds"] for name in names)
        print(f"| {family} | {', '.join(f'`{name}`' for name in names)} | {slowest:.2f} |")
    print("\n| game | names | why not |\n|---|---|---|")
    for (family, problem), names in bad.items():
        print(f"| {family} | {len(names)} | {problem} |")


if __name__ == "__main__":
    main()
