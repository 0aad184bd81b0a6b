"""What a session holds: what was said, the tokens that spell it, and where each turn ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.protocol.values import ChatMessage

TOKEN_BYTES: Final = 4
"""Bytes of one packed token id."""


@dataclass(frozen=True, slots=True)
class View:
    """Which messages the model is given: the first ``kept``, and those from ``resumes_at`` on."""

    kept: int = 0
    resumes_at: int = 0

    @property
    def n_dropped(self) -> int:
        """Messages between the two."""
        return max(0, self.resumes_at - self.kept)

    def of(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Return what the model is given of ``messages``."""
        return messages[: self.kept] + messages[max(self.kept, self.resumes_at) :]


@dataclass(frozen=True, slots=True)
class TurnMark:
    """Where a turn stands in its session's history.

    ``n_before`` messages came before it, ``n_messages`` were there at its end. Then the first ``n_tokens`` of the
    history's tokens spelled the first ``n_chars`` of its covered text; both are 0 once the conversation was rendered
    anew, since when other tokens spell it.
    """

    turn_id: str
    n_before: int
    n_messages: int
    n_tokens: int
    n_chars: int
    view: View


@dataclass(frozen=True, slots=True)
class Extent:
    """How much was said: characters, and ``entries``, which are messages and calls of tools."""

    n_chars: int = 0
    n_entries: int = 0

    @classmethod
    def of(cls, messages: Iterable[ChatMessage]) -> Extent:
        """Measure messages."""
        n_chars = n_entries = 0
        for message in messages:
            n_chars += chars_of(message)
            n_entries += 1 + len(message.tool_calls or ())
        return cls(n_chars, n_entries)

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.n_chars + other.n_chars, self.n_entries + other.n_entries)


@dataclass(frozen=True, slots=True)
class Room:
    """The most that a session's history may be."""

    max_chars: int
    max_entries: int

    def check(self, extent: Extent) -> None:
        """Refuse what is more.

        Raises:
            InferenceCenterError: ``context_full``.
        """
        if extent.n_chars > self.max_chars:
            raise _too_long(f"{extent.n_chars} characters; {self.max_chars} are allowed")
        if extent.n_entries > self.max_entries:
            raise _too_long(f"{extent.n_entries} messages and calls of tools; {self.max_entries} are allowed")


@dataclass(frozen=True, slots=True)
class History:
    """Messages, the packed tokens that spell the text ``covered``, and the turns that have ended.

    ``view`` is what of the messages was last rendered. ``made_by`` names the model whose tokens they are.
    """

    messages: tuple[ChatMessage, ...] = ()
    tokens: bytes = b""
    covered: str = ""
    view: View = View()
    turns: tuple[TurnMark, ...] = ()
    made_by: str = ""
    # Measured when it is asked for, and carried along, so that what is appended costs what it is itself.
    _extent: Extent | None = field(default=None, repr=False, compare=False)

    @property
    def n_tokens(self) -> int:
        """Tokens held."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def extent(self) -> Extent:
        """How much was said in all messages."""
        if self._extent is None:
            object.__setattr__(self, "_extent", Extent.of(self.messages))
        assert self._extent is not None
        return self._extent

    def made_for(self, model: str) -> History:
        """Return the history as ``model`` goes on with it: another model's tokens mean nothing to it."""
        if self.made_by == model:
            return self
        if not self.made_by:
            return replace(self, made_by=model)
        return replace(self, tokens=b"", covered="", turns=_unspelled(self.turns), made_by=model)

    def appended(self, messages: tuple[ChatMessage, ...], *, room: Room) -> History:
        """Return the history with more messages; their tokens follow with the next turn.

        Raises:
            InferenceCenterError: See ``Room.check``.
        """
        extent = self.extent + Extent.of(messages)
        room.check(extent)
        return replace(self, messages=self.messages + messages, _extent=extent)

    def check_results(self, messages: tuple[ChatMessage, ...]) -> None:
        """Refuse results of calls that nobody has asked for, neither before nor in ``messages``.

        Raises:
            InferenceCenterError: ``invalid_request``.
        """
        results = [message.tool_call_id for message in messages if message.tool_call_id is not None]
        if not results:
            return
        unknown = dict.fromkeys(results)
        # Results mostly belong to the last calls.
        for message in chain(reversed(messages), reversed(self.messages)):
            for call in message.tool_calls or ():
                unknown.pop(call.call_id, None)
            if not unknown:
                return
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"tool_call_id is {next(iter(unknown))}, which is no call of this session",
            field="messages",
            hint="It is the call_id of one of the tool_calls of an answer.",
        )

    def after(self, turn_id: str, now: History, *, goes_on: bool) -> History:
        """Return the history with one turn more.

        Args:
            turn_id: The turn.
            now: What is held at its end, without turns: these messages and those of the turn.
            goes_on: Whether the tokens held now begin with those held before.
        """
        earlier = self.turns if goes_on else _unspelled(self.turns)
        mark = TurnMark(
            turn_id=turn_id,
            n_before=len(self.messages),
            n_messages=len(now.messages),
            n_tokens=now.n_tokens,
            n_chars=len(now.covered),
            view=now.view,
        )
        extent = self.extent + Extent.of(now.messages[len(self.messages) :])
        return replace(now, turns=(*earlier, mark), _extent=extent)

    def until(self, turn: str) -> History:
        """Return the history as it was when a turn ended, or before the first one for ``START``.

        Its tokens are the very ones of then, unless the conversation was rendered anew since; then it has none.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        if turn == START:
            n_messages = self.turns[0].n_before if self.turns else len(self.messages)
            return History(self.messages[:n_messages], made_by=self.made_by)
        for index in range(len(self.turns) - 1, -1, -1):
            mark = self.turns[index]
            if mark.turn_id == turn:
                return History(
                    self.messages[: mark.n_messages],
                    self.tokens[: mark.n_tokens * TOKEN_BYTES],
                    self.covered[: mark.n_chars],
                    mark.view,
                    self.turns[: index + 1],
                    self.made_by,
                )
        raise InferenceCenterError(
            ErrorCode.TURN_NOT_FOUND,
            "no turn of this session's history has this id",
            field="turn",
            hint=f"get_session lists them; {START} stands for the place before the first one.",
        )


def chars_of(message: ChatMessage) -> int:
    """Return the characters of a message, with what was thought and the calls of tools."""
    n_chars = len(message.content) + len(message.reasoning or "")
    return n_chars + sum(len(call.name) + len(call.arguments) for call in message.tool_calls or ())


def _too_long(what: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.CONTEXT_FULL, f"the session's history would hold {what}", hint="Open a new session."
    )


def _unspelled(turns: tuple[TurnMark, ...]) -> tuple[TurnMark, ...]:
    """Return the marks of turns whose tokens are no longer held."""
    return tuple(replace(turn, n_tokens=0, n_chars=0) if turn.n_chars else turn for turn in turns)
