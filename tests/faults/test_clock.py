"""The wall clock jumps or stops, or the machine sleeps: no session expires wrongly and no turn fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from inferencecenter.config.settings import SessionSettings
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.manager import SessionManager
from tests.e2e.harness import connect_client, stopped
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import LINE, logged
from tests.sessions.conftest import FakeEngine, FakeJournal, FakeSink, FakeTimer, InlineTemplates, one_model
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.harness import DaemonHarness

YEARS_S = 20 * 365.25 * 86_400
NOON = 2_000_000_000.0


@dataclass
class ManualClocks:
    """Sessions with a wall clock and a monotonic clock that a test advances; timers use the monotonic one."""

    time_of_day: float = NOON
    monotonic: float = 500.0
    engine: FakeEngine = field(default_factory=FakeEngine)
    sink: FakeSink = field(default_factory=FakeSink)
    journal: FakeJournal = field(default_factory=FakeJournal)
    client: Principal = field(default_factory=lambda: Principal("ada", 4, "normal", frozenset({"user"})))
    timers: list[tuple[float, FakeTimer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = SessionManager(
            engines=one_model(self.engine),
            renderers=InlineTemplates(),
            config_params=Params(),
            settings=SessionSettings(max_sessions=4, default_ttl_s=60.0, retention_days=1.0),
            journal=self.journal,
            clock=lambda: self.time_of_day,
            monotonic=lambda: self.monotonic,
            local_time=lambda: datetime.fromtimestamp(self.time_of_day, tz=UTC),
            call_later=self._call_later,
        )

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(delay_s, callback)
        self.timers.append((self.monotonic + delay_s, timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Advance the clocks and run the timers that are due."""
        self.monotonic += seconds
        self.time_of_day += seconds
        for due in [due for due in self.timers if due[0] <= self.monotonic]:
            self.timers.remove(due)
            if not due[1].cancelled:
                due[1].callback()

    def create(self) -> str:
        """Create a session."""
        request = requests.CreateSession(op="create_session")
        return self.sessions.create(self.client, request, self.sink).session_id

    def infer(self, session_id: str, **params: object) -> None:
        """Start a turn."""
        request = requests.Infer(op="infer", session_id=session_id, prompt="Hi", params=params)
        self.sessions.infer(self.client, request, self.sink)

    def after_a_restart(self, *, jump_s: float) -> ManualClocks:
        """Return the sessions as a later daemon loads them."""
        after = ManualClocks(time_of_day=self.time_of_day + jump_s, monotonic=7.0)
        after.sessions.restore(kept(self.journal.records), clean=True)
        return after


@pytest.fixture(params=[YEARS_S, -YEARS_S], ids=["forward", "back"])
def jump_s(request: pytest.FixtureRequest) -> float:
    """Seconds by which the wall clock jumps."""
    seconds: float = request.param
    return seconds


def test_session_expiry_ignores_wall_clock_jumps(jump_s: float) -> None:
    """A session expires after its 60 seconds of monotonic time."""
    clocks = ManualClocks()
    clocks.create()
    clocks.advance(30.0)
    clocks.time_of_day += jump_s
    clocks.advance(29.0)
    assert len(clocks.sessions.session_ids()) == 1
    clocks.advance(2.0)
    assert len(clocks.sessions.session_ids()) == 0
    assert clocks.sink.ops == ["session_expired"]


def test_turn_times_ignore_wall_clock_jumps(jump_s: float) -> None:
    """The turn ends normally, and its times are consistent."""
    clocks = ManualClocks()
    session_id = clocks.create()
    clocks.infer(session_id)
    clocks.engine.start()
    clocks.engine.lose()
    clocks.time_of_day += jump_s
    clocks.advance(2.0)
    clocks.engine.ready()
    clocks.engine.answer("Hello")
    end = clocks.sink.last
    assert isinstance(end, events.End)
    assert (end.stats.total_ms, end.stats.ttft_ms, end.stats.queue_ms) == (2000.0, 2000.0, 2000.0)
    assert clocks.sink.text == "Hello"


def test_last_use_in_the_future_counts_as_now() -> None:
    """A session last used at a future time was used just now."""
    after = ManualClocks()
    after.create()
    after = after.after_a_restart(jump_s=-YEARS_S)
    after.advance(59.0)
    assert len(after.sessions.session_ids()) == 1
    after.advance(2.0)
    assert len(after.sessions.session_ids()) == 0


def test_session_expires_while_no_daemon_runs() -> None:
    """A session unused for years has expired and is not loaded."""
    before = ManualClocks()
    before.create()
    assert before.after_a_restart(jump_s=YEARS_S).sessions.session_ids() == ()


def test_time_limit_of_a_resumed_turn_is_clamped(jump_s: float) -> None:
    """After a restart the rest of the time limit is positive and at most the limit."""
    before = ManualClocks()
    session_id = before.create()
    before.infer(session_id, max_time_ms=30_000)
    before.engine.start()
    before.engine.generate("Hel")
    after = before.after_a_restart(jump_s=jump_s)
    limit_ms = Params.model_validate_json(after.engine.last.params_json).max_time_ms
    assert limit_ms is not None
    assert 1 <= limit_ms <= 30_000
    after.engine.generate("lo")
    after.engine.finish(kept="Hello")
    session = after.sessions.get(after.client, requests.GetSession(op="get_session", session_id=session_id))
    assert [message.content for message in session.transcript] == ["Hi", "Hello"]


@pytest.mark.slow
async def test_machine_sleep_is_not_an_engine_hang(echo: DaemonHarness) -> None:
    """A daemon stopped for longer than the hang timeout restarts no engine afterwards."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 3)
        await recorder.until("token")
        engine_pid = echo.daemon.engine_pid()
        with stopped(engine_pid), stopped(echo.daemon.process.pid):
            # There is no event to wait for: nothing must happen.
            await asyncio.sleep(2.0)
        assert await recorder.finish() == LINE * 3
        assert await recorder.turn("Next.") == "Next."
        assert echo.daemon.engine_pid() == engine_pid
        assert not logged(echo.daemon, "engine_hangs")
