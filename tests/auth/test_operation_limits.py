"""Rate limits of operations other than turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.rate_limits import FRAME_UNIT_CHARS, UNIT_CHARS, OperationRateLimiter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import Frame
from tests.server.harness import ask, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.protocol.base import Request
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


class Clock:
    """Seconds that a test advances."""

    now = 5.0

    def __call__(self) -> float:
        """Return them."""
        return self.now


def test_operations_refill_evenly() -> None:
    """A minute's worth may be used at once; then each is refilled after its share of the minute."""
    clock = Clock()
    rates = OperationRateLimiter(60, monotonic=clock)
    for _ in range(60):
        rates.charge("ada")
    for client in ("eve", "bob"):
        rates.charge(client)
    with pytest.raises(InferenceCenterError) as caught:
        rates.charge("ada")
    assert (caught.value.code, caught.value.retry_after_ms) == (ErrorCode.RATE_LIMITED, 1000)
    clock.now += 1
    rates.charge("ada")
    with pytest.raises(InferenceCenterError):
        rates.charge("ada")


def test_long_sessions_cost_more() -> None:
    """A session of 16 MiB costs 257 operations, which may be overdrawn."""
    clock = Clock()
    rates = OperationRateLimiter(60, monotonic=clock)
    rates.charge("ada", n_chars=256 * UNIT_CHARS)
    with pytest.raises(InferenceCenterError) as caught:
        rates.charge("ada")
    assert caught.value.retry_after_ms == (257 - 60 + 1) * 1000


def test_long_frames_cost_more() -> None:
    """The cost depends on their characters; a refused frame counts only while operations are left."""
    clock = Clock()
    rates = OperationRateLimiter(60, monotonic=clock)
    rates.charge("ada", n_frame_chars=58 * FRAME_UNIT_CHARS)
    rates.count("ada", n_frame_chars=FRAME_UNIT_CHARS)
    for _ in range(100):
        rates.count("ada", n_frame_chars=FRAME_UNIT_CHARS)
    with pytest.raises(InferenceCenterError) as caught:
        rates.charge("ada")
    assert caught.value.retry_after_ms == 2000


def test_idle_clients_are_evicted() -> None:
    """The number of clients is unbounded; those that are overdrawn stay."""
    clock = Clock()
    rates = OperationRateLimiter(60, monotonic=clock)
    for n in range(20_000):
        clock.now += 0.1
        rates.charge(f"client-{n}")
        assert len(rates) <= 2000


async def test_operations_beyond_the_rate_are_refused(serve: Serve) -> None:
    """All sockets of the client count; turns and aborts continue, and other clients are unaffected."""
    async with serve(operations_per_minute=5) as server, server.v1() as one, server.v1() as other:
        for socket in (one, other):
            await receive(socket)
        session_id = (await ask(one, op="create_session"))["session_id"]
        for n in range(4):
            await ask((one, other)[n % 2], op="ping")
        for op in ("ping", "get_session", "fork_session", "resume_session", "set_metadata"):
            fields = {"session_id": session_id} if op != "ping" else {}
            refused = await ask(other, op=op, **fields, **({"metadata": {}} if op == "set_metadata" else {}))
            assert (refused["op"], refused["code"]) == ("error", "rate_limited"), op
            assert refused["retry_after_ms"] > 0
            assert refused.get("session_id") == fields.get("session_id")
        queued = await ask(one, op="infer", session_id=session_id, prompt="hi")
        assert queued["op"] == "queued"
        assert (await ask(one, op="abort", session_id=session_id))["op"] == "end"


async def test_excess_frames_are_refused_before_validation(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost depends on op and size; the answer has the frame's id."""
    parsed: list[str] = []
    parse = Frame.parse

    def noting(frame: Frame) -> Request:
        parsed.append(frame.op)
        return parse(frame)

    monkeypatch.setattr(Frame, "parse", noting)
    messages = [{"role": "user", "content": "x" * FRAME_UNIT_CHARS}] * 5
    async with serve(operations_per_minute=5) as server, server.v1() as socket:
        await receive(socket)
        session_id = (await ask(socket, op="create_session"))["session_id"]
        first = await ask(socket, op="append", session_id=session_id, messages=messages, id="first")
        assert (first["op"], first["id"]) == ("appended", "first")
        for op in ("append", "create_session", "nonsense"):
            refused = await ask(socket, op=op, messages=messages, id="second")
            assert (refused["code"], refused["id"]) == ("rate_limited", "second")
    assert parsed == ["create_session", "append"]


@pytest.mark.parametrize(
    "frame",
    ['{"op": "infer", "session_id": "gone", "prompt": "hi"}', '{"op": "abort", "session_id": "gone"}', "{", "[1]"],
)
async def test_refused_frames_count_as_operations(serve: Serve, frame: str) -> None:
    """Frames that are free when accepted, and invalid ones, count as well."""
    async with serve(operations_per_minute=5) as server, server.v1() as socket:
        await receive(socket)
        for _ in range(5):
            await socket.send(frame)
            assert (await receive(socket))["code"] in ("session_not_found", "invalid_json")
        assert (await ask(socket, op="ping"))["code"] == "rate_limited"


async def test_legacy_socket_receives_the_rate_limit_error(serve: Serve) -> None:
    """A failed session creation has its own op in the first protocol."""
    async with serve(operations_per_minute=1) as server, server.connect() as socket:
        await receive(socket)
        await ask(socket, op="auth", client_id="kitchen", api_key="kitchen-key")
        await ask(socket, op="hello")
        assert (await ask(socket, op="create_session"))["op"] == "session_error"
