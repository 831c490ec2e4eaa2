"""Whole runs of tasks that ask a judge: keys are in nothing that a run writes, and a resumed run asks nothing twice."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from cohort.run.directory import RunDirectory
from tests.helpers.command_line import ENV, command, differences, no_worker_is_left, only_run, remains

FLAGS = (
    *("--batch.prompts=4", "--batch.samples=4", "--sampling.max-tokens=12", "--eval.problems=4"),
    *("--eval.every=2", "--save.every=2", "--threads=1"),
)
RECIPE = """
from cohort.recipes.tiny import quickstart
from dataclasses import replace

def recipe():
    return replace(quickstart(), task={task}(), reward={{}})
"""


class JudgeServer:
    """A judge on this machine. Every request gets a new random score, unless `fixed` has one for its text.

    `asked` has all texts, in order. `before_reply` is called with each text, and may keep the reply back.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.said: dict[str, float] = {}  # the last score of each text
        self.fixed: dict[str, float] = {}
        self.before_reply: Any = lambda text: None
        rng, lock, judge = random.Random(0), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with lock:
                    judge.asked.append(text)
                    judge.before_reply(text)
                    score = judge.said[text] = judge.fixed.get(text, rng.random())
                body = json.dumps({"score": score}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Prints nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    """Returns a judge that is closed afterwards."""
    made = JudgeServer()
    yield made
    made.close()


def run_cohort(*args: object, at: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `cohort ARGS` in `at` with further environment variables."""
    return subprocess.run(
        command(args), cwd=at, env={**ENV, **variables}, capture_output=True, text=True, timeout=300, check=False
    )


# ---- a judge, and a kill

JUDGED = '''
import json, os, urllib.request
import cohort
from cohort.tasks.base import Verdict

@cohort.task("judged")
class Judged:
    """Sums whose answers a server scores."""
    service = True
    accuracy = None

    def rows(self, split):
        for n in range(24) if split == "train" else range(100, 104):
            yield {"id": f"{split}-{n}", "question": f"What is {n} + {n + 1}?"}

    def prompt(self, row): return row["question"]

    def score(self, row, answer):
        text = row["id"] + "\\n" + answer.text
        request = urllib.request.Request(os.environ["JUDGE_URL"], text.encode(errors="replace"))
        with urllib.request.urlopen(request) as reply:
            return Verdict(json.load(reply)["score"], text)
'''


def read_journal(run: Path) -> list[str]:
    """Returns the texts whose scores are in the journal of a run."""
    lines = (run / "outcomes.jsonl").read_bytes().split(b"\n")
    return [json.loads(line)[1][0]["reason"] for line in lines[:-1]]


@pytest.mark.parametrize("order", ["rounds", pytest.param("continuous", marks=pytest.mark.slow)])
def test_a_killed_run_asks_nothing_again_and_ends_like_an_undisturbed_one(
    tmp_path: Path, judge: JudgeServer, order: str
) -> None:
    file = tmp_path / "judged.py"
    file.write_text(JUDGED + RECIPE.format(task="Judged"))
    args = ["train", f"{file}:recipe", "--steps=4", *FLAGS, "--scoring.env=JUDGE_URL", f"--rollout.order={order}"]
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
    environment = {**ENV, "JUDGE_URL": judge.url}
    process = subprocess.Popen(
        command(args), cwd=folders[0], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def kill_in_step_four(text: str) -> None:
        """Kills the run when it asks for an answer of step 4: step 3 is then lost, and its scores are not."""
        run = only_run(folders[0])
        metrics = run / "metrics.jsonl" if run else None
        if metrics and metrics.exists() and '"step": 3' in metrics.read_text() and process.poll() is None:
            process.kill()

    judge.before_reply = kill_in_step_four
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    assert no_worker_is_left(process.pid)
    judge.before_reply = lambda text: None
    killed = only_run(folders[0])
    assert killed is not None
    kept, num_before = read_journal(killed), len(judge.asked)
    assert len(kept) == len(set(kept)) > 40 and set(kept) <= set(judge.asked)

    done = run_cohort("resume", killed.relative_to(folders[0]), at=folders[0], JUDGE_URL=judge.url)
    assert done.returncode == 0, done.stderr
    again = judge.asked[num_before:]
    assert again and not set(again) & set(kept), "an answer in the journal was asked again"
    assert len(again) == len(set(again)) and read_journal(killed)[: len(kept)] == kept

    # The scores that were used, by content, whatever the order in which they are asked for.
    judge.fixed = dict(judge.said)
    done = run_cohort(*args, at=folders[1], JUDGE_URL=judge.url)
    assert done.returncode == 0, done.stderr
    whole = only_run(folders[1])
    assert whole is not None and sorted(read_journal(whole)) == sorted(read_journal(killed))
    # The journal is in the order of replies.
    assert set(differences(remains(whole), remains(killed))) <= {"outcomes.jsonl"}
    steps = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert len({line["metrics"]["reward/mean"] for line in steps if "reward/mean" in line["metrics"]}) == 4


# ---- keys

# With both quotes, a character beyond ASCII, %, +, a backslash and a line break.
KEY = "sk-pl'an\"ted+50%-ключ\\n0\nsecond-line-of-it"
LEAKY = '''
import base64, json, os, sys
from urllib.parse import quote
import cohort
from cohort.tasks.base import Verdict

@cohort.task("leaky")
class Leaky:
    """A grader that tells its key in every way it has."""
    service = SERVICE
    accuracy = None

    def rows(self, split):
        for n in range(24) if split == "train" else range(100, 104):
            yield {"id": f"{split}-{n}", "n": n}

    def prompt(self, row): return f"Say {row['n']}."

    def score(self, row, answer):
        key = os.environ["JUDGE_KEY"]
        print("printed", key, repr(key), file=sys.stderr)
        print(json.dumps({"Authorization": f"Bearer {key}"}))
        os.write(2, b"raw " + key.encode())
        way = os.environ["WAY"]
        if way == "err": raise RuntimeError(f"the service refused {key}")
        if way == "key": raise KeyError(f"it's {key}")
        if way == "nam": return {key: 1.0}
        if way == "txt": return {"score": key}
        if way == "die": os._exit(7)
        ways = [key, repr(key), ascii(key), json.dumps(key), quote(key), quote(key, safe=""), key.encode().hex(),
                base64.b64encode(key.encode()).decode(), base64.b64encode(f"user:{key}".encode()).decode(),
                repr(key.encode()), "x" * 490 + key, "\\n".join(["Traceback:", "  " + key, "end"])]
        return Verdict(float(len(answer.text) % 7), ways[len(answer.text) % len(ways)] + " told")
'''


def list_forms(key: str) -> list[bytes]:
    """Returns what must be nowhere: the key in every form, and each of its lines."""
    data = key.encode()
    texts = [key, repr(key)[1:-1], ascii(key)[1:-1], json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]]
    texts += [quote(key), quote(key, safe=""), quote_plus(key), " ".join(key.split()), data.hex()]
    texts += [repr(data)[2:-1], base64.b64encode(data).decode()[:-4], base64.urlsafe_b64encode(data).decode()[:-4]]
    # The middle of the base64 of "user:KEY".
    texts += [base64.b64encode(f"user:{key}".encode()).decode()[8:-8], "second-line-of-it", key.splitlines()[0]]
    # JSON files have texts once more as JSON.
    return [t.encode() for t in {*texts, *(json.dumps(t)[1:-1] for t in texts), "sk-pl'an"}]


def find_key(folder: Path, *outputs: str) -> list[str]:
    """Returns the files below a folder, and the outputs, that have the key in any form."""
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {f"output {n}": text.encode() for n, text in enumerate(outputs)}
    return [name for name, data in texts.items() if any(form in data for form in list_forms(KEY))]


@pytest.mark.parametrize("service", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_key_is_in_nothing_that_commands_write_or_print(tmp_path: Path, service: bool) -> None:
    files, work = tmp_path / "files", tmp_path / "work"
    files.mkdir()
    work.mkdir()
    grader = LEAKY.replace("SERVICE", str(service)) + RECIPE.format(task="Leaky")
    (files / "leaky.py").write_text(grader)
    spec = f"{files / 'leaky.py'}:recipe"
    scoring = ["--scoring.env", "JUDGE_KEY", "WAY", "--scoring.retries=0"]
    flags = [*FLAGS, *scoring, "--steps=2"]
    evaluate = ["eval", f"{files / 'leaky.py'}:leaky", *scoring, "--limit=2", "--samples=4", "--max-tokens=12"]
    variables = {"JUDGE_KEY": KEY, "COHORT_CACHE": str(work / "cache"), "TMPDIR": str(work)}
    outputs = []
    # Values of less than four characters, such as those of WAY, are no secrets.
    ways = ("err", "key", "nam", "txt", "die") if service else ("err", "nam")
    for args, way in (
        (["check", spec, *flags], "ok"),
        (["train", spec, *flags], "ok"),
        (evaluate, "ok"),
        *(([*evaluate, f"--out={way}"], way) for way in ways),
    ):
        done = run_cohort(*args, at=work, WAY=way, **variables)
        assert done.returncode == (0 if way == "ok" and args[0] != "check" else done.returncode), done.stderr
        assert "Traceback (most" not in done.stderr and done.returncode in (0, 1, 2), done.stderr
        assert way in ("ok", "txt", "die") or "[JUDGE_KEY]" in done.stderr, (way, done.stderr)
        outputs += [done.stdout, done.stderr]
    run = only_run(work)
    assert run is not None and RunDirectory.open(run).config.scoring.env == ("JUDGE_KEY", "WAY")
    for more in ([], ["--html=page.html"]):
        done = run_cohort("explain", run, "--step=2", *more, at=work, **variables)
        assert done.returncode == 0, done.stderr
        outputs += [done.stdout, done.stderr]
    # What was told is there, without the key.
    with_name = [p for p in run.rglob("*") if p.is_file() and b"[JUDGE_KEY]" in p.read_bytes()]
    assert with_name and any("[JUDGE_KEY]" in text for text in outputs)
    assert find_key(work, *outputs) == []


def test_a_process_that_dies_with_its_key_on_its_lips_does_not_tell_it(tmp_path: Path) -> None:
    """The message of a death has what the process printed. Python itself prints a traceback when it cannot start."""
    from cohort.scoring.service import ServicePool
    from cohort.tasks.base import make_plain_answer
    from cohort.tasks.ref import TaskRef

    (tmp_path / "dying.py").write_text(
        "import os, sys, cohort\n@cohort.task('dying')\nclass Dying:\n    service = True\n"
        "    def rows(self, split): yield {'x': 1}\n    def prompt(self, row): return '?'\n"
        "    def score(self, row, answer):\n"
        "        key = os.environ['JUDGE_KEY']\n"
        "        os.write(2, f'panic: {key} {key!r} {key.encode()!r}'.encode())\n        os._exit(9)\n"
    )
    before = os.environ.get("JUDGE_KEY")
    os.environ["JUDGE_KEY"] = KEY
    try:
        with ServicePool(TaskRef(name="dying", path=str(tmp_path / "dying.py")), retries=0, env=("JUDGE_KEY",)) as pool:
            [outcome] = pool.score([({"id": "0"}, make_plain_answer("x"))])
    finally:
        os.environ.pop("JUDGE_KEY") if before is None else os.environ.update(JUDGE_KEY=before)
    assert 'exited with code 9; it had printed "panic: [JUDGE_KEY]' in outcome.failure
    assert not any(form in outcome.failure.encode() for form in list_forms(KEY))


@pytest.mark.parametrize("name", ["train", "check", "eval"])
def test_a_variable_that_is_not_set_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "judged.py").write_text(JUDGED + RECIPE.format(task="Judged"))
    args = [name, "judged.py:judged" if name == "eval" else "judged.py:recipe", "--scoring.env=JUDGE_URL"]
    args += FLAGS if name != "eval" else ()
    environment = {key: value for key, value in ENV.items() if key != "JUDGE_URL"}
    done = subprocess.run(command(args), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "scoring.env names JUDGE_URL, which is not set. Set it before the command" in done.stderr
    assert only_run(tmp_path) is None


@pytest.mark.parametrize("name", ["train", "eval"])
@pytest.mark.parametrize("flag", ["--scoring.env={}", "--scoring.env=JUDGE_KEY={}"])
def test_a_key_in_place_of_a_name_is_refused_and_not_shown(tmp_path: Path, flag: str, name: str) -> None:
    (tmp_path / "judged.py").write_text(JUDGED + RECIPE.format(task="Judged"))
    what = "judged.py:judged" if name == "eval" else "judged.py:recipe"
    done = run_cohort(name, what, flag.format("sk-planted-0123456789"), at=tmp_path)
    assert done.returncode == 2 and "has a text that is no name of an environment variable" in done.stderr
    assert "planted" not in done.stdout + done.stderr and done.stderr.count("\n") == 1


# ---- groups and reward functions

RELATIVE = '''
import cohort

@cohort.task("relative")
class Relative:
    """The longest answer of a group is the best."""
    accuracy = None

    def rows(self, split):
        for n in range(24) if split == "train" else range(100, 104):
            yield {"id": f"{split}-{n}", "n": n}

    def prompt(self, row): return f"Say {row['n']}."

    def score_group(self, row, answers):
        lengths = sorted(a.num_tokens for a in answers)
        return [cohort.Verdict(lengths.index(a.num_tokens) / len(answers), f"among {len(answers)}") for a in answers]
'''


def test_a_relative_judge_scores_whole_groups_in_both_orders(tmp_path: Path) -> None:
    left = []
    for order in ("rounds", "continuous"):
        folder = tmp_path / order
        folder.mkdir()
        (folder / "relative.py").write_text(RELATIVE + RECIPE.format(task="Relative"))
        done = run_cohort("train", "relative.py:recipe", *FLAGS, "--steps=2", f"--rollout.order={order}", at=folder)
        assert done.returncode == 0, done.stderr
        run = only_run(folder)
        assert run is not None
        left.append(remains(run))
    train = left[0]["samples"]
    assert train and {s["reason"] for s in train} == {"among 4"} and len({s["reward"] for s in train}) > 1
    assert [s["reward"] for s in left[0]["samples"]] == [s["reward"] for s in left[1]["samples"]]
    eval_args = ("eval", "relative.py:relative", "--limit=4", "--samples=4", "--max-tokens=12", "--out=e.json")
    done = run_cohort(*eval_args, at=tmp_path / "rounds")
    assert done.returncode == 0, done.stderr
    items = json.loads((tmp_path / "rounds" / "e.json").read_text())["items"]
    assert len(items) == 4 and {a["reason"] for item in items for a in item["answers"]} == {"among 4"}
    assert any(len({a["reward"] for a in item["answers"]}) > 1 for item in items)


@pytest.mark.parametrize("more", [["--turns=think_again"], []])
def test_groups_of_several_turns_are_refused(tmp_path: Path, more: list[str]) -> None:
    tools = (
        ""
        if more
        else "\n    def add(a: int, b: int) -> int:\n        'Adds.'\n        return a + b\n    tools = [add]\n"
    )
    (tmp_path / "relative.py").write_text(RELATIVE + tools + RECIPE.format(task="Relative"))
    done = run_cohort("train", "relative.py:recipe", *FLAGS, "--steps=2", *more, at=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "the task relative scores the answers of a group together" in done.stderr


REWARDED = """
import asyncio
import cohort

IDS = []

def brevity(completions, completion_ids, log_extra, **kwargs):
    log_extra("ids", [len(ids) for ids in completion_ids])
    return [-len(c) / 100 for c in completions]

async def judge(prompts, completions, n, **kwargs):
    await asyncio.sleep(0)
    return [None if number % 2 else len(set(text)) / 10 for number, text in zip(n, completions)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "truth": ground_truth}

def tokens(row, answer):
    assert len(answer.tokens) == answer.num_tokens > 0
    return answer.num_tokens

@cohort.task("rewarded")
class Rewarded:
    rewards = [brevity, JUDGE compute_score, tokens]

    def rows(self, split):
        for n in range(24) if split == "train" else range(100, 104):
            yield {"id": f"{split}-{n}", "n": n, "data_source": "own", "ground_truth": str(n)}

    def prompt(self, row): return f"Say {row['n']}."
"""


@pytest.mark.parametrize("with_judge", [True, False])
def test_a_run_with_functions_of_every_kind(tmp_path: Path, with_judge: bool) -> None:
    text = REWARDED.replace("JUDGE", "judge," if with_judge else "")
    (tmp_path / "rewarded.py").write_text(text + RECIPE.format(task="Rewarded"))
    coefficient = ["--reward.tokens=0.01"]
    done = run_cohort("train", "rewarded.py:recipe", *FLAGS, "--steps=2", *coefficient, at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None and (run / "outcomes.jsonl").exists() == with_judge
    samples = remains(run)["samples"]
    assert samples and all(s["reason"].startswith(f"ids {s['num_tokens']}; ") for s in samples)
    for s in samples:
        parts = json.loads(s["parts"]) if isinstance(s["parts"], str) else s["parts"]
        assert parts["tokens"] == s["num_tokens"] and parts["compute_score"] in (0.0, 1.0)
        assert s["reward"] == pytest.approx(
            sum((0.01 if k == "tokens" else 1.0) * v for k, v in parts.items()), abs=1e-6
        )
