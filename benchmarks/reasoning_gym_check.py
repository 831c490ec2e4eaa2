"""Every data set of reasoning-gym, measured: rows, right answers, empty answers, garbage, time, and what graders run.

    python benchmarks/reasoning_gym_check.py [--rows 20] [--only chain_sum ...] [--write docs/reasoning_gym.md]

Needs pip install 'cohort[reasoning-gym]'. It compares what it measures with the tables in
src/cohort/tasks/reasoning_gym/faults.py, prints every difference, and exits with 1 if there is one. With --write it
replaces the table between the marks in that file. Times are of computing, because the machine may be shared. It takes
about two minutes of computing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

from cohort.errors import TaskError
from cohort.run.machine import describe_machine
from cohort.tasks.base import make_plain_answer
from cohort.tasks.expression import evaluate
from cohort.tasks.grading import grade
from cohort.tasks.reasoning_gym import faults, package
from cohort.tasks.reasoning_gym.package import DatasetDescription, DatasetKey, Entry
from cohort.tasks.reasoning_gym.task import ReasoningGym, is_answerable

SEED = 1
LONG = 10_000  # characters of a long answer
LEVEL_SECONDS = 20  # of computing, for one row of the highest level
BEGIN, END = "<!-- begin: reasoning_gym_check.py -->", "<!-- end: reasoning_gym_check.py -->"
CANARY = "cohort_canary"
_PROGRAM = f"__import__('sys').modules.__setitem__('{CANARY}', 1)"
# Data sets of sums, of which the right answers are computed again.
NUM_SUMS = 500
SUMS: dict[str, dict[str, Any]] = {
    "`chain_sum`": {"dataset": "chain_sum"},
    "`decimal_chain_sum`": {"dataset": "decimal_chain_sum"},
    "`basic_arithmetic`": {"dataset": "basic_arithmetic"},
    "`basic_arithmetic` without division": {"dataset": "basic_arithmetic", "operators": ("+", "-", "*")},
}
_SUM = re.compile(r"[-(\s]*\d[-+*/().\d\s]*[\d)]|\d")
PROGRAMS = (_PROGRAM, f"[{_PROGRAM}]", f"[['Q', {_PROGRAM}]]", f"1 + {_PROGRAM}", f"['a', {_PROGRAM}]")


@dataclass(kw_only=True)
class Checked:
    """What was measured of a data set, on `rows` rows."""

    info: DatasetDescription
    rows: int
    is_stable: bool = False  # the same rows twice, in another order, in one process
    is_alike: bool = False  # the same rows in a process with another hash seed
    has_gold: bool = True
    num_gold: int = 0  # rows whose right answer gets full marks, through the answer tags
    num_left_out: int = 0  # rows that the task leaves out, because their right answer is empty or would be run
    empty: float = 0.0  # the best score of the package for an empty answer
    empty_ours: float = 0.0  # the same through the task
    garbage: dict[str, int] = field(default_factory=dict)  # rows in which a senseless answer gets full marks, by kind
    other: int = 0  # rows in which the right answer of another row gets full marks, of `num_others`
    num_others: int = 0
    raised: set[str] = field(default_factory=set)
    runs_answer: bool = False  # the package's grader runs an answer as Python
    runs_ours: bool = False  # so it does through the task
    make_ms: float = 0.0
    score_ms: float = 0.0
    highest: str = ""  # what is wrong with the highest level

    @property
    def fault(self) -> str:
        """Why the data set cannot be used, as measured; "" if it can. Hash seeds are not counted."""
        found = [kind for kind, count in self.garbage.items() if count]
        if not self.is_stable:
            return "rows depend on earlier rows"
        if self.has_gold and self.num_gold < self.rows - self.num_left_out:
            return "gold is not right"
        if found:
            return f"full marks: {', '.join(found)}"
        return "the gold of other rows is right" if self.other > self.num_others / 2 else ""


def check_dataset(info: DatasetDescription, num_rows: int, others: dict[str, str]) -> Checked:
    """Returns what is measured of a data set. `others` are the digests of rows that another process made."""
    key = DatasetKey(name=info.name)
    checked = Checked(info=info, rows=num_rows)
    begin = time.process_time()
    entries = make_entries(key, range(num_rows))
    checked.make_ms = 1e3 * (time.process_time() - begin) / num_rows
    package.open_piece.cache_clear()
    again = make_entries(key, reversed(range(num_rows)))[::-1]
    checked.is_stable = digest_rows(entries) == digest_rows(again)
    checked.is_alike = digest_rows(entries) == others[info.name]
    checked.has_gold = all(entry.gold is not None for entry in entries)
    check_grader(checked, key, entries)
    check_programs(checked, key, entries[0])
    checked.highest = try_highest_level(info)
    return checked


def make_entries(key: DatasetKey, indices: Any) -> list[Entry]:
    """Returns rows of a data set in the order of `indices`."""
    return [package.make_entry(key, SEED, index) for index in indices]


def digest_rows(entries: Sequence[Entry]) -> str:
    """Returns a digest of the questions and right answers of rows."""
    return hashlib.sha256(json.dumps([(e.question, e.gold) for e in entries]).encode()).hexdigest()[:12]


def make_scorer(name: str) -> Callable[[Entry, int, str], float] | None:
    """Returns a function (row, index, answer) -> best part, through the task; None if the task refuses the data set."""
    with hashing_allowed():
        try:
            task = ReasoningGym.choose_class({"dataset": name})(dataset=name, seed=SEED)
        except TaskError:
            return None

    def score(entry: Entry, index: int, text: str) -> float:
        """Returns the largest part that the task gives the answer."""
        row = {"id": "0", "dataset": name, "index": index, "question": entry.question, "answer": entry.gold}
        answer = make_plain_answer(f"<answer>{text}</answer>")
        return max(grade(task, row, answer).parts.values())  # type: ignore[arg-type]

    return score


@contextlib.contextmanager
def hashing_allowed() -> Iterator[None]:
    """Lets data sets pass whose rows follow the hash seed: here all rows are made in this process."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def check_grader(checked: Checked, key: DatasetKey, entries: Sequence[Entry]) -> None:
    """Measures the grader of a data set: right, empty and senseless answers, and time."""
    name = checked.info.name
    ours = make_scorer(name)
    times: list[float] = []

    def score(entry: Entry, text: str) -> float:
        """Returns the package's score of an answer, and notes time and errors."""
        begin = time.process_time()
        result = package.score_text(key, SEED, entry, text)
        times.append(time.process_time() - begin)
        if result.error:
            checked.raised.add(result.error.partition(":")[0])
        return result.value

    for index, entry in enumerate(entries):
        gold = entry.gold or ""
        if not is_answerable(name, entry.gold):
            checked.num_left_out += 1
            continue
        if entry.gold is not None:
            checked.num_gold += score(entry, gold.strip()) == 1 and (ours is None or ours(entry, index, gold) == 1)
        checked.empty = max(checked.empty, score(entry, ""))
        if ours is not None:
            checked.empty_ours = max(checked.empty_ours, ours(entry, index, ""), ours(entry, index, " \n\u200b"))
        senseless = {"banana": "banana", "0": "0", "42": "42", "long": "a" * LONG, "question": entry.question}
        for kind, text in senseless.items():
            is_right = score(entry, text) == 1 and not is_same_number(text, gold)
            checked.garbage[kind] = checked.garbage.get(kind, 0) + is_right
        other = entries[(index + 7) % len(entries)].gold
        if other is not None and other.strip() and not is_same_number(other, gold):
            checked.num_others += 1
            checked.other += score(entry, other) == 1
    checked.score_ms = 1e3 * sum(times) / len(times)


def is_same_number(text: str, gold: str) -> bool:
    """Returns whether two answers are equal, as texts or as numbers."""
    try:
        return text == gold or float(text) == float(gold)
    except ValueError:
        return False


def check_programs(checked: Checked, key: DatasetKey, entry: Entry) -> None:
    """Finds out whether the grader runs an answer as Python: whether a program in it leaves its mark."""
    ours = make_scorer(checked.info.name)
    for program in PROGRAMS:
        package.score_text(key, SEED, entry, program)
        checked.runs_answer |= sys.modules.pop(CANARY, None) is not None
        if ours is not None:
            ours(entry, 0, program)
            checked.runs_ours |= sys.modules.pop(CANARY, None) is not None


def try_highest_level(info: DatasetDescription) -> str:
    """Returns what goes wrong when a row of level 0 and one of the highest level are made; "" if nothing does."""

    def give_up(*_: Any) -> None:
        """Ends the attempt."""
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, give_up)
    for level in (0, info.levels - 1) if info.levels else ():
        signal.setitimer(signal.ITIMER_VIRTUAL, LEVEL_SECONDS)
        try:
            package.make_entry(DatasetKey(name=info.name, level=level), SEED, 0)
        except TimeoutError:
            return f"level {level}: over {LEVEL_SECONDS} s"
        except TaskError as error:
            is_late = isinstance(error.__cause__, TimeoutError)
            return f"level {level}: over {LEVEL_SECONDS} s" if is_late else f"level {level} fails"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ""


def compare_tables(results: Sequence[Checked]) -> list[str]:
    """Returns every difference between what was measured and the tables of faults."""
    lines = []
    pairs: list[tuple[str, Callable[[Checked], bool], frozenset[str]]] = [
        ("REFUSED", lambda c: bool(c.fault), frozenset(faults.REFUSED)),
        ("HASHED", lambda c: not c.is_alike and c.is_stable, faults.HASHED),
        ("WITHOUT_GOLD", lambda c: not c.has_gold, faults.WITHOUT_GOLD),
        ("EVALUATED or PARSED_BY_SYMPY", lambda c: c.runs_answer, faults.EVALUATED | faults.PARSED_BY_SYMPY),
        ("answers that run through the task: none", lambda c: c.runs_ours, frozenset()),
        ("parts of an empty answer: 0", lambda c: c.empty_ours > 0, frozenset()),
    ]
    for table, holds, named in pairs:
        for checked in results:
            if holds(checked) != (checked.info.name in named):
                lines.append(f"{checked.info.name}: {table} says otherwise; measured: {checked}")
    return lines


def format_row(c: Checked) -> str:
    """Returns the row of a data set in the table."""
    name = c.info.name
    notes = [
        "refused" if name in faults.REFUSED else "",
        "hash seed" if name in faults.HASHED else "",
        "runs answers" if c.runs_answer else "",
        f"left out: {c.num_left_out}" if c.num_left_out else "",
        c.fault,
        f"raises {', '.join(sorted(c.raised))}" if c.raised else "",
        c.highest,
    ]
    gold = f"{c.num_gold}/{c.rows - c.num_left_out}" if c.has_gold else "none"
    levels = f"0-{c.info.levels - 1}" if c.info.levels else ""
    other = f"{c.other}/{c.num_others}" if c.other else ""
    paid = f"{c.empty:g}" if c.empty else ""
    text = "; ".join(filter(None, notes))
    return f"| `{name}` | {levels} | {gold} | {paid} | {other} | {c.make_ms:.1f} | {c.score_ms:.1f} | {text} |"


def format_table(results: Sequence[Checked]) -> str:
    """Returns the whole table, with the date, the versions and the machine."""
    here = describe_machine()
    usable = [c for c in results if c.info.name not in faults.REFUSED]
    paying = sum(c.empty > 0 for c in results)
    lines = [
        f"{date.today()}, reasoning-gym {package.get_version()}, Python {sys.version.split()[0]}, {here.processor}, "
        f"{here.num_cores} cores (load {os.getloadavg()[1]:.1f}).",
        f"{len(results)} data sets, {results[0].rows} rows of each. {len(usable)} can be used. The package pays for an "
        f"empty answer in {paying}.",
        "",
        "| data set | levels | gold | empty | other gold | make, ms | score, ms | notes |",
        "|---|---|---:|---:|---:|---:|---:|---|",
        *map(format_row, results),
    ]
    return "\n".join(lines)


def format_recomputed() -> str:
    """Returns a table of data sets of sums whose right answers are computed once more, exactly."""
    lines = ["| sums that were computed again | rows | wrong right answers | for example |", "|---|---:|---:|---|"]
    for what, settings in SUMS.items():
        rows = list(ReasoningGym.choose_class(settings)(**settings, train_size=NUM_SUMS).rows("train"))
        wrong = []
        for row in rows:
            expression = _SUM.search(row["question"])[0].strip()  # type: ignore[index]
            if evaluate(expression).value != Fraction(row["answer"]):
                wrong.append(f"`{expression}` is not {row['answer']}")
        shortest = min(wrong, key=len, default="")
        lines.append(f"| {what} | {len(rows)} | {len(wrong)} | {shortest} |")
    return "\n".join(lines)


def read_digests(names: Sequence[str], num_rows: int) -> dict[str, str]:
    """Returns the digests of the rows that a process with another hash seed makes."""
    command = [sys.executable, __file__, "--digests", "--rows", str(num_rows), "--only", *names]
    # This process has a random hash seed, or that of the user, which is hardly this one.
    made = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "12345"}
    )
    found: dict[str, str] = json.loads(made.stdout)
    return found


def main() -> int:
    """Checks the data sets, prints the table, and returns 1 if a table of faults is wrong."""
    parser = argparse.ArgumentParser(description="Check every data set of reasoning-gym.")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--digests", action="store_true", help="only print the digests of rows, as JSON")
    args = parser.parse_args()
    infos = [i for i in package.list_datasets() if i.name != "composite" and (not args.only or i.name in args.only)]
    if args.digests:
        keys = [DatasetKey(name=info.name) for info in infos]
        print(json.dumps({key.name: digest_rows(make_entries(key, range(args.rows))) for key in keys}))
        return 0
    others = read_digests([info.name for info in infos], args.rows)
    results = []
    for info in infos:
        results.append(check_dataset(info, args.rows, others))
        print(f"{len(results)}/{len(infos)} {info.name}", file=sys.stderr, flush=True)
    table = f"{format_table(results)}\n\n{format_recomputed()}"
    print(table)
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        head, _, rest = text.partition(BEGIN)
        args.write.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    differences = compare_tables(results)
    print("\n".join(differences), file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
