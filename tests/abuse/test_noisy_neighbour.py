"""A client with a valid token repeats operations that are cheap to ask for: another client's stream does not suffer.

Each act runs beside a neighbour that streams all the time, on one daemon with the echo backend. The neighbour's texts
and errors are those of an undisturbed run and its worst gap is near it, the event loop is never blocked, and both
processes keep their size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from benchmarks.abuse.acts import ACTS
from inferencecenter.hardware.process_usage import read_usage
from tests.abuse.conftest import attack
from tests.abuse.neighbour import Heard, listen
from tests.e2e.harness import Daemon, command_line, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.abuse.acts import Act

pytestmark = pytest.mark.slow

SETTINGS = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "5",
    "INFERENCECENTER_ENGINE__SLOTS": "4",
    "INFERENCECENTER_SERVER__MAX_CONNECTIONS": "100",
    "INFERENCECENTER_ENGINE__N_CTX": "4096",
}
GAP_TICKS = 100
"""What the worst gap may be above that of the undisturbed run: one second of a machine that runs."""
GROWTH_BYTES = 192 * 2**20
"""What both processes may grow by in one act: buffers of the largest requests, and what the allocator keeps of them."""
SECONDS_OF_AN_ACT = 4


@dataclass(frozen=True)
class Box:
    """A daemon, the abusive client's token, and what the neighbour hears without it."""

    daemon: Daemon
    token: str
    undisturbed: Heard


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Box]:
    """A daemon for all acts, one after the other."""
    with run_daemon(tmp_path_factory.mktemp("abuse") / "state", demo_model_path, **SETTINGS) as daemon:
        token = command_line(daemon, "token", "create", "noisy")["token"]
        undisturbed = asyncio.run(listen(daemon, asyncio.sleep(0), least_turns=4))
        assert undisturbed.errors == []
        assert len(undisturbed.texts) == 1
        yield Box(daemon, token, undisturbed)


def rss_bytes(daemon: Daemon) -> int:
    """What both processes of a daemon hold."""
    return sum(read_usage(pid).rss_bytes for pid in (daemon.process.pid, daemon.engine_pid()))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
async def test_others_do_not_suffer(box: Box, act: Act) -> None:
    """Texts, errors and gaps are those of an undisturbed run, and memory and the event loop stay within bounds."""
    engine, before_bytes, log_bytes = box.daemon.engine_pid(), rss_bytes(box.daemon), box.daemon.log.stat().st_size
    outcomes: dict[str, int] = {}

    async def disturb() -> None:
        outcomes.update(
            await attack(box.daemon, box.token, act.name, max(4, round(act.rate_per_s * SECONDS_OF_AN_ACT)))
        )

    heard = await listen(box.daemon, disturb(), least_turns=2)

    assert heard.errors == []
    assert heard.texts == box.undisturbed.texts
    assert heard.worst_gap_ticks <= box.undisturbed.worst_gap_ticks + GAP_TICKS
    assert outcomes, "the act was answered"
    assert outcomes.keys().isdisjoint({"internal", "closed 4408"})
    assert box.daemon.engine_pid() == engine
    assert rss_bytes(box.daemon) - before_bytes <= GROWTH_BYTES
    box.daemon.assert_loop_was_free(since_bytes=log_bytes)
