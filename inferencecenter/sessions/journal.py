"""The port to durable storage: the records of sessions, and the journal that commits them before clients see them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.protocol.events import End
    from inferencecenter.protocol.values import ChatMessage, McpCallStatus, Preset, TranscriptTurn
    from inferencecenter.sessions.context import SessionConfig
    from inferencecenter.sessions.history import History, TurnFailure
    from inferencecenter.sessions.output_parsing.parts import Part
    from inferencecenter.sessions.turn import TurnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session was opened, as a fork of ``parent`` where set, with a history, turns, and ``notes`` by turn id."""

    config: SessionConfig
    history: History
    turns: tuple[TranscriptTurn, ...]
    last_used_at: float
    notes: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnQueued:
    """A turn was queued, or continues with a shifted context; ``seq`` is the number of the session's last event."""

    session_id: str
    seq: int
    last_used_at: float
    spec: TurnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAppended:
    """A turn generated packed ``tokens``, and ``text`` is about to be published, or the ``parts`` parsed from it.

    Without all of them the record only advances ``seq``, for an event such as a queue position. Plain text has no
    parts.
    """

    session_id: str
    seq: int
    turn_id: str
    tokens: bytes
    text: str
    parts: Sequence[Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """A turn ended and its history is committed. ``turn_key`` is the client's key for it, ``end`` its terminal event.

    Its tokens are charged to ``token_id``, except the ``prompt_tokens`` and ``cached_tokens`` recorded at the prefill
    and the ``completion_tokens`` recorded while it was running.
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

    def remaining_usage(self) -> UsageRecorded:
        """Return the usage that was not recorded before."""
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
    """A turn failed and leaves only its failure and the usage ``usage``."""

    session_id: str
    seq: int
    last_used_at: float
    turn_id: str
    failure: TurnFailure | None = None
    usage: UsageRecorded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryChanged:
    """The history changed without a turn: messages were appended or hidden, or it was ``rewound`` to a turn."""

    session_id: str
    seq: int
    last_used_at: float
    history: History
    turns: tuple[TranscriptTurn, ...]
    rewound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCallsChanged:
    """The tool calls that run on MCP servers, or whose outcome is unknown, changed to ``calls``."""

    session_id: str
    seq: int
    last_used_at: float
    calls: tuple[McpCallStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChanged:
    """A client replaced the metadata or the model; ``config`` contains it."""

    config: SessionConfig

    @property
    def session_id(self) -> str:
        return self.config.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetStored:
    """A client saved a preset, in place of that of the same type and name."""

    client_id: str
    preset: Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetRemoved:
    """A client deleted a preset."""

    client_id: str
    preset_type: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChanged:
    """Events of the session were lost; its event history continues under another ``epoch``."""

    session_id: str
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDeleted:
    """A session was closed, expired or purged; ``n_chars`` is its approximate size, where known."""

    session_id: str
    n_chars: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionArchived:
    """A session was unloaded from memory, with this size; it stays stored and is loaded when it is used."""

    session_id: str
    n_messages: int
    n_tokens: int
    n_chars: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShare:
    """A share without its messages; times are Unix seconds. ``secret_sha256`` is the hash of the link's secret."""

    share_id: str
    session_id: str
    client_id: str
    secret_sha256: bytes
    title: str
    created_at: float
    expires_at: float | None
    n_messages: int

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRecorded(StoredShare):
    """A client shared a snapshot of a session."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDeleted:
    """A client revoked a share, or it expired."""

    share_id: str
    client_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecorded:
    """Usage charged to a token at ``at`` (Unix seconds): for a prompt, part of an answer, or a turn."""

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
    | McpCallsChanged
    | ConfigChanged
    | PresetStored
    | PresetRemoved
    | EpochChanged
    | SessionDeleted
    | SessionArchived
    | ShareRecorded
    | ShareDeleted
    | UsageRecorded
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A turn that was queued or running when the daemon ended, with everything it had generated and published.

    ``parts`` is the published output where that is not plain ``text``.
    """

    spec: TurnSpec
    tokens: bytes
    text: str
    parts: Sequence[Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session in the store.

    ``ends`` are the terminal events of turns by their keys, latest last; ``notes`` are the private notes by turn id;
    ``failures`` are the failures by turn id. ``mcp_calls`` ran when the daemon ended, or were unknown before.
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
    mcp_calls: tuple[McpCallStatus, ...] = ()


MAX_PENDING: Final = 20_000
"""Records and held-back calls of one client; above this, further writes are refused."""
MAX_RESUMING: Final = 1000
"""Resumes of one client that may wait for the store; above this, another is refused."""
RETRY_SOON_MS: Final = 1000
"""Retry delay for a fault that may pass by itself."""
RETRY_LATER_MS: Final = 60_000
"""Retry delay for a fault that an operator must repair."""


@dataclass(frozen=True, slots=True)
class StorageFault:
    """Why sessions cannot be stored at the moment.

    ``message`` is sent to clients: it contains no path and no text of a library. ``retry_after_ms`` is the earliest
    useful retry.
    """

    message: str
    retry_after_ms: int = RETRY_SOON_MS


class Journal(Protocol):
    """Writes records and holds back deliveries until the commit. Called on the event loop; never blocks."""

    @property
    def fault(self) -> StorageFault | None:
        """Why nothing can be written at the moment; ``None`` if writes work."""

    @property
    def n_pending(self) -> int:
        """Number of pending records and held-back calls."""

    @property
    def n_skipped(self) -> int:
        """Records that were skipped because an internal error prevented writing them."""

    def is_incomplete(self, session_id: str) -> bool:
        """Return whether a record of this session was skipped."""

    def of_client(self, client_id: str) -> Journal:
        """Return the journal of one client; its records and calls are ordered and independent of other clients."""

    def write(self, record: Record, *, flush: bool) -> None:
        """Write a record after all earlier ones.

        With ``flush`` the record survives a power loss before the calls released after it run; without it, a crash of
        the process.
        """

    def release(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the event loop once everything written so far is committed, in the order of these calls.

        Called at once if nothing is pending. While the store cannot write, calls are held back.
        """


class NullJournal:
    """The journal of sessions that are not stored: writes nothing and holds back nothing."""

    fault: StorageFault | None = None
    n_pending: int = 0
    n_skipped: int = 0

    def is_incomplete(self, session_id: str) -> bool:
        """Return ``False``."""
        return False

    def of_client(self, client_id: str) -> Journal:
        """Return itself."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Discard the record."""

    def release(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at once."""
        callback()


def check_writable(journal: Journal) -> None:
    """Refuse a change while the store cannot write or too much of the client is pending.

    Raises:
        InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
    """
    if journal.fault is not None or journal.n_pending > MAX_PENDING:
        raise _refusal(journal)


class ResumeLimiter:
    """Counts the resumes held back by journals per client, since each holds its events and its socket in memory."""

    def __init__(self) -> None:
        self._n_held: Counter[str] = Counter()

    def check(self, journal: Journal, client_id: str) -> None:
        """Refuse a resume that would wait while too many of its client are waiting.

        Raises:
            InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
        """
        if journal.n_pending and self._n_held.get(client_id, 0) >= MAX_RESUMING:
            raise _refusal(journal)

    def add(self, journal: Journal, client_id: str) -> None:
        """Count a resume until the journal releases it."""
        self._n_held[client_id] += 1
        journal.release(partial(self._released, client_id))

    def _released(self, client_id: str) -> None:
        self._n_held[client_id] -= 1
        if not self._n_held[client_id]:
            del self._n_held[client_id]


def _refusal(journal: Journal) -> InferenceCenterError:
    if (fault := journal.fault) is not None:
        return InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            fault.message,
            hint="Try again after the operator has repaired it; a session opened with store false works meanwhile.",
            retry_after_ms=fault.retry_after_ms,
        )
    return InferenceCenterError(
        ErrorCode.OVERLOADED,
        "too many writes of this client wait for the store",
        hint="Try again later, with fewer requests at once.",
        retry_after_ms=RETRY_SOON_MS,
    )
