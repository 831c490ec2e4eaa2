"""Problems with tools or an environment: every model plays an episode of its own, turn by turn, as in training.

The episodes are those of rollouts: the token stream of a model is its prompt, the tokens that it sampled and the tokens
of the replies, and nothing is rendered or encoded again. All models take a turn, then the calls of all are run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cohort.chat.answering import REQUEST_ID, stream_answers
from cohort.chat.conversation import ModelTurn
from cohort.chat.models import ChatModel
from cohort.chat.options import DEFAULT_MAX_TOKENS, ChatOptions
from cohort.chat.screen import AnswersView
from cohort.errors import ConfigError
from cohort.rollout.episode import AfterTurn, Episode, EpisodeSettings
from cohort.rollout.producer import Scorer
from cohort.rollout.settings import make_conversation_turns
from cohort.tasks.environment import Opening
from cohort.types import Finish, Message, Outcome, Prompt, Row, Sampling

POLL_SECONDS = 0.1  # after which a look is taken whether the user has stopped the tools
PURPOSE = "chat"  # of the random numbers


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """The episode of one model, and the scoring workers that run its tools."""

    episode: Episode
    scorer: Scorer
    last: Outcome | None = None  # of the newest turn that was answered or scored
    text: str = ""  # of the newest turn
    seconds: float = 0.0  # since the problem was shown

    @property
    def is_over(self) -> bool:
        """Whether the episode has reached its end, and was not stopped before."""
        return self.last is not None and (bool(self.last.failure) or bool(self.last.parts))


def begin_episode(model: ChatModel, row: Row, task: str, opening: Opening, options: ChatOptions, index: int) -> Episode:
    """Returns the episode of a model on a row of a task. `index` chooses the random numbers of the answers.

    The game itself depends only on the seed and the row. Raises ConfigError, with the numbers, if the prompt leaves no
    room in the context.
    """
    rendered = model.render(opening.messages, options.system, opening.tools, options.call_format)
    if len(rendered.tokens) >= model.context:
        raise ConfigError(
            f"{model.label}: the problem has {len(rendered.tokens)} tokens, and the context of the model "
            f"{model.context}, so that there is no room for an answer. /next asks the next one."
        )
    sampling = Sampling(
        max_tokens=options.max_tokens or DEFAULT_MAX_TOKENS,
        temperature=options.temperature,
        top_p=options.top_p if options.temperature > 0 else 1.0,
        stop_ids=model.tokenizer.stop_ids,
    )
    prompt = Prompt(
        task=task,
        id=row["id"],
        visit=0,
        row=row,
        messages=opening.messages,
        tokens=list(rendered.tokens),
        provenance=[int(p) for p in rendered.provenance],
        forced_text=rendered.forced_text,
        tools=opening.tools,
    )
    settings = EpisodeSettings(
        sampling=sampling,
        group_size=1,
        seed=options.seed,
        purpose=PURPOSE,
        coefficients={},
        later_turns=make_conversation_turns(options.conversation, sampling, model.tokenizer),
        context=model.context,
    )
    return Episode(prompt=prompt, index=index, settings=settings)


def play_episodes(
    models: Sequence[ChatModel], plays: Mapping[int, PlayedEpisode], view: AnswersView, is_stopped: Callable[[], bool]
) -> None:
    """Plays the episodes of all models to their end, and shows every turn, call and reply while they happen.

    `plays` are by the place of the model. When `is_stopped()` becomes true, turns are cut and tools are given up; these
    episodes stay without a verdict.
    """
    begin = time.perf_counter()
    ready = list(plays)
    try:
        while ready and not is_stopped():
            _take_turns(models, {place: plays[place] for place in ready}, view, is_stopped)
            waiting = [place for place in ready if plays[place].episode.sample.finish != Finish.ABORT]
            ready = _await_replies({place: plays[place] for place in waiting}, view, is_stopped)
            for place in waiting:
                plays[place].seconds = time.perf_counter() - begin
    finally:
        for place, play in plays.items():
            play.scorer.drop(str(place))
            models[place].engine.forget(REQUEST_ID)


def _take_turns(
    models: Sequence[ChatModel], plays: Mapping[int, PlayedEpisode], view: AnswersView, is_stopped: Callable[[], bool]
) -> None:
    """Samples one turn per episode, shows it while it grows, and hands it to the scoring workers."""
    requests = {place: play.episode.make_request(REQUEST_ID) for place, play in plays.items()}
    for place, play in plays.items():
        play.text = ""
        if not play.episode.answers:
            view.add(place, play.episode.prompt.forced_text)
    for piece in stream_answers(models, requests, is_stopped):
        play = plays[piece.model]
        view.add(piece.model, piece.text)
        if piece.sample is None:
            continue
        play.text = piece.sample.text
        answer = play.episode.add_turn(piece.sample)
        if piece.sample.finish != Finish.ABORT:
            play.scorer.submit(str(piece.model), play.episode.prompt.row, answer, play.episode.make_past())


def _await_replies(plays: Mapping[int, PlayedEpisode], view: AnswersView, is_stopped: Callable[[], bool]) -> list[int]:
    """Waits for what the environments say to the newest turns, and shows it. Returns who has another turn."""
    waiting = set(plays)
    ready: list[int] = []
    while waiting and not is_stopped():
        # Models whose calls have the same format share their workers.
        scorers = {id(plays[place].scorer): plays[place].scorer for place in waiting}
        found = [pair for scorer in scorers.values() for pair in scorer.poll(POLL_SECONDS / len(scorers))]
        for name, outcome in found:
            place = int(name)
            play = plays[place]
            move = play.episode.settle(outcome)
            play.last = outcome
            if move is AfterTurn.CLOSE:
                row, answer = play.episode.prompt.row, play.episode.answers[-1]
                play.scorer.submit(name, row, answer, play.episode.make_past(), closing=str(Finish.TOTAL))
                continue
            waiting.discard(place)
            if move is AfterTurn.NEXT_TURN:
                view.add(place, format_replies(outcome))
                ready.append(place)
    return sorted(ready)


def format_replies(outcome: Outcome) -> str:
    """Returns the results of calls and the replies of an environment as they are shown between two turns.

    Calls that did not succeed are counted by how they ended.

    >>> format_replies(Outcome(replies=[{"role": "tool", "name": "add", "content": "no"}], calls={"error": 1}))
    '\\n[add] no\\n(calls: 1 error)\\n'
    """
    lines = [f"[{describe_speaker(message)}] {message['content']}" for message in outcome.replies]
    failed = [f"{number} {kind}" for kind, number in outcome.calls.items() if kind != "ok"]
    if failed:
        lines.append(f"(calls: {', '.join(failed)})")
    if outcome.earned:
        lines.append(f"(earned {outcome.earned:g})")
    return "\n" + "\n".join(lines) + "\n"


def describe_speaker(message: Message) -> str:
    """Returns who a reply is from: the name of a tool, or the role."""
    return str(message.get("name") or message["role"])


def describe_end(play: PlayedEpisode, options: ChatOptions) -> str:
    """Returns a note about an episode that did not end by itself; "" if it did."""
    finish = play.episode.sample.finish
    if not play.is_over:
        return "(stopped)"
    notes = {
        Finish.LENGTH: f"(cut off after {options.max_tokens or DEFAULT_MAX_TOKENS} tokens of a turn, or at the end of "
        "the context; /max-tokens N allows more)",
        Finish.TURNS: f"(ended after {options.max_turns} turns; --max-turns N allows more)",
        Finish.CALLS: f"(ended before more than {options.max_calls} calls; --max-calls N allows more)",
        Finish.TOTAL: "(ended: no token has room after the replies; --max-total and the context are the limits)",
    }
    return notes.get(finish, "" if play.text.strip() else "(an empty answer)")


def make_turn(play: PlayedEpisode) -> ModelTurn:
    """Returns an episode as what a model was given and wrote in one exchange."""
    episode = play.episode
    sample = episode.sample
    return ModelTurn(
        asked=tuple(episode.prompt.tokens),
        restarts=True,
        written=tuple(sample.tokens),
        text=play.text,
        finish=sample.finish if play.is_over else Finish.ABORT,
        forced_text=episode.prompt.forced_text if len(episode.answers) == 1 else "",
        seconds=play.seconds,
        outcome=play.last if play.is_over else None,
        messages=tuple(episode.history),
        provenance=tuple(sample.provenance),
        calls=tuple(sorted(episode.count_calls().items())),
        earned=tuple(episode.earned) if any(episode.earned) else (),
    )
