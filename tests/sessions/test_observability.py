"""Token rates and estimates of waits."""

from __future__ import annotations

from inferencecenter.protocol.values import TurnStats
from inferencecenter.sessions.observability import TokenMeter, TurnRecord, WaitEstimator


def test_token_rate_covers_the_last_ten_seconds() -> None:
    """Earlier tokens count in the total only."""
    meter = TokenMeter()
    meter.add(50, now=100.2)
    meter.add(50, now=100.7)
    meter.add(20, now=108.0)
    assert meter.per_s(now=109.0) == 12
    assert meter.per_s(now=115.0) == 2
    assert meter.per_s(now=130.0) == 0
    assert meter.total == 120


def test_rate_window_is_bounded() -> None:
    """A long run keeps only the last seconds."""
    meter = TokenMeter()
    for second in range(1000):
        meter.add(1, now=float(second))
    assert meter.per_s(now=999.0) == 1
    assert meter.total == 1000


def record(*, queue_ms: float, total_ms: float, prompt_tokens: int = 9, model: str = "toy") -> TurnRecord:
    """A turn record in which only the times matter."""
    return TurnRecord(
        client_id="c",
        session_id="s",
        turn_id="t",
        model=model,
        finish="stop",
        stats=TurnStats(
            queue_ms=queue_ms,
            ttft_ms=0.0,
            total_ms=total_ms,
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            tokens=1,
            tps=0.0,
            preempted=0,
        ),
    )


def test_expected_wait_follows_from_slot_times() -> None:
    """With two slots held for 400 ms each, one becomes free every 200 ms."""
    waits = WaitEstimator()
    assert waits.eta_ms("toy", 1, slots=2) is None
    waits.update(record(queue_ms=600, total_ms=1000))
    assert waits.eta_ms("toy", 1, slots=2) == 200
    assert waits.eta_ms("toy", 3, slots=2) == 600


def test_waits_are_estimated_per_model() -> None:
    """Turns of a small model do not affect a large one."""
    waits = WaitEstimator()
    waits.update(record(queue_ms=0, total_ms=100))
    assert waits.eta_ms("large", 1, slots=1) is None
    waits.update(record(queue_ms=0, total_ms=5000, model="large"))
    assert (waits.eta_ms("toy", 1, slots=1), waits.eta_ms("large", 1, slots=1)) == (100, 5000)


def test_turn_aborted_in_the_queue_does_not_change_the_estimate() -> None:
    """A turn aborted in the queue held no slot."""
    waits = WaitEstimator()
    waits.update(record(queue_ms=0, total_ms=100))
    waits.update(record(queue_ms=5000, total_ms=9000, prompt_tokens=0))
    assert waits.eta_ms("toy", 1, slots=1) == 100
