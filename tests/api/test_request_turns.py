"""Turns of a request: coalescing for slow readers, cancellation and keepalive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.api.request_context import Caller, ClientDisconnectedError, RequestContext
from inferencecenter.api.request_turns import MOST_SEPARATE, NullSink, RequestTurns
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.requests import CreateSession, Infer
from inferencecenter.protocol.values import TokenLogprobs
from tests.server.harness import KITCHEN, StubEngine, stub_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.http import HttpConnection

SESSION = "s_1"


def token(text: str, *, seq: int = 1, logprobs: bool = False) -> events.Token:
    """Return a token event."""
    probs = (TokenLogprobs(token=text, token_id=1, logprob=-0.5, top=()),) if logprobs else None
    return events.Token(session_id=SESSION, seq=seq, turn_id="t_1", content=text, logprobs=probs)


def tool_call_delta(text: str, *, index: int = 0, name: str | None = None) -> events.ToolCall:
    """Return a tool call delta."""
    return events.ToolCall(
        session_id=SESSION, seq=1, turn_id="t_1", index=index, call_id=f"c{index}", name=name, arguments=text
    )


def reasoning_token(text: str) -> events.Reasoning:
    """Return a reasoning token event."""
    return events.Reasoning(session_id=SESSION, seq=1, turn_id="t_1", content=text)


class FakeConnection:
    """A connection that keeps what is written, while ``takes_chunks``."""

    def __init__(self) -> None:
        self.takes_chunks = True
        self.written: list[bytes] = []

    def write_chunk(self, data: bytes) -> bool:
        """Keep the data."""
        assert self.takes_chunks
        self.written.append(data)
        return True


def request_of_kitchen(connection: FakeConnection | None = None) -> RequestContext:
    """Return a request context of the client kitchen."""
    caller = Caller(account=KITCHEN, address="127.0.0.1", traceparent=None)
    return RequestContext(caller, cast("HttpConnection | None", connection))


def start_turn(context: ServerContext, turns: RequestTurns) -> str:
    """Start a turn in a new session and return its id."""
    sessions, client = context.sessions, KITCHEN
    created = sessions.create(client, CreateSession(op="create_session"), NullSink(), stateless=True)
    turns.begin(Infer(op="infer", session_id=created.session_id, prompt="Hi"))
    return list(_engine(context).turns)[-1]


def stream() -> RequestTurns:
    """Return the turns of a request; a test puts events into their queue."""
    return RequestTurns(stub_context(), request_of_kitchen())


def _engine(context: ServerContext) -> StubEngine:
    return cast("StubEngine", context.models)


async def next_batch(turns: RequestTurns) -> list[tuple[int, Any]]:
    """Return the next events."""
    return await anext(aiter(turns.batches()))


async def test_fast_reader_receives_every_token() -> None:
    """Tokens are passed one by one and end with the turn."""
    context = stub_context()
    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        for text in "abc":
            _engine(context).say(turn, text)
        _engine(context).finish(turn)
        batches = [batch async for batch in turns.batches()]
    groups = [event for _, event in batches[0]]
    assert [type(event).__name__ for event in groups] == ["Queued", "Token", "Token", "Token", "End"]
    assert "".join(event.content for event in groups if isinstance(event, events.Token)) == "abc"
    assert len(batches) == 1


_TEXTS = st.lists(
    st.one_of(
        st.builds(token, st.text(max_size=3), logprobs=st.booleans()),
        st.builds(reasoning_token, st.text(max_size=3)),
        st.builds(
            tool_call_delta, st.text(max_size=3), index=st.integers(0, 1), name=st.sampled_from([None, None, "f"])
        ),
    ),
    max_size=150,
)


@given(groups=st.lists(st.tuples(st.integers(0, 1), _TEXTS), max_size=4))
def test_coalesced_text_is_equal(groups: list[tuple[int, list[Any]]]) -> None:
    """The text of each turn and kind stays whole and in order, and so do logprobs."""
    turns = stream()
    given_events = [(index, event) for index, group in groups for event in group]
    for index, event in given_events:
        turns._queue.put_event(index, event)
    taken = turns._queue.pop_all()
    assert _spelled(taken) == _spelled(given_events)
    assert len(taken) <= len(given_events)


def _spelled(pairs: list[tuple[int, Any]]) -> dict[int, list[Any]]:
    """Concatenate neighboring events of one kind."""
    spelled: dict[int, list[Any]] = {}
    for index, event in pairs:
        parts = spelled.setdefault(index, [])
        text = event.arguments if isinstance(event, events.ToolCall) else event.content
        kind = (type(event).__name__, getattr(event, "index", None))
        joins = parts and parts[-1][0] == kind and event.logprobs is None and getattr(event, "name", None) is None
        if joins and parts[-1][2] is None:
            parts[-1][1] += text
        else:
            parts.append([kind, text, event.logprobs, getattr(event, "name", None)])
    return spelled


def test_queue_length_is_bounded_by_coalescing() -> None:
    """Beyond a number of separate tokens they are joined."""
    turns = stream()
    for number in range(1000):
        turns._queue.put_event(0, token("x", seq=number + 1))
    taken = turns._queue.pop_all()
    assert len(taken) <= MOST_SEPARATE + 1
    assert taken[-1][1].seq == 1000  # type: ignore[attr-defined]


async def test_stalled_reader_has_its_turn_aborted() -> None:
    """Beyond the byte limit the turn is aborted, the queue is cleared and the reader gets the reason."""
    context = stub_context()
    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        for _ in range(40):
            _engine(context).say(turn, "x" * 1000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert turn not in _engine(context).turns
        with pytest.raises(InferenceCenterError) as caught:
            await next_batch(turns)
    assert caught.value.code is ErrorCode.OVERLOADED


async def test_queued_events_are_counted_until_they_are_read_or_dropped() -> None:
    """Bytes of streams over HTTP are in the gauge of all slow readers, and none is left in it at the end."""
    context = stub_context()

    def n_bytes() -> float | None:
        return context.metrics.registry.get_sample_value("inferencecenter_outbox_bytes")

    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        _engine(context).say(turn, "x" * 1000)
        assert (n_bytes() or 0) > 1000
        await next_batch(turns)
        assert n_bytes() == 0
        _engine(context).say(turn, "x" * 1000)
        assert n_bytes() == 1000
    assert n_bytes() == 0


async def test_leaving_the_context_discards_the_turn() -> None:
    """A running turn is aborted, and its session is as before."""
    context = stub_context()
    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        _engine(context).say(turn, "Hel")
    await asyncio.sleep(0)
    assert turn not in _engine(context).turns
    (session,) = context.sessions._table
    assert session.history.messages == ()
    assert session.sink is None


async def test_dismissed_request_raises_the_reason() -> None:
    """Queued events are dropped."""
    context, request_context = stub_context(), request_of_kitchen()
    with RequestTurns(context, request_context) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        _engine(context).say(turn, "Hel")
        request_context.close(CloseCode.POLICY, "enough")
        with pytest.raises(InferenceCenterError, match="enough") as caught:
            await next_batch(turns)
    assert caught.value.code is ErrorCode.FORBIDDEN


async def test_only_the_first_reason_counts() -> None:
    """A disconnected client is not notified of the shutdown."""
    context, request_context = stub_context(), request_of_kitchen()
    with RequestTurns(context, request_context) as turns:
        start_turn(context, turns)
        request_context.end(ClientDisconnectedError())
        request_context.close(CloseCode.RESTART, "the daemon stops")
        with pytest.raises(ClientDisconnectedError):
            await next_batch(turns)


async def test_ended_request_aborts_turns_started_later() -> None:
    """They are not awaited."""
    context, request_context = stub_context(), request_of_kitchen()
    request_context.end(ClientDisconnectedError())
    with RequestTurns(context, request_context) as turns, pytest.raises(ClientDisconnectedError):
        await next_batch(turns)


async def _next_events(batches: AsyncIterator[list[tuple[int, Event]]]) -> list[str]:
    while not (batch := await anext(batches)):
        pass
    return [type(event).__name__ for _, event in batch]


async def test_turn_without_events_yields_keepalives() -> None:
    """An empty batch follows after a time without text, also during prefill."""
    context = stub_context()
    vars(context.settings)["sse_keepalive_s"] = 0.001
    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        batches = aiter(turns.batches())
        assert [type(event).__name__ for _, event in await anext(batches)] == ["Queued"]
        for done in range(2):
            turns._sinks[0].send(events.Progress(session_id=SESSION, seq=1, turn_id=turn, done=done, total=9))
            assert await _next_events(batches) == ["Progress"]
            assert await anext(batches) == []
        _engine(context).say(turn, "x")
        assert await _next_events(batches) == ["Token"]
        await batches.aclose()  # type: ignore[attr-defined]  # it is a generator


def _encoded(_index: int, event: Event) -> bytes:
    assert isinstance(event, events.Token)
    return event.content.encode()


async def test_token_is_written_while_the_reader_waits() -> None:
    """No task is resumed for it; what a slow client or an event before it holds up goes to the reader, in order."""
    context, connection = stub_context(), FakeConnection()
    with RequestTurns(context, request_of_kitchen(connection)) as turns:
        engine, turn = _engine(context), start_turn(context, turns)
        turns.write_through(_encoded)
        read: list[str] = []

        async def reading() -> None:
            async for batch in turns.batches():
                read.append("+".join(type(event).__name__ for _, event in batch))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reading())
            engine.begin(turn)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for text, takes in (("a", True), ("b", True), ("c", False), ("d", True)):
                connection.takes_chunks = takes
                engine.say(turn, text)
            engine.finish(turn)
    assert connection.written == [b"a", b"b"]
    assert read[-1] == "Token+Token+End"


async def test_keepalive_counts_from_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that resumed no task counts as well: the timer set before it is too early."""
    context, now_s = stub_context(), 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    vars(context.settings)["sse_keepalive_s"] = 10
    with RequestTurns(context, request_of_kitchen(FakeConnection())) as turns:
        engine, turn = _engine(context), start_turn(context, turns)
        turns.write_through(_encoded)
        n_read: list[int] = []

        async def reading() -> None:
            async for batch in turns.batches():
                n_read.append(len(batch))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reading())
            engine.begin(turn)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            now_s = 105.0
            engine.say(turn, "x")
            for passed_s, batches in ((110.0, [1]), (115.0, [1, 0])):
                now_s = passed_s
                turns._time_out()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert n_read == batches
            engine.finish(turn)


async def test_waits_for_tokens_share_a_timer() -> None:
    """A token sets no timer: the one of the keepalive is kept until it is due."""
    context = stub_context()
    with RequestTurns(context, request_of_kitchen()) as turns:
        turn = start_turn(context, turns)
        _engine(context).begin(turn)
        batches = turns.batches()
        await anext(batches)
        timers = []
        for text in "ab":
            asyncio.get_running_loop().call_soon(_engine(context).say, turn, text)
            assert len(await anext(batches)) == 1
            timers.append(turns._timer)
        assert timers[0] is timers[1] is not None
        await batches.aclose()
