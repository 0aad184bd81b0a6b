"""Turns as callers use them: text loops, whole answers, leaving early, retries."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import (
    Asked,
    Client,
    ClientTurn,
    InferOptions,
    NotFoundError,
    RequestError,
    Timing,
    TryLaterError,
    Turn,
)
from inferencecenter.client.blocking import BlockingTurn
from inferencecenter.client.errors import DaemonError
from inferencecenter.protocol.events import End, Queued, Token
from tests.client.peer import STATS, USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from inferencecenter.client import ClientSession
    from tests.client.peer import Peer, Start

_TIMEOUT_S = 60.0


async def _say(peer: Peer, turn_id: str, *pieces: str, **end: Any) -> None:
    for piece in pieces:
        await peer.token(turn_id, piece)
    await peer.end(turn_id, **end)


async def _until_aborted(peer: Peer, turn_id: str) -> dict[str, Any]:
    """Begin an answer that continues until it is aborted, and return the abort."""
    await peer.begin(turn_id)
    await peer.token(turn_id, "One")
    abort = await peer.receive()
    assert (abort["op"], abort["turn_id"]) == ("abort", turn_id)
    await _say(peer, turn_id, " two", finish_reason="aborted")
    return abort


async def test_text_loop_and_result(scripted: Start) -> None:
    """The loop yields text only; reasoning, usage and the finish reason are attributes of the turn."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.numbered("reasoning", turn_id="t1", content="Hm.")
        await _say(peer, "t1", "Hel", "lo", warnings=["w"])

    async with Client(await scripted(daemon), "ic_a_b") as client, client.session() as session:
        turn = session.infer("hi")
        assert turn.stats is None
        assert [text async for text in turn] == ["Hel", "lo"]
        assert [text async for text in turn] == [], "it is read once"
    assert (turn.content, turn.reasoning, turn.finish_reason, turn.turn_id) == ("Hello", "Hm.", "stop", "t1")
    assert turn.stats is not None
    assert turn.stats.model_dump() == STATS
    assert turn.usage is not None
    assert turn.usage.model_dump(exclude_defaults=True) == USAGE
    assert (str(turn.answer), turn.answer.warnings) == ("Hello", ("w",))


async def test_whole_answer_is_awaited(scripted: Start) -> None:
    """One ``await`` returns it."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        infer = await peer.begin()
        assert infer["params"] == {"temperature": 0.0}
        await _say(peer, "t1", "Hel", "lo")

    async with Client(await scripted(daemon), "ic_a_b") as client, client.session() as session:
        answer = await session.ask("hi", params={"temperature": 0.0})
    assert str(answer) == "Hello"
    assert answer.finish_reason == "stop"


async def _break(session: ClientSession) -> None:
    async for _ in session.infer("count"):
        break


async def _fail_in_the_loop(session: ClientSession) -> None:
    async for _ in session.infer("count"):
        raise ZeroDivisionError


async def _raise(session: ClientSession) -> None:
    with pytest.raises(ZeroDivisionError):
        await _fail_in_the_loop(session)


async def _run_out_of_time(session: ClientSession) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.ask("count"), 0.05)


async def _leave_the_block(session: ClientSession) -> None:
    async with session.infer("count") as turn:
        texts = aiter(turn)
        assert await anext(texts) == "One"


async def _break_out_of_events(session: ClientSession) -> None:
    async for event in session.infer("count").events():
        if isinstance(event, Token):
            return


@pytest.mark.parametrize("leave", [_break, _raise, _run_out_of_time, _leave_the_block, _break_out_of_events])
async def test_leaving_a_turn_aborts_it(
    scripted: Start, leave: Callable[[ClientSession], Coroutine[Any, Any, None]]
) -> None:
    """This holds for every way of leaving it; the next request waits for its end."""
    received: list[str] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await _until_aborted(peer, "t1")
        await peer.begin("t2")
        await _say(peer, "t2", "ok")
        received.extend(frame["op"] for frame in peer.received)

    async with asyncio.timeout(_TIMEOUT_S), Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        await leave(session)
        assert str(await session.ask("next")) == "ok"
    assert received == ["auth", "create_session", "infer", "abort", "infer"]


async def test_left_turn_has_its_text(scripted: Start) -> None:
    """All text up to the real end is part of its answer."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await _until_aborted(peer, "t1")

    async with asyncio.timeout(_TIMEOUT_S), Client(await scripted(daemon), "ic_a_b") as client:
        turn = (await client.create_session()).infer("count")
        async for text in turn:
            assert text == "One"
            break
        answer = await turn.result()
    assert (str(answer), answer.finish_reason) == ("One two", "aborted")


async def test_closing_the_client_aborts_a_left_turn_first(scripted: Start) -> None:
    """The abort is sent before the socket closes."""
    aborts: list[str] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        aborts.append((await _until_aborted(peer, "t1"))["turn_id"])

    async with asyncio.timeout(_TIMEOUT_S), Client(await scripted(daemon), "ic_a_b") as client:
        await _break(await client.create_session())
    assert aborts == ["t1"]


async def test_detached_turn_continues(scripted: Start) -> None:
    """No abort is sent, and it can be followed after a resume."""
    received: list[str] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        ping = await peer.receive()
        received.append(ping["op"])
        await peer.send(op="models", id=ping["id"], models=[])

    async with Client(await scripted(daemon), "ic_a_b") as client:
        turn = (await client.create_session()).infer("count")
        turn.detach()
        async for _ in turn:
            break
        assert await client.models() == ()
    assert received == ["list_models"]


async def test_unread_turn_is_never_requested(scripted: Start) -> None:
    """Creating and dropping it sends nothing."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await _say(peer, "t1", "ok")

    async with Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        session.infer("dropped")
        aiter(session.infer("dropped"))
        gc.collect()
        assert str(await session.ask("asked")) == "ok"


async def test_closed_session_ends_waiting_for_its_turns(scripted: Start) -> None:
    """The turn being read raises, and no call waits for its end."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")

    async with asyncio.timeout(_TIMEOUT_S), Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        turn = session.infer("count")
        texts = aiter(turn)
        assert await anext(texts) == "One"
        await session.close()
        with pytest.raises(NotFoundError):
            await anext(texts)


async def test_deleted_session_can_be_left(scripted: Start) -> None:
    """Leaving its block raises nothing."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.refuse(await peer.receive(), "session_not_found")

    async with Client(await scripted(daemon), "ic_a_b") as client, client.session() as session:
        assert session.session_id == "s1"


async def _refused_then_answered(peer: Peer, *codes: str, **refusal: Any) -> None:
    await peer.welcome()
    await peer.open_session()
    for code in codes:
        await peer.refuse(await peer.receive(), code, session_id="s1", **refusal)
    await peer.begin()
    await _say(peer, "t1", "ok")
    keys = [frame["turn_key"] for frame in peer.received if frame["op"] == "infer"]
    assert len(set(keys)) == len(codes) + 1


async def test_retryable_refusals_are_retried(scripted: Start) -> None:
    """Each waits for the daemon's delay and a jitter that grows."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def daemon(peer: Peer) -> None:
        await _refused_then_answered(peer, "overloaded", "rate_limited", retry_after_ms=3000)

    timing = Timing(sleep=sleep, random=lambda: 1.0)
    async with Client(await scripted(daemon), "ic_a_b", retries=2, timing=timing) as client:
        session = await client.create_session()
        assert str(await session.ask("hi")) == "ok"
    assert slept == [3.5, 4.0]


@pytest.mark.parametrize(("client_retries", "turn_retries", "n_asked"), [(0, None, 1), (3, 0, 1), (0, 1, 2)])
async def test_retry_count_is_respected(
    scripted: Start, client_retries: int, turn_retries: int | None, n_asked: int
) -> None:
    """The turn's count takes precedence over the client's; then the error is raised."""
    received = 0

    async def sleep(_seconds: float) -> None:
        pass

    async def daemon(peer: Peer) -> None:
        nonlocal received
        await peer.welcome()
        await peer.open_session()
        while True:
            await peer.refuse(await peer.receive(), "queue_full", session_id="s1", retry_after_ms=1500)
            received += 1

    url = await scripted(daemon)
    async with Client(url, "ic_a_b", retries=client_retries, timing=Timing(sleep=sleep)) as client:
        session = await client.create_session()
        with pytest.raises(TryLaterError) as caught:
            await (session.ask("hi") if turn_retries is None else session.ask("hi", retries=turn_retries))
    assert caught.value.retry_after_ms == 1500
    assert received == n_asked


async def test_unloaded_model_is_awaited(scripted: Start) -> None:
    """Waiting for the model counts as no retry; the callback is called."""

    async def sleep(_seconds: float) -> None:
        pass

    async def daemon(peer: Peer) -> None:
        await _refused_then_answered(peer, "model_loading", "model_loading")

    notices: list[str] = []
    async with Client(await scripted(daemon), "ic_a_b", timing=Timing(sleep=sleep)) as client:
        session = await client.create_session()
        assert str(await session.ask("hi", on_loading=notices.append)) == "ok"
    assert notices == ["model_loading"] * 2


async def test_started_answer_is_not_retried(scripted: Start) -> None:
    """Shown text cannot be taken back, so the failure is raised."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        failed: dict[str, Any] = {"code": "queue_timeout", "message": "m", "error": "m", "retryable": True}
        await peer.numbered("error", turn_id="t1", **failed)

    async with Client(await scripted(daemon), "ic_a_b", retries=9) as client:
        session = await client.create_session()
        turn = session.infer("count")
        with pytest.raises(TryLaterError):
            await turn.result()
        assert turn.content == "One"
        assert await turn.next_event() is None


async def test_turn_that_fails_in_the_queue_is_retried(scripted: Start) -> None:
    """A turn that fails before any output is retried."""

    async def sleep(_seconds: float) -> None:
        pass

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        failed: dict[str, Any] = {"code": "queue_timeout", "message": "m", "error": "m", "retryable": True}
        await peer.numbered("error", turn_id="t1", **failed)
        await peer.begin("t2")
        await _say(peer, "t2", "ok")

    async with Client(await scripted(daemon), "ic_a_b", retries=1, timing=Timing(sleep=sleep)) as client:
        session = await client.create_session()
        events = [event async for event in session.infer("hi").events()]
    assert [type(event) for event in events] == [Queued, Queued, Token, End]


async def test_leaving_during_backoff_sends_nothing(scripted: Start) -> None:
    """The daemon has refused the turn, so there is nothing to abort."""
    waiting = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.refuse(await peer.receive(), "overloaded", session_id="s1")
        frame = await peer.receive()
        assert frame["op"] == "list_models"
        await peer.send(op="models", id=frame["id"], models=[])

    async with Client(await scripted(daemon), "ic_a_b", retries=9, timing=Timing(sleep=sleep)) as client:
        session = await client.create_session()
        pending = asyncio.gather(session.ask("hi"), return_exceptions=True)
        await waiting.wait()
        pending.cancel()
        await asyncio.wait([pending])
        await session.wait_settled()
        assert await client.models() == ()


async def test_invalid_arguments_are_refused_locally(scripted: Start) -> None:
    """The error names the field."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()

    async with Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        with pytest.raises(RequestError, match="give either prompt or messages"):
            session.infer("hi", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(RequestError) as caught:
            session.infer("hi", tool_choices="none")  # type: ignore[call-arg]
        assert (caught.value.field, caught.value.hint) == ("tool_choices", "Did you mean tool_choice?")
        with pytest.raises(RequestError):
            await client.create_session(ttl_s=-1)
    with pytest.raises(TypeError, match="retry"):
        Client("ws://127.0.0.1:1/", "ic_a_b", retry=3)  # type: ignore[call-arg]


async def test_unopened_client_raises() -> None:
    """The error says that it is not open."""
    client = Client("ws://127.0.0.1:1/", "ic_a_b")
    with pytest.raises(Exception, match="not open"):
        await client.models()
    await client.close()


async def test_server_errors_have_their_class(scripted: Start) -> None:
    """An error that no other request can avoid."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.refuse(await peer.receive(), "internal", session_id="s1")

    async with Client(await scripted(daemon), "ic_a_b", retries=9) as client:
        session = await client.create_session()
        with pytest.raises(DaemonError):
            await session.ask("hi")


def test_former_names_remain_importable_and_callable() -> None:
    """Programs written for the former names of classes and methods keep working."""
    assert (Turn, Asked) == (ClientTurn, InferOptions)
    assert (ClientTurn.rest, ClientTurn.let_run) == (ClientTurn.result, ClientTurn.detach)
    assert (BlockingTurn.rest, BlockingTurn.let_run) == (BlockingTurn.result, BlockingTurn.detach)
