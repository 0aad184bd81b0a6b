"""The daemon as a benchmark target, against daemons in separate processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.model import SHAPES, write_model
from benchmarks.peers import detect, make_target
from benchmarks.target import TargetSpec, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.e2e.harness import Daemon, run_daemon
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.target import Target


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon without a model, slow enough to be aborted, which prefills in short steps."""
    state = tmp_path_factory.mktemp("echo") / "state"
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1",
        "INFERENCECENTER_ENGINE__TARGET_STEP_MS": "10",
        "INFERENCECENTER_ENGINE__N_BATCH": "64",
        "INFERENCECENTER_ENGINE__N_UBATCH": "64",
    }
    with run_daemon(state, state / "none.gguf", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on a random-weight model."""
    folder = tmp_path_factory.mktemp("random")
    write_model(folder / "tiny.gguf", SHAPES["tiny"], name="tiny")
    with run_daemon(folder / "state", folder / "tiny.gguf", INFERENCECENTER_ENGINE__N_CTX="1024") as running:
        yield running


def _target(daemon: Daemon) -> Target:
    return make_target(TargetSpec("ours", "inferencecenter", daemon.url, daemon.admin_token))


@pytest.mark.parametrize("kind", ["echo", "random_weights"])
async def test_turn_has_the_requested_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    """Prompt and answer have the requested sizes, and times increase."""
    async with _target(request.getfixturevalue(kind)).session() as session:
        trace = await session.turn(Work(prompt_tokens=40, max_tokens=24, seed=1))

    assert trace.error is None
    assert (trace.prompt_tokens, trace.tokens, trace.cached_tokens) == (40, 24, 0)
    assert 0 < len(trace.token_times_s) <= 24
    times = [trace.started_s, *trace.token_times_s, trace.ended_s]
    assert times == sorted(times)


async def test_each_visible_token_is_recorded(echo: Daemon) -> None:
    """A fast reader receives one piece for each token."""
    pieces: list[None] = []
    async with _target(echo).session() as session:
        trace = await session.turn(Work(prompt_tokens=10, max_tokens=30, seed=1), on_text=lambda: pieces.append(None))

    assert len(trace.token_times_s) == trace.tokens == len(pieces) == 30


async def test_turns_of_a_conversation_reuse_its_context(random_weights: Daemon) -> None:
    """The next prompt includes the earlier turns, whose KV is reused; conversations are separate."""
    work = Work(prompt_tokens=40, max_tokens=8, seed=1, history_id="h")
    async with _target(random_weights).session() as session:
        await session.turn(work)
        later = await session.turn(Work(prompt_tokens=20, max_tokens=8, seed=2, history_id="h"))
        other = await session.turn(Work(prompt_tokens=20, max_tokens=8, seed=3))

    assert later.prompt_tokens == 40 + 8 + 20
    assert later.cached_tokens is not None
    assert later.cached_tokens >= 40
    assert other.prompt_tokens == 20


async def test_sessions_are_closed(echo: Daemon) -> None:
    """A conversation of one turn closes its session."""
    async with _target(echo).session() as session:
        for seed in range(5):
            assert (await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=seed))).error is None
        # Frames are answered in order, so the last session was closed before this reading.
        await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=9, history_id="open"))
        status, body = echo.get("/metrics")

    assert status == 200
    open_sessions = [line for line in body.splitlines() if line.startswith("inferencecenter_sessions ")]
    assert open_sessions == ["inferencecenter_sessions 1.0"]


@pytest.mark.parametrize(("after_tokens", "prompt_tokens"), [(3, 20), (None, 7000)])
async def test_abort_ends_the_turn(echo: Daemon, after_tokens: int | None, prompt_tokens: int) -> None:
    """The turn may be in decode or in prefill."""
    async with _target(echo).session() as session:
        work = Work(prompt_tokens=prompt_tokens, max_tokens=1000, seed=1)
        trace = await session.turn_then_abort(work, after_tokens=after_tokens)

        assert trace.error is None
        assert trace.started_s < trace.aborted_s < trace.ended_s
        assert (len(trace.token_times_s) >= 3) if after_tokens else not trace.token_times_s
        assert (await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=2))).error is None


async def test_turn_that_ends_first_was_not_aborted(echo: Daemon) -> None:
    """The trace says so, since its times measure nothing."""
    async with _target(echo).session() as session:
        trace = await session.turn_then_abort(Work(prompt_tokens=5, max_tokens=2, seed=1), after_tokens=99)

    assert trace.error == "the turn ended by itself"


async def test_refused_turn_is_reported(echo: Daemon) -> None:
    """The trace has the daemon's error."""
    async with _target(echo).session() as session:
        trace = await session.turn(Work(prompt_tokens=9000, max_tokens=2, seed=1))

    assert trace.error is not None
    assert "9000" in trace.error.replace(",", "")
    assert trace.tokens == 0


async def test_facts(random_weights: Daemon) -> None:
    """The facts are all that must be equal for a comparison."""
    facts = await _target(random_weights).facts()

    assert (facts.kind, facts.model, facts.n_ctx) == ("inferencecenter", "tiny", 1024)
    assert facts.slots
    assert facts.threads
    assert facts.model_bytes
    assert facts.n_params
    assert facts.library.startswith("llama.cpp")


async def test_wrong_token_is_refused(echo: Daemon) -> None:
    """The error is the daemon's."""
    target = make_target(TargetSpec("ours", "inferencecenter", echo.url, "ic_no_such"))

    with pytest.raises(InferenceCenterError) as refused:
        await target.facts()

    assert refused.value.code is ErrorCode.NOT_AUTHENTICATED


async def test_closed_port_is_unreachable() -> None:
    """The error names the address."""
    target = make_target(TargetSpec("ours", "inferencecenter", f"ws://127.0.0.1:{free_port()}/", None))

    with pytest.raises(InferenceCenterError) as refused:
        await target.facts()

    assert refused.value.code is ErrorCode.DAEMON_UNREACHABLE


async def test_daemon_is_recognised_at_its_http_address(echo: Daemon) -> None:
    """It becomes the WebSocket address."""
    spec = await detect("ours", f"http://127.0.0.1:{echo.port}", token="t")

    assert spec == TargetSpec("ours", "inferencecenter", echo.url, "t")
