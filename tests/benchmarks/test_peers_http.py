"""llama-server and OpenAI servers as benchmark targets, against servers with answers of the real shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from benchmarks.peers import detect, make_target
from benchmarks.target import Opening, TargetSpec, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.benchmarks.peer_server import BOS, FakeServer, serving
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORK = Work(prompt_tokens=30, max_tokens=4, seed=5)


@pytest.fixture
async def llama() -> AsyncIterator[FakeServer]:
    """A llama-server."""
    async with serving(FakeServer(), speaks_llama=True) as server:
        yield server


@pytest.fixture
async def openai() -> AsyncIterator[FakeServer]:
    """A server with the OpenAI API only."""
    async with serving(FakeServer(), speaks_llama=False) as server:
        yield server


async def test_server_kinds_are_detected(llama: FakeServer, openai: FakeServer) -> None:
    """The answers identify the server; the end of the API's address does not matter."""
    assert await detect("a", llama.url) == TargetSpec("a", "llama-server", llama.url)
    assert await detect("b", f"{openai.url}/v1/", token="t") == TargetSpec(
        "b", "openai", openai.url, "t", model="tiny.gguf"
    )
    assert await detect("c", "ws://host:1/") == TargetSpec("c", "inferencecenter", "ws://host:1/")


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host/", "http://"])
async def test_invalid_addresses_are_refused(url: str) -> None:
    """Only HTTP and WebSocket URLs are supported."""
    with pytest.raises(InferenceCenterError) as refused:
        await detect("a", url)

    assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_closed_port_is_unreachable() -> None:
    """The probe and the target report it alike."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(InferenceCenterError) as probed:
        await detect("a", url)
    with pytest.raises(InferenceCenterError) as asked:
        await make_target(TargetSpec("a", "llama-server", url)).facts()

    assert probed.value.code is asked.value.code is ErrorCode.DAEMON_UNREACHABLE


async def test_unknown_server_kind_is_refused() -> None:
    """The error says that it has none of the three protocols."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    with pytest.raises(InferenceCenterError, match="neither InferenceCenter nor llama-server"):
        await detect("a", f"http://127.0.0.1:{port}")
    await runner.cleanup()


async def test_token_is_sent_and_its_refusal_reported() -> None:
    """The target's token is the bearer token."""
    async with serving(FakeServer(token="right"), speaks_llama=True) as server:
        assert (await make_target(TargetSpec("a", "llama-server", server.url, "right")).facts()).n_params == 494
        with pytest.raises(InferenceCenterError, match="Invalid API Key") as refused:
            await make_target(TargetSpec("a", "llama-server", server.url, "wrong")).facts()

    assert refused.value.code is ErrorCode.NOT_AUTHENTICATED


async def test_llama_server_facts(llama: FakeServer) -> None:
    """The facts are those that llama-server reports."""
    facts = await make_target(TargetSpec("peer", "llama-server", llama.url)).facts()

    assert (facts.model, facts.model_bytes, facts.n_params) == ("tiny.gguf", 530, 494)
    assert (facts.library, facts.slots, facts.n_ctx, facts.threads) == ("b9001-0c1e57098", 1, 4096, None)


async def test_llama_server_turn(llama: FakeServer) -> None:
    """It sends exact ids and equal sampling, records visible pieces, and uses a new connection each time."""
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        trace = await session.turn(WORK)
        again = await session.turn(WORK)

    assert trace.error is None
    assert (trace.prompt_tokens, trace.tokens, trace.cached_tokens) == (30, 4, 3)
    assert len(trace.token_times_s) == 3
    times = [trace.started_s, *trace.token_times_s, trace.ended_s]
    assert times == sorted(times)
    assert again.started_s >= trace.ended_s
    body = llama.bodies[0]
    assert body["prompt"][0] == BOS
    assert len(body["prompt"]) == 30
    assert {
        name: body[name] for name in ("n_predict", "ignore_eos", "temperature", "top_k", "top_p", "min_p", "seed")
    } == {
        "n_predict": 4,
        "ignore_eos": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "seed": 5,
    }
    assert body["cache_prompt"] is True
    assert "id_slot" not in body
    assert len(llama.connections) == 2


async def test_llama_server_keeps_a_named_slot(llama: FakeServer) -> None:
    """Each request names it, and each visible piece is recorded at once."""
    heard: list[None] = []
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        await session.turn(Work(30, 4, seed=1, slot=0), on_text=lambda: heard.append(None))

    assert llama.bodies[0]["id_slot"] == 0
    assert len(heard) == 3


async def test_llama_server_prompts_share_a_prefix(llama: FakeServer) -> None:
    """Their ids are equal up to its end."""
    opening = Opening(tokens=20, seed=7)
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        for seed in (1, 2):
            await session.turn(Work(30, 1, seed=seed, opening=opening))

    one, other = (body["prompt"] for body in llama.bodies)
    assert one[:20] == other[:20]
    assert one[20:] != other[20:]
    assert len(one) == len(other) == 30


async def test_llama_server_receives_the_whole_conversation(llama: FakeServer) -> None:
    """The ids of a later turn begin with those of the earlier turns and answers."""
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        await session.turn(Work(prompt_tokens=30, max_tokens=2, seed=1, history_id="h"))
        later = await session.turn(Work(prompt_tokens=10, max_tokens=2, seed=2, history_id="h"))

    first, second = (body["prompt"] for body in llama.bodies)
    assert second[:32] == [*first, 1001, 1002]
    assert BOS not in second[1:]
    assert later.prompt_tokens == len(second) == 42


async def test_llama_server_failure_during_a_turn(llama: FakeServer) -> None:
    """The stream's error is the turn's error."""
    llama.failure = "context shift is disabled"
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        assert (await session.turn(WORK)).error == "context shift is disabled"


async def test_llama_server_abort_during_decode(llama: FakeServer) -> None:
    """The connection closes after the requested pieces, and the trace ends when the slot is free."""
    llama.endless = True
    llama.busy_polls = 3
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        trace = await session.turn_then_abort(WORK, after_tokens=3)

        assert trace.error is None
        assert len(trace.token_times_s) == 3
        assert trace.started_s < trace.aborted_s < trace.ended_s
        assert llama.left.is_set()
        assert llama.polls[:3] == [True, True, True]
        assert llama.polls[-1] is False


async def test_llama_server_abort_during_prefill(llama: FakeServer) -> None:
    """The connection closes when part of the prompt was read."""
    llama.slow_prompt = True
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        trace = await session.turn_then_abort(WORK, after_tokens=None)

        assert trace.error is None
        assert trace.token_times_s == ()
        assert llama.left.is_set()


async def test_llama_server_turn_that_ends_first_was_not_aborted(llama: FakeServer) -> None:
    """The trace says so, since its times measure nothing."""
    async with make_target(TargetSpec("peer", "llama-server", llama.url)).session() as session:
        trace = await session.turn_then_abort(WORK, after_tokens=99)

    assert trace.error == "the turn ended by itself"
    assert not llama.left.is_set()


async def test_openai_turn(openai: FakeServer) -> None:
    """Tokens are counted by the server's usage; events may arrive in arbitrary portions."""
    heard: list[None] = []
    async with make_target(TargetSpec("peer", "openai", openai.url, model="m")).session() as session:
        trace = await session.turn(WORK, on_text=lambda: heard.append(None))

    assert trace.error is None
    assert len(heard) == 4
    assert (trace.prompt_tokens, trace.tokens, trace.cached_tokens) == (30, 4, 2)
    assert len(trace.token_times_s) == 4
    body = openai.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["seed"]) == ("m", 4, True, 5)


async def test_openai_server_receives_the_whole_conversation(openai: FakeServer) -> None:
    """The text of a later turn begins with the earlier turns and answers."""
    async with make_target(TargetSpec("peer", "openai", openai.url)).session() as session:
        await session.turn(Work(prompt_tokens=30, max_tokens=2, seed=1, history_id="h"))
        await session.turn(Work(prompt_tokens=10, max_tokens=2, seed=2, history_id="h"))

    first, second = (body["prompt"] for body in openai.bodies[-2:])
    assert second.startswith(f"{first} w0 w1 ")
    assert len(second.split()) == 29 + 2 + 10


async def test_openai_server_failure_during_a_turn(openai: FakeServer) -> None:
    """The stream's error is the turn's error."""
    async with make_target(TargetSpec("peer", "openai", openai.url)).session() as session:
        openai.failure = "out of memory"
        assert (await session.turn(WORK)).error == "out of memory"


async def test_openai_aborts_are_not_measured(openai: FakeServer) -> None:
    """The end of the server's work is not observable."""
    async with make_target(TargetSpec("peer", "openai", openai.url)).session() as session:
        trace = await session.turn_then_abort(WORK, after_tokens=1)

    assert trace.error is not None
    assert "cannot be seen" in trace.error
