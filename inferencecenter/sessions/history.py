"""The state of a session: its messages, the tokens of their rendering, and the log of its turns. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage, TranscriptTurn, Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from inferencecenter.protocol.events import End, Error
    from inferencecenter.protocol.values import MessageInParts


TOKEN_BYTES: Final = 4
"""Bytes of one packed token id."""
MAX_TURNS: Final = 1000
"""Maximum number of turns listed."""
MAX_TURN_KEYS: Final = 64
"""Maximum number of turns found by a repeated ``turn_key``."""
MAX_FAILURES: Final = 16
"""Maximum number of failed turns remembered."""
_NO_ENDS: Final[Mapping[str, End]] = MappingProxyType({})
_NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_FAILURES: Final[Mapping[str, TurnFailure]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HistoryView:
    """The messages in the model's context: the first ``kept``, and those from ``resumes_at`` on."""

    kept: int = 0
    resumes_at: int = 0

    @property
    def n_dropped(self) -> int:
        """Number of messages dropped between the two."""
        return max(0, self.resumes_at - self.kept)

    def of(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        return messages[: self.kept] + messages[max(self.kept, self.resumes_at) :]


@dataclass(frozen=True, slots=True)
class TurnCheckpoint:
    """The position of a turn in its session's history.

    ``n_before`` and ``n_messages`` are the numbers of messages before it and at its end. At that point the first
    ``n_tokens`` of the history's tokens encoded the first ``n_chars`` of its covered text; both are 0 once the
    conversation was rendered again, because other tokens encode it since.
    """

    turn_id: str
    n_before: int
    n_messages: int
    n_tokens: int
    n_chars: int
    view: HistoryView


@dataclass(frozen=True, slots=True)
class HistorySize:
    """The size of messages: characters, and ``entries``, which are messages, tool calls and images."""

    n_chars: int = 0
    n_entries: int = 0

    @classmethod
    def of(cls, messages: Iterable[ChatMessage]) -> HistorySize:
        n_chars = n_entries = 0
        for message in messages:
            n_chars += chars_of(message)
            n_entries += 1 + len(message.tool_calls or ()) + len(message.images or ())
        return cls(n_chars, n_entries)

    def __add__(self, other: HistorySize) -> HistorySize:
        return HistorySize(self.n_chars + other.n_chars, self.n_entries + other.n_entries)


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """The maximum size of a session's history."""

    max_chars: int
    max_entries: int

    def check(self, size: HistorySize) -> None:
        """Refuse a size above the limits.

        Raises:
            InferenceCenterError: ``context_full``.
        """
        if size.n_chars > self.max_chars:
            raise _too_long(f"{size.n_chars} characters; {self.max_chars} are allowed")
        if size.n_entries > self.max_entries:
            raise _too_long(f"{size.n_entries} messages, tool calls and images; {self.max_entries} are allowed")


@dataclass(frozen=True, slots=True)
class History:
    """Messages, the packed tokens that encode the text ``covered``, and the turns that have ended.

    ``view`` selects the messages rendered last. ``model_fingerprint`` identifies the model of the tokens.
    """

    messages: tuple[ChatMessage, ...] = ()
    tokens: bytes = b""
    covered: str = ""
    view: HistoryView = HistoryView()
    turns: tuple[TurnCheckpoint, ...] = ()
    model_fingerprint: str = ""
    # Computed on first use and carried along, so that appending costs only the size of what is appended.
    _size: HistorySize | None = field(default=None, repr=False, compare=False)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def size(self) -> HistorySize:
        if self._size is None:
            object.__setattr__(self, "_size", HistorySize.of(self.messages))
        assert self._size is not None
        return self._size

    def for_model(self, model: str) -> History:
        """Return the history for ``model``: the tokens of another model are dropped."""
        if self.model_fingerprint == model:
            return self
        if not self.model_fingerprint:
            return replace(self, model_fingerprint=model)
        return replace(self, tokens=b"", covered="", turns=_without_tokens(self.turns), model_fingerprint=model)

    def appended(self, messages: tuple[ChatMessage, ...], *, limits: HistoryLimits) -> History:
        """Return the history with more messages; their tokens follow with the next turn.

        Raises:
            InferenceCenterError: See ``HistoryLimits.check``.
        """
        size = self.size + HistorySize.of(messages)
        limits.check(size)
        return replace(self, messages=self.messages + messages, _size=size)

    def check_tool_results(self, messages: tuple[ChatMessage, ...]) -> None:
        """Refuse tool results without a matching tool call in the history or in ``messages``.

        Raises:
            InferenceCenterError: ``invalid_request``.
        """
        results = [message.tool_call_id for message in messages if message.tool_call_id is not None]
        if not results:
            return
        unknown = dict.fromkeys(results)
        # Most results belong to the latest calls.
        for message in chain(reversed(messages), reversed(self.messages)):
            for call in message.tool_calls or ():
                unknown.pop(call.call_id, None)
            if not unknown:
                return
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"tool_call_id is {next(iter(unknown))}, which is not a tool call of this session",
            field="messages",
            hint="Use the call_id of a tool call in an answer.",
        )

    def with_turn(self, turn_id: str, now: History, *, extends_tokens: bool) -> History:
        """Return the history with one more turn.

        Args:
            turn_id: The turn.
            now: The history at its end, without turns: these messages and those of the turn.
            extends_tokens: Whether the new tokens start with the old ones.
        """
        earlier = self.turns if extends_tokens else _without_tokens(self.turns)
        mark = TurnCheckpoint(
            turn_id=turn_id,
            n_before=len(self.messages),
            n_messages=len(now.messages),
            n_tokens=now.n_tokens,
            n_chars=len(now.covered),
            view=now.view,
        )
        size = self.size + HistorySize.of(now.messages[len(self.messages) :])
        return replace(now, turns=(*earlier, mark), _size=size)

    def until(self, turn: str) -> History:
        """Return the history at the end of a turn, or before the first turn for ``START``.

        Its tokens are those of that time, or none if the conversation was rendered again since.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        if turn == START:
            n_messages = self.turns[0].n_before if self.turns else len(self.messages)
            return History(self.messages[:n_messages], model_fingerprint=self.model_fingerprint)
        for index in range(len(self.turns) - 1, -1, -1):
            mark = self.turns[index]
            if mark.turn_id == turn:
                return History(
                    self.messages[: mark.n_messages],
                    self.tokens[: mark.n_tokens * TOKEN_BYTES],
                    self.covered[: mark.n_chars],
                    mark.view,
                    self.turns[: index + 1],
                    self.model_fingerprint,
                )
        raise InferenceCenterError(
            ErrorCode.TURN_NOT_FOUND,
            "no turn of this session's history has this id",
            field="turn",
            hint=f"get_session lists the turns; {START} means before the first one.",
        )


def plain_messages(messages: Iterable[ChatMessage | MessageInParts]) -> tuple[ChatMessage, ...]:
    """Return messages as they are stored; those in parts were replaced when their images were (``ImageLibrary``)."""
    plain = tuple(message for message in messages if isinstance(message, ChatMessage))
    assert all(isinstance(message, ChatMessage) for message in messages), "images are stored before a turn begins"
    return plain


def chars_of(message: ChatMessage) -> int:
    """Return the characters of a message, including reasoning, tool calls and what stands for images."""
    n_chars = len(message.content) + len(message.reasoning or "")
    n_chars += sum(len(image.alt or "") for image in message.images or ())
    return n_chars + sum(len(call.name) + len(call.arguments) for call in message.tool_calls or ())


def _too_long(what: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.CONTEXT_FULL, f"the session's history would hold {what}", hint="Open a new session."
    )


def _without_tokens(turns: tuple[TurnCheckpoint, ...]) -> tuple[TurnCheckpoint, ...]:
    return tuple(replace(turn, n_tokens=0, n_chars=0) if turn.n_chars else turn for turn in turns)


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """The published error of a failed turn, and the turn's note."""

    error: Error
    note: str


class TurnLog:
    """A session's turns, their total usage, and the terminal events that answer a repeated ``turn_key``.

    Args:
        turns: The ended turns, oldest first.
        ends: Terminal events by turn key, latest last.
        notes: Private notes by turn id.
        failures: Failures by turn id, latest last.
        usage: The total usage of the turns, if known.
    """

    def __init__(
        self,
        turns: Iterable[TranscriptTurn] = (),
        ends: Mapping[str, End] = _NO_ENDS,
        notes: Mapping[str, str] = _NO_NOTES,
        failures: Mapping[str, TurnFailure] = _NO_FAILURES,
        *,
        usage: Usage | None = None,
    ) -> None:
        self._turns = list(turns)
        self._notes = dict(notes)
        self._ends = OrderedDict(list(ends.items())[-MAX_TURN_KEYS:])
        self._failures = OrderedDict(list(failures.items())[-MAX_FAILURES:])
        self.usage = _sum([turn.usage for turn in self._turns]) if usage is None else usage

    @property
    def turns(self) -> tuple[TranscriptTurn, ...]:
        """The latest turns, oldest first, as listed to clients."""
        return tuple(self._turns[-MAX_TURNS:])

    @property
    def all_turns(self) -> tuple[TranscriptTurn, ...]:
        """All turns, oldest first, as stored."""
        return tuple(self._turns)

    @property
    def notes(self) -> Mapping[str, str]:
        """Private notes by turn id."""
        return dict(self._notes)

    @property
    def n_note_chars(self) -> int:
        return sum(map(len, self._notes.values()))

    def turn(self, turn_id: str) -> tuple[TranscriptTurn, str] | None:
        """Return a turn's entry and its note; ``None`` if it is unknown."""
        turn = next((turn for turn in reversed(self._turns) if turn.turn_id == turn_id), None)
        return None if turn is None else (turn, self._notes.get(turn_id, ""))

    def record_end(
        self, turn_key: str | None, end: End, *, n_messages: int, note: str = "", ended_at: float | None = None
    ) -> TranscriptTurn:
        """Add a turn that did not fail, after which the history has ``n_messages``, and return its entry."""
        turn = TranscriptTurn(
            turn_id=end.turn_id,
            finish_reason=end.finish_reason,
            messages=n_messages,
            usage=end.usage,
            ended_at=ended_at,
        )
        self._turns.append(turn)
        self.usage = _sum((self.usage, end.usage))
        if note:
            self._notes[end.turn_id] = note
        if turn_key is not None:
            self._ends[turn_key] = end
            if len(self._ends) > MAX_TURN_KEYS:
                self._ends.popitem(last=False)
        return turn

    def record_failure(self, turn_id: str, failure: TurnFailure) -> None:
        """Add a failed turn."""
        self._failures[turn_id] = failure
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def failure(self, turn_id: str) -> TurnFailure | None:
        """Return the failure of a turn, if it is still remembered."""
        return self._failures.get(turn_id)

    def find_end(self, turn_key: str | None) -> End | None:
        """Return the terminal event of the turn with this key, if it is still remembered."""
        return None if turn_key is None else self._ends.get(turn_key)

    def until(self, turn: str | None) -> TurnLog:
        """Return a copy up to ``turn``, which must exist; empty for ``START``, complete for ``None``.

        Keys are not copied: their terminal events belong to this session.
        """
        if turn is None:
            return TurnLog(self._turns, notes=self._notes, usage=self.usage)
        turns = self._turns[: self._length(turn)]
        kept = {known.turn_id for known in turns}
        return TurnLog(turns, notes={turn_id: note for turn_id, note in self._notes.items() if turn_id in kept})

    def rewind(self, turn: str) -> None:
        """Remove all turns after ``turn``, which must exist, or all turns for ``START``, and all failures."""
        length = self._length(turn)
        removed = {later.turn_id for later in self._turns[length:]}
        del self._turns[length:]
        self.usage = _sum([turn.usage for turn in self._turns])
        for key in [key for key, end in self._ends.items() if end.turn_id in removed]:
            del self._ends[key]
        for turn_id in removed:
            self._notes.pop(turn_id, None)
        self._failures.clear()

    def _length(self, turn: str) -> int:
        if turn == START:
            return 0
        return next(index for index, known in enumerate(self._turns, start=1) if known.turn_id == turn)


def _sum(usages: Collection[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
