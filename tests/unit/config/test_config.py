"""Configs: recipes, flags that change them, the rules that refuse settings, and the file config.yaml."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import flags
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import PairPolicy
from cohort.config.document import get_variant_name
from cohort.config.imitation import DPO
from cohort.config.kinds import RL
from cohort.config.load import (
    change_config,
    diff_configs,
    dump_config,
    load_config,
    parse_config,
    validate,
)
from cohort.config.options import EvalOptions
from cohort.config.preferences import PAIR_LOSSES
from cohort.config.schema import (
    ALGOS,
    GRPO,
    BatchConfig,
    Conversation,
    DrGRPO,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    SingleTurn,
)
from cohort.errors import CohortError, ConfigError
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import make_plain_answer
from cohort.tasks.countdown import Countdown
from tests.helpers.installed_recipes import CALLABLE as RECIPES

OWN_FILE = '''
from __future__ import annotations

from dataclasses import replace

import cohort
from cohort.recipes.tiny import quickstart


@cohort.task("reverse_for_tests")
class Reverse:
    """Spell backwards."""

    length: int = 5
    alphabet: tuple[str, ...] = ("a", "b")

    def rows(self, split):
        yield {"id": split, "word": "ab"}

    def prompt(self, row):
        return [{"role": "user", "content": row["word"]}]

    def score(self, row, answer):
        return {"correct": float(answer.text == row["word"][::-1])}


def mine():
    """My own."""
    return replace(quickstart(), task=Reverse(length=7), reward={})


def wrong():
    return {"steps": 5}
'''


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN_FILE)
    return path


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_loads_and_survives_its_file(name: str) -> None:
    config = load_config(name)
    assert config.recipe == name
    text = dump_config(config)
    assert parse_config(text) == config
    assert dump_config(parse_config(text)) == text
    for field in config.variants:
        assert type(getattr(parse_config(text), field)) is type(getattr(config, field))
    if isinstance(config, RL):
        assert set(config.reward) == set(config.task.parts), "every part has its coefficient in the file"


def num_settings(config: RunConfig) -> int:
    """Returns the number of values in config.yaml; a list counts as one."""

    def count(tree: object) -> int:
        return sum(map(count, tree.values())) if isinstance(tree, dict) else 1

    return count(yaml.safe_load(dump_config(config)))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_no_file_has_more_than_120_settings(recipe: str) -> None:
    everything_on = "--learner.lora.rank=2 --algo.kl.weight=0.1 --algo.correction.kind=mask --replay.prompts=1"
    assert num_settings(load_config(recipe)) <= 120
    config = load_config(recipe)
    # A loss on pairs has no KL penalty and no correction.
    if isinstance(config, RL) and not isinstance(config.algo, PairPolicy):
        assert num_settings(load_config(recipe, everything_on.split())) <= 120


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
@pytest.mark.parametrize("algo", sorted(ALGOS))
def test_the_quickstarts_file_has_at_most_80_settings(algo: str, task: str) -> None:
    config = load_config("quickstart", ["--algo", algo, "--task", task])
    assert num_settings(config) <= 80
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            own = [f for f in dataclasses.fields(value) if not dataclasses.is_dataclass(getattr(value, f.name))]
            assert len(own) <= 12, section.name


def test_overrides_reach_their_field_and_no_other() -> None:
    args = "--steps 7 --algo.kl.weight 0.01 --algo.kl.estimator k2 --task.max-digits=3 --learner.prefix-sharing false"
    config = load_config("quickstart", args.split())
    changed = diff_configs(load_config("quickstart"), config)
    assert {name: new for name, (_, new) in changed.items()} == {
        "steps": 7,
        "algo.kl.weight": 0.01,
        "algo.kl.estimator": "k2",
        "task.max_digits": 3,
        "learner.prefix_sharing": False,
    }


def test_several_values_and_values_that_look_like_flags() -> None:
    config = load_config("quickstart", ["--sampling.stop", "</answer>", "END", "--task.keep", "10", "500"])
    assert config.sampling.stop == ("</answer>", "END")
    assert config.task.keep == (10, 500)
    assert load_config("quickstart", ["--model=--odd"]).model == "--odd"


def test_a_variant_starts_from_its_own_defaults() -> None:
    config = load_config("quickstart", ["--algo", "dr_grpo", "--task", "countdown", "--task.max-target", "50"])
    assert config.algo == DrGRPO()
    assert config.task == Countdown(max_target=50)
    assert config.reward == dict.fromkeys(Countdown.parts, 1.0), "the coefficients belonged to the other task"


def test_choosing_the_same_variant_keeps_the_recipes_values() -> None:
    base = load_config("smollm2_arithmetic")
    assert base.task.instructions
    assert load_config("smollm2_arithmetic", ["--task", "arithmetic"]) == base


def test_reward_weights_by_part() -> None:
    config = load_config("quickstart", ["--reward.format", "0.25"])
    assert config.reward == {"correct": 1.0, "format": 0.25}


def test_python_callers_use_the_same_names() -> None:
    settings = {"steps": 7, "sampling.stop": ("a", "b"), "algo": "dr_grpo", "learner.prefix_sharing": False}
    config = load_config("quickstart", given=settings)
    assert (config.steps, config.sampling.stop, config.algo) == (7, ("a", "b"), DrGRPO())
    assert config.learner.prefix_sharing is False


BAD_FLAGS = {
    "--algo.clip-hi 0.3": "unknown flag --algo.clip-hi. Did you mean --algo.clip-high?",
    "--lr 1e-4": "unknown flag --lr. Did you mean --optim.lr?",
    "--stesp 3": "unknown flag --stesp. Did you mean --steps?",
    "--zzzzz 3": "unknown flag --zzzzz. Add --help",
    "--reward.fromat 0": "unknown flag --reward.fromat. Did you mean --reward.format?",
    "--task countdown --task.max-digits 3": "a setting of --task arithmetic, calculator, but this run has countdown",
    "--recipe x": "unknown flag --recipe",
    "--algo dr_gpo": 'unknown algo "dr_gpo". Did you mean "dr_grpo"?',
    "--task cuontdown": 'unknown task "cuontdown". Did you mean "countdown"?',
    "--engine nativ": 'unknown engine "nativ". Did you mean "native"?',
    "--steps many": '--steps must be a whole number, not "many".',
    "--steps 1.5": '--steps must be a whole number, not "1.5".',
    "--optim.lr fast": '--optim.lr must be a number, not "fast".',
    "--algo.scale max": '--algo.scale must be one of std, batch, centred, mean, none, not "max".',
    "--save.keep-best maybe": '--save.keep-best must be True or False, not "maybe".',
    "--task.keep 1": '--task.keep must be 2 values (a whole number, a whole number), not "1".',
    "--steps": "--steps takes one value (a whole number), got none. Write --steps VALUE",
    "--steps 1 2": "--steps takes one value (a whole number), got 2: 1 2. Write --steps VALUE",
    "--steps 1 --steps 2": "--steps is given twice",
    "--algo grpo --algo grpo": "--algo is given twice",
    "steps=3": 'unexpected word "steps=3". Flags have two dashes: --steps 3.',
    "--task.min-digits 5 --steps x": '--steps must be a whole number, not "x".',
    "--task.min-digits 5": "min_digits",
    "--lora.rank 4": "unknown flag --lora.rank. Did you mean --learner.lora.rank?",
    "--learner.lora.targets q": "must be one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (several",
}


@pytest.mark.parametrize(("args", "message"), BAD_FLAGS.items(), ids=BAD_FLAGS)
def test_bad_flags(args: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CohortError) as caught:
        load_config("quickstart", args.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "the parser must not print a message of its own"


BAD_VALUES = {
    "--steps 0": "steps is 0; it must be at least 1",
    "--optim.lr nan": "optim.lr is nan; it must be a finite number",
    "--optim.lr -1": "optim.lr is -1.0; it must be at least 0",
    "--sampling.temperature 0": "sampling.temperature is 0.0; it must be above 0",
    "--optim.beta2 1": "optim.beta2 is 1.0; it must be at least 0 and below 1",
    "--optim.schedule linear --optim.lr-floor 2": "optim.lr_floor is 2.0; it must be from 0 to 1",
    "--optim.schedule linear --optim.lr-floor -1": "optim.lr_floor is -1.0; it must be from 0 to 1",
    "--sampling.top-p nan": "sampling.top_p is nan; it must be above 0 and at most 1",
    "--reward.format inf": "reward.format is inf; it must be a finite number",
    "--batch.samples 1": "Raise --batch.samples, for example to 8",
    "--learner.minibatches 100": "learner.minibatches is 100, but a batch has only 32 groups",
    "--learner.token-budget 60": "learner.token_budget is 60, too small",
    "--sampling.top-p 0.9": "add --sampling.allow-truncation True",
    "--sampling.top-k 5": "add --sampling.allow-truncation True",
    "--sampling.min-p 0.1": "add --sampling.allow-truncation True",
    "--sampling.stop=": "empty string",
    "--optim.warmup 60 --steps 60": "the run makes only 60 optimizer steps",
    "--reward.correct 0 --reward.format 0": "there is nothing to learn",
    "--algo.kl.estimator k1": "--algo.kl.estimator has no effect: algo.kl.weight is 0",
    "--algo.kl.place loss": "--algo.kl.place has no effect: algo.kl.weight is 0",
    "--optim.lr-floor 0.1": "--optim.lr-floor has no effect: optim.schedule is constant",
    "--sampling.allow-truncation True": "--sampling.allow-truncation has no effect",
    "--algo.clip-high 0.28": "--algo.clip-high has no effect: with one update per batch",
    "--algo.credit.per turn": "--algo.credit.per has no effect: every sample has only one turn",
    "--algo.credit.discount 0.9": "--algo.credit.discount has no effect: algo.credit.per is episode",
    "--eval.temperature 0 --eval.samples 4": "--eval.samples has no effect: at temperature 0",
    "--learner.lora.rank -1": "learner.lora.rank is -1; it must be at least 0",
    "--learner.lora.rank 4 --learner.lora.alpha 0": "learner.lora.alpha is 0.0; it must be above 0",
    "--learner.lora.rank 4 --learner.lora.alpha inf": "learner.lora.alpha is inf; it must be a finite number",
    "--learner.lora.rank 4 --learner.lora.targets": "learner.lora.targets is []; name one matrix or more",
    "--learner.lora.rank 4 --learner.lora.targets q_proj q_proj": "['q_proj', 'q_proj']; name one matrix or more, each",
    "--learner.lora.alpha 16": "--learner.lora.alpha has no effect: there are no adapters. Remove it",
    "--learner.lora.base nf4": "--learner.lora.base has no effect: there are no adapters",
    "--learner.lora.load x --learner.lora.rank 4": "--learner.lora.rank has no effect: the adapters in",
}


@pytest.mark.parametrize(("args", "message"), BAD_VALUES.items(), ids=BAD_VALUES)
def test_impossible_and_ineffective_settings(args: str, message: str) -> None:
    base = replace(RECIPES["quickstart"](), batch=BatchConfig(prompts=32, samples=8))
    with pytest.raises(ConfigError) as caught:
        change_config(base, args.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD_VALUES = [
    "--algo.kl.weight 0.01 --algo.kl.estimator k1 --algo.kl.place reward",
    "--optim.schedule cosine --optim.lr-floor 0.1",
    "--sampling.top-p 0.9 --sampling.allow-truncation true",
    "--learner.epochs 2 --algo.clip-high 0.28",
    "--learner.minibatches 2 --algo.clip-low 0.1",
    "--eval.temperature 0",
    "--steps 3",
    "--learner.lora.rank 16 --learner.lora.alpha 8 --learner.lora.targets q_proj down_proj --learner.lora.base nf4",
    "--learner.lora.load folder --learner.lora.base nf4",
]


@pytest.mark.parametrize("args", GOOD_VALUES)
def test_settings_with_an_effect_are_accepted(args: str) -> None:
    load_config("quickstart", args.split())


def test_a_recipes_own_setting_without_effect_is_refused() -> None:
    config = RL(task=Arithmetic(), optim=OptimConfig(lr_floor=0.1))
    with pytest.raises(ConfigError, match="lr-floor has no effect"):
        change_config(config)


def test_nested_sections_of_a_recipe_are_checked() -> None:
    tuned = RL(task=Arithmetic(), learner=LearnerConfig(lora=LoraConfig(alpha=8.0)))
    with pytest.raises(ConfigError, match=r"lora\.alpha has no effect"):
        change_config(tuned)
    lora = LoraConfig(rank=2, targets=("q_prj",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'targets: unknown matrix "q_prj". Did you mean "q_proj"'):
        validate(RL(task=Arithmetic(), learner=LearnerConfig(lora=lora)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--algo.baseline batch", "algo.scale std divides by"),
        ("--algo reinforce --algo.scale mean", "algo.scale mean divides by"),
        ("--algo reinforce --algo.dead drop", "groups of equal rewards have a gradient"),
        ("--algo reinforce_pp --algo.dead refill", "groups of equal rewards have a gradient"),
        ("--algo.kl.weight 0.1 --algo.kl.to sampler", "the sampler is the policy itself"),
        ("--algo.kl.weight 0.1 --algo.kl.refresh 1", "the reference is the policy itself"),
        ("--algo.kl.weight 0.1 --algo.kl.estimator k1", "gradient of zero on average"),
        (
            "--algo.correction.kind mask --algo.correction.bounds 1.5 2",
            "the first from 0 to 1 and the second at least 1",
        ),
        (
            "--algo.correction.kind truncate --algo.correction.bounds 0 inf",
            "the first from 0 to 1 and the second at least 1",
        ),
        ("--algo cispo --learner.minibatches 2 --algo.clip-high 0.2", "at least 1"),
        ("--algo gspo --learner.minibatches 2 --algo.clip-low 2", "from 0 to 1"),
        ("--algo.entropy 3 --algo.entropy-target 0.5", "at most 1"),
        ("--turns think_again --algo.credit.per turn --algo.credit.discount 0", "above 0 and at most 1"),
        ("--turns think_again --algo gspo --algo.credit.per turn", "or choose --algo gspo_token"),
        ("--turns think_again --algo gmpo --algo.credit.per turn", "the mean advantage of all turns"),
        ("--turns think_again --algo pass_at_k --algo.credit.per turn", "the best of k whole samples"),
        (
            "--turns think_again --algo reinforce --algo.baseline none --algo.scale batch --algo.credit.per turn",
            "0 if only one sample reaches it",
        ),
        ("--algo pass_at_k --algo.k 99", "algo.k is 99, but a group has only"),
        ("--algo rloo --batch.samples 1", "batch.samples is 1"),
    ],
)
def test_algorithms_refuse_settings_without_effect_or_with_a_wrong_one(args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", args.split())


@pytest.mark.parametrize(
    "args",
    [
        "--algo reinforce --batch.samples 1",
        "--algo gmpo --learner.minibatches 2 --algo.clip-low 1.5",
        "--algo.kl.weight 0.1 --algo.kl.to sampler --learner.epochs 2",
        "--algo.kl.weight 0.1 --algo.kl.refresh 2",
        "--algo.kl.weight 0.1 --algo.kl.estimator k1 --algo.kl.place reward",
        "--algo.correction.kind mask --algo.correction.bounds 0.5 5 --replay.prompts 4",
        "--algo.baseline batch --algo.scale batch",
        "--turns think_again --algo gspo_token --algo.credit.per turn --algo.credit.discount 0.9",
        "--turns think_again --algo reinforce --algo.baseline none --algo.credit.per turn",
    ],
)
def test_algorithms_accept_settings_with_an_effect(args: str) -> None:
    load_config("quickstart", args.split())


BAD_SFT = {
    "--eval.every 3": "--eval.every has no effect: --data traces are synthetic conversations",
    "--eval.samples 3": "--eval.samples has no effect: nothing is sampled in its evaluations, because the run",
    "--save.keep-best false": "--save.keep-best has no effect: the best checkpoint is that of the best accuracy",
    "--passes 2": "--passes has no effect: --data traces are synthetic conversations without end",
    "--loss last": "--loss has no effect: --data traces",
    "--data conversations --data.path x.jsonl --passes 2 --steps 3": "--steps has no effect: the length of the run is",
    "--data conversations --data.path x_{split}.jsonl --data.held-out 0.1": "the path has {split}",
    "--data pairs --data.path x.jsonl": "an sft run learns from conversations: set --data conversations",
    "--learner.prefix-sharing false": "--learner.prefix-sharing has no effect: an example has one answer",
    "--template text": "Set --template chat",
    "--learner.minibatches 99": "a step has only 64 examples (batch.examples) to divide",
    "--data.think 0.9 --data.broken 0.2": "data.think + data.broken is 1.1; it must be at most 1",
    "--data.right 2": "data.right is 2.0; it must be from 0 to 1",
    "--batch.examples 0": "batch.examples is 0; it must be at least 1",
    "--batch.prompts 4": "unknown flag --batch.prompts. Did you mean --batch.examples?",
    "--data tracse": 'unknown data "tracse". Did you mean "traces"?',
    "--sampling.max-tokens 4": "--sampling.max-tokens has no effect: nothing is sampled in its evaluations",
    "--sampling.top-p 0.5": "unknown flag --sampling.top-p",
    "--task countdown --eval.turns all": "--eval.turns has no effect: every sample of this kind of run has only one",
    "--task.max-numbers 3": "It is a setting of --task countdown, but this run has none",
    "--data task": "--data task imitates the right answers of a task; name it with --task",
    "--data conversations --data.map f.py": 'data.map is "f.py", which names no function of a file',
    "--data conversations --data.map f.py:g --data.columns a=b": "--data.columns has no effect: the function in",
    "--data conversations --data.map f.py:g --data.format text": "--data.format has no effect: the function in",
    "--data conversations --data.test-split train": "data.train_split and data.test_split are both train",
    "--data conversations --data.test-split t --data.held-out 0.1": "--data.held-out has no effect: the rows of the",
    "--data conversations --data.train-split a/b": "data.train_split is a/b; it must be the name of a split",
}


@pytest.mark.parametrize(("args", "message"), BAD_SFT.items(), ids=BAD_SFT)
def test_sft_has_its_own_settings_and_no_others(args: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_sft", args.split())
    assert message in str(caught.value)


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_a_task_is_chosen_by_name_or_not_at_all(recipe: str) -> None:
    plain = load_config(recipe)
    assert plain.task is None and not plain.has_splits and "\ntask:" not in dump_config(plain)  # type: ignore[attr-defined]
    assert parse_config(dump_config(plain)) == plain
    measured = load_config(recipe, ["--task", "countdown", "--task.max-numbers", "3", "--eval.samples", "2"])
    assert measured.task == Countdown(max_numbers=3) and measured.has_splits  # type: ignore[attr-defined]
    assert parse_config(dump_config(measured)) == measured
    assert diff_configs(plain, measured)["task"] == ("none", "countdown")
    assert change_config(measured, ["--task", "none"]).task is None  # type: ignore[attr-defined]
    # A file of an earlier version has neither a task nor its sampling.
    earlier = dump_config(plain).replace("sampling:\n  max_tokens: 0\n  stop: []\n", "")
    assert earlier != dump_config(plain) and parse_config(earlier, warn=False) == plain
    with pytest.raises(ConfigError, match='unknown task "none"'):
        load_config("quickstart", ["--task", "none"])


BAD_DPO = {
    "--loss.beta 0": "loss.beta is 0.0; it must be above 0",
    "--loss robust --loss.label-smoothing 0.5": "it must be at most 0.49",
    "--loss simpo --reference stored": "--reference has no effect: this loss has no reference",
    "--loss ipo --loss.gamma 1": "--loss.gamma",
    "--loss sgmoid": 'unknown loss "sgmoid". Did you mean "sigmoid"?',
    "--learner.minibatches 99": "a step has only 32 pairs (batch.pairs) to divide",
    "--data traces": "a dpo run learns from pairs of answers: set --data pairs",
    "--eval.temperature 0": "--eval.temperature has no effect: nothing is sampled",
}


@pytest.mark.parametrize(("args", "message"), BAD_DPO.items(), ids=BAD_DPO)
def test_dpo_has_its_own_settings_and_no_others(args: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_dpo", args.split())
    assert message in str(caught.value)


def test_every_loss_of_pairs_is_chosen_by_name() -> None:
    for name, cls in PAIR_LOSSES.items():
        config = load_config("tiny_dpo", ["--loss", name, "--loss.beta", "0.3"])
        assert isinstance(config, DPO) and type(config.loss) is cls and config.loss.beta == 0.3
        assert parse_config(dump_config(config)) == config


def test_a_file_of_sft() -> None:
    config = load_config("tiny_sft", ["--batch.examples", "8", "--learner.lora.rank", "2"])
    tree = yaml.safe_load(dump_config(config))
    assert (tree["kind"], tree["data"]["name"], tree["batch"]) == ("sft", "traces", {"examples": 8})
    assert "task" not in tree
    # Files of earlier versions have no evaluations and no way to say what is imitated.
    old = {name: value for name, value in tree.items() if name not in ("eval", "loss", "passes")}
    assert parse_config(yaml.safe_dump(old)) == config
    assert diff_configs(config, load_config("quickstart"))["kind"] == ("sft", "rl")


def test_switching_off_a_section_that_a_recipe_configured_is_no_error() -> None:
    config = RL(task=Arithmetic(), algo=GRPO(kl=KLConfig(weight=0.1, estimator="k1")))
    assert change_config(config, ["--algo.kl.weight", "0"]).algo.kl.weight == 0
    with pytest.raises(ConfigError, match=r"kl\.estimator has no effect"):
        change_config(config, ["--algo.kl.weight", "0", "--algo.kl.estimator", "k2"])


def test_a_config_without_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no task"):
        change_config(RL())


def test_unknown_reward_part_in_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r'unknown reward part "formt".*Did you mean "format"'):
        change_config(RL(task=Arithmetic(), reward={"formt": 0.5}))
    with pytest.raises(ConfigError, match=r"another recipe's task.*write reward=\{\} beside task=") as caught:
        change_config(RL(task=Countdown(), reward={"formt": 0.5}))
    assert "parts = (" not in str(caught.value)  # the task is not the user's


nasty = st.one_of(
    st.text(min_size=1, max_size=12),
    st.sampled_from(["yes", "null", "1e-3", "~", "a: b", "- x", "#", "1", "\x85"]),
)


@given(
    model=nasty,
    stop=st.lists(nasty, max_size=3),
    lr=st.floats(0, 1, allow_nan=False),
    eps=st.floats(1e-300, 1, exclude_min=True),
    seed=st.integers(0, 2**63),
    dr=st.booleans(),
)
def test_parse_is_the_inverse_of_dump(model: str, stop: list[str], lr: float, eps: float, seed: int, dr: bool) -> None:
    config = replace(
        RECIPES["quickstart"](),
        model=model,
        seed=seed,
        sampling=SamplingConfig(stop=tuple(stop)),
        optim=OptimConfig(lr=lr, eps=eps),
        algo=DrGRPO(clip_high=0.3) if dr else GRPO(kl=KLConfig(weight=0.1)),
    )
    again = parse_config(dump_config(config))
    assert again == config
    assert type(again.algo) is type(config.algo)
    assert diff_configs(again, config) == {}


BROKEN = {
    "steps: 60": ("steps: sixty", "steps must be a whole number, not 'sixty'"),
    "seed: 0": ("seed: 0.5", "seed must be a whole number, not 0.5"),
    "prompts:": ("promts:", 'unknown setting batch.promts. Did you mean "prompts"?'),
    "schedule: constant": (
        "schedule: wavy",
        "optim.schedule must be one of constant, linear, cosine, not 'wavy'",
    ),
    "name: grpo": ("name: grop", 'unknown algo "grop". Did you mean "grpo"?'),
    "model: tiny": ("", "model is missing"),
    "clip_norm: 1.0": (f"clip_norm: 1{'0' * 400}", "optim.clip_norm must be a number, not 1000"),
    "threads: 0": ("threads: true", "threads must be a whole number, not True"),
    "recipe: quickstart": ("recipe: [", "not valid YAML"),
}


@pytest.mark.parametrize("old", BROKEN)
def test_a_damaged_file_is_refused_by_name(old: str) -> None:
    new, message = BROKEN[old]
    text = dump_config(replace(load_config("quickstart"), steps=60, seed=0, threads=0))
    assert text.count(old) >= 1
    with pytest.raises(ConfigError) as caught:
        parse_config(text.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("  keep_best: true\n", "save.keep_best = True"),
        ("  schedule: constant\n", "optim.schedule = 'constant'"),
        ("    base: keep\n    load: ''\n", "learner.lora.base = 'keep', learner.lora.load = ''"),
        ("    refresh: 0\n", "algo.kl.refresh = 0"),
    ],
)
def test_a_setting_missing_in_an_old_file_takes_its_default_with_a_warning(
    lines: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("tiny_lora", ["--algo.kl.weight", "0.1"])
    text = dump_config(config)
    assert text.count(lines) == 1
    assert parse_config(text.replace(lines, ""), "runs/a/config.yaml") == config
    warned = f"runs/a/config.yaml is from an earlier version of Cohort. Settings that it does not have: {said}"
    assert [r.getMessage() for r in caplog.records] == [warned]


@pytest.mark.parametrize("section", [f.name for f in fields(RL) if f.name not in ("replay", "scoring", *RL.added)])
def test_a_file_without_a_whole_section_is_damaged(section: str) -> None:
    tree = yaml.safe_load(dump_config(load_config("quickstart")))
    del tree[section]
    with pytest.raises(ConfigError, match=rf"{section}(\.name)? is missing( or not a text)?; restore the file"):
        parse_config(yaml.safe_dump(tree))


def test_a_file_from_before_a_setting_outside_of_sections_gets_its_default() -> None:
    config = load_config("quickstart")
    tree = yaml.safe_load(dump_config(config))
    assert RL.added == ("date", "system") and [tree.pop(name) for name in RL.added] == ["", ""]
    assert parse_config(yaml.safe_dump(tree)) == config


def test_an_old_run_without_an_order_continues_in_rounds() -> None:
    tree = yaml.safe_load(dump_config(load_config("quickstart"))) | {"format": 1}
    del tree["rollout"]
    assert parse_config(yaml.safe_dump(tree)).rollout.order == "rounds"


def test_a_complete_file_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    parse_config(dump_config(load_config("quickstart")))
    assert caplog.records == []


# A section that can be off: the flags that turn it on, and a flag of another of its settings.
OFF = {
    "learner.lora": ("--learner.lora.rank 4", "--learner.lora.alpha 8"),
    "replay": ("--replay.prompts 2 --algo.correction.kind mask", "--replay.steps 9"),
    "algo.kl": ("--algo.kl.weight 0.5", "--algo.kl.estimator k2"),
    "algo.correction": ("--algo.correction.kind truncate", "--algo.correction.level sequence"),
    "algo.credit": ("--turns think_again --algo.credit.per turn", "--algo.credit.discount 0.5"),
}


@pytest.mark.parametrize("section", OFF)
def test_a_section_that_is_off_is_not_written_and_its_deciding_setting_turns_it_on(section: str) -> None:
    on, other = (args.split() for args in OFF[section])
    off = yaml.safe_load(dump_config(load_config("quickstart")))
    config = load_config("quickstart", [*on, *other])
    text = dump_config(config)
    written = yaml.safe_load(text)
    for part in section.split(".")[:-1]:
        off, written = off[part], written[part]
    name = section.rpartition(".")[2]
    assert name not in off
    assert written[name][other[0].rpartition(".")[2]] is not None
    assert parse_config(text) == config and dump_config(parse_config(text)) == text
    with pytest.raises(ConfigError, match="has no effect"):
        load_config("quickstart", other)


def test_settings_of_a_section_that_is_off_make_no_difference() -> None:
    """Such settings are neither written nor compared: a run with them is the same run."""
    idle = replace(load_config("quickstart"), algo=GRPO(kl=KLConfig(estimator="k2")))
    assert diff_configs(idle, load_config("quickstart")) == {} and dump_config(idle) == dump_config(
        load_config("quickstart")
    )
    switched_off = change_config(
        RL(task=Arithmetic(), algo=GRPO(kl=KLConfig(weight=0.1, estimator="k2"))), ["--algo.kl.weight", "0"]
    )
    assert parse_config(dump_config(switched_off)) == switched_off


def test_a_missing_kl_section_is_the_algorithms_own_default() -> None:
    config = load_config("quickstart", ["--algo", "reinforce_pp"])
    assert parse_config(dump_config(config)).algo.kl.estimator == "k1" and "kl:" not in dump_config(config)


def first_format(config: RL) -> str:
    """Returns the text that the first version of Cohort wrote: without format and kind, with sections that are off."""
    tree = {"reward": config.reward}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name != "reward":
            tree[field.name] = json.loads(json.dumps(dataclasses.asdict(value))) if is_dataclass(value) else value
    for field in config.variants:
        tree[field] = {"name": get_variant_name(field, getattr(config, field)), **tree[field]}
    return yaml.safe_dump(tree)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_file_of_the_first_format_is_the_same_config(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(recipe)
    # The first format had no algorithms on pairs.
    if isinstance(config, RL) and not isinstance(config.algo, PairPolicy):
        text = first_format(config)
        assert "correction:" in text and not {"format: 3", "kind: rl"} & set(text.splitlines())
        assert parse_config(text) == config and diff_configs(parse_config(text), config) == {}
        assert caplog.records == []


def test_files_of_later_versions_and_other_kinds_are_refused() -> None:
    text = dump_config(load_config("quickstart"))
    assert text.startswith("format: 3\nkind: rl\n")
    for old, new, message in (
        (
            "format: 3",
            "format: 4",
            "config.yaml has format 4, but this version of Cohort reads formats up to 3; upgrade Cohort",
        ),
        ("format: 3", "format: two", "format must be a whole number"),
        ("kind: rl", "kind: rll", "unknown kind of run 'rll'. Did you mean \"rl\"?"),
        ("kind: rl\n", "", "unknown kind of run None"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(text.replace(old, new, 1))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_without_a_kind_gets_an_error_that_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"Write RL\(\.\.\.\) or SFT\(\.\.\.\) instead"):
        RunConfig(task=Arithmetic(), steps=5)
    assert isinstance(RL(), RunConfig) and copy.deepcopy(RL(steps=5)) == RL(steps=5)


def test_every_number_has_bounds() -> None:
    """This also holds where an algorithm declares a field again to change its default."""
    # Other tests of this process may have registered algorithms of their own.
    built_in = [name for name, variant in ALGOS.items() if variant.__module__.startswith("cohort.")]
    configs = [load_config("quickstart", ["--algo", algo]) for algo in built_in]
    configs += [load_config("quickstart", ["--turns", "think_again"]), load_config("tiny_sft")]
    numbers = [(n, leaf) for c in configs for n, leaf in flags.collect_settings(c).items() if leaf.type in (int, float)]
    assert {n for n, leaf in numbers if not leaf.bounds and not n.startswith(("task.", "reward."))} == set()
    assert len({n for n, _ in numbers}) > 50


@pytest.mark.parametrize("text", ["", "just text", "[1, 2]", "steps: 5"])
def test_text_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


def test_secrets_are_never_written() -> None:
    config = load_config("quickstart")
    with pytest.raises(ConfigError, match="password in an address"):
        dump_config(replace(config, model="https://me:hunter2@host/model"))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Keyed(DrGRPO):
        api_key: str = "sk-123"

    ALGOS["keyed"] = Keyed
    try:
        with pytest.raises(ConfigError, match=r"algo\.api_key looks like a secret"):
            dump_config(replace(config, algo=Keyed()))
    finally:
        del ALGOS["keyed"]


def test_diff_names_what_changed() -> None:
    a = load_config("quickstart")
    b = load_config("quickstart", ["--steps", "3", "--algo", "dr_grpo", "--task", "countdown"])
    changed = diff_configs(a, b)
    assert changed["steps"] == (a.steps, 3)
    assert changed["algo"] == ("grpo", "dr_grpo")
    assert changed["algo.scale"] == ("std", "none")
    assert changed["task"] == ("arithmetic", "countdown")
    assert "optim.lr" not in changed
    assert diff_configs(a, a) == {}


def test_recipe_and_task_in_a_users_file(own_file: Path) -> None:
    config = load_config(f"{own_file}:mine", ["--task.alphabet", "x", "y", "z"])
    assert config.recipe == f"{own_file}:mine"
    assert (config.task.length, config.task.alphabet) == (7, ("x", "y", "z"))
    assert config.reward == {"correct": 1.0}
    text = dump_config(config)
    assert parse_config(text) == config
    # Another process finds the user's file through the path in the config.
    program = (
        "import sys; from cohort.config.load import parse_config; print(parse_config(sys.stdin.read()).task.length)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


def test_task_from_a_file_on_a_built_in_recipe(own_file: Path) -> None:
    config = load_config("quickstart", ["--task", f"{own_file}:reverse_for_tests", "--task.length", "3"])
    assert config.task.length == 3
    assert parse_config(dump_config(config)) == config


def test_a_part_that_the_users_task_does_not_list_is_explained(own_file: Path) -> None:
    config = load_config(f"{own_file}:mine")
    with pytest.raises(
        ConfigError, match=r'unknown reward part "credit".*parts = \("correct", "credit"\) in the class'
    ):
        change_config(replace(config, reward={"credit": 0.5}))


def test_files_that_cannot_be_used(own_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    for spec, message in {
        f"{own_file}:mien": 'no function "mien".*Did you mean "mine"',
        f"{own_file}:wrong": "returned a dict, which is no config",
        str(
            own_file
        ): r"names a file but no function in it.*functions in the file: .*own.py:mine.*--task .*:reverse_for",
        f"{own_file}:reverse_for_tests": "is a task, not a recipe.*own.py:mine.*--task .*own.py:reverse_for_tests",
        f"{tmp_path}/none.py": "names a file but no function or class in it",
        f"{tmp_path}/none.py:f": "there is no file",
        f"{broken}:f": r"broken.py, line 1 is not valid Python: .*; correct the file\.\n  def f\(:",
        "quickstrat": 'unknown recipe "quickstrat". Did you mean "quickstart"',
    }.items():
        with pytest.raises(CohortError, match=message):
            load_config(spec)


FLAGS = """
model steps seed threads template system device task turns algo engine reward.correct reward.format
batch.prompts batch.samples sampling.max_tokens sampling.temperature sampling.top_p sampling.top_k sampling.min_p
sampling.stop sampling.allow_truncation engine.slots engine.weights engine.place engine.replicas
engine.devices engine.patience engine.restarts engine.memory engine.transfer rollout.order eval.turns
scoring.workers scoring.concurrency scoring.seconds scoring.retries scoring.env scoring.sandbox
algo.baseline algo.scale algo.aggregate algo.truncated algo.dead
algo.entropy algo.entropy_target algo.kl.weight algo.kl.to algo.kl.estimator algo.kl.place algo.kl.target
algo.kl.refresh algo.correction.kind algo.correction.level algo.correction.bounds algo.clip_low algo.clip_high
algo.dual_clip algo.credit.per algo.credit.discount replay.prompts replay.steps optim.lr optim.schedule optim.warmup
optim.lr_floor optim.beta1 optim.beta2 optim.eps optim.weight_decay optim.clip_norm
learner.epochs learner.minibatches learner.token_budget learner.prefix_sharing learner.dtype learner.lora.rank
learner.shard learner.tensor learner.lora.alpha learner.lora.targets learner.lora.base learner.lora.load eval.every
eval.problems eval.samples eval.temperature eval.split eval.validation_share batch.too_long date
save.every save.keep_last save.keep_best save.rollouts
""".split()  # noqa: SIM905 (a list of sixty literals is no easier to read)


def test_the_flags_of_train_change_only_on_purpose() -> None:
    from cohort.config.load import _make_settings_record

    found = {
        name
        for name in flags.collect_settings(_make_settings_record(load_config("quickstart")))
        if not name.startswith("task.")
    }
    assert found == set(FLAGS)


README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_task_in_the_readme_loads(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    for name in ("make_rows.py", "sums.py"):
        block = re.search(rf"```python\n(# {name}\n.*?)```", text, re.DOTALL)
        assert block is not None
        (tmp_path / name).write_text(block[1], encoding="utf-8")
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True)
    task = load_config(f"{tmp_path}/sums.py:sums").task
    train, test = ([(row["a"], row["b"]) for row in task.rows(split)] for split in ("train", "test"))
    assert len(test) >= 500 and not set(train) & set(test)
    row = {"a": 12, "b": 30, "total": 42}
    for text, expected in (("<answer>42</answer>", 1.0), ("<answer>41</answer>", 0.0), ("42", 0.0)):
        assert task.score(row, make_plain_answer(text)) == {"correct": expected}


def test_the_commands_in_the_readme_load() -> None:
    pages = [README, *(README.parent / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", "") for page in pages)
    commands = re.findall(r"^cohort train (quickstart --.*?)(?: +#.*)?$", text, re.MULTILINE)
    # tests/peers has those that need a package.
    commands = [c for c in commands if not re.search(r"--help|--sinks|\.py:|reasoning_gym", c)]
    assert len(commands) >= 2, commands
    for command in commands:
        # The name of a run and the number of ranks are flags of the command, not settings.
        recipe, *args = re.sub(r" --(name|ranks) \S+", "", command).split()
        load_config(recipe, args)


def test_a_run_whose_length_is_in_passes_may_have_any_schedule() -> None:
    """How many steps the passes take is known only when the rows are read."""
    flags = ["--passes=3", "--eval.every=1000", "--save.every=1000", "--optim.warmup=500", "--data.path=x.jsonl"]
    config = load_config("sft", flags)
    assert config.eval.every == 1000 and config.optim.warmup == 500
    with pytest.raises(ConfigError, match=r"eval\.every is 1000, but the run has only 7 steps"):
        load_config("sft", ["--passes=0", "--steps=7", "--eval.every=1000", "--data.path=x.jsonl"])


def test_a_task_with_tools_has_conversations() -> None:
    config = load_config("quickstart", ["--task=calculator"])
    assert isinstance(config.turns, Conversation)
    # The limits of a recipe stay for another task with tools, and go with the last one.
    assert load_config("tiny_calculator", ["--task=calculator"]).turns.max_turns == 3  # type: ignore[union-attr]
    assert isinstance(load_config("tiny_calculator", ["--task=arithmetic"]).turns, SingleTurn)
    for flag, message in {
        "--turns=single": "remove --turns single",
        "--turns=think_again": "--turns think_again cannot be used with it",
        "--sampling.stop=x": "would cut the ends of calls",
        "--template=text": "needs a chat template",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config("tiny_calculator", [flag])
    with pytest.raises(ConfigError, match="has neither tools nor an environment"):
        load_config("quickstart", ["--turns=conversation"])


def test_a_conversation_has_room_for_a_turn() -> None:
    with pytest.raises(ConfigError, match=r"turns\.max_total is 10, less than one turn .* Raise --turns\.max-total"):
        load_config("tiny_calculator", ["--turns.max-total", "10"])
    assert load_config("tiny_calculator", ["--turns.max-total", "600"]).turns.max_total == 600
    with pytest.raises(ConfigError, match="--max-total 10 is less than one turn of --max-tokens 64"):
        EvalOptions(max_total=10, max_tokens=64).check()
