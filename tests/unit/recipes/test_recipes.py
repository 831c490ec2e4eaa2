"""Every built-in recipe without a model: its config, its data, its prompts as tokens, its memory on a device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cohort.config import load
from cohort.config.document import get_variant_name
from cohort.config.imitation import DPO, SFT, PairRows, TaskAnswers
from cohort.config.kinds import RL
from cohort.config.load import dump_config, parse_config
from cohort.config.schema import SingleTurn, ThinkAgain
from cohort.examples.encode import ExampleRenderer, encode_conversations
from cohort.examples.from_task import make_task_conversations
from cohort.learner.plan import MemoryDemand, plan_memory
from cohort.models.catalog import resolve_model
from cohort.models.limits import count_layer_params
from cohort.models.shapes import find_shape
from cohort.tasks.base import make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.self_check import run_self_check
from cohort.tasks.stream import TaskStream
from cohort.text import PromptRenderer, Tokenizer
from cohort.types import Provenance
from tests.helpers.data_rows import rows_made_once, use_written_rows
from tests.helpers.installed_recipes import CALLABLE as RECIPES

DEVICE_GIB = 139.8  # an H200
RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
ADAPTERS = {"gsm8k_7b_lora", "gsm8k_14b_lora", "gsm8k_again", "ifeval", "arithmetic", "calculator", "search_qa"}


@pytest.fixture(autouse=True, scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_written_rows(tmp_path_factory.mktemp("data"), patch)
        yield


@cache
def load_config(name: str) -> RL:
    """A recipe; its config cannot be changed, so all tests share it."""
    return load.load_config(name)  # type: ignore[return-value]


def shape_of(model: str) -> str:
    """Returns the name of the shape of a published model."""
    name = model.rpartition("/")[2].lower()
    return re.sub(r"-(instruct|math|coder|chat|hf)(?=-|$)", "", name)


@pytest.mark.parametrize("name", sorted(name for name, recipe in RECIPES.items() if isinstance(recipe(), RL)))
def test_config_data_prompts_and_graders(name: str) -> None:
    config = load_config(name)
    assert parse_config(dump_config(config)) == config and config.recipe == name
    task = config.task
    assert run_self_check(task, 10).num_gold >= 10
    tokenizer = Tokenizer.load(resolve_model("tiny"))  # any tokenizer with a chat template will do
    stream = TaskStream(task, PromptRenderer(tokenizer, config.template, config.system), config.seed)
    stream.check_enough_rows(config.batch.prompts)
    prompts = stream.next_prompts(config.batch.prompts)
    held_out = stream.render_held_out(config.eval.problems if config.eval.problems <= 20 else 0)
    assert len({p.id for p in prompts}) == len(prompts) and not {p.id for p in prompts} & {p.id for p in held_out}
    for prompt in [*prompts[:3], *held_out[:3]]:
        text = tokenizer.spell(prompt.tokens)
        assert text.endswith("<|im_start|>assistant\n" + prompt.forced_text)
        assert (Provenance.FORCED in prompt.provenance) == ("countdown" in name and not name.startswith("tiny_"))
        if task.name != "ifeval":  # some instructions are followed by any text
            assert grade(task, prompt.row, make_plain_answer("I do not know.")).parts[task.accuracy] == 0
    best = [grade(task, row, make_plain_answer(task.gold(row))).parts for row in rows_made_once(task, "train")[:5]]
    worth = [sum(config.reward.get(part, 1.0) * value for part, value in parts.items()) for parts in best]
    if getattr(task, "reward", "") != "seed":  # re-grpo pays nothing without a call of the tool
        assert all(w >= 0.7 for w in worth), "a right answer is paid for; the tutor takes 0.5 from these short ones"


IMITATING = sorted(n for n, r in RECIPES.items() if isinstance(c := r(), SFT) and isinstance(c.data, TaskAnswers))


@pytest.mark.parametrize("name", IMITATING)
def test_the_answers_that_are_imitated_are_right_and_fit(name: str) -> None:
    config = load.load_config(name)
    assert isinstance(config, SFT) and isinstance(config.data, TaskAnswers)
    assert parse_config(dump_config(config)) == config and config.is_evaluated
    task = config.task
    assert run_self_check(task, 10).num_gold >= 10
    rows = rows_made_once(task, "train")[:50]
    tokenizer = Tokenizer.load(resolve_model("tiny"))
    framing = ExampleRenderer(tokenizer=tokenizer, template=config.template, system=config.system)
    talks = list(make_task_conversations(task, rows))
    encoded = encode_conversations(talks, framing, config.loss, config.data.max_tokens or 1024, "error")
    for row, talk, group in zip(rows, talks, encoded.groups, strict=True):
        assert talk.messages[:-1] == task.prompt(row)
        assert grade(task, row, make_plain_answer(talk.messages[-1]["content"])).parts[task.accuracy] == 1
        # The answers in the evaluations may be as long as those that are imitated.
        assert len(group.samples[0].tokens) <= (config.sampling.max_tokens or task.max_tokens)


def test_preferences_of_ultrafeedback_are_those_of_the_original_project() -> None:
    config = load.load_config("ultrafeedback_dpo")
    assert isinstance(config, DPO) and isinstance(config.data, PairRows)
    assert parse_config(dump_config(config)) == config
    data, loss = config.data, config.loss
    assert (config.model, data.path) == (f"{Q}-7B-Instruct", "HuggingFaceH4/ultrafeedback_binarized")
    assert (data.train_split, data.held_out_split, data.max_tokens) == ("train_prefs", "test_prefs", 2049)
    assert (get_variant_name("loss", loss), loss.beta, loss.nll) == ("sigmoid", 0.1, 0.1)
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup) == (1e-5, "cosine", 5)
    # It fits on one large device.
    shape = find_shape(shape_of(config.model))
    targets = shape.hidden * 4 + (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    demand = MemoryDemand(
        model=shape,
        bytes_per_number=2,
        longest=2 * 2049,
        batch_tokens=config.batch.pairs * 2 * 2049,
        kv_tokens=0,
        num_trained=config.learner.lora.rank * shape.num_layers * targets,
        frozen_bytes=count_layer_params(shape) * 2,
    )
    assert plan_memory(demand, int(DEVICE_GIB * 2**30)).peak <= DEVICE_GIB * 2**30
    small = load.load_config("smollm2_dpo")
    assert isinstance(small, DPO) and small.model == "smollm2-135m" and small.steps <= 20
    assert isinstance(small.data, PairRows) and small.data.max_tokens == 512 and small.data.path == data.path


def test_each_seed_recipe_has_a_variant_for_a_cpu() -> None:
    small = {"arithmetic": "quickstart", "countdown": "tiny_countdown", "gsm8k": "smollm2_gsm8k"}
    small |= {"dr_grpo_math": "smollm2_math", "ifeval": "smollm2_ifeval", "gsm8k_tutor": "smollm2_gsm8k_tutor"}
    small |= {"countdown_minibatches": "tiny_countdown_minibatches", "gsm8k_again": "smollm2_gsm8k_again"}
    small |= {"calculator": "tiny_calculator", "search_qa": "smollm2_search_qa"}
    for name, variant in small.items():
        config = load_config(variant)
        assert type(config.task) is type(load_config(name).task) and config.model in ("tiny", "smollm2-135m")
        assert config.batch.prompts * config.batch.samples * config.sampling.max_tokens <= 64 * 8 * 128


@pytest.mark.parametrize("name", sorted(n for n, r in RECIPES.items() if r().model != "tiny" and isinstance(r(), RL)))
def test_memory_plan(name: str) -> None:
    """Each recipe fits on one large device without changes."""
    config = load_config(name)
    plan = plan_memory(compute_demand(config), int(DEVICE_GIB * 2**30))
    assert plan.peak <= DEVICE_GIB * 2**30
    assert (config.learner.lora.rank > 0) == (name in ADAPTERS)


def compute_demand(config: RL) -> MemoryDemand:
    """Returns the memory that a recipe needs with prompts of 512 tokens."""
    c = find_shape(shape_of(config.model))
    batch, prompt, new = config.batch, 512, config.max_sampled_tokens
    rows = batch.prompts * batch.samples
    trained, base = None, 0
    if lora := config.learner.lora.rank:
        sides = 2 * (c.hidden + c.num_heads * c.head_dim) + 2 * (c.hidden + c.num_kv_heads * c.head_dim)
        trained = lora * c.num_layers * (sides + 3 * (c.hidden + c.ff))
        base = count_layer_params(c) * 2
    return MemoryDemand(
        model=c,
        bytes_per_number=2,
        longest=prompt + new,
        batch_tokens=batch.prompts * prompt + rows * new,
        kv_tokens=batch.prompts * prompt + min(rows, config.engine.slots) * new,
        has_reference=config.algo.kl.weight > 0 and not lora,
        num_trained=trained,
        frozen_bytes=base,
    )


def test_second_attempts_fit_into_the_context_of_their_models() -> None:
    for name in ("gsm8k_again", "smollm2_gsm8k_again"):
        config = load_config(name)
        assert isinstance(config.turns, ThinkAgain)
        assert config.max_sampled_tokens + 1024 <= find_shape(shape_of(config.model)).max_positions


Q = "Qwen/Qwen2.5"
# Of the original projects: model, steps, prompts, samples, tokens, temperature, learning rate, schedule, KL, LoRA rank.
PUBLISHED = {
    "countdown": (f"{Q}-3B", 125, 64, 8, 1024, 1.0, 1e-6, "cosine", 0.0, 0),
    "countdown_minibatches": (f"{Q}-3B-Instruct", 125, 8, 8, 896, 1.0, 1e-6, "constant", 0.0, 0),
    "gsm8k": (f"{Q}-0.5B-Instruct", 300, 128, 8, 3000, 1.0, 1e-6, "cosine", 0.001, 0),
    "gsm8k_1_5b": (f"{Q}-1.5B-Instruct", 300, 128, 8, 3000, 1.0, 1e-6, "cosine", 0.001, 0),
    "gsm8k_3b": (f"{Q}-3B-Instruct", 300, 128, 8, 3000, 1.0, 1e-6, "cosine", 0.001, 0),
    "gsm8k_7b_lora": (f"{Q}-7B-Instruct", 300, 64, 8, 3000, 1.0, 1e-6, "cosine", 0.001, 64),
    "gsm8k_14b_lora": (f"{Q}-14B-Instruct", 300, 64, 8, 3000, 1.0, 1e-6, "cosine", 0.001, 64),
    "dr_grpo_math": (f"{Q}-Math-1.5B", 300, 128, 8, 3000, 1.0, 1e-6, "constant", 0.0, 0),
    "gsm8k_tutor": (f"{Q}-3B-Instruct", 934, 8, 4, 512, 0.7, 5e-6, "constant", 0.0, 0),
    "gsm8k_tutor_llama2": ("meta-llama/Llama-2-7b-chat-hf", 934, 8, 4, 512, 0.7, 5e-6, "constant", 0.0, 0),
    "gsm8k_again": (f"{Q}-3B", 195, 32, 16, 1024, 1.0, 1e-5, "constant", 0.0, 8),
    "ifeval": (f"{Q}-7B", 390, 16, 16, 2048, 1.0, 1e-5, "constant", 0.0, 8),
    "arithmetic": ("unsloth/Llama-3.2-1B-Instruct", 300, 32, 12, 1024, 1.0, 5e-6, "constant", 0.01, 16),
    "calculator": (f"{Q}-3B-Instruct", 256, 4, 4, 128, 0.7, 5e-6, "constant", 0.01, 16),
    "search_qa": (f"{Q}-3B-Instruct", 256, 4, 4, 128, 0.7, 5e-6, "constant", 0.01, 16),
}
REWARDS = {
    "countdown": {"correct": 0.9, "format": 0.1},
    "countdown_minibatches": {"correct": 1.0, "format": 0.01},
    "ifeval": {
        "prompt_strict": 0.4,
        "instruction_strict": 0.3,
        "prompt_loose": 0.2,
        "instruction_loose": 0.1,
        "format": 0.1,
        "thinks": 0.05,
        "effort": 2.0,
    },
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_settings_are_those_that_were_published(name: str) -> None:
    c = load_config(name)
    run = (c.model, c.steps, c.batch.prompts, c.batch.samples, c.sampling.max_tokens, c.sampling.temperature)
    assert (*run, c.optim.lr, c.optim.schedule, c.algo.kl.weight, c.learner.lora.rank) == PUBLISHED[name]
    assert c.reward == REWARDS.get(name, c.reward)


@pytest.mark.parametrize("name", ["coder_gsm8k", "coder_countdown"])
def test_a_recipe_with_a_result_is_the_run_that_gave_it(name: str) -> None:
    """Equal, except for the number of steps, settings of the machine, and the order of rollouts (there was one then).

    The order makes no difference to these runs: no group is replaced, and there is one turn.
    """
    kept = RESULTS / name
    ran, recipe = parse_config((kept / "config.yaml").read_text(encoding="utf-8")), load_config(name)
    steps = json.loads((kept / "result.json").read_text(encoding="utf-8"))["training"]["steps"]
    assert recipe.steps == steps
    learner = replace(ran.learner, dtype=recipe.learner.dtype)
    save = replace(ran.save, every=recipe.save.every)
    assert recipe.algo.dead != "refill" and isinstance(recipe.turns, SingleTurn)
    ran = replace(ran, steps=steps, device=recipe.device, learner=learner, save=save, rollout=recipe.rollout)
    assert ran == recipe
