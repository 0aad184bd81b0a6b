"""The time of day jumps, or stands still: sessions neither expire nor come back from it, and no turn goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.client import Principal
from inferencecenter.sessions.manager import SessionManager
from tests.e2e.harness import stopped, talk
from tests.e2e.witness import Witness
from tests.faults.harness import LINE, logged
from tests.sessions.conftest import FakeEngine, FakeJournal, FakeSink, FakeTimer, InlineTemplates, one_model
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.harness import Site

YEARS_S = 20 * 365.25 * 86_400
NOON = 2_000_000_000.0


@dataclass
class Clocks:
    """Sessions whose two clocks a test moves one by one; timers run by the one that only rises."""

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
            max_sessions=4,
            default_ttl_s=60.0,
            retention_days=1.0,
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

    def pass_by(self, seconds: float) -> None:
        """Let time pass: what was arranged for happens."""
        self.monotonic += seconds
        self.time_of_day += seconds
        for due in [due for due in self.timers if due[0] <= self.monotonic]:
            self.timers.remove(due)
            if not due[1].cancelled:
                due[1].callback()

    def create(self) -> str:
        """Open a session."""
        request = requests.CreateSession(op="create_session")
        return self.sessions.create(self.client, request, self.sink).session_id

    def infer(self, session_id: str, **params: object) -> None:
        """Start a turn."""
        request = requests.Infer(op="infer", session_id=session_id, prompt="Hi", params=params)
        self.sessions.infer(self.client, request, self.sink)

    def after_a_restart(self, *, jump_s: float) -> Clocks:
        """Return the sessions as the next daemon finds them, for which it is that much later."""
        after = Clocks(time_of_day=self.time_of_day + jump_s, monotonic=7.0)
        after.sessions.restore(kept(self.journal.records), clean=True)
        return after


@pytest.fixture(params=[YEARS_S, -YEARS_S], ids=["forward", "back"])
def jump_s(request: pytest.FixtureRequest) -> float:
    """Seconds by which the time of day is suddenly another."""
    seconds: float = request.param
    return seconds


def test_a_session_expires_by_the_seconds_that_passed(jump_s: float) -> None:
    """Whatever the calendar says, it has its 60 seconds, and not one more."""
    clocks = Clocks()
    clocks.create()
    clocks.pass_by(30.0)
    clocks.time_of_day += jump_s
    clocks.pass_by(29.0)
    assert len(clocks.sessions.session_ids()) == 1
    clocks.pass_by(2.0)
    assert len(clocks.sessions.session_ids()) == 0
    assert clocks.sink.ops == ["session_expired"]


def test_a_turn_is_measured_by_the_seconds_that_passed(jump_s: float) -> None:
    """It ends well, and what is told of it adds up."""
    clocks = Clocks()
    session_id = clocks.create()
    clocks.infer(session_id)
    clocks.engine.start()
    clocks.engine.lose()
    clocks.time_of_day += jump_s
    clocks.pass_by(2.0)
    clocks.engine.ready()
    clocks.engine.answer("Hello")
    end = clocks.sink.last
    assert isinstance(end, events.End)
    assert (end.stats.total_ms, end.stats.ttft_ms, end.stats.queue_ms) == (2000.0, 2000.0, 2000.0)
    assert clocks.sink.text == "Hello"


def test_a_clock_that_was_wrong_when_the_daemon_ended() -> None:
    """A session last used in what is now the future was used just now."""
    after = Clocks()
    after.create()
    after = after.after_a_restart(jump_s=-YEARS_S)
    after.pass_by(59.0)
    assert len(after.sessions.session_ids()) == 1
    after.pass_by(2.0)
    assert len(after.sessions.session_ids()) == 0


def test_years_without_a_daemon() -> None:
    """A session that nobody used for years has expired, and is not brought back."""
    before = Clocks()
    before.create()
    assert before.after_a_restart(jump_s=YEARS_S).sessions.session_ids() == ()


def test_an_unfinished_turn_of_another_time(jump_s: float) -> None:
    """It goes on after the restart; of a limit of its time something is always left, and never more than it was."""
    before = Clocks()
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
async def test_the_machine_sleeps(echo: Site) -> None:
    """A daemon that stood still for longer than its engine may hang takes nobody for hung when it goes on."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 3)
        await witness.until("token")
        engine_pid = echo.daemon.engine_pid()
        with stopped(engine_pid), stopped(echo.daemon.process.pid):
            # Nothing happens that could be waited for: that is the point.
            await asyncio.sleep(2.0)
        assert await witness.finish() == LINE * 3
        assert await witness.turn("Next.") == "Next."
        assert echo.daemon.engine_pid() == engine_pid
        assert not logged(echo.daemon, "engine_hangs")
