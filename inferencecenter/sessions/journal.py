"""The port to durable storage: the records of sessions, and the journal that writes them before clients see them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.protocol.events import End
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import TranscriptTurn
    from inferencecenter.sessions.history import History, HistoryView, TurnFailure
    from inferencecenter.sessions.output_parsing.parts import Part
    from inferencecenter.sessions.session_config import SessionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """A turn that has not ended: all that it takes to run it, or what is left of it.

    ``warnings`` are about its parameters, ``rank`` is its class as the engine orders turns. ``submitted_at`` is Unix
    seconds. ``rendered_at`` is the local time that its template was told, in ISO 8601 with offset. ``model`` is the
    model that answers by its name, empty where that was not written down, and ``model_fingerprint`` by what its tokens
    mean. ``view`` is set once its prompt was made shorter: which messages are read since. ``token_id`` is the token
    that it counts for, empty for a client that shows a key. ``note`` is text of whoever asked, kept with the turn for
    itself.
    """

    turn_id: str
    request: Infer
    params: Params
    rank: int
    warnings: tuple[str, ...]
    submitted_at: float
    rendered_at: str
    model: str
    model_fingerprint: str
    view: HistoryView | None = None
    token_id: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session begins, as a fork of ``parent`` with a history, and turns with ``notes`` by their ids."""

    config: SessionConfig
    history: History
    turns: tuple[TranscriptTurn, ...]
    last_used_at: float
    notes: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnQueued:
    """A turn begins to wait, or goes on with a shorter prompt; ``seq`` is the number of the session's last event."""

    session_id: str
    seq: int
    last_used_at: float
    spec: TurnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAppended:
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
class TurnEnded:
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

    def spent(self) -> UsageRecorded:
        """Return what it counts for beside what was counted before."""
        usage = self.turn.usage
        return UsageRecorded(
            client_id=self.client_id,
            token_id=self.token_id,
            at=self.last_used_at,
            prompt_tokens=max(0, usage.prompt_tokens - self.prompt_tokens),
            cached_tokens=max(0, usage.cached_tokens - self.cached_tokens),
            completion_tokens=max(0, usage.completion_tokens - self.completion_tokens),
            turns=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFailed:
    """A turn failed and leaves nothing behind but why, and what it ``spent``."""

    session_id: str
    seq: int
    last_used_at: float
    turn_id: str
    failure: TurnFailure | None = None
    spent: UsageRecorded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryChanged:
    """The history changed without a turn: appended to, or ``rewound`` to the first of its turns."""

    session_id: str
    seq: int
    last_used_at: float
    history: History
    turns: tuple[TranscriptTurn, ...]
    rewound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataChanged:
    """A session's client gave it other metadata; ``config`` have it."""

    config: SessionConfig

    @property
    def session_id(self) -> str:
        """The session."""
        return self.config.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChanged:
    """The events of a session up to now are lost for good: its history of events has another ``epoch``."""

    session_id: str
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDeleted:
    """A session is closed, has expired or was purged; ``n_chars`` is about what it held, where that is known."""

    session_id: str
    n_chars: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecorded:
    """What counts for a token, at ``at`` in Unix seconds: a prompt that was read, an answer, or a turn that is over."""

    client_id: str
    token_id: str
    at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    turns: int = 0


Record: TypeAlias = (
    SessionOpened
    | TurnQueued
    | TokensAppended
    | TurnEnded
    | TurnFailed
    | HistoryChanged
    | MetadataChanged
    | EpochChanged
    | SessionDeleted
    | UsageRecorded
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A turn that was running or waiting when the daemon ended, with all it had generated and shown.

    ``parts`` are what was shown where that is not its ``text``.
    """

    spec: TurnSpec
    tokens: bytes
    text: str
    parts: Sequence[Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as it was written down.

    ``ends`` are the ends of turns by their keys, the latest last, ``notes`` what was noted of turns by their ids, and
    ``failures`` why others failed of which something was noted.
    """

    config: SessionConfig
    seq: int
    last_used_at: float
    history: History
    turns: tuple[TranscriptTurn, ...]
    ends: Mapping[str, End]
    pending_turn: PendingTurn | None
    notes: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, TurnFailure] = field(default_factory=dict)


MAX_PENDING: Final = 20_000
"""Records and calls of one client that may wait before what would bring more is refused."""
MAX_RESUMING: Final = 1000
"""Resumes of one client that may wait for the store before another is refused."""
RETRY_SOON_MS: Final = 1000
"""When to try again where a fault may pass by itself."""
RETRY_LATER_MS: Final = 60_000
"""When to try again where an operator has to act first."""


@dataclass(frozen=True, slots=True)
class StorageFault:
    """Why sessions cannot be written at the moment.

    ``message`` is told to clients: it has no path and quotes no library. ``retry_after_ms`` is the earliest useful
    retry.
    """

    message: str
    retry_after_ms: int = RETRY_SOON_MS


class Journal(Protocol):
    """Takes records, and holds back what clients are told until they are safe. On the event loop; never blocks."""

    @property
    def fault(self) -> StorageFault | None:
        """Why nothing can be written at the moment; ``None`` when all is well."""

    @property
    def n_pending(self) -> int:
        """How many records and calls wait."""

    @property
    def n_set_aside(self) -> int:
        """Records that could not be written because of a defect, and were left out."""

    def lacks(self, session_id: str) -> bool:
        """Tell whether a record of this session was left out."""

    def of_client(self, client_id: str) -> Journal:
        """Return the journal of one client, whose records and calls keep their order and wait for no other client's."""

    def write(self, record: Record, *, flush: bool) -> None:
        """Have a record written, after all earlier ones.

        With ``flush`` it survives a power cut once what is released after it goes out, without it the end of the
        process.
        """

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` on the event loop once everything written so far is safe, in the order of these calls.

        At once when there is nothing to wait for. While the store cannot write, what is held back waits for it.
        """


class NullJournal:
    """The journal of a daemon that keeps no sessions: nothing is written and nothing waits."""

    fault: StorageFault | None = None
    n_pending: int = 0
    n_set_aside: int = 0

    def lacks(self, session_id: str) -> bool:
        """Nothing is left out where nothing is written."""
        return False

    def of_client(self, client_id: str) -> Journal:
        """Return itself."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Forget the record."""

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at once."""
        tell()


def check_writable(journal: Journal) -> None:
    """Refuse what would have to be written down while nothing can be, or while its client has too much waiting.

    Raises:
        InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
    """
    if journal.fault is not None or journal.n_pending > MAX_PENDING:
        raise _refusal(journal)


class Resuming:
    """Counts the resumes that journals hold back, by client: each keeps what it is to tell, and its socket."""

    def __init__(self) -> None:
        self._n_held: Counter[str] = Counter()

    def check(self, journal: Journal, client_id: str) -> None:
        """Refuse a resume that would have to wait while too many of its client do.

        Raises:
            InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
        """
        if journal.n_pending and self._n_held.get(client_id, 0) >= MAX_RESUMING:
            raise _refusal(journal)

    def begun(self, journal: Journal, client_id: str) -> None:
        """Take note of a resume, which waits until the journal releases it."""
        self._n_held[client_id] += 1
        journal.release(partial(self._told, client_id))

    def _told(self, client_id: str) -> None:
        self._n_held[client_id] -= 1
        if not self._n_held[client_id]:
            del self._n_held[client_id]


def _refusal(journal: Journal) -> InferenceCenterError:
    """Return why no more is taken that has to be written down, or told once something is."""
    if (fault := journal.fault) is not None:
        return InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            fault.message,
            hint="Try again when the operator has mended it; a session opened with store false works meanwhile.",
            retry_after_ms=fault.retry_after_ms,
        )
    return InferenceCenterError(
        ErrorCode.OVERLOADED,
        "the store is behind with what this client has asked for",
        hint="Ask again later, and for less at once.",
        retry_after_ms=RETRY_SOON_MS,
    )
