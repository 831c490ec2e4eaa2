"""The scores in the data sheet of the bundled model: held-out accuracy per task, with and without a forced style."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice

from cohort.engines.base import Request, sample
from cohort.engines.native.engine import NativeEngine
from cohort.models.decoder import Decoder
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Task, make_plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.grading import grade
from cohort.tasks.traces.styles import CALCULATOR
from cohort.text import Tokenizer
from cohort.types import Key, Message, Row, Sampling

# A whole tool call, and the longest answer in tokens.
CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
MAX_TOKENS = 160


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row of the data sheet."""

    task: str
    # The text that answers had to begin with; empty = the model chose.
    forced: str
    accuracy: float
    mean_tokens: float
    # The share of answers that begin with <think>.
    thinking: float

    def __str__(self) -> str:
        forced = f"`{self.forced}`" if self.forced else "nothing"
        return f"| {self.task} | {forced} | {self.accuracy:.3f} | {self.mean_tokens:.1f} | {self.thinking:.2f} |"


def measure_scores(decoder: Decoder, tokenizer: Tokenizer, num: int) -> list[Score]:
    """Returns all rows of the data sheet: one answer at temperature 1 to each of the first `num` held-out problems."""
    engine = NativeEngine(decoder, tokenizer.decode, slots=256, max_context=512)
    sums = Arithmetic(test_size=num)
    numbers = Countdown(test_size=num)
    three = Countdown(test_size=num, max_numbers=3)
    scores = [score_task(engine, tokenizer, sums, forced, num) for forced in ("", "<think>", "<answer>")]
    scores += [score_task(engine, tokenizer, three, forced, num, "countdown, 3 numbers") for forced in ("", "<think>")]
    scores += [score_task(engine, tokenizer, numbers, "", num, "countdown, 3 to 4")]
    return [*scores, score_calculator_calls(engine, tokenizer, sums, num)]


def probe_on_train_problems(decoder: Decoder, tokenizer: Tokenizer, num: int) -> str:
    """Returns rows of scores on sums as text, to be printed during training.

    The problems are of the split `train`, because those of `test` must not influence any choice.
    """
    engine = NativeEngine(decoder, tokenizer.decode, slots=num, max_context=512)
    sums = Arithmetic(train_size=num)
    scores = [score_task(engine, tokenizer, sums, forced, num, split="train") for forced in ("", "<think>", "<answer>")]
    return "\n".join(map(str, scores))


def score_task(
    engine: NativeEngine,
    tokenizer: Tokenizer,
    task: Task,
    forced: str,
    num: int,
    title: str = "",
    split: str = "test",
) -> Score:
    """Samples an answer that begins with `forced` to each of `num` problems, and scores it with the task's grader.

    `title` is the name of the task in the data sheet; empty = its own.
    """
    rows = list(islice(task.rows(split), num))
    prefix: list[Message] = [{"role": "assistant", "content": forced}] if forced else []
    prompts = [tokenizer.render([*task.prompt(row), *prefix]).tokens for row in rows]
    texts, mean_tokens = sample_answers(engine, tokenizer, task, rows, prompts)
    # The grader sees the forced beginning as part of the answer.
    full = [forced + text for text in texts]
    right = [grade(task, row, make_plain_answer(text)).parts["correct"] for row, text in zip(rows, full, strict=True)]
    thinking = sum(text.startswith("<think>") for text in full) / num
    return Score(
        task=title or task.name,
        forced=forced,
        accuracy=sum(right) / num,
        mean_tokens=mean_tokens,
        thinking=thinking,
    )


def score_calculator_calls(engine: NativeEngine, tokenizer: Tokenizer, task: Task, num: int) -> Score:
    """Returns how often the model calls the calculator with exactly the expression of the question."""
    rows = list(islice(task.rows("test"), num))
    prompts = [tokenizer.render(task.prompt(row), [CALCULATOR]).tokens for row in rows]
    texts, mean_tokens = sample_answers(engine, tokenizer, task, rows, prompts)
    right = [parse_calculator_call(text) == row["expression"] for row, text in zip(rows, texts, strict=True)]
    return Score(task="calculator call", forced="", accuracy=sum(right) / num, mean_tokens=mean_tokens, thinking=0.0)


def parse_calculator_call(text: str) -> str | None:
    """Returns the expression in a call of the calculator; None if `text` is not a well-formed call."""
    match = CALL.fullmatch(text.strip())
    try:
        call = json.loads(match[1]) if match else {}
    except ValueError:
        return None
    arguments = call.get("arguments") if isinstance(call, dict) else None
    return arguments.get("expression") if isinstance(arguments, dict) else None


def sample_answers(
    engine: NativeEngine, tokenizer: Tokenizer, task: Task, rows: list[Row], prompts: list[list[int]]
) -> tuple[list[str], float]:
    """Returns (one answer per prompt, their mean length in tokens)."""
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_ids=tokenizer.stop_ids)
    requests = [
        Request(
            id=str(i),
            tokens=tokens,
            sampling=sampling,
            key=Key(seed=0, purpose="eval", task=task.name, prompt_id=row["id"], visit=0, sample=0),
        )
        for i, (row, tokens) in enumerate(zip(rows, prompts, strict=True))
    ]
    done = sample(engine, requests)
    samples = [done[str(i)] for i in range(len(rows))]
    return [s.text for s in samples], sum(len(s.tokens) for s in samples) / len(samples)
