"""What the bundled model can do: held-out accuracy by task, as it likes and with the style forced on it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice

from cohort.engines.base import Request, sample
from cohort.engines.native.engine import NativeEngine
from cohort.models.decoder import Decoder
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Task, grade, plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.traces.styles import CALCULATOR
from cohort.text import Tokenizer
from cohort.types import Key, Message, Row, Sampling

CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
MAX_TOKENS = 160


@dataclass(frozen=True, kw_only=True)
class Score:
    """One line of the data sheet."""

    task: str
    forced: str  # how the answer had to begin
    accuracy: float
    mean_tokens: float
    thinking: float  # share of answers that begin with a thought

    def __str__(self) -> str:
        forced = f"`{self.forced}`" if self.forced else "nothing"
        return f"| {self.task} | {forced} | {self.accuracy:.3f} | {self.mean_tokens:.1f} | {self.thinking:.2f} |"


def measure(decoder: Decoder, tokenizer: Tokenizer, num: int) -> list[Score]:
    """Temperature 1, one answer each to the first `num` held-out problems."""
    engine = NativeEngine(decoder, tokenizer.decode, slots=256, max_context=512)
    sums, numbers = Arithmetic(test_size=num), Countdown(test_size=num)
    three = Countdown(test_size=num, max_numbers=3)
    scores = [graded(engine, tokenizer, sums, forced, num) for forced in ("", "<think>", "<answer>")]
    scores += [graded(engine, tokenizer, three, forced, num, "countdown, 3 numbers") for forced in ("", "<think>")]
    scores += [graded(engine, tokenizer, numbers, "", num, "countdown, 3 to 4")]
    return [*scores, called(engine, tokenizer, sums, num)]


def probe(decoder: Decoder, tokenizer: Tokenizer, num: int) -> str:
    """A glance during training, on problems of `train`: those of `test` must not steer any choice."""
    engine = NativeEngine(decoder, tokenizer.decode, slots=num, max_context=512)
    sums = Arithmetic(train_size=num)
    told = [graded(engine, tokenizer, sums, forced, num, split="train") for forced in ("", "<think>", "<answer>")]
    return "\n".join(map(str, told))


def graded(
    engine: NativeEngine,
    tokenizer: Tokenizer,
    task: Task,
    forced: str,
    num: int,
    title: str = "",
    split: str = "test",
) -> Score:
    """The task's own verdict on each answer."""
    rows = list(islice(task.rows(split), num))
    prefix: list[Message] = [{"role": "assistant", "content": forced}] if forced else []
    prompts = [tokenizer.render([*task.prompt(row), *prefix]).tokens for row in rows]
    texts, mean_tokens = answers(engine, tokenizer, task, rows, prompts)
    full = [forced + text for text in texts]
    right = [grade(task, row, plain_answer(text)).parts["correct"] for row, text in zip(rows, full, strict=True)]
    thinking = sum(text.startswith("<think>") for text in full) / num
    return Score(
        task=title or task.name,
        forced=forced,
        accuracy=sum(right) / num,
        mean_tokens=mean_tokens,
        thinking=thinking,
    )


def called(engine: NativeEngine, tokenizer: Tokenizer, task: Task, num: int) -> Score:
    """Share of questions for which the calculator is called with the expression asked for."""
    rows = list(islice(task.rows("test"), num))
    prompts = [tokenizer.render(task.prompt(row), [CALCULATOR]).tokens for row in rows]
    texts, mean_tokens = answers(engine, tokenizer, task, rows, prompts)
    right = [asked(text) == row["expression"] for row, text in zip(rows, texts, strict=True)]
    return Score(task="calculator call", forced="", accuracy=sum(right) / num, mean_tokens=mean_tokens, thinking=0.0)


def asked(text: str) -> str | None:
    """The expression of a well-formed call of the calculator."""
    found = CALL.fullmatch(text.strip())
    try:
        call = json.loads(found[1]) if found else {}
    except ValueError:
        return None
    arguments = call.get("arguments") if isinstance(call, dict) else None
    return arguments.get("expression") if isinstance(arguments, dict) else None


def answers(
    engine: NativeEngine, tokenizer: Tokenizer, task: Task, rows: list[Row], prompts: list[list[int]]
) -> tuple[list[str], float]:
    """One answer to each prompt, and their mean length."""
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
