"""The dashboard's nodes: their state, memory, GPUs and engines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from inferencecenter.protocol.events import Nodes
from inferencecenter.protocol.values import ClusterEngine, ClusterGpu, ClusterNode, ClusterRpcServer
from tests.web.browser import DESKTOP, MARKS, PHONE, barriers
from tests.web.test_dashboard import AdminStub, open_dashboard, plan
from tests.web.test_screenshots import FOLDER_VARIABLE

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit
    from tests.web.stub import Stub

pytestmark = MARKS


def engine(model: str, replica: int, state: str, **figures: Any) -> ClusterEngine:
    """Return an engine."""
    return ClusterEngine(
        model=model,
        replica=replica,
        state=state,
        **{"load_fraction": 1.0, "running": 0, "waiting": 0, "sessions": 0, **figures},
    )


NODES = (
    ClusterNode(
        name="local",
        state="up",
        drain="none",
        version="0.2.0",
        sessions=12,
        engines=(engine("qwen", 0, "ready", running=3, waiting=1, sessions=12),),
        ram_used_mb=9216,
        ram_total_mb=32_768,
    ),
    ClusterNode(
        name="box2",
        address="10.0.0.2",
        state="up",
        drain="none",
        version="0.2.0",
        heartbeat_age_s=0.4,
        sessions=1,
        engines=(engine("qwen", 1, "ready", running=2, sessions=1), engine("gemma", 0, "starting", load_fraction=0.42)),
        ram_used_mb=4096,
        ram_total_mb=65_536,
        gpus=(
            ClusterGpu(name="NVIDIA GeForce RTX 3070", used_mb=6656, total_mb=8192, utilization=87, temp=71),
            ClusterGpu(name="", used_mb=512, total_mb=6144),
        ),
    ),
    ClusterNode(
        name="a-machine-with-a-very-long-name.and-a-domain.of-its-own.example",
        address="10.0.0.3",
        state="down",
        drain="none",
        sessions=0,
        engines=(engine("qwen", 2, "backoff", detail="the connection to the engine on box3 was lost: no heartbeat"),),
    ),
    ClusterNode(
        name="box4",
        address="10.0.0.4",
        state="up",
        drain="draining",
        drain_waits_for=("2 running turns of large",),
        heartbeat_age_s=0.2,
        sessions=4,
        engines=(),
        rpc_servers=(
            ClusterRpcServer(model="large", state="ready", running=2),
            ClusterRpcServer(model="larger", state="starting"),
        ),
    ),
    ClusterNode(
        name="box5",
        address="10.0.0.5",
        state="up",
        drain="drained",
        heartbeat_age_s=0.2,
        sessions=0,
        engines=(),
        rpc_servers=(
            ClusterRpcServer(model="large", state="missing", detail="it is drained"),
            ClusterRpcServer(model="larger", state="stopped"),
        ),
    ),
    ClusterNode(name="box6", state="unknown", drain="none", sessions=0, engines=()),
    ClusterNode(name="box7", address="10.0.0.7", state="up", drain="none", heartbeat_age_s=2.5, sessions=0, engines=()),
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "is_mobile": True, "has_touch": True},
}


class NodesStub(AdminStub):
    """A daemon with these machines, for an account with these scopes; ``asked`` counts the requests for machines."""

    def __init__(self, *nodes: ClusterNode, scopes: tuple[str, ...] = ("user", "operator")) -> None:
        super().__init__(plan())
        self.nodes = nodes
        self.scopes = scopes
        self.asked = 0

    def stub(self) -> Stub:
        """Return the stub daemon."""
        made = super().stub()
        account = made.answers["auth"]({})
        own = {"auth": lambda _: account | {"scopes": self.scopes}, "list_nodes": self._list}
        return replace(made, answers={**made.answers, **own})

    def _list(self, _asked: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        return Nodes(nodes=self.nodes).model_dump(exclude_none=True)


def node(visit: Visit, name: str) -> Locator:
    """Return the entry of a machine."""
    heading = visit.page.get_by_role("heading", name=name, exact=True)
    return visit.page.get_by_role("listitem").filter(has=heading)


@pytest.mark.parametrize("look", LOOKS)
async def test_nodes_are_shown(browser: Browser, daemon: Daemon, look: str, tmp_path: Path) -> None:
    """State, heartbeat, GPUs, memory and engines of each, without barriers, on every screen."""
    async with open_dashboard(browser, daemon, NodesStub(*NODES), **LOOKS[look]) as visit:
        panel = visit.page.get_by_role("region", name="Nodes")
        await expect(panel.get_by_role("heading", level=3)).to_have_count(len(NODES))
        for name, words in (
            ("This machine", ("Joined", "12 sessions", "9 GiB of 32 GiB", "qwen, replica 0", "3 running", "1 waiting")),
            (
                "box2",
                ("Joined", "10.0.0.2", "version 0.2.0", "heartbeat 400 ms ago", "6.50 GiB of 8 GiB, 87 % busy, 71 °C"),
            ),
            (
                "box2",
                ("GPU 1", "512 MiB of 6 GiB", "Main memory", "4 GiB of 64 GiB", "gemma", "Loading the model 42 %"),
            ),
            (NODES[2].name, ("Lost", "Restarting", "no heartbeat")),
            ("box4", ("Draining", "4 sessions", "Waits for: 2 running turns of large")),
            ("box4", ("Devices for large", "In use", "2 running", "Devices for larger", "Starting")),
            ("box5", ("Drained", "Missing", "it is drained", "Not running")),
            ("box6", ("Unknown", "No engines.")),
            ("box7", ("Heartbeat late", "heartbeat 2.5 s ago")),
        ):
            for each in words:
                await expect(node(visit, name)).to_contain_text(each)
        meter = node(visit, "box2").get_by_role("meter", name="Memory: NVIDIA GeForce RTX 3070")
        await expect(meter).to_have_attribute("aria-valuetext", "6.50 GiB of 8 GiB, 87 % busy, 71 °C")
        assert await meter.evaluate("(meter) => meter.value / meter.max") == pytest.approx(6656 / 8192)
        assert await visit.page.evaluate("() => document.querySelector('.page').scrollWidth <= innerWidth")
        await panel.scroll_into_view_if_needed()
        folder = Path(os.environ.get(FOLDER_VARIABLE) or tmp_path)
        await panel.screenshot(path=folder / f"nodes-{look}.png")
        assert not await barriers(visit)


async def test_nodes_are_followed(browser: Browser, daemon: Daemon) -> None:
    """A machine that is lost or joins is shown, without a click."""
    stub = NodesStub(*NODES[:2])
    async with open_dashboard(browser, daemon, stub) as visit:
        await expect(node(visit, "box2")).to_contain_text("Joined")
        stub.nodes = (NODES[0], NODES[1].model_copy(update={"state": "down"}), NODES[3])
        await expect(node(visit, "box2")).to_contain_text("Lost")
        await expect(node(visit, "box4")).to_be_visible()


@pytest.mark.parametrize(
    ("nodes", "scopes", "asks"), [((), ("user", "operator"), True), (NODES, ("user",), False)], ids=["none", "user"]
)
async def test_no_nodes_to_show(
    browser: Browser, daemon: Daemon, nodes: tuple[ClusterNode, ...], scopes: tuple[str, ...], *, asks: bool
) -> None:
    """Without a cluster there is no panel; other users do not ask."""
    stub = NodesStub(*nodes, scopes=scopes)
    async with open_dashboard(browser, daemon, stub) as visit:
        await expect(visit.page.get_by_role("heading", name="Your usage")).to_be_visible()
        await expect(visit.page.get_by_role("heading", name="Nodes")).to_have_count(0)
        assert stub.asked == int(asks)
