"""Which crashes of engines count against a client, and when it is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Failed
from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.poison_turns import CrashLimit
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, end_of

WINDOW_S = 600.0


@dataclass
class CrashLimitHarness:
    """A limit of three crashes, and a clock that the test advances."""

    max_deaths: int = 3
    now_s: float = 0.0
    limit: CrashLimit = field(init=False)

    def __post_init__(self) -> None:
        self.limit = CrashLimit(max_deaths=self.max_deaths, window_s=WINDOW_S, monotonic=lambda: self.now_s)

    def refuses(self, client_id: str) -> bool:
        """Whether a new turn of a client is refused."""
        refusal = self.limit.refusal(client_id)
        return refusal is not None and refusal.code is ErrorCode.RATE_LIMITED


def test_client_is_refused_until_its_crashes_expire() -> None:
    """The refusal has a retry delay; other clients are not refused."""
    hour = CrashLimitHarness()
    for number in range(3):
        assert not hour.refuses("eve")
        refused = hour.limit.engine_died({f"t{number}": "eve"})
        assert refused == (frozenset({"eve"}) if number == 2 else frozenset())
        hour.now_s += 10.0
    with pytest.raises(InferenceCenterError) as refusal:
        hour.limit.check("eve")
    assert refusal.value.retry_after_ms == (WINDOW_S - 30.0) * 1000
    assert not hour.refuses("ada")
    hour.now_s = WINDOW_S
    assert not hour.refuses("eve")
    assert hour.limit.engine_died({"t3": "eve"}) == {"eve"}


def test_bystander_turns_are_cleared() -> None:
    """A crash counts against a client until its turns that may have caused it are cleared."""
    hour = CrashLimitHarness(max_deaths=1)
    assert hour.limit.engine_died({"a1": "ada", "a2": "ada", "e": "eve"}) == {"ada", "eve"}
    hour.limit.cleared("a1")
    assert hour.refuses("ada")
    hour.limit.cleared("a2")
    assert (hour.refuses("ada"), hour.refuses("eve")) == (False, True)


def test_without_a_limit_no_client_is_refused() -> None:
    """The number of crashes does not matter."""
    hour = CrashLimitHarness(max_deaths=0)
    for number in range(100):
        assert hour.limit.engine_died({f"t{number}": "eve"}) == frozenset()
    assert not hour.refuses("eve")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("die"), st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), max_size=3)),
            st.tuples(st.just("clear"), st.integers(0, 9)),
            st.tuples(st.just("wait"), st.floats(0, WINDOW_S)),
        )
    )
)
def test_crash_limit_equals_a_reference(steps: list[tuple[str, object]]) -> None:
    """For any sequence of events the result is that of a list of all of them."""
    hour, deaths = CrashLimitHarness(), list[tuple[float, dict[str, str]]]()
    owner: dict[str, str] = {}
    for what, detail in steps:
        if isinstance(detail, dict):
            # A turn has one client, and a cleared one that is named again is suspected again.
            named = {f"t{number}": owner.setdefault(f"t{number}", client) for number, client in detail.items()}
            hour.limit.engine_died(named)
            deaths.append((hour.now_s, dict(named)))
        elif isinstance(detail, int) and what == "clear":
            hour.limit.cleared(f"t{detail}")
            for _, suspected in deaths:
                suspected.pop(f"t{detail}", None)
        elif isinstance(detail, float):
            hour.now_s += detail
        for client in "abc":
            counted = sum(client in suspected.values() and hour.now_s - at_s < WINDOW_S for at_s, suspected in deaths)
            assert hour.refuses(client) == (counted >= hour.max_deaths)


@pytest.mark.usefixtures("stub", "stopped")
@pytest.mark.parametrize("withdraws", [False, pytest.param(True, id="withdraws")])
async def test_client_that_crashes_engines_is_refused(*, withdraws: bool) -> None:
    """Its turns may be quarantined or withdrawn; the engine is not given up, and other clients continue."""
    limit = CrashLimit(max_deaths=4, window_s=WINDOW_S, monotonic=lambda: 0.0)
    watched = ObservedSupervisor(slots=8, max_restarts=3, crash_limit=limit)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    refusal: InferenceCenterError | None = None
    n_turns = 0
    with capture_logs() as logs:
        for n_turns in range(10):
            try:
                poison = watched.submit(f"poison{n_turns}", "die 2", client_id="eve")
            except InferenceCenterError as error:
                refusal = error
                break
            watched.states.clear()
            if withdraws:
                await watched.until(EngineState.BACKOFF)
                watched.supervisor.abort(poison.turn_id)
            await asyncio.wait_for(poison.ended.wait(), TIMEOUT_S)
    assert refusal is not None
    assert refusal.code is ErrorCode.RATE_LIMITED
    assert n_turns == (4 if withdraws else 2)
    assert [line["client"] for line in logs if line["event"] == "client_refused"] == ["eve"]
    assert not watched.supervisor.given_up
    assert (await end_of(watched.submit("fine", "count 3", client_id="ada"))).reason == "stop"
    await watched.supervisor.stop()


@pytest.mark.usefixtures("stub", "stopped")
async def test_queued_turns_of_a_refused_client_fail() -> None:
    """They could crash engines too; each gets the reason, and turns of others run."""
    limit = CrashLimit(max_deaths=2, window_s=WINDOW_S, monotonic=lambda: 0.0)
    watched = ObservedSupervisor(slots=8, max_queue=100, crash_limit=limit)
    fine = watched.submit("fine", "count 300", client_id="ada")
    poisons = [watched.submit(f"poison{number}", "die-reading 0", client_id="eve") for number in range(20)]
    watched.supervisor.start()
    for poison in poisons:
        await asyncio.wait_for(poison.ended.wait(), TIMEOUT_S)
    ends = [end for poison in poisons for end in poison.terminal if isinstance(end, Failed)]
    assert [end.code for end in ends] == ["rate_limited"] * 20
    assert (await end_of(fine)).reason == "stop"
    for _ in range(3):  # a third engine starts also if the second has answered all others
        await watched.until(EngineState.READY)
    assert watched.supervisor.status.restarts == 2
    await watched.supervisor.stop()
