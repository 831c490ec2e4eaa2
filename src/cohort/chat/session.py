"""A chat from its first line to its last: reads the user's lines, asks the models, and runs commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cohort.chat.answering import PreparedRequest, drop_stop, prepare_request, stream_answers
from cohort.chat.commands import run_command
from cohort.chat.conversation import Conversation, Exchange, ModelTurn
from cohort.chat.models import ChatModels
from cohort.chat.options import ChatOptions
from cohort.chat.playing import PlayedEpisode, begin_episode, describe_end, make_turn, play_episodes
from cohort.chat.problems import TaskProblems
from cohort.chat.saving import SavedConversation, SavedModel, format_counts, save_chat
from cohort.chat.screen import AnswersView, Screen
from cohort.errors import CohortError, ConfigError
from cohort.jobs.room import format_gigabytes
from cohort.rollout.settings import make_conversation_rules
from cohort.system.ending import EndSignals
from cohort.system.interrupt import InterruptFlag
from cohort.types import Finish, Key, Message


class ChatSession:
    """The state of a chat. Commands change it; `run` is its loop. A signal in `ends` stops an answer and the loop."""

    def __init__(
        self,
        models: ChatModels,
        options: ChatOptions,
        screen: Screen,
        problems: TaskProblems | None = None,
        ends: EndSignals | None = None,
    ) -> None:
        self.models = models
        self.options = options
        self.screen = screen
        self.problems = problems  # None = no task was given
        self.conversation = Conversation(system=options.system)
        self.is_over = False  # whether the user has asked to leave
        self._past: list[SavedConversation] = []  # conversations that are over
        self._speakers = self._note_models()  # models of the present conversation
        self._files: dict[Path, list[SavedConversation]] = {}  # files that this chat has written, with what they have
        self._interrupt = InterruptFlag()
        self._ends = EndSignals() if ends is None else ends

    @property
    def labels(self) -> list[str]:
        """The names of the models above their columns."""
        return [model.label for model in self.models.members]

    def run(self) -> None:
        """Reads and handles line after line until the input ends or the user leaves.

        Errors are shown and the chat goes on. Without a user at a terminal they are raised. Files that the user has
        saved are brought up to date at the end.
        """
        try:
            self._handle_lines()
        finally:
            self._update_files()

    def _handle_lines(self) -> None:
        """Does what `run` does, apart from files."""
        if self.screen.is_interactive:
            self.show_models()
            task = "Enter asks the next problem. " if self.problems else ""
            self.screen.show_note(f"{task}/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.")
        while not self.is_over and not self._ends.code:
            try:
                line = self.screen.read_line()
                if line is None:
                    break
                with self.screen.hide_typing():
                    self.handle_line(line)
            except CohortError as error:
                if not self.screen.is_interactive:
                    raise
                self.screen.show_note(str(error))
            except KeyboardInterrupt:
                # An engine that was interrupted in the middle of a step cannot be used any more.
                if not self.screen.is_interactive or self._interrupt.is_insistent:
                    raise
                # The terminal shows ^C at the end of the line.
                self.screen.show_gap()
                self.screen.show_note("Ctrl-D or /quit leaves the chat.")

    def handle_line(self, line: str) -> None:
        """Handles one line of the user.

        An empty line asks the next problem of the task, if there is one. / begins a command; // is a text that begins
        with /.
        """
        # Half of a character, from input in another encoding, has no tokens.
        line = line.encode("utf-8", "replace").decode("utf-8")
        if line.startswith("/") and not line.startswith("//"):
            run_command(self, line)
        elif line.strip():
            self.ask([{"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line}])
        elif self.problems is not None:
            self.ask_next_problem()

    def ask_next_problem(self) -> None:
        """Begins a new conversation with the next problem of the task. Raises ConfigError without a task."""
        if self.problems is None:
            raise ConfigError("there are no problems to ask; start the chat with --task TASK.")
        row, messages = self.problems.take_row(self.options.seed)
        self.begin_anew()
        self.screen.show_note(self.problems.describe_next())
        self.screen.show_note("\n\n".join(str(message["content"]) for message in messages), style="cyan")
        if names := self.problems.list_tools(row["id"], self.options.seed):
            self.screen.show_note(f"tools: {', '.join(names)}")
        self.ask(messages, row=row["id"])

    def ask(self, messages: Sequence[Message], *, attempt: int = 0, row: str = "") -> None:
        """Asks all models, shows their answers while they grow, and adds them to the conversation.

        `attempt` chooses the random numbers, `row` is the id of the task's row that the messages come from. A model
        without room in its context says so and does not answer; if none answers, the conversation stays as it is.
        """
        if not self.models.members:
            raise ConfigError("no model is loaded; /model M loads one.")
        if row and self.problems is not None and self.problems.has_conversations:
            self._play(row, attempt)
            return
        requests: dict[int, PreparedRequest] = {}
        refusals: dict[int, str] = {}
        for place, model in enumerate(self.models.members):
            key = self._make_key(attempt, row, model.copy_index)
            try:
                requests[place] = prepare_request(model, place, self.conversation, messages, self.options, key)
            except ConfigError as error:
                refusals[place] = str(error)
        if not requests:
            raise ConfigError(" ".join(refusals.values()))
        with self._watch_interrupts(), self.screen.open_answers(self.labels) as view:
            for place, refusal in refusals.items():
                view.end(place, f"({refusal})")
            turns = self._show_answers(requests, view)
        exchange = Exchange(
            messages=tuple(messages),
            turns=tuple(turns.get(place) for place in range(len(self.models.members))),
            attempt=attempt,
            row=row,
        )
        self.conversation = self.conversation.add(exchange)
        if row:
            self._judge(exchange)
        self.screen.show_gap()

    def _play(self, id: str, attempt: int) -> None:
        """Has all models play the episode of a task's row, with tools and environment, and shows the verdicts.

        `attempt` chooses the random numbers of the answers. The game stays the same.
        """
        assert self.problems is not None
        row, opening = self.problems.open_row(id, self.options.seed)
        members = self.models.members
        options = replace(self.options, system=self.conversation.system)
        plays: dict[int, PlayedEpisode] = {}
        refusals: dict[int, str] = {}
        for place, model in enumerate(members):
            try:
                index = attempt * len(members) + model.copy_index
                episode = begin_episode(model, row, self.problems.task.name, opening, options, index)
            except ConfigError as error:
                refusals[place] = str(error)
                continue
            rules = make_conversation_rules(options.conversation, model.tokenizer)
            plays[place] = PlayedEpisode(episode=episode, scorer=self.problems.get_player(rules))
        if not plays:
            raise ConfigError(" ".join(refusals.values()))
        with self._watch_interrupts(), self.screen.open_answers(self.labels) as view:
            for place, refusal in refusals.items():
                view.end(place, f"({refusal})")
            play_episodes(members, plays, view, self._is_stopped)
            for place, play in plays.items():
                view.end(place, describe_end(play, options))
        turns = tuple(make_turn(plays[place]) if place in plays else None for place in range(len(members)))
        exchange = Exchange(
            messages=tuple(opening.messages), turns=turns, attempt=attempt, row=id, tools=tuple(opening.tools)
        )
        self.conversation = self.conversation.add(self.problems.count(exchange))
        self._show_verdicts(self.conversation.exchanges[-1])
        self.screen.show_gap()

    def _show_answers(self, requests: dict[int, PreparedRequest], view: AnswersView) -> dict[int, ModelTurn]:
        """Shows the answers to requests while they grow. Returns them by the place of the model."""
        turns: dict[int, ModelTurn] = {}
        orders = {place: prepared.request for place, prepared in requests.items()}
        for place, prepared in requests.items():
            view.add(place, prepared.forced_text)
        for piece in stream_answers(self.models.members, orders, self._is_stopped):
            view.add(piece.model, piece.text)
            if piece.sample is None:
                continue
            prepared = requests[piece.model]
            written = piece.sample.tokens
            # In plain text the conversation simply goes on where the answer ended.
            if self.models.members[piece.model].template == "text":
                written = drop_stop(written, prepared.request)
            turns[piece.model] = ModelTurn(
                asked=prepared.asked,
                restarts=prepared.restarts,
                written=tuple(written),
                text=piece.sample.text,
                finish=piece.sample.finish,
                forced_text=prepared.forced_text,
                seconds=piece.seconds,
            )
            view.end(piece.model, describe_finish(turns[piece.model], prepared))
        return turns

    def _judge(self, exchange: Exchange) -> None:
        """Has the answers to a task's problem scored, and shows the verdicts."""
        assert self.problems is not None
        with self._watch_interrupts():
            scored = self.problems.score(exchange, self._is_stopped)
        self.conversation = self.conversation.replace_last(scored)
        self._show_verdicts(scored)

    def _show_verdicts(self, scored: Exchange) -> None:
        """Shows the verdicts on the answers to a task's problem, and how many were right so far."""
        assert self.problems is not None
        self.screen.show_verdicts(self.labels, [self.problems.describe_outcome(turn) for turn in scored.turns])
        if scored.counts:
            self.screen.show_note(format_counts(self.labels, scored.counts))

    @contextmanager
    def _watch_interrupts(self) -> Iterator[None]:
        """Context in which Ctrl-C or a signal stops the answers. Without a terminal it ends the program, as usual."""
        if not self.screen.is_interactive:
            yield
            return
        with self._interrupt, self._ends.hold():
            yield

    def _is_stopped(self) -> bool:
        """Returns whether Ctrl-C or a signal has stopped what is under way."""
        return self._interrupt.is_set or self._ends.code > 0

    def _make_key(self, attempt: int, row: str, copy_index: int) -> Key:
        """Returns the key of an answer's random numbers.

        All models get the same ones, so that equal models give equal answers; a model that is named twice does not.
        """
        place = row or f"message {len(self.conversation.exchanges)}"
        return Key(
            seed=self.options.seed,
            purpose="chat",
            task=self.problems.task.name if row and self.problems else "chat",
            prompt_id=place,
            visit=attempt,
            sample=copy_index,
        )

    def show_models(self) -> None:
        """Shows the models with their memory and context, and what the problems are to runs that they come from."""
        for model in self.models.members:
            size = f"{format_gigabytes(model.demand.weights)} GB, context {model.context} tokens"
            self.screen.show_note(f"{model.full_label}: {size}, {self.models.place}")
        if self.problems is not None:
            runs = {model.run: model.label for model in reversed(self.models.members) if model.run is not None}
            notes = [self.problems.describe_split(label, run) for run, label in reversed(runs.items())]
            for note in filter(None, notes):
                self.screen.show_note(note)

    def set_system(self, system: str) -> None:
        """Replaces the system prompt. Raises ModelError, and changes nothing, if a model's template refuses it."""
        for model in self.models.members:
            model.render([{"role": "user", "content": "x"}], system)
        self.conversation = self.conversation.replace_system(
            system,
            lambda place, exchange: (
                self.models.members[place]
                .render(exchange.messages, system, exchange.tools, self.options.call_format)
                .tokens
            ),
        )
        self.options = replace(self.options, system=system)

    def swap_models(self, names: Sequence[str]) -> None:
        """Loads other models, and begins the conversation anew."""
        self.models.swap(names)
        self.begin_anew()
        self._speakers = self._note_models()
        if self.problems is not None:
            self.problems.forget_counts()

    def begin_anew(self) -> None:
        """Begins a new conversation. The one before is kept for files."""
        self._past = self.list_talks()
        self.conversation = self.conversation.reset()

    def list_talks(self) -> list[SavedConversation]:
        """Returns all conversations since the chat began, without empty ones."""
        if not self.conversation.list_all():
            return self._past
        now = SavedConversation(conversation=self.conversation, models=self._speakers, options=self.options)
        return [*self._past, now]

    def save(self, path: Path) -> None:
        """Writes all conversations to a file, which must not exist unless this chat has written it.

        Raises ConfigError if that fails, or if there is nothing to write.
        """
        talks = self.list_talks()
        if not talks:
            raise ConfigError("there is nothing to save yet: no message was answered.")
        save_chat(path, talks, overwrite=path.absolute() in self._files)
        self._files[path.absolute()] = talks
        num = sum(len(talk.conversation.list_all()) for talk in talks)
        self.screen.show_note(f"wrote {path}, with {num} {'exchange' if num == 1 else 'exchanges'} since the start")

    def _update_files(self) -> None:
        """Writes the files of this chat again that lack what was said later."""
        talks = self.list_talks()
        for path, written in list(self._files.items()):
            if written != talks:
                try:
                    self.save(path)
                except CohortError as error:
                    self.screen.show_note(str(error))

    def _note_models(self) -> tuple[SavedModel, ...]:
        """Returns what a file tells about the models."""
        return tuple(
            SavedModel(name=model.name, label=model.label, folder=model.folder, context=model.context)
            for model in self.models.members
        )


def describe_finish(turn: ModelTurn, prepared: PreparedRequest) -> str:
    """Returns a note about an answer that did not end by itself; "" if it did."""
    if turn.finish == Finish.ABORT:
        return "(stopped)"
    if turn.finish == Finish.LENGTH and prepared.is_cut_by_context:
        return "(cut off: the context of the model is full; /undo or /reset makes room)"
    if turn.finish == Finish.LENGTH:
        return f"(cut off after {len(turn.written)} tokens; /max-tokens N allows more)"
    return "" if turn.text.strip() else "(an empty answer)"
