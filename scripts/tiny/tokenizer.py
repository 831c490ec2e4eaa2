"""The bundled model's tokenizer: byte-level BPE with 512 entries, every digit a token of its own.

    python -m scripts.tiny.tokenizer --out src/cohort/models/tiny

writes it anew, the same bytes each time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from cohort.tasks.traces import mixture
from cohort.tasks.traces.styles import Mix
from cohort.text.template import ChatTemplate

FOLDER = Path("src/cohort/models/tiny")
SIZE = 512
NUM_TRACES = 20_000
MIX = Mix(think=0.3, broken=0.1, right=0.3, system=0.15)  # its own: tuning the training must not move ids
PAD, START, END = CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # never part of a text
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")  # graders read these
# A digit; a parenthesis; an operator with the spaces around it; a word; other marks; white space.
PIECES = r"\p{N}|[()]| ?[-+*/=,] ?| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
# Everyday words, so that text outside the tasks is not spelled byte by byte.
PROSE = """\
Cohort teaches language models by reinforcement learning with verifiable rewards. It samples a group of
answers for each prompt, scores them, and moves the policy toward the better ones. The model reads a
question, thinks about it step by step when that helps, and gives the final answer between tags. Use the
numbers to make the target. Use the tools that you are given, and call them with the right arguments. What
is the result of the expression? How many are there in all? Which of these is larger, the first or the
second? Please show your work and explain each step. There is no need to hurry: the first idea is often
wrong, and the next one may be right. When you have found the answer, check it, then write it down. Words,
numbers, names, lists and code can all be written: every byte has its own token."""


def corpus(template: ChatTemplate) -> Iterator[str]:
    """Conversations as the template writes them, without added tokens (they never merge), and the prose."""
    rows = mixture.load(8_000, keep=(0, 0))  # every size of number
    added = re.compile("|".join(map(re.escape, CONTROL + TAGS)))
    for i in range(NUM_TRACES):
        trace = mixture.trace(rows, "tokenizer", i, MIX)
        yield from added.split(template.render(trace.messages, trace.tools, generation_prompt=False))
    yield from [PROSE.replace("\n", " ")] * 40


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges; the same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True) for t in CONTROL] + [AddedToken(t, special=False) for t in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer makes every added token special; tags are text for graders, so decoding must keep them.
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(spec))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them, and the generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    ids = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    generation = {"do_sample": True, "temperature": 1.0, **ids}
    for name, value in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled model's tokenizer anew.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"), {})
    save(train(corpus(template)), out)


if __name__ == "__main__":
    main()
