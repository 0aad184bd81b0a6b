"""The measuring program `benchmarks.wasm`: both sides do the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon
    from tests.wasm.conftest import GuestRunner

pytest.importorskip("wasmtime", reason="the extra wasm is not installed")

from benchmarks.wasm import Workload


@pytest.mark.parametrize("streams", [False, True])
def test_guest_and_client_generate_the_same_tokens(runner: GuestRunner, daemon: Daemon, streams: bool) -> None:
    """By the daemon's counters."""
    workload = Workload("few", n_turns=3, n_tokens=7, streams=streams)

    def tokens() -> float:
        return daemon.metric("generated_tokens_total")

    before = tokens()
    assert runner.run(workload.guest()).code == 0
    between = tokens()
    runner.loop.call(workload.run(runner.client))
    assert between - before == tokens() - between == 21
