"""Building a job: its parts fit together, and a combination that cannot work is refused in one clear line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cohort.config.algo_sections import KLConfig
from cohort.config.load import change_config
from cohort.config.schema import GRPO, BatchConfig, EvalConfig, LearnerConfig, OptimConfig, SamplingConfig
from cohort.errors import CohortError, ConfigError, RunError, TaskError
from cohort.run import checkpoint
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.gsm8k import GSM8K
from tests.helpers.hostile_task import Hostile
from tests.helpers.small_runs import built_job, run_steps, small_run

FEW = Arithmetic(train_size=5, test_size=4)


def catch_refusal(config) -> CohortError:
    """Returns the error with which building a job is refused. It must be one line."""
    with pytest.raises(CohortError) as caught, built_job(config):
        pass
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"batch": BatchConfig(prompts=6), "task": FEW}, ConfigError, ["5 train rows", "batch.prompts = 6"]),
        (
            {"sampling": SamplingConfig(max_tokens=1024)},
            ConfigError,
            ["may have 1024 tokens", "no room for a prompt in the model's context of 1024 tokens"],
        ),
        (
            {"sampling": SamplingConfig(max_tokens=300), "learner": LearnerConfig(token_budget=300)},
            ConfigError,
            ["may have 300 tokens", "no room for a prompt in a microbatch of 300 tokens"],
        ),
        ({"model": "no-such-model"}, CohortError, ["no-such-model"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(changes, kind, words):
    values = {"batch": BatchConfig(prompts=4), "eval": EvalConfig(problems=4), **changes}
    error = catch_refusal(small_run(**values))
    assert isinstance(error, kind)
    for word in words:
        assert word in str(error)


def test_the_last_room_for_a_prompt_is_one_token():
    config = small_run(sampling=SamplingConfig(max_tokens=1023), learner=LearnerConfig(token_budget=4096))
    # A prompt of one token would fit, but no prompt is that short.
    error = catch_refusal(config)
    assert isinstance(error, TaskError) and "more than the 1 that fit" in str(error)


@pytest.mark.parametrize("room", ["budget", "context"])
def test_a_prompt_over_the_context_or_the_budget_names_the_row_and_the_limit(room):
    """Hostile's prompts have about 40 tokens; 20 are left."""
    if room == "budget":
        config = small_run(task=Hostile(), reward={}, learner=LearnerConfig(token_budget=52))
    else:
        sampling, learner = SamplingConfig(max_tokens=1004), LearnerConfig(token_budget=4096)
        config = small_run(task=Hostile(), reward={}, sampling=sampling, learner=learner)
    error = catch_refusal(config)
    assert isinstance(error, TaskError) and 'row "test-0"' in str(error) and "more than the 20 that fit" in str(error)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch.samples", "1"], "batch.samples is 1"),
        (["--learner.minibatches", "7"], "learner.minibatches is 7"),
        (["--learner.token-budget", "32"], "learner.token_budget is 32"),
        (["--sampling.temperature", "0"], "sampling.temperature is 0"),
    ],
)
def test_combinations_that_need_no_model_are_refused_with_the_config(flags, words):
    with pytest.raises(ConfigError, match=words):
        change_config(small_run(), flags)


def test_engine_learner_and_producers_share_what_must_be_shared():
    config = small_run(
        sampling=SamplingConfig(max_tokens=17, temperature=0.7, stop=("zz",)),
        eval=EvalConfig(problems=5, temperature=0.3),
        learner=LearnerConfig(token_budget=400, epochs=2, minibatches=3),
        algo=GRPO(kl=KLConfig(weight=0.1)),
        reward={"correct": 2.0, "format": 0.5},
        seed=11,
        steps=9,
    )
    with built_job(config) as job:
        assert job.engine.decoder is job.learner.decoder is job.model.decoder
        assert job.learner.weights().module is job.engine.decoder  # loading weights copies nothing
        assert job.learner.temperature == job.producer.settings.sampling.temperature == 0.7
        assert job.learner.num_updates == 9 * 2 * 3
        assert job.learner.reference is not None and job.learner.reference is not job.model.decoder
        assert not any(p.requires_grad for p in job.learner.reference.parameters())
        assert all(
            torch.equal(a, b)
            for a, b in zip(job.learner.reference.parameters(), job.model.decoder.parameters(), strict=True)
        )
        assert (job.producer.settings.purpose, job.eval_producer.settings.purpose) == ("train", "eval")
        assert job.producer.settings.seed == job.eval_producer.settings.seed == job.producer.stream.seed == 11
        assert job.producer.settings.coefficients == {"correct": 2.0, "format": 0.5}
        assert job.eval_producer.settings.sampling == replace(job.producer.settings.sampling, temperature=0.3)
        assert job.producer.settings.sampling.stop_ids and job.producer.settings.sampling.stop_strings == ("zz",)
        assert job.engine.max_context == 400  # token_budget is the smaller limit here
        assert torch.get_num_threads() == 1
        assert torch.get_deterministic_debug_mode() == 2  # an operation that is not deterministic is an error


def test_truncation_reaches_the_sampler_in_training_and_not_in_evaluation():
    sampling = SamplingConfig(max_tokens=8, top_p=0.9, top_k=7, min_p=0.01, allow_truncation=True)
    with built_job(small_run(sampling=sampling)) as job:
        drawn = job.producer.settings.sampling
        assert (drawn.top_p, drawn.top_k, drawn.min_p) == (0.9, 7, 0.01)
        assert not job.eval_producer.settings.sampling.truncates


def test_without_a_kl_there_is_no_reference():
    with built_job(small_run()) as job:
        assert job.learner.reference is None


def test_evaluation_is_on_the_test_split_and_leaves_the_stream_alone():
    with built_job(small_run()) as job:
        job.producer.stream.next_prompts(2)
        found = job.evaluate(3)
        assert job.producer.stream.cursor == 2
        rows = [row["id"] for row in job.config.task.rows("test")]
        assert [item.id for item in found.items] == rows[:6]
        s = found.setting
        assert (s.step, s.split, s.num_problems, s.num_samples, s.template) == (3, "test", 6, 1, "chat")
        assert found.items[0].prompt.endswith("<|im_start|>assistant\n")


def test_evaluation_samples_as_often_as_asked():
    with built_job(small_run(eval=EvalConfig(problems=3, samples=4))) as job:
        found = job.evaluate(0)
        texts = [{answer.text for answer in item.answers} for item in found.items]
        assert all(len(item.answers) == 4 for item in found.items) and any(len(seen) > 1 for seen in texts)


def test_a_checkpoint_carries_the_cursor_the_counters_and_the_threads(tmp_path):
    with built_job(small_run(optim=OptimConfig(lr=1e-4))) as job:
        run_steps(job, 1)
        job.learner.num_bad = 2
        state = job.make_checkpoint(1)
        assert (state.step, state.cursor) == (1, 6)
        assert state.numbers["threads"] == 1 and state.numbers["torch"] == torch.__version__
        path = checkpoint.save(tmp_path, state, job.write_model)
    with built_job(small_run(optim=OptimConfig(lr=1e-4))) as other:
        decoder = other.model.decoder
        other.restore(checkpoint.load(path))
        assert other.model.decoder is decoder is other.engine.decoder  # in place: what is shared stays shared
        assert (other.producer.stream.cursor, other.eval_producer.stream.cursor) == (6, 6)
        assert (other.learner.update_index, other.learner.num_bad, other.learner.optimizer.num_steps) == (1, 2, 1)
        assert other.engine.version == 1


def test_a_checkpoint_has_the_open_prompts_besides_the_cursor(tmp_path):
    with built_job(small_run()) as job:
        run_steps(job, 1)
        assert "open" not in job.make_checkpoint(1).numbers  # a step that waits for all its groups leaves none
        taken = job.producer._take_prompts(2)  # as if the run ended while they are sampled
        state = job.make_checkpoint(1)
        assert state.cursor == 8 and state.numbers["open"] == [[p.id, p.visit] for p in taken]
        path = checkpoint.save(tmp_path, state, job.write_model)
    with built_job(small_run()) as other:
        other.restore(checkpoint.load(path))
        groups = other.producer.collect(3, accept=lambda group: True)
        assert [g.prompt for g in groups[:2]] == taken and other.producer.stream.cursor == 9


def test_an_extension_tells_the_jump_of_a_decaying_rate():
    """After 3 of 6 steps the linear schedule would go on with 0.5 of the rate; over 12 steps it is 0.75 there."""
    decaying = small_run(steps=6, optim=OptimConfig(lr=1e-3, warmup=0, schedule="linear"))
    with built_job(decaying) as job:
        assert job.describe_extension(0, 6, 12) == ""  # nothing was trained with the old schedule
        job.learner.update_index = 3
        jump = "the learning rate goes from 0.000667 (step 3) to 0.00075 (step 4)"
        assert job.describe_extension(3, 6, 12) == f"the linear schedule now ends at step 12, so {jump}"
        assert job.describe_extension(3, 6, 6) == ""
    with built_job(replace(decaying, optim=OptimConfig(lr=1e-3, warmup=0, schedule="constant"))) as job:
        job.learner.update_index = 3
        assert job.describe_extension(3, 6, 12) == ""


def test_an_optimizer_state_that_lacks_a_moment_is_refused(tmp_path):
    with built_job(small_run()) as job:
        run_steps(job, 1)
        path = checkpoint.save(tmp_path, job.make_checkpoint(1), job.write_model)
        state = checkpoint.load(path)
        state.optimizer = {name: t for name, t in state.tensors.items() if name != "exp_avg_sq/embed"}
        with pytest.raises(RunError, match="exp_avg_sq/embed"):
            job.restore(state)


def test_prompts_that_are_too_long_can_be_left_out_and_are_counted(tmp_path):
    for split, lengths in (("train", (1, 2, 600, 3)), ("test", (4, 700, 5))):
        rows = [{"question": f"{n}. " + "Count. " * n, "answer": "#### 1"} for n in lengths]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_run(
        task=GSM8K(data=f"{tmp_path}/{{split}}.jsonl"),
        batch=BatchConfig(prompts=3, samples=2, too_long="skip"),
        eval=EvalConfig(problems=3),
    )
    with built_job(config) as job:
        assert job.describe().left_out == (
            "training rows left out, because their prompts are too long: 1 of 4",
            "held-out problems left out, because their prompts are too long: 1 of 3",
        )
        assert len(job.problems) == 2 and job.evaluate(0).setting.num_left_out == 1
        assert {p.row["question"][:2] for p in job.producer.stream.next_prompts(9)} == {"1.", "2.", "3."}
    error = catch_refusal(replace(config, batch=BatchConfig(prompts=4, samples=2, too_long="skip")))
    assert "3 train rows whose prompts have at most" in str(error)
    error = catch_refusal(replace(config, batch=BatchConfig(prompts=3, samples=2)))
    assert "leave such rows out with --batch.too-long skip" in str(error)


def test_a_run_may_be_evaluated_on_rows_that_it_does_not_train_on():
    cut = EvalConfig(problems=3, split="validation", validation_share=0.4)
    with built_job(small_run(eval=cut)) as job:
        assert job.evaluate(0).setting.split == "validation"
        trained = {p.id for p in job.producer.stream.next_prompts(100)}
        assert len(job.problems) == 3 and not trained & {p.id for p in job.problems}


def test_fewer_held_out_rows_than_asked_for_are_all_used_and_the_user_is_told():
    few = small_run(eval=EvalConfig(problems=500), task=FEW, batch=BatchConfig(prompts=4))
    with built_job(few) as job:
        assert len(job.problems) == 4 and job.config.eval.problems == 500
        assert job.notice_if_fewer_problems() == (
            "evaluations use all 4 test rows of the task arithmetic, because there are no more; eval.problems is 500"
        )
    with built_job(replace(few, eval=EvalConfig(problems=4))) as job:
        assert job.notice_if_fewer_problems() == ""
