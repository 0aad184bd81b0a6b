"""The backoff before a restart."""

from __future__ import annotations

from inferencecenter.supervisor.lifecycle import HEALTHY_AFTER_S, RestartBackoff


def test_backoff_doubles_up_to_its_bound() -> None:
    """The bound holds after any number of failures."""
    backoff = RestartBackoff(min_s=0.5, max_s=6.0, random=lambda: 1.0)
    waits = [backoff.after_failure(ready_s=0.0) for _ in range(2000)]
    assert waits[:5] == [0.5, 1.0, 2.0, 4.0, 6.0]
    assert waits[-1] == 6.0


def test_jitter_is_at_most_half() -> None:
    """Daemons that lost their engines together do not restart them together."""
    assert RestartBackoff(min_s=0.5, max_s=6.0, random=lambda: 0.0).after_failure(ready_s=0.0) == 0.25


def test_healthy_engine_resets_the_backoff() -> None:
    """An engine that served for a while is restarted at once; one that has just started is not."""
    backoff = RestartBackoff(min_s=0.5, max_s=6.0, random=lambda: 1.0)
    assert [backoff.after_failure(ready_s=ready_s) for ready_s in (0.0, HEALTHY_AFTER_S - 1, HEALTHY_AFTER_S)] == [
        0.5,
        1.0,
        0.5,
    ]
