"""Our supervised fine-tuning equals that of TRL's own SFTTrainer: which tokens are targets, the loss and its gradient.

Nothing of TRL is re-implemented here: the trainer prepares the rows, its data loader makes padded batches, its
`compute_loss` runs on transformers' Llama, and `train` and `evaluate` are its own. Ours reads the same rows from a file
and the same weights from a folder. TRL computes log-probabilities in fp32 whatever the model's type, so that all is
compared in fp32: losses to 1e-6, gradients to 1e-5 of their largest entry. Needs `trl` (`make test-peers`).

Where the definitions differ:

- TRL trains exactly what is between the marks of a template. Ours also trains a stop token right after a mark, because
  a model that never sees one does not learn to stop. (TRL warns.)
- For a template without marks TRL has a copy with marks for some known families, which may include line breaks around
  the answer. Ours trains what the model would have to write: from the end of the generation prompt to the stop token.
- `completion_only_loss` of TRL, and its loss on all tokens, also train what the template writes after the last stop
  token, such as a line break. A sampled answer ends with the stop token, so ours ends there.
- A row of texts `prompt` and `completion` is one text for TRL. For ours it is a question and an answer: a conversation,
  or with `--template text` two texts with a blank line between them.
- The loss of a step is one mean over all target tokens of the step in both. In TRL's `evaluate` it is a mean over rows
  of the means over the tokens of each batch; `eval/loss` of ours is one mean over all tokens again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos.imitation import Imitation
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.batch import Batch
from cohort.data.pack import make_batch, pack_minibatch
from cohort.examples.encode import ExampleRenderer, encode_conversations
from cohort.examples.rows import read_conversations
from cohort.learner.local import LocalLearner
from cohort.models.decoder import hf_views, to_hf_shape
from cohort.models.files import load_folder
from cohort.text import Tokenizer
from cohort.text.answers import Targets
from cohort.types import Group, Provenance
from tests.helpers.chat_templates import write_tokenizer
from tests.peers.trl_chats import MARKED, MARKED_WITHOUT_STOP, NOTHING_AFTER, save_llama, say
from tests.peers.trl_rows import trl

pytestmark = pytest.mark.peers

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers>", "parameters": {}}}]
TALKS: list[dict[str, Any]] = [
    {"messages": [say("user", "What is three and four?"), say("assistant", "The answer is <answer>7</answer>")]},
    {
        "messages": [
            say("user", "one"),
            say("assistant", "word"),
            say("user", "Use the tool, then answer. é 世界 🙂"),
            say("assistant", "The user in one word.\n\n  12  "),
            say("user", "of"),
            say("assistant", "3"),
        ]
    },
    {"messages": [say("system", "Be brief."), say("user", "sum?"), say("assistant", "You are a helpful assistant.")]},
    {"messages": [say("user", "x " * 40), say("assistant", "12 " * 60)]},
    {
        "messages": [
            say("user", "12 + 30?"),
            say("assistant", "", tool_calls=[CALL]),
            say("tool", "42"),
            say("assistant", "It is 42."),
        ],
        "tools": json.dumps(TOOLS),
    },
    {"messages": [say("user", "a"), say("assistant", "b")]},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in TALKS if "tools" not in row
]
TEXTS = [
    {"text": "The answer is inside the tags. " * 3},
    {"text": "4"},
    {"text": "Use the\ntool <answer>12</answer> é"},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama."""
    return save_llama(tmp_path_factory.mktemp("tiny-llama"))


class Sides:
    """TRL's trainer and our learner on the same rows and the same weights."""

    def __init__(self, weights: Path, folder: Path, template: str, rows: Sequence[dict[str, Any]], **settings: Any):
        self.folder, self.rows, self.weights = folder, rows, weights
        stop = settings.pop("stop", "<|im_end|>")
        write_tokenizer(folder, template, pad_token="<|endoftext|>", eos_token=stop)
        self.trainer = self._make_trainer(
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3} | settings
        )
        self.learner = LocalLearner(
            load_folder(weights).decoder, LearnerConfig(dtype="float32"), OptimConfig(lr=1e-3), num_updates=3
        )

    def _make_trainer(self, settings: dict[str, Any]) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # The columns of a data set are those of its first row.
        names = {name: None for row in self.rows for name in row}
        data = Dataset.from_list([{**names, **row} for row in self.rows])
        args = trl.SFTConfig(
            output_dir=str(self.folder / "out"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            max_length=None,
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            **settings,
        )
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(self.weights, dtype=torch.float32),
            args=args,
            processing_class=AutoTokenizer.from_pretrained(self.folder),
            train_dataset=data,
            eval_dataset=data,
        )
        trainer.model.train()
        return trainer

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    def encode(self, targets: Targets = "assistant", template: str = "chat") -> list[Group]:
        """Returns our examples: the rows are read from a file, as a run does."""
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        framing = ExampleRenderer(tokenizer=self.tokenizer, template=template, system="")
        rows = read_conversations(str(file), "train", "auto", ())
        return encode_conversations(rows, framing, targets, 1024, "error").groups

    def list_theirs(self) -> list[list[tuple[int, bool]]]:
        """Returns TRL's rows: every token, and whether it is a target. The first one has nothing that predicts it."""
        data = self.trainer.train_dataset
        return [
            [(token, n > 0 and label != -100) for n, (token, label) in enumerate(zip(ids, labels, strict=True))]
            for ids, labels in zip(data["input_ids"], data["labels"], strict=True)
        ]

    def compute_theirs(self) -> tuple[float, dict[str, Tensor]]:
        """Returns TRL's loss of a step, over all its padded batches, and the gradient by parameter."""
        trainer = self.trainer
        trainer.model.zero_grad()
        steps = trainer.args.gradient_accumulation_steps
        batches, num_tokens = trainer.get_batch_samples(
            iter(trainer.get_train_dataloader()), steps, torch.device("cpu")
        )
        losses = [trainer.compute_loss(trainer.model, batch, num_items_in_batch=num_tokens) for batch in batches]
        torch.stack(losses).sum().backward()
        return sum(loss.item() for loss in losses), {name: p.grad for name, p in trainer.model.named_parameters()}

    def compute_ours(self, groups: Sequence[Group]) -> tuple[float, dict[str, Tensor]]:
        """Returns our loss of a step, over several packed microbatches, and the gradient by parameter."""
        batch = make_targets_batch(groups)
        longest = max(len(g.prompt.tokens) + len(g.samples[0].tokens) for g in groups)
        minibatch = pack_minibatch(batch, 0, longest)
        assert len(minibatch.microbatches) > 1
        tally = self.learner.forward_backward(minibatch, Imitation()).tally
        views = hf_views(self.learner.decoder, select=lambda p: p.grad)  # type: ignore[arg-type, return-value]
        return tally.to_metrics()["loss"], {name: to_hf_shape(name, view).clone() for name, view in views}

    def assert_same_loss(self, groups: Sequence[Group]) -> None:
        """Compares the losses and, relative to their largest entries, the gradients."""
        theirs, their_gradient = self.compute_theirs()
        ours, gradient = self.compute_ours(groups)
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert gradient.keys() == their_gradient.keys()
        for name, expected in their_gradient.items():
            largest = float(expected.abs().max())
            assert largest > 1e-4 and (gradient[name] - expected).abs().max() <= 1e-5 * largest, name


def make_targets_batch(groups: Sequence[Group]) -> Batch:
    """Returns the batch of a step of supervised fine-tuning."""
    return make_batch(groups, loss_on=Provenance.TARGET)


def list_ours(groups: Sequence[Group]) -> list[list[tuple[int, bool]]]:
    """Returns our examples: every token, and whether it is a target."""
    found = []
    for group in groups:
        [sample] = group.samples
        tokens = [*group.prompt.tokens, *sample.tokens]
        provenance = [*group.prompt.provenance, *sample.provenance]
        found.append([(token, p == Provenance.TARGET) for token, p in zip(tokens, provenance, strict=True)])
    return found


def assert_same_targets(ours: list[list[tuple[int, bool]]], theirs: list[list[tuple[int, bool]]]) -> None:
    """Compares row by row and token by token. Ours ends with its last target; what follows there is no target."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other[: len(mine)]
        assert mine[-1][1] and not any(is_target for _, is_target in other[len(mine) :])


@pytest.mark.parametrize("template", ["line break after", "nothing after"])
def test_assistant_only_loss_equals_trl(template: str, weights: Path, tmp_path: Path) -> None:
    source = MARKED if template == "line break after" else NOTHING_AFTER
    sides = Sides(weights, tmp_path, source, TALKS, assistant_only_loss=True)
    groups = sides.encode()
    assert_same_targets(list_ours(groups), sides.list_theirs())
    # Every answer with its stop token: one each, but three in the second conversation and two in that with a tool.
    stop = sides.tokenizer.end_of_turn
    assert [sum(pair == (stop, True) for pair in row) for row in list_ours(groups)] == [1, 3, 1, 1, 2, 1]
    sides.assert_same_loss(groups)


def test_a_stop_token_outside_the_marks_is_a_target_of_ours_alone(weights: Path, tmp_path: Path) -> None:
    sides = Sides(weights, tmp_path, MARKED_WITHOUT_STOP, TALKS, assistant_only_loss=True)
    stop = sides.tokenizer.end_of_turn
    added = 0
    for mine, other in zip(list_ours(sides.encode()), sides.list_theirs(), strict=True):
        different = [n for n, pair in enumerate(mine) if pair != other[n]]
        assert all(mine[n] == (stop, True) and other[n] == (stop, False) and mine[n - 1][1] for n in different)
        added += len(different)
    assert added == 9


@pytest.mark.parametrize(("family", "stop"), [("qwen2_5", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_a_template_without_marks_has_the_targets_of_trl_without_its_frame(
    family: str, stop: str, weights: Path, tmp_path: Path
) -> None:
    """TRL puts marks into its copy of the family's template; ours compares prefixes of the conversation."""
    source = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()
    rows = [row for row in TALKS if "tools" not in row or family == "qwen2_5"]
    sides = Sides(weights, tmp_path, source, rows, assistant_only_loss=True, stop=stop)
    tokenizer, num_targets = sides.tokenizer, 0
    for mine, other in zip(list_ours(sides.encode()), sides.list_theirs(), strict=True):
        assert [token for token, _ in mine] == [token for token, _ in other[: len(mine)]]
        rest = [(token, False) for token, _ in other[len(mine) :]]
        for n, (pair, theirs) in enumerate(zip([*mine, *rest], other, strict=True)):
            num_targets += pair[1]
            if pair != theirs:
                # A line break before the answer or after its stop token.
                assert theirs[1] and tokenizer.decode([theirs[0]]) == "\n", (n, tokenizer.decode([theirs[0]]))
    assert num_targets > 100


def test_completion_only_loss_equals_trl(weights: Path, tmp_path: Path) -> None:
    sides = Sides(weights, tmp_path, NOTHING_AFTER, PROMPTS, completion_only_loss=True)
    groups = sides.encode("last")
    assert_same_targets(list_ours(groups), sides.list_theirs())
    sides.assert_same_loss(groups)
    # By default we also imitate the answers in the prompt.
    assert list_ours(sides.encode()) != list_ours(groups)


@pytest.mark.parametrize("targets", ["last", "all"])
def test_trl_also_trains_what_follows_the_last_stop_token(targets: Targets, weights: Path, tmp_path: Path) -> None:
    sides = Sides(weights, tmp_path, MARKED, PROMPTS, completion_only_loss=targets == "last")
    line_break = sides.tokenizer.encode("\n")
    for mine, other in zip(list_ours(sides.encode(targets)), sides.list_theirs(), strict=True):
        assert mine == other[: len(mine)]
        assert other[len(mine) :] == [(token, True) for token in line_break]


def test_prompt_and_completion_as_texts_equal_trl_after_a_blank_line(weights: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "What is three and four?", "completion": "The answer is 7"},
        {"prompt": "x", "completion": "one word " * 9},
        {"prompt": "The user in one word", "completion": "4"},
    ]
    spaced = [{**row, "prompt": row["prompt"] + "\n\n"} for row in rows]
    sides = Sides(weights, tmp_path, MARKED, spaced, completion_only_loss=True)
    sides.rows = rows
    groups = sides.encode(template="text")
    assert list_ours(groups) == sides.list_theirs()
    sides.assert_same_loss(groups)


@pytest.mark.parametrize("kind", ["texts", "conversations"])
def test_the_loss_on_all_tokens_equals_trl(kind: str, weights: Path, tmp_path: Path) -> None:
    sides = Sides(weights, tmp_path, NOTHING_AFTER, TEXTS if kind == "texts" else TALKS)
    groups = sides.encode("all")
    assert list_ours(groups) == sides.list_theirs()
    sides.assert_same_loss(groups)


def test_the_loss_of_an_evaluation_equals_trl_for_one_batch(weights: Path, tmp_path: Path) -> None:
    losses = {}
    for size in (len(TALKS), 1):
        sides = Sides(
            weights, tmp_path / str(size), MARKED, TALKS, assistant_only_loss=True, per_device_eval_batch_size=size
        )
        losses[size] = sides.trainer.evaluate()["eval_loss"]
    ours = sides.learner.measure(make_targets_batch(sides.encode()), Imitation())["loss"]
    assert ours == pytest.approx(losses[len(TALKS)], rel=1e-6)
    # With several batches TRL's is a mean of means: each row counts the same, however long it is.
    assert abs(losses[1] - ours) > 0.01


def test_a_whole_training_equals_trl(weights: Path, tmp_path: Path) -> None:
    """Three steps of AdamW on all conversations: TRL in three padded batches per step, ours packed."""
    sides = Sides(weights, tmp_path, MARKED, TALKS, assistant_only_loss=True, max_steps=3, logging_steps=1)
    sides.trainer.train()
    theirs = [entry["loss"] for entry in sides.trainer.state.log_history if "loss" in entry]
    batch = make_targets_batch(sides.encode())
    ours = [sides.learner.update(batch, Imitation()).metrics["loss"] for _ in range(3)]
    assert len(theirs) == 3 and theirs[2] < theirs[0] - 0.05
    assert ours == pytest.approx(theirs, abs=1e-4)
    start = dict(load_folder(weights).decoder.named_weights())
    state = sides.trainer.model.state_dict()
    for name, tensor in sides.learner.weights():
        moved = (state[name] - start[name]).abs().max()
        assert moved > 1e-4 and (tensor - state[name]).abs().max() <= 1e-3 * moved, name
