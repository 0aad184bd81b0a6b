"""Requests to the process that talks to Ray."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from inferencecenter.cluster import ray_cluster
from inferencecenter.cluster.ray_cluster import RayCluster
from inferencecenter.ipc.link import LinkTicket
from inferencecenter.supervisor.process import NodeUnreachableError
from tests.cluster import stuck_driver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TICKET = LinkTicket(
    engine="m/0",
    epoch=1,
    key="k",
    address=("127.0.0.1", 1),
    authority="",
    certificate="",
    certificate_key="",
    lost_after_s=3.0,
    orphan_s=60.0,
)


@asynccontextmanager
async def connected(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayCluster]:
    """A connection to the stub driver."""
    monkeypatch.setattr(ray_cluster, "DRIVER", stuck_driver.MODULE)
    cluster = RayCluster("127.0.0.1:1")
    try:
        yield cluster
    finally:
        await cluster.close()


async def test_machine_that_does_not_answer_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of nodes arrives while a start waits for its machine, which is answered only after it."""
    async with connected(monkeypatch) as cluster:
        start = cluster.start_host("stuck", TICKET, module="host")
        refused, nodes = await asyncio.gather(start, cluster.nodes(), return_exceptions=True)
        assert isinstance(nodes, tuple)
        assert [node.name for node in nodes] == ["a"]
        assert isinstance(refused, NodeUnreachableError)
        assert str(refused) == "it does not answer"


async def test_cancelled_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late reply is dropped."""
    async with connected(monkeypatch) as cluster:
        await cluster.nodes()
        driver = cluster._driver
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cluster.start_host("stuck", TICKET, module="host"), timeout=0.05)
        for _ in range(2):
            assert [node.name for node in await cluster.nodes()] == ["a"]
        assert cluster._driver is driver


async def test_requests_fail_when_the_driver_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has not answered; the next request starts another."""
    async with connected(monkeypatch) as cluster:
        starts = [cluster.start_host(node, TICKET, module="host") for node in ("stuck", "dead")]
        for failure in await asyncio.gather(*starts, return_exceptions=True):
            assert isinstance(failure, NodeUnreachableError)
            assert "cannot be reached, or refuses the token" in str(failure)
        assert [node.name for node in await cluster.nodes()] == ["a"]
