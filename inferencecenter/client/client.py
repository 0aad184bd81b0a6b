"""An authenticated client that multiplexes sessions over one connection and reconnects when its socket is lost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from array import array
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Unpack

from inferencecenter.client.connection import DaemonConnection, expect
from inferencecenter.client.errors import RequestError, failure, new_request
from inferencecenter.client.options import Address, ClientOptions, request_fields, retry_options, socket_url, unix_path
from inferencecenter.client.retry import BackoffPolicy, Timing
from inferencecenter.client.session import ClientSession
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION
from inferencecenter.protocol.events import (
    AuthSuccess,
    DocumentScores,
    Embeddings,
    Hello,
    McpTools,
    Metrics,
    Models,
    ModelUnloaded,
    PresetDeleted,
    Presets,
    PresetSaved,
    SessionCreated,
    SessionResumed,
    Sessions,
    SessionsFound,
    ShareCreated,
    ShareRevoked,
    Shares,
    Swap,
    UsageReport,
)
from inferencecenter.protocol.requests import MAX_EMBEDDED_TEXTS
from inferencecenter.protocol.values import DocumentScore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from inferencecenter.client.options import SessionOptions
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.values import (
        McpServer,
        MessageImage,
        ModelSummary,
        Preset,
        PresetType,
        Priority,
        SessionSummary,
        SessionUsage,
        Share,
    )

_PAGE_SESSIONS: Final = 1000
_DRAIN_S: Final = 1.0
"""Seconds that ``close`` waits for abandoned turns to end."""


@dataclass(frozen=True, slots=True)
class TextEmbeddings:
    """Embedding vectors, normalized to length 1, with their model and the number of tokens of the texts."""

    model: str
    vectors: tuple[list[float], ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class RankedDocuments:
    """Documents with their scores, best first, with the model and the number of tokens processed."""

    model: str
    results: tuple[DocumentScore, ...]
    n_tokens: int


def _floats(packed: str) -> list[float]:
    floats = array("f", b64decode(packed))
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tolist()


class Client:
    """A connection to one daemon, open inside ``async with``, or from ``open`` to ``close``.

    When the socket is lost, the client reconnects and restores every session.

    Args:
        url: Address of the daemon: ``ws://`` or ``wss://``, the ``http://`` address of the web page, or ``unix://`` and
            the path of its Unix socket.
        token: Bearer token; not needed on the Unix socket for users that ``auth.unix_users`` lists.
        options: See ``ClientOptions``.

    Raises:
        RequestError: Neither a token nor a client id with its API key is given, or both are, or the URL is invalid.
    """

    def __init__(self, url: str, token: str | None = None, **options: Unpack[ClientOptions]) -> None:
        if unknown := options.keys() - ClientOptions.__annotations__:
            raise TypeError(f"a client has no option {min(unknown)}")
        credential = new_request(
            requests.Auth,
            token=token,
            client_id=options.get("client_id"),
            api_key=options.get("api_key"),
            protocol=PROTOCOL_VERSION,
        )
        address = socket_url(url)
        if not credential.has_credential and unix_path(address) is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, requests.ONE_CREDENTIAL)
        self._address = Address(
            url=address,
            credential=credential,
            tls=options.get("tls"),
            open_timeout_s=options.get("open_timeout_s", 10.0),
            keepalive_s=options.get("keepalive_s", 20.0),
        )
        self._options = options
        self._opened: DaemonConnection | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address.url} {self._opened}>"

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open a socket and authenticate.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, ``forbidden`` or ``rate_limited``.
        """
        options = self._options
        policy = BackoffPolicy(give_up_after_s=options.get("give_up_after_s", 300.0))
        connection = DaemonConnection(
            self._address,
            policy=policy if options.get("reconnect", True) else None,
            on_notice=options.get("on_notice"),
            timing=options.get("timing", Timing()),
            retries=options.get("retries", 0),
        )
        await connection.open()
        self._opened = connection

    async def close(self) -> None:
        """Close the socket. Sessions and their turns continue on the daemon; abandoned turns are aborted first."""
        if self._opened is not None:
            await self._opened.wait_drained(timeout_s=_DRAIN_S)
            await self._opened.close()

    @property
    def _connection(self) -> DaemonConnection:
        if self._opened is None:
            raise failure(ErrorCode.DAEMON_UNREACHABLE, "the client is not open", hint="Use it inside `async with`.")
        return self._opened

    @property
    def hello(self) -> Hello:
        """The daemon's ``hello`` of the latest connection or ``refresh_hello``."""
        return self._connection.hello

    @property
    def account(self) -> AuthSuccess:
        """The authenticated account."""
        return self._connection.account

    @property
    def connected(self) -> bool:
        """Whether the socket is open and every session is restored."""
        return self._connection.connected

    @property
    def ended(self) -> InferenceCenterError | None:
        """Why the connection ended for good; ``None`` while it has not."""
        return self._connection.ended

    async def add_image(self, file: str | Path | bytes) -> MessageImage:
        """Upload an image that is too large for a frame; the option ``images`` of a turn takes the result.

        Args:
            file: The path of the file, or its content.

        Raises:
            InferenceCenterError: ``invalid_request``, also without a token; ``quota_exceeded``, ``message_too_large``
                or ``daemon_unreachable``.
        """
        if self._address.credential.client_id is not None:
            raise failure(ErrorCode.INVALID_REQUEST, "uploads need a token, and this client has an API key")
        from inferencecenter.client.transport import upload_image  # noqa: PLC0415 - see its head

        return await asyncio.to_thread(upload_image, self._address, file)

    @contextlib.asynccontextmanager
    async def session(self, **options: Unpack[SessionOptions]) -> AsyncIterator[ClientSession]:
        """Open a session that is closed when the block exits; ``create_session`` opens one that stays.

        Args:
            options: See ``SessionOptions``.

        Raises:
            InferenceCenterError: See ``create_session``.
        """
        session = await self.create_session(**options)
        try:
            yield session
        except BaseException:
            await session.leave(failed=True)
            raise
        await session.leave(failed=False)

    async def create_session(self, **options: Unpack[SessionOptions]) -> ClientSession:
        """Open a session, waiting for its model to load if necessary.

        Args:
            options: See ``SessionOptions``.

        Raises:
            InferenceCenterError: The daemon's refusal, ``model_loading`` when loading exceeds its timeout, or
                ``daemon_unreachable``.
        """
        create = new_request(requests.CreateSession, **request_fields(options))
        retry = self._connection.retry_policy(**retry_options(options))
        created = await retry.run(lambda: self._connection.request(create))
        return ClientSession.opened(self._connection, expect(created, SessionCreated))

    async def resume(self, session_id: str) -> tuple[ClientSession, SessionResumed]:
        """Resume a session; another connection that has it attached loses it.

        Returns:
            The session, whose ``follow`` yields the running turn, and the session's history.

        Raises:
            InferenceCenterError: ``session_not_found``, or ``daemon_unreachable``.
        """
        await self._connection.wait_connected()
        session = self._connection.sessions.get(session_id) or ClientSession(self._connection, session_id, epoch=None)
        self._connection.attach(session)
        session.attach()
        try:
            answer = await self._connection.request_unchecked(
                requests.ResumeSession(op="resume_session", session_id=session_id)
            )
        except InferenceCenterError:
            self._connection.detach(session)
            raise
        return session, expect(answer, SessionResumed)

    async def sessions(self, *, order: Literal["oldest", "recent"] = "oldest") -> tuple[SessionSummary, ...]:
        """Return all sessions of this client, live and archived, on any connection.

        Args:
            order: ``oldest`` by creation, oldest first, or ``recent`` by last use, latest first.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        found: list[SessionSummary] = []
        after: str | None = None
        while True:
            request = requests.ListSessions(op="list_sessions", limit=_PAGE_SESSIONS, after=after, order=order)
            page = expect(await self.request(request), Sessions)
            found += page.sessions
            if (after := page.next) is None:
                return tuple(found)

    async def session_usage(self) -> SessionUsage | None:
        """Return this client's use of its session limits; ``None`` from a daemon before version 0.2.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        return expect(await self.request(requests.ListSessions(op="list_sessions", limit=1)), Sessions).session_usage

    async def search_sessions(self, query: str, *, limit: int = 20, after: str | None = None) -> SessionsFound:
        """Search titles and messages of this client's stored sessions, most recently used first.

        Args:
            query: Words and "phrases", all of which must occur in a session; the last word also matches as a prefix.
            limit: Number of results, up to 50.
            after: ``next`` of the previous page.

        Raises:
            InferenceCenterError: ``invalid_request``, ``unknown_op`` if the daemon has no search, ``rate_limited``,
                ``storage_unavailable`` or ``daemon_unreachable``.
        """
        request = new_request(requests.SearchSessions, query=query, limit=limit, after=after)
        return expect(await self.request(request), SessionsFound)

    async def create_share(self, session_id: str, *, expires_in_s: int | None = None) -> ShareCreated:
        """Share a snapshot of a session by a link, which any account of the daemon can open.

        Args:
            session_id: A stored session of this client.
            expires_in_s: Lifetime of the link in seconds; ``None`` if it does not expire.

        Returns:
            The share and its secret, which cannot be read again. The link is the address of the web page with
            ``#/s/SHARE_ID/SHARE_TOKEN``.

        Raises:
            InferenceCenterError: ``forbidden`` if the operator does not allow it, ``session_not_found``,
                ``invalid_request``, ``quota_exceeded``, ``storage_unavailable`` or ``daemon_unreachable``.
        """
        request = new_request(requests.CreateShare, session_id=session_id, expires_in_s=expires_in_s)
        return expect(await self.request(request), ShareCreated)

    async def shares(self) -> tuple[Share, ...]:
        """Return this client's share links, oldest first.

        Raises:
            InferenceCenterError: ``storage_unavailable`` or ``daemon_unreachable``.
        """
        return expect(await self.request(requests.ListShares(op="list_shares")), Shares).shares

    async def revoke_share(self, share_id: str) -> None:
        """Revoke a share link.

        Raises:
            InferenceCenterError: ``share_not_found``, ``storage_unavailable`` or ``daemon_unreachable``.
        """
        expect(await self.request(requests.RevokeShare(op="revoke_share", share_id=share_id)), ShareRevoked)

    async def mcp_servers(self, server: str | None = None) -> tuple[McpServer, ...]:
        """Return the MCP servers that the client may use, with their tools; see ``ClientSession.call_mcp_tool``.

        Args:
            server: Return only this server.

        Raises:
            InferenceCenterError: ``invalid_request``, ``queue_full`` or ``daemon_unreachable``.
        """
        request = new_request(requests.ListMcpTools, server=server)
        return expect(await self.request(request), McpTools).mcp_servers

    async def usage(self, *, days: int = 30, client_id: str | None = None) -> UsageReport:
        """Return the usage by day and the remaining quota.

        Args:
            days: Number of days, including today; days begin at midnight UTC.
            client_id: The account; the accounts of others need the operator scope.

        Raises:
            InferenceCenterError: ``forbidden`` or ``daemon_unreachable``.
        """
        return expect(await self.request(new_request(requests.Usage, days=days, client_id=client_id)), UsageReport)

    async def metrics(self, interval_s: float = 1.0) -> AsyncIterator[Metrics]:
        """Yield samples of GPU, engine and load metrics periodically; waits while the connection is lost.

        Args:
            interval_s: Seconds between samples.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        while True:
            yield expect(await self.request(requests.Metrics(op="metrics")), Metrics)
            await self._connection.timing.sleep(interval_s)

    async def embed(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        priority: Priority | None = None,
    ) -> TextEmbeddings:
        """Return the embedding vectors of texts, in the same order; many texts are split into several requests.

        Args:
            texts: Any number of texts, none of them empty.
            model: An embedding model; may be absent if there is one.
            dimensions: Number of dimensions, if the model allows fewer than its own.
            priority: Priority class; raising it needs the scope ``priority``.

        Raises:
            InferenceCenterError: ``invalid_request``, ``prompt_too_long``, another refusal of the daemon, or
                ``daemon_unreachable``.
        """
        vectors: list[list[float]] = []
        found, n_tokens = model or "", 0
        for start in range(0, len(texts), MAX_EMBEDDED_TEXTS):
            part = list(texts[start : start + MAX_EMBEDDED_TEXTS])
            request = new_request(
                requests.EmbedTexts, texts=part, model=model, dimensions=dimensions, priority=priority
            )
            answer = expect(await self.request(request), Embeddings)
            vectors += map(_floats, answer.vectors)
            found, n_tokens = answer.model, n_tokens + answer.prompt_tokens
        return TextEmbeddings(found, tuple(vectors), n_tokens)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        priority: Priority | None = None,
    ) -> RankedDocuments:
        """Score documents by relevance to a query, and return them best first; many are split into requests.

        Args:
            query: The query that the documents are scored for.
            documents: Any number of documents, none of them empty.
            model: A reranking model; may be absent if there is one.
            top_n: How many of the best documents to return.
            priority: Priority class; raising it needs the scope ``priority``.

        Raises:
            InferenceCenterError: ``invalid_request``, ``prompt_too_long``, another refusal of the daemon, or
                ``daemon_unreachable``.
        """
        scores: list[DocumentScore] = []
        found, n_tokens = model or "", 0
        for start in range(0, len(documents), MAX_EMBEDDED_TEXTS):
            part = list(documents[start : start + MAX_EMBEDDED_TEXTS])
            request = new_request(
                requests.RerankDocuments, query=query, documents=part, model=model, top_n=top_n, priority=priority
            )
            answer = expect(await self.request(request), DocumentScores)
            scores += [each.model_copy(update={"index": start + each.index}) for each in answer.results]
            found, n_tokens = answer.model, n_tokens + answer.prompt_tokens
        scores.sort(key=lambda each: -each.relevance_score)
        return RankedDocuments(found, tuple(scores[:top_n]), n_tokens)

    async def presets(self) -> Presets:
        """Return the client's presets: named conversation settings and prompts.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        return expect(await self.request(requests.ListPresets(op="list_presets")), Presets)

    async def save_preset(self, preset: Preset) -> None:
        """Save a preset, replacing the one with its type and name.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        expect(await self.request(requests.SavePreset(op="save_preset", preset=preset)), PresetSaved)

    async def delete_preset(self, preset_type: PresetType, name: str) -> None:
        """Delete a preset.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = new_request(requests.DeletePreset, preset_type=preset_type, name=name)
        expect(await self.request(request), PresetDeleted)

    async def models(self) -> tuple[ModelSummary, ...]:
        """Return the models available to this client, sorted by name.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        return expect(await self.request(requests.ListModels(op="list_models")), Models).models

    async def load_model(self, name: str, *, on_progress: Callable[[Swap], None] | None = None) -> None:
        """Load a model and make it the default for sessions that name none; return when it is loaded.

        Args:
            name: A name listed by ``models``.
            on_progress: Called with each progress event.

        Raises:
            InferenceCenterError: ``forbidden``, ``model_not_found``, ``model_loading`` while another model is being
                loaded, ``engine_unavailable`` with the reason when loading fails, which changes nothing, or
                ``daemon_unreachable``.
        """

        def is_interim(event: Event) -> bool:
            if not isinstance(event, Swap) or event.phase in ("done", "failed"):
                return False
            if on_progress is not None:
                on_progress(event)
            return True

        load = requests.LoadModel(op="load_model", name=name)
        ended = expect(await self._connection.request(load, is_interim=is_interim), Swap)
        if ended.phase == "failed":
            raise failure(ErrorCode.ENGINE_UNAVAILABLE, f"{name} cannot be loaded: {ended.detail}")

    async def unload_model(self, name: str) -> None:
        """Free a model's memory once its turns have ended; the next turn that needs it loads it again.

        Raises:
            InferenceCenterError: ``forbidden``, ``model_not_found`` or ``daemon_unreachable``.
        """
        expect(await self.request(requests.UnloadModel(op="unload_model", name=name)), ModelUnloaded)

    async def refresh_hello(self) -> Hello:
        """Request ``hello`` again: the daemon's identity and readiness.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        answer = await self.request(requests.Hello(op="hello", protocol=PROTOCOL_VERSION))
        self._connection.hello = expect(answer, Hello)
        return self._connection.hello

    async def request(self, request: Request) -> Event:
        """Send a request and return its direct reply; waits while the connection is lost.

        A read, or a request that closes a session, is sent again if its reply is lost with the socket. The outcome of
        any other request is then unknown, and ``daemon_unreachable`` is raised.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        return await self._connection.request(request)
