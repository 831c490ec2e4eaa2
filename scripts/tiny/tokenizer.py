"""The training of the bundled model's tokenizer: byte-level BPE with 512 entries, where every digit is one token.

    python -m scripts.tiny.tokenizer --out src/cohort/models/tiny

This writes the tokenizer again, with the same bytes each time.
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
# The tokenizer has its own mixture of styles, so that a change of the training's mixture does not change token ids.
MIX = Mix(think=0.3, broken=0.1, right=0.3, system=0.15)
# Control tokens, which are never part of a text: padding, begin and end of a message. Their order gives their ids.
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = CONTROL
# Tags that are part of the text, because graders read them.
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
# Pieces that merges cannot cross: a digit; a parenthesis; an operator with the spaces around it; a word; other marks;
# white space.
PIECES = r"\p{N}|[()]| ?[-+*/=,] ?| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
# Common words, so that text outside the tasks is not split into single bytes.
PROSE = """\
Cohort teaches language models by reinforcement learning with verifiable rewards. It samples a group of
answers for each prompt, scores them, and moves the policy toward the better ones. The model reads a
question, thinks about it step by step when that helps, and gives the final answer between tags. Use the
numbers to make the target. Use the tools that you are given, and call them with the right arguments. What
is the result of the expression? How many are there in all? Which of these is larger, the first or the
second? Please show your work and explain each step. There is no need to hurry: the first idea is often
wrong, and the next one may be right. When you have found the answer, check it, then write it down. Words,
numbers, names, lists and code can all be written: every byte has its own token."""


def make_corpus(template: ChatTemplate) -> Iterator[str]:
    """Yields the texts that merges are learned from: conversations rendered by the template, then the prose.

    Conversations are split at control tokens and tags, which never merge with other text.
    """
    # With keep=(0, 0) the rows have numbers of every size.
    rows = mixture.load_trace_rows(8_000, keep=(0, 0))
    added = re.compile("|".join(map(re.escape, CONTROL + TAGS)))
    for i in range(NUM_TRACES):
        trace = mixture.make_trace(rows, "tokenizer", i, MIX)
        yield from added.split(template.render(trace.messages, trace.tools, generation_prompt=False))
    yield from [PROSE.replace("\n", " ")] * 40


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Returns a tokenizer with merges learned from `texts`. It depends only on the texts and their order."""
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
    # The trainer marks every added token as special, and decoding drops special tokens. Graders need the tags.
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(spec))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json, in the formats of transformers."""
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
    """Trains the tokenizer and writes it to the folder `--out`."""
    parser = argparse.ArgumentParser(description="Train the bundled model's tokenizer and write it.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"), {})
    save_tokenizer(train_tokenizer(make_corpus(template)), out)


if __name__ == "__main__":
    main()
