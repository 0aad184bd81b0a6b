"""What is written down of sessions, and what comes back of it at the next start. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.events import End
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import TranscriptTurn
    from inferencecenter.sessions.facts import SessionFacts
    from inferencecenter.sessions.formats.parts import Part
    from inferencecenter.sessions.history import History, View
    from inferencecenter.sessions.ledger import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrder:
    """A turn that has not ended: all that it takes to run it, or what is left of it.

    ``warnings`` are about its parameters, ``rank`` is its class as the engine orders turns. ``submitted_at`` is Unix
    seconds. ``rendered_at`` is the local time that its template was told, in ISO 8601 with offset. ``model`` is the
    model that answers by its name, empty where that was not written down, and ``made_by`` by what its tokens mean.
    ``view`` is set once its prompt was made shorter: which messages are read since. ``token_id`` is the token that it
    counts for, empty for a client that shows a key. ``note`` is text of whoever asked, kept with the turn for itself.
    """

    turn_id: str
    request: Infer
    params: Params
    rank: int
    warnings: tuple[str, ...]
    submitted_at: float
    rendered_at: str
    model: str
    made_by: str
    view: View | None = None
    token_id: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session begins, as a fork of ``parent`` with a history, and turns with ``notes`` by their ids."""

    facts: SessionFacts
    history: History
    turns: tuple[TranscriptTurn, ...]
    last_used_at: float
    notes: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """A turn begins to wait, or goes on with a shorter prompt; ``seq`` is the number of the session's last event."""

    session_id: str
    seq: int
    last_used_at: float
    order: TurnOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn generated packed ``tokens``, and ``text`` is about to be shown, or those ``parts`` that it was read as.

    With none of them the session only told something that leaves no other trace, as a place in the queue. Answers that
    are plain text have no parts.
    """

    session_id: str
    seq: int
    turn_id: str
    tokens: bytes
    text: str
    parts: Sequence[Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A turn is over and its history holds. ``turn_key`` is the client's name for it, ``end`` what it was told.

    Its tokens count for ``token_id``, but for the ``prompt_tokens`` and ``cached_tokens`` that were counted when its
    prompt was read, and the ``completion_tokens`` that were counted while it was answered.
    """

    session_id: str
    client_id: str
    seq: int
    last_used_at: float
    history: History
    turn: TranscriptTurn
    turn_key: str | None
    end: End
    token_id: str = ""
    note: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def spent(self) -> Spent:
        """Return what it counts for beside what was counted before."""
        usage = self.turn.usage
        return Spent(
            client_id=self.client_id,
            token_id=self.token_id,
            at=self.last_used_at,
            prompt_tokens=max(0, usage.prompt_tokens - self.prompt_tokens),
            cached_tokens=max(0, usage.cached_tokens - self.cached_tokens),
            completion_tokens=max(0, usage.completion_tokens - self.completion_tokens),
            turns=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A turn failed and leaves nothing behind but why, and what it ``spent``."""

    session_id: str
    seq: int
    last_used_at: float
    turn_id: str
    failure: Failure | None = None
    spent: Spent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The history changed without a turn: appended to, or ``rewound`` to the first of its turns."""

    session_id: str
    seq: int
    last_used_at: float
    history: History
    turns: tuple[TranscriptTurn, ...]
    rewound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A session's client gave it other metadata; ``facts`` have it."""

    facts: SessionFacts

    @property
    def session_id(self) -> str:
        """The session."""
        return self.facts.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """The events of a session up to now are lost for good: its history of events has another ``epoch``."""

    session_id: str
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A session is closed, has expired or was purged; ``n_chars`` is about what it held, where that is known."""

    session_id: str
    n_chars: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What counts for a token, at ``at`` in Unix seconds: a prompt that was read, an answer, or a turn that is over."""

    client_id: str
    token_id: str
    at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    turns: int = 0


Record: TypeAlias = Opened | Ordered | Said | Ended | Dropped | Changed | Described | Renamed | Gone | Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A turn that was running or waiting when the daemon ended, with all it had generated and shown.

    ``parts`` are what was shown where that is not its ``text``.
    """

    order: TurnOrder
    tokens: bytes
    text: str
    parts: Sequence[Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A session as it was written down.

    ``ends`` are the ends of turns by their keys, the latest last, ``notes`` what was noted of turns by their ids, and
    ``failures`` why others failed of which something was noted.
    """

    facts: SessionFacts
    seq: int
    last_used_at: float
    history: History
    turns: tuple[TranscriptTurn, ...]
    ends: Mapping[str, End]
    unfinished: Unfinished | None
    notes: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
