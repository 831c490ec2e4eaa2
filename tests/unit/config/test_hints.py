"""Names that do not exist: words of other tools, settings of other variants and commands, settings without dashes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from cohort.cli.data import Options as DataOptions
from cohort.cli.eval import Options as EvalOptions
from cohort.config import foreign
from cohort.config.flags import collect_settings, format_flag
from cohort.config.hints import find_command_remedy, find_remedy
from cohort.config.load import _make_settings_record, load_config
from cohort.config.options import EngineBenchOptions
from cohort.errors import ConfigError


@cache
def settings(command: str) -> dict[str, Any]:
    """Returns the settings of a command line that has only a recipe and variants, by full name."""
    recipe, *args = command.split()
    return collect_settings(_make_settings_record(load_config(recipe, args)))


# The word of another tool, and what the hint must name. All are asked of the quickstart.
TRANSLATED = {
    **dict.fromkeys(["learning-rate", "lr", "LR", "optim.learning_rate", "actor.optim.lr"], "--optim.lr"),
    **dict.fromkeys(["beta", "kl", "kl-coef", "algo.beta"], "--algo.kl.weight"),
    **dict.fromkeys(["batch-size", "Per_Device-Train_Batch_Size"], "--batch.prompts or --batch.samples"),
    **dict.fromkeys(["num-generations", "n", "actor_rollout_ref.rollout.n"], "--batch.samples"),
    **dict.fromkeys(["max-completion-length", "max-new-tokens"], "--sampling.max-tokens"),
    "max-prompt-length": "a prompt may fill what a completion of --sampling.max-tokens leaves of the model's context",
    **dict.fromkeys(["epsilon", "cliprange"], "--algo.clip-low or --algo.clip-high"),
    "epsilon-high": "--algo.clip-high",
    **dict.fromkeys(["model_name_or_path", "model-name", "actor_rollout_ref.model.path"], "--model"),
    **dict.fromkeys(["num-train-epochs", "max-steps", "total-training-steps", "trainer.total_epochs"], "--steps"),
    "gradient-accumulation-steps": "--learner.token-budget",
    "temperature": "--sampling.temperature? In evaluations it is --eval.temperature.",
    "top-p": "--sampling.top-p? It needs --sampling.allow-truncation True.",
    "output-dir": "Use --out",
    "run-name": "Use --name: the name of the run; --out is the folder in which it is made",
    "report-to": "Use --sinks",
    "logging-steps": "every step is logged",
    "eval-steps": "--eval.every",
    "save-steps": "--save.every",
    "warmup-ratio": "--optim.warmup? It is a number of optimizer steps, not a share",
    "warmup-steps": "--optim.warmup",
    "lr-scheduler-type": "--optim.schedule",
    "weight-decay": "--optim.weight-decay",
    "max-grad-norm": "--optim.clip-norm",
    "use-vllm": "--engine vllm samples with vLLM",
    "bf16": "--learner.dtype",
    "gradient-checkpointing": "Activations are computed again where memory is short",
    "lora-r": "--learner.lora.rank",
    "lora-alpha": "--learner.lora.alpha",
    "dataset": "--task",
    "reward-funcs": "The reward is the method score of a task",
    "reward-weights": "--reward.PART",
    "scale-rewards": "--algo.scale",
    "loss-type": "--algo?",
    "mask-truncated-completions": "--algo.truncated",
    "num-iterations": "--learner.epochs",
    "mini-batch-size": "--learner.minibatches? It is the number of minibatches per batch, not their size",
    "entropy-coeff": "--algo.entropy",
    "system_prompt": "--system?",
    "config": "takes the place of a recipe: cohort train path/config.yaml",
    "config-file": "takes the place of a recipe: cohort train path/config.yaml",
    # Not of another tool, but a mistake: a name of the same section comes first.
    "learner.lora.target": "Did you mean --learner.lora.targets?",
}


@pytest.mark.parametrize(("word", "ours"), TRANSLATED.items())
def test_words_of_other_tools_lead_to_ours(word: str, ours: str) -> None:
    assert ours in find_remedy(word, settings("quickstart"), format_flag)


def test_the_table_names_only_settings_that_exist() -> None:
    bench = collect_settings(EngineBenchOptions())
    evaluation = collect_settings(EvalOptions()) | collect_settings(DataOptions())
    known = {"name", "out", "log", "sinks", "reward.PART", *bench, *evaluation}
    commands = (
        "quickstart",
        "quickstart --task gsm8k",
        "quickstart --turns think_again",
        "tiny_sft",
        "tiny_dpo",
        "sft",
    )
    for command in (*commands, "quickstart --algo online_dpo"):
        known |= settings(command).keys()
    for entry in foreign.SETTINGS:
        named = {*entry.settings.split(), *re.findall(r"\{([\w.]+)\}", entry.note)}
        assert named <= known, entry
        assert entry.words == entry.words.lower() and "-" not in entry.words and (entry.settings or entry.note)
    for words in foreign.COMMANDS:
        assert find_command_remedy(words.split()[-1])


ELSEWHERE = {
    "quickstart --algo rloo|algo.clip_high": "It is a setting of --algo grpo, dr_grpo, dapo, gspo, gspo_token, cispo, "
    "gmpo, pass_at_k, reinforce_pp, reinforce_pp_baseline, but this run has rloo. Choose another, or remove it.",
    "quickstart --algo rloo|epsilon_low": "--algo.clip-low is a setting of --algo grpo, dr_grpo, dapo, gspo, "
    "gspo_token, gmpo, pass_at_k, reinforce_pp, reinforce_pp_baseline, but this run has rloo. "
    "Choose another, or remove it.",
    "quickstart|task.max_target": "It is a setting of --task countdown, but this run has arithmetic. "
    "Choose another, or remove it.",
    "quickstart|turns.attempts": "It is a setting of --turns think_again, but this run has single. "
    "Choose another, or remove it.",
    "quickstart|engine.tensor": "It is a setting of --engine vllm, sglang, but this run has native. "
    "Choose another, or remove it.",
    "quickstart|batch": "It is a section of settings: --batch.prompts, --batch.samples, --batch.too-long.",
    "tiny_sft|sampling.temperature": "It is a setting of reinforcement learning, and this recipe is of another kind. "
    "Remove it.",
    "tiny_sft|temperature": "--sampling.temperature is a setting of reinforcement learning, and this recipe is of "
    "another kind. Remove it.",
    "tiny_sft|batch_size": "Did you mean --batch.examples?",
}


@pytest.mark.parametrize(("case", "remedy"), ELSEWHERE.items())
def test_a_setting_of_another_variant_or_kind_says_so(case: str, remedy: str) -> None:
    command, name = case.split("|")
    assert find_remedy(name, settings(command), format_flag) == remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sampling.temperature", "Did you mean --temperature?"),
        ("num_generations", "Did you mean --samples?"),
        ("max_new_tokens", "Did you mean --max-tokens?"),
        ("learning_rate", "--optim.lr is a setting of cohort train, and this command does not train. Remove it."),
        ("algo.clip_high", "It is a setting of cohort train, and this command does not train. Remove it."),
        ("sinks", "It is a flag of cohort train, and an argument sinks= of cohort.train. Remove it here."),
    ],
)
def test_another_command_has_its_own_names(name: str, remedy: str) -> None:
    assert find_remedy(name, collect_settings(EvalOptions()), format_flag) == remedy


MISPLACED = {
    "steps=3": "Flags have two dashes: --steps 3.",
    "steps:3": "Flags have two dashes: --steps 3.",
    "++optim.lr=1": "Flags have two dashes: --optim.lr 1.",
    "-n 8": "Flags have two dashes. Did you mean --batch.samples?",
    "--steps 3 -n 8": "Flags have two dashes. Did you mean --batch.samples?",
    "--steps 3 lr=1": "Flags have two dashes. Did you mean --optim.lr?",
    "trainer.total_epochs=3": "Flags have two dashes. Did you mean --steps?",
    "~x": "Flags have two dashes. Add --help to see every flag.",
    "./x:y": "Remove it, or write settings as flags",
}


@pytest.mark.parametrize(("args", "remedy"), MISPLACED.items())
def test_settings_without_two_dashes(args: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=r'^unexpected word ".*"\. ') as caught:
        load_config("quickstart", args.split())
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1}, 'unknown setting "learning_rate". Did you mean "optim.lr"?'),
        (
            {"optim": {"lr": 1}},
            'settings["optim"] is a section, not a setting. Give each setting of it by its full name, '
            'such as "optim.lr".',
        ),
        ({"optim.lr": "fast"}, "settings[\"optim.lr\"] must be a number, not 'fast'. Correct the value."),
        ({"steps": 2.5}, 'settings["steps"] must be a whole number, not 2.5. Correct the value.'),
        ({"steps": True}, 'settings["steps"] must be a whole number, not True. Correct the value.'),
        ({"algo": 3}, 'settings["algo"] must be one of grpo, '),
        ({"save.keep_best": 1}, 'settings["save.keep_best"] must be True or False, not 1. Correct the value.'),
        ({"optim.lr": 10**400}, 'settings["optim.lr"] must be a number, not 1000'),
        ({"out": "x"}, "It is a flag of cohort train, and an argument out= of cohort.train. Remove it here."),
    ],
)
def test_settings_from_python_are_named_as_in_python(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", given=settings)
    assert message in str(caught.value)
