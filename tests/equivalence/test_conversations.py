"""Conversations with tools and a real model: the trained tokens are the sampled ones, in every format and template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.config.schema import BatchConfig, Conversation, EvalConfig, LearnerConfig, SamplingConfig
from cohort.engines.base import Event
from cohort.jobs.build import RLJob
from cohort.loops.learning import annotate
from cohort.types import Finish, Group, Provenance, Sample
from tests.helpers.decoders_and_groups import pack_groups
from tests.helpers.small_runs import built_job, gradient_rows, make_producer, small_run
from tests.helpers.talking_task import HOSTILE, Talking

# In the manner of SmolLM2: no tools, a system message that the template itself writes.
SMOL = """{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system
You are small.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# In the manner of Qwen2.5: tools in the system message, results of neighbouring calls in one turn of the user.
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CASES = [(template, format) for template in ("tiny", "smol", "qwen") for format in ("hermes", "llama3", "tags")]


class RecordingEngine:
    """The job's engine, which remembers the tokens of every turn that it has sampled, by the id of the request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.turns: dict[str, list[list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def poll(self, timeout: float = 0.0) -> list[Event]:
        events: list[Event] = self._engine.poll(timeout)
        for event in events:
            if event.sample is not None:
                self.turns.setdefault(event.id, []).append(event.sample.tokens)
        return events


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def talked(request: Any, tmp_path_factory: Any) -> Iterator[tuple[RLJob, RecordingEngine, list[Group]]]:
    template, format = request.param
    path = "chat"
    if template != "tiny":
        file: Path = tmp_path_factory.mktemp("templates") / f"{template}.jinja"
        file.write_text({"smol": SMOL, "qwen": QWEN}[template])
        path = str(file)
    config = small_run(
        task=Talking(format=format),
        reward={},
        template=path,
        turns=Conversation(max_turns=6, format=format),
        batch=BatchConfig(prompts=6, samples=3),
        sampling=SamplingConfig(max_tokens=28, temperature=0.7),
        learner=LearnerConfig(token_budget=4096, dtype="float64"),
        eval=EvalConfig(problems=2),
    )
    with built_job(config) as job:
        engine = RecordingEngine(job.engine)
        producer = make_producer(job, 3, engine=engine)
        groups = producer.roll_out(job.producer.stream.next_prompts(6))
        annotate(job.learner, groups, ["old"])
        yield job, engine, groups


def split_turns(sample: Sample) -> list[tuple[int, list[int]]]:
    """The sample's tokens as (provenance, tokens) of neighbours with the same provenance."""
    turns: list[tuple[int, list[int]]] = []
    for token, provenance in zip(sample.tokens, sample.provenance, strict=True):
        if not turns or turns[-1][0] != provenance:
            turns.append((provenance, []))
        turns[-1][1].append(token)
    return turns


def test_the_trained_ids_are_the_sampled_ids(talked: Any) -> None:
    _, engine, groups = talked
    lengths = set()
    for number, group in enumerate(groups):
        for index, sample in enumerate(group.samples):
            sampled = [tokens for kind, tokens in split_turns(sample) if kind == Provenance.SAMPLED]
            assert sampled == engine.turns[f"{number}/{index}"]
            assert not sample.failure
            # The bundled model sometimes writes calls, which are answered and leave the environment waiting.
            if not sample.calls:
                assert sample.num_turns <= group.prompt.row["turns"]
                assert sample.num_turns == group.prompt.row["turns"] or sample.finish is Finish.LENGTH
            lengths.add(sample.num_turns)
    assert lengths >= {1, 2, 3, 4}, "conversations of many lengths are compared"


def test_sampler_and_learner_agree_in_every_turn(talked: Any) -> None:
    _, _, groups = talked
    for sample in (s for g in groups for s in g.samples):
        assert sample.old_logprobs == pytest.approx(sample.sampler_logprobs, abs=1e-10)


def test_environment_tokens_have_exactly_zero_gradient(talked: Any) -> None:
    job, _, groups = talked
    for group in groups:
        for i, sample in enumerate(group.samples):
            sample.advantage = 1.0 + i
    num = 0
    for micro, touched in gradient_rows(job.learner, pack_groups(groups, 8192), job.algo):
        assert touched == set(micro.source.tolist())
        num += len(micro.targets)
    assert num == sum(s.num_sampled for g in groups for s in g.samples)


def test_the_stream_is_what_the_template_renders_and_nothing_is_injected(talked: Any) -> None:
    """Where encoding an answer's text again gives the same tokens, a whole render of the conversation is the stream."""
    job, _, groups = talked
    tokenizer = job.tokenizer
    starts = tokenizer.get_token_id("<|im_start|>")
    num_equal = 0
    for group in groups:
        for sample in group.samples:
            turns = split_turns(sample)
            replies = [tokens for kind, tokens in turns if kind == Provenance.ENVIRONMENT]
            for tokens in replies:
                # One turn per result, or one for all, and that of the assistant. What a tool says begins none.
                num_results = 1 + tokenizer.decode(tokens).count("again")
                assert 2 <= tokens.count(starts) <= 1 + num_results or sample.calls
                assert sample.calls or HOSTILE.split("<")[0] in tokenizer.decode(tokens)
            written = [tokens for kind, tokens in turns if kind == Provenance.SAMPLED]
            ends = {tokens[-1] for tokens in written}
            if sample.calls or sample.finish is not Finish.STOP or ends != {tokenizer.end_of_turn}:
                continue
            if any(tokenizer.encode(tokenizer.decode(t), markup=True) != t[:-1] for t in written):
                continue
            messages = [*group.prompt.messages]
            environment = job.config.task.environment()
            environment.start(group.prompt.row, None)
            for tokens in written[:-1]:
                messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})
                messages += environment.step(None).replies
            whole = job.producer.stream._tokenizer.render(messages, group.prompt.tools).tokens
            assert [*group.prompt.tokens, *sample.tokens][: -len(written[-1])] == whole
            num_equal += len(written) > 1
    assert num_equal >= 3


def test_rewards_of_turns_add_up(talked: Any) -> None:
    _, _, groups = talked
    for group in groups:
        for sample in (s for s in group.samples if not s.calls):
            earned = 0.25 * (sample.num_turns - 1)
            done = sample.num_turns == group.prompt.row["turns"] and sample.finish is Finish.STOP
            assert sample.reward == pytest.approx(earned + float(done))
            assert sum(sample.turn_rewards) == pytest.approx(sample.reward if sample.turn_rewards else 0.0)
            assert len(sample.turn_rewards) in (0, sample.num_turns)


def test_both_orders_give_the_same_samples(talked: Any) -> None:
    """In continuous order conversations go on at once, so other turns are sampled together. No token changes."""
    job, _, groups = talked
    job.producer.stream.seek(0)
    prompts = job.producer.stream.next_prompts(6)
    again = make_producer(job, 3, order="continuous").roll_out(prompts)
    for one, other in zip(groups, again, strict=True):
        assert [s.tokens for s in one.samples] == [s.tokens for s in other.samples]
        assert [s.reward for s in one.samples] == [s.reward for s in other.samples]
