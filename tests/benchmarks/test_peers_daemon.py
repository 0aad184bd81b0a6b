"""Tests of ``bench.peers.daemon``, against daemons in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.model import SHAPES, write_model
from benchmarks.peers import detect, make_target
from benchmarks.target import TargetSpec, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.e2e.harness import Daemon, free_port, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.target import Target


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon without a model, slow enough for an abort to come in time, that reads prompts in short steps."""
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
async def test_a_turn_has_exactly_the_tokens_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    """Prompt and answer have the sizes of the work, and times rise from the start to the end."""
    async with _target(request.getfixturevalue(kind)).session() as session:
        trace = await session.turn(Work(prompt_tokens=40, max_tokens=24, seed=1))

    assert trace.error is None
    assert (trace.prompt_tokens, trace.tokens, trace.cached_tokens) == (40, 24, 0)
    assert 0 < len(trace.token_times_s) <= 24
    times = [trace.started_s, *trace.token_times_s, trace.ended_s]
    assert times == sorted(times)


async def test_a_piece_is_noted_for_each_token_that_is_text(echo: Daemon) -> None:
    """A client that keeps up sees as many pieces as there are tokens."""
    heard: list[None] = []
    async with _target(echo).session() as session:
        trace = await session.turn(Work(prompt_tokens=10, max_tokens=30, seed=1), on_text=lambda: heard.append(None))

    assert len(trace.token_times_s) == trace.tokens == len(heard) == 30


async def test_turns_of_one_history_continue_it(random_weights: Daemon) -> None:
    """The next turn's prompt holds the turns before, whose KV is reused; other conversations know nothing of it."""
    work = Work(prompt_tokens=40, max_tokens=8, seed=1, history_id="h")
    async with _target(random_weights).session() as session:
        await session.turn(work)
        later = await session.turn(Work(prompt_tokens=20, max_tokens=8, seed=2, history_id="h"))
        other = await session.turn(Work(prompt_tokens=20, max_tokens=8, seed=3))

    assert later.prompt_tokens == 40 + 8 + 20
    assert later.cached_tokens is not None
    assert later.cached_tokens >= 40
    assert other.prompt_tokens == 20


async def test_many_turns_leave_no_sessions_behind(echo: Daemon) -> None:
    """The session of a conversation of one turn is closed after it."""
    async with _target(echo).session() as session:
        for seed in range(5):
            assert (await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=seed))).error is None
        # Frames are answered in order, so the last session was closed before these figures were taken.
        await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=9, history_id="kept"))
        status, body = echo.get("/metrics")

    assert status == 200
    open_sessions = [line for line in body.splitlines() if line.startswith("inferencecenter_sessions ")]
    assert open_sessions == ["inferencecenter_sessions 1.0"]


@pytest.mark.parametrize(("after_tokens", "prompt_tokens"), [(3, 20), (None, 7000)])
async def test_an_abort_ends_the_turn(echo: Daemon, after_tokens: int | None, prompt_tokens: int) -> None:
    """The turn ends after it was aborted: while it generates, and while its prompt is read."""
    async with _target(echo).session() as session:
        work = Work(prompt_tokens=prompt_tokens, max_tokens=1000, seed=1)
        trace = await session.turn_then_abort(work, after_tokens=after_tokens)

        assert trace.error is None
        assert trace.started_s < trace.aborted_s < trace.ended_s
        assert (len(trace.token_times_s) >= 3) if after_tokens else not trace.token_times_s
        assert (await session.turn(Work(prompt_tokens=5, max_tokens=2, seed=2))).error is None


async def test_a_turn_that_ends_first_was_not_aborted(echo: Daemon) -> None:
    """The trace says so, since its times measure nothing."""
    async with _target(echo).session() as session:
        trace = await session.turn_then_abort(Work(prompt_tokens=5, max_tokens=2, seed=1), after_tokens=99)

    assert trace.error == "the turn ended by itself"


async def test_a_refused_turn_is_reported(echo: Daemon) -> None:
    """What the daemon says against a turn is its error."""
    async with _target(echo).session() as session:
        trace = await session.turn(Work(prompt_tokens=9000, max_tokens=2, seed=1))

    assert trace.error is not None
    assert "9000" in trace.error.replace(",", "")
    assert trace.tokens == 0


async def test_facts(random_weights: Daemon) -> None:
    """What must be equal for a fair comparison is told."""
    facts = await _target(random_weights).facts()

    assert (facts.kind, facts.model, facts.n_ctx) == ("inferencecenter", "tiny, random weights", 1024)
    assert facts.slots
    assert facts.threads
    assert facts.model_bytes
    assert facts.n_params
    assert facts.library.startswith("llama.cpp")


async def test_a_wrong_token_is_refused(echo: Daemon) -> None:
    """The failure is the daemon's own."""
    target = make_target(TargetSpec("ours", "inferencecenter", echo.url, "ic_no_such"))

    with pytest.raises(InferenceCenterError) as refused:
        await target.facts()

    assert refused.value.code is ErrorCode.NOT_AUTHENTICATED


async def test_an_address_without_a_daemon_is_unreachable() -> None:
    """Nothing listens there."""
    target = make_target(TargetSpec("ours", "inferencecenter", f"ws://127.0.0.1:{free_port()}/", None))

    with pytest.raises(InferenceCenterError) as refused:
        await target.facts()

    assert refused.value.code is ErrorCode.DAEMON_UNREACHABLE


async def test_it_is_recognised_behind_its_http_address(echo: Daemon) -> None:
    """A web address of the daemon becomes its WebSocket address."""
    spec = await detect("ours", f"http://127.0.0.1:{echo.port}", token="t")

    assert spec == TargetSpec("ours", "inferencecenter", echo.url, "t")
