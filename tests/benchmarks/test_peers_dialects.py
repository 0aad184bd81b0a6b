"""The OpenAI and Responses targets of the benchmarks, against a daemon in a separate process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks import protocols
from benchmarks.model import SHAPES, write_model
from benchmarks.peers import make_target
from benchmarks.target import TargetSpec, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.e2e.harness import Daemon, run_daemon
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.stage import SpecTransform

DIALECTS = [pytest.param(protocols.chat_completions, id="chat"), pytest.param(protocols.responses, id="responses")]
PROTOCOLS = [*DIALECTS, pytest.param(protocols.websocket, id="websocket")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on a random-weight model."""
    folder = tmp_path_factory.mktemp("random")
    write_model(folder / "tiny.gguf", SHAPES["tiny"], name="tiny")
    with run_daemon(folder / "state", folder / "tiny.gguf", INFERENCECENTER_ENGINE__N_CTX="1024") as running:
        yield running


def spec(daemon: Daemon) -> TargetSpec:
    """Where it is."""
    return TargetSpec("ours", "inferencecenter", daemon.url, daemon.admin_token)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_turn_has_the_requested_tokens(daemon: Daemon, protocol: SpecTransform) -> None:
    """The prompt's tokens include the template's; the time of each piece of the answer is recorded."""
    heard: list[None] = []
    async with make_target(protocol(spec(daemon))).session() as session:
        trace = await session.turn(Work(prompt_tokens=60, max_tokens=24, seed=1), on_text=lambda: heard.append(None))

    assert trace.error is None
    assert (trace.prompt_tokens, trace.tokens) == (60, 24)
    assert 0 < len(trace.token_times_s) == len(heard) <= 24
    times = [trace.started_s, *trace.token_times_s, trace.ended_s]
    assert times == sorted(times)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_turns_of_a_conversation_reuse_its_context(daemon: Daemon, protocol: SpecTransform) -> None:
    """A later prompt includes the earlier turns, whose KV is reused; other conversations are separate."""
    async with make_target(protocol(spec(daemon))).session() as session:
        first = await session.turn(Work(prompt_tokens=100, max_tokens=8, seed=1, history_id="h"))
        later = await session.turn(Work(prompt_tokens=20, max_tokens=8, seed=2, history_id="h"))
        other = await session.turn(Work(prompt_tokens=60, max_tokens=8, seed=3))

    assert (first.error, later.error, other.error) == (None, None, None)
    assert later.prompt_tokens > first.prompt_tokens + first.tokens
    assert later.cached_tokens is not None
    assert later.cached_tokens >= first.prompt_tokens + first.tokens - 1
    assert other.prompt_tokens == 60


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_answers_follow_a_schema(daemon: Daemon, protocol: SpecTransform) -> None:
    """With random weights, the schema allows one of two words and the end."""
    wanted = replace(protocol(spec(daemon)), json_schema='{"enum": ["a", "b"]}')
    async with make_target(wanted).session() as session:
        trace = await session.turn(Work(prompt_tokens=60, max_tokens=100, seed=1))

    assert trace.error is None
    assert 3 <= trace.tokens < 10


@pytest.mark.parametrize("protocol", DIALECTS)
async def test_refused_turn_is_reported(daemon: Daemon, protocol: SpecTransform) -> None:
    """The daemon's error is the error of the turn."""
    async with make_target(protocol(spec(daemon))).session() as session:
        trace = await session.turn(Work(prompt_tokens=2000, max_tokens=2, seed=1))
        aborted = await session.turn_then_abort(Work(prompt_tokens=60, max_tokens=2, seed=1), after_tokens=1)

    assert trace.error is not None
    assert "2000" in trace.error.replace(",", "")
    assert aborted.error is not None


@pytest.mark.parametrize("protocol", DIALECTS)
async def test_facts(daemon: Daemon, protocol: SpecTransform) -> None:
    """The API reports only its existence."""
    facts = await make_target(protocol(spec(daemon))).facts()

    assert (facts.kind, facts.slots) == (protocol(spec(daemon)).kind, None)


@pytest.mark.parametrize("protocol", DIALECTS)
async def test_closed_port_is_unreachable(protocol: SpecTransform) -> None:
    """The error has the code ``daemon_unreachable``."""
    unreachable = TargetSpec("ours", "inferencecenter", f"ws://127.0.0.1:{free_port()}/", "t")
    with pytest.raises(InferenceCenterError) as refused:
        async with make_target(protocol(unreachable)).session():
            pass

    assert refused.value.code is ErrorCode.DAEMON_UNREACHABLE
