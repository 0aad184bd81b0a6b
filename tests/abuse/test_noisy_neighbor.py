"""A client that repeats cheap operations with a valid token does not degrade another client's stream.

Each action runs beside a neighbor that streams continuously, on one daemon with the echo backend. Its texts
and errors equal those of an undisturbed run, its worst gap stays close to that run's, the event loop never blocks, and
the memory of both processes stays bounded.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from benchmarks.abuse.actions import ACTIONS
from inferencecenter.hardware.process_usage import read_usage
from tests.abuse.conftest import attack
from tests.abuse.neighbor import StreamObservation, stream_until
from tests.e2e.harness import Daemon, command_line, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.abuse.actions import Action

pytestmark = pytest.mark.slow

SETTINGS = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "5",
    "INFERENCECENTER_ENGINE__SLOTS": "4",
    "INFERENCECENTER_SERVER__MAX_CONNECTIONS": "100",
    "INFERENCECENTER_ENGINE__N_CTX": "4096",
}
GAP_TICKS = 100
"""Limit of the worst gap above that of the undisturbed run: one second of a running machine."""
GROWTH_BYTES = 192 * 2**20
"""Limit of the memory growth of both processes in one action: the largest requests, and what the allocator keeps."""
SECONDS_OF_AN_ACTION = 4


@dataclass(frozen=True)
class AbuseSetup:
    """A daemon, the abusive client's token, and the neighbor's undisturbed observation."""

    daemon: Daemon
    token: str
    undisturbed: StreamObservation


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[AbuseSetup]:
    """A daemon shared by all actions, and the baseline of the neighbor."""
    with run_daemon(tmp_path_factory.mktemp("abuse") / "state", demo_model_path, **SETTINGS) as daemon:
        token = command_line(daemon, "token", "create", "noisy")["token"]
        undisturbed = asyncio.run(stream_until(daemon, asyncio.sleep(0), least_turns=4))
        assert undisturbed.errors == []
        assert len(undisturbed.texts) == 1
        yield AbuseSetup(daemon, token, undisturbed)


def rss_bytes(daemon: Daemon) -> int:
    """Return the resident memory of both processes of a daemon."""
    return sum(read_usage(pid).rss_bytes for pid in (daemon.process.pid, daemon.engine_pid()))


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
async def test_abusive_client_does_not_degrade_another_clients_stream(setup: AbuseSetup, action: Action) -> None:
    """Texts, errors and gaps match the undisturbed run; memory and event loop delays stay bounded."""
    engine, before_bytes, log_bytes = (
        setup.daemon.engine_pid(),
        rss_bytes(setup.daemon),
        setup.daemon.log.stat().st_size,
    )
    outcomes: dict[str, int] = {}

    async def disturb() -> None:
        outcomes.update(
            await attack(
                setup.daemon, setup.token, action.name, max(4, round(action.rate_per_s * SECONDS_OF_AN_ACTION))
            )
        )

    observed = await stream_until(setup.daemon, disturb(), least_turns=2)

    assert observed.errors == []
    assert observed.texts == setup.undisturbed.texts
    assert observed.worst_gap_ticks <= setup.undisturbed.worst_gap_ticks + GAP_TICKS
    assert outcomes, "the action was answered"
    assert outcomes.keys().isdisjoint({"internal", "closed 4408"})
    assert setup.daemon.engine_pid() == engine
    assert rss_bytes(setup.daemon) - before_bytes <= GROWTH_BYTES
    setup.daemon.warn_of_blocked_loop(since_bytes=log_bytes)
