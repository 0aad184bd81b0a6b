"""One authenticated socket, shared by any number of sessions at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import websockets
from pydantic import Field, TypeAdapter, ValidationError
from websockets.asyncio.client import connect as open_socket
from websockets.typing import Subprotocol

from inferencecenter.client.session import ClientSession, expect
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL, TurnEvent
from inferencecenter.protocol.close import CLOSE_CODES
from inferencecenter.protocol.events import AnyEvent, AuthFailed, AuthSuccess, Error, Hello, SessionCreated
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.values import Mode, OnFull

R = TypeVar("R", bound="Request")

_EVENTS: Final[TypeAdapter[AnyEvent]] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="op")])
_MAX_FRAME_BYTES: Final = 2**26


class Client:
    """A connected client; ``connect`` makes one.

    Attributes:
        hello: What the daemon said when the socket opened.
        account: Who the daemon says this is.
    """

    hello: Hello
    account: AuthSuccess

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._mailboxes: dict[str, asyncio.Queue[Event | InferenceCenterError]] = {}
        self._lost: InferenceCenterError | None = None

    async def create_session(
        self,
        *,
        system: str | None = None,
        mode: Mode = "chat",
        params: dict[str, Any] | None = None,
        on_full: OnFull | None = None,
    ) -> ClientSession:
        """Open a session; without ``on_full`` the mode decides what happens when its context is full.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        created = await self.request(
            requests.CreateSession(op="create_session", system=system, mode=mode, params=params, on_full=on_full)
        )
        return ClientSession(self, expect(created, SessionCreated))

    async def refresh_hello(self) -> Hello:
        """Ask again who answers and whether it is ready.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        answer = await self.request(requests.Hello(op="hello", protocol=PROTOCOL_VERSION))
        self.hello = expect(answer, Hello)
        return self.hello

    async def request(self, request: Request) -> Event:
        """Send a request and return its direct reply.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = self.numbered(request)
        with self.mailbox(str(request.id)) as mailbox:
            await self.send(request)
            return await self.receive(mailbox)

    def numbered(self, request: R) -> R:
        """Return the request with an id of its own."""
        return request.model_copy(update={"id": f"c{next(self._ids)}"})

    async def send(self, request: Request) -> None:
        """Send a request without waiting for anything.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        if self._lost is not None:
            raise self._lost
        with contextlib.suppress(websockets.ConnectionClosed):  # the reader says why, to everyone who waits
            await self._socket.send(request.model_dump_json(exclude_none=True))

    @contextlib.contextmanager
    def mailbox(self, *keys: str) -> Iterator[asyncio.Queue[Event | InferenceCenterError]]:
        """Collect, while inside, the events that answer a frame or belong to a session named in ``keys``."""
        mailbox: asyncio.Queue[Event | InferenceCenterError] = asyncio.Queue()
        self._mailboxes |= dict.fromkeys(keys, mailbox)
        try:
            yield mailbox
        finally:
            for key in keys:
                self._mailboxes.pop(key, None)

    async def receive(self, mailbox: asyncio.Queue[Event | InferenceCenterError]) -> Event:
        """Return the next event of a mailbox.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        item = await mailbox.get()
        if isinstance(item, InferenceCenterError):
            raise item
        if isinstance(item, Error):
            raise _as_exception(item)
        return item

    async def authenticate(self, credential: requests.Auth) -> None:
        """Show a credential.

        Raises:
            InferenceCenterError: ``not_authenticated`` when it is refused, or ``daemon_unreachable``.
        """
        answer = await self.request(credential)
        if isinstance(answer, AuthFailed):
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED,
                f"the daemon refuses the credential: {answer.reason}",
                retry_after_ms=answer.retry_after_ms,
            )
        self.account = expect(answer, AuthSuccess)

    async def read_hello(self) -> None:
        """Take the greeting that opens every socket."""
        greeting = _parse(await self._socket.recv())
        if not isinstance(greeting, Hello):
            raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, "what answers there is no InferenceCenter")
        self.hello = greeting

    async def read(self) -> None:
        """Hand out events until the socket closes, then tell everyone who waits."""
        with contextlib.suppress(websockets.ConnectionClosed):
            async for text in self._socket:
                if (event := _parse(text)) is not None:
                    self._deliver(event)
        self._lost = _closed(self._socket.close_code, self._socket.close_reason)
        for mailbox in set(self._mailboxes.values()):
            mailbox.put_nowait(self._lost)

    def _deliver(self, event: Event) -> None:
        # By id first: a late refusal of an abort names the session too, but is not part of the turn that runs by now.
        mailbox = self._mailboxes.get(event.id) if event.id else None
        if mailbox is None and (isinstance(event, TurnEvent) or (isinstance(event, Error) and event.turn_id)):
            mailbox = self._mailboxes.get(str(event.session_id))
        if mailbox is not None:
            mailbox.put_nowait(event)


@contextlib.asynccontextmanager
async def connect(
    url: str,
    *,
    token: str | None = None,
    client_id: str | None = None,
    api_key: str | None = None,
    open_timeout_s: float = 10.0,
) -> AsyncIterator[Client]:
    """Open a socket and authenticate with a token, or with a client id and its API key.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(
                open_socket(
                    url, subprotocols=[Subprotocol(SUBPROTOCOL)], open_timeout=open_timeout_s, max_size=_MAX_FRAME_BYTES
                )
            )
            client = Client(socket)
            await client.read_hello()
        except (OSError, websockets.WebSocketException) as error:
            raise _unreachable(url, error) from error
        readers = TaskGroup("client")
        stack.push_async_callback(readers.cancel)
        readers.spawn(client.read(), name="reader")
        await client.authenticate(
            requests.Auth(op="auth", token=token, client_id=client_id, api_key=api_key, protocol=PROTOCOL_VERSION)
        )
        yield client


def _parse(text: str | bytes) -> Event | None:
    """An event, or ``None`` for an op or a shape that this version does not know."""
    try:
        return _EVENTS.validate_json(text)
    except ValidationError:
        return None


def _as_exception(event: Error) -> InferenceCenterError:
    code = ErrorCode(event.code) if event.code in set(ErrorCode) else ErrorCode.INTERNAL
    return InferenceCenterError(
        code, event.message, hint=event.hint, field=event.field, retry_after_ms=event.retry_after_ms
    )


def _unreachable(url: str, error: Exception) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.DAEMON_UNREACHABLE,
        f"no daemon answers at {url}: {str(error) or type(error).__name__}",
        hint="Start one with `inferencecenter serve`, or name another with --url.",
    )


def _closed(code: int | None, reason: str | None) -> InferenceCenterError:
    row = next((row for row in CLOSE_CODES if row.code == code), None)
    words = reason or (row.meaning if row else "without a reason")
    kind = ErrorCode.NOT_AUTHENTICATED if code == 4401 else ErrorCode.DAEMON_UNREACHABLE
    return InferenceCenterError(
        kind, f"the connection closed with {code}: {words}", hint=f"{row.client_should.capitalize()}." if row else None
    )
