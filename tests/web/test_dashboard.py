"""The dashboard's plan and client list, with a stub or a real daemon."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from inferencecenter.protocol.values import EnginePlan
from tests.e2e.harness import command_line
from tests.web.browser import MARKS, PHONE, barriers, origin_of, signed_in, visiting
from tests.web.stub import Stub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS

GIB: Final = 2**30
MODEL: Final = {"state": "ready", "name": "qwen2.5-7b", "architecture": "qwen2", "layers": 28, "gpu_layers": 28}
READINGS: Final = {
    "op": "metrics",
    "timestamp": 1_000.0,
    "gpu": dict.fromkeys(("name", "temp", "vram_total_mb", "vram_used_mb", "utilization", "power_watts"))
    | {"throttling": None, "throttle_reasons": None},
    "inference": {
        "active_generations": 1, "total_sessions": 3, "last_tps": 20.0, "last_ttft_ms": 80.0, "queue_depth": 0,
        "total_tokens_generated": 100, "tokens_per_s": 20.0, "slots_used": 1, "slots": 8, "parked_sessions": 0,
        "parked_mb": 0.0,
    },
    "engine": {"state": "ready", "model": "qwen2.5-7b", "gpu_layers": 28, "restarts": 0, "rss_mb": 812.0},
}  # fmt: skip


def device(number: int, **changes: Any) -> dict[str, Any]:
    """Return a GPU of 8 GiB with its part of a plan."""
    return {
        "id": f"0000:0{number}:00.0", "name": "NVIDIA GeForce RTX 3070", "total_bytes": 8 * GIB,
        "free_bytes": 7 * GIB, "margin_bytes": GIB // 2, "layers": 14, "weight_bytes": 3 * GIB, "kv_bytes": GIB,
        "compute_bytes": GIB // 2, "context_bytes": 300 * 2**20,
    } | changes  # fmt: skip


def plan(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a plan for these GPUs in its wire format."""
    on_gpus = sum(each["layers"] for each in devices)
    why = "all layers and the output matrix fit" if devices else "llama.cpp can use no GPU"
    told = {
        "fits": True, "layers": 29, "n_gpu_layers": on_gpus, "split_mode": "layer" if len(devices) > 1 else "none",
        "slots": 8, "n_ctx": 4096, "n_batch": 2048, "n_ubatch": 512, "kv_type_k": "f16", "kv_type_v": "q8_0",
        "flash_attention": True, "n_threads": 4, "devices": devices,
        "host": {"available_bytes": 32 * GIB, "weight_bytes": GIB, "kv_bytes": 0, "compute_bytes": GIB // 8,
                 "expert_layers": 0},
        "reasons": [{"name": "n_gpu_layers", "value": f"{on_gpus} of 29", "why": why, "explicit": False},
                    {"name": "slots", "value": "8", "why": "set; 224 MiB of KV per slot", "explicit": True}],
        "advice": ['For a single user with a long context: 1 slot of 32768 tokens; gpu.prefer = "long" selects it.'],
    } | changes  # fmt: skip
    return EnginePlan.model_validate(told, strict=False).model_dump(exclude_none=True)


def client(name: str, **changes: int) -> dict[str, Any]:
    """Return a connected client."""
    return {
        "client_id": name, "connections": 1, "addresses": 1, "sessions": 2, "busy": 0, "tokens_today": 1200,
    } | changes  # fmt: skip


class AdminStub:
    """A daemon with these clients and this plan, as an administrator sees it."""

    def __init__(self, told: dict[str, Any] | None, *clients: dict[str, Any], state: str = "ready") -> None:
        self.plan = told
        self.clients = list(clients)
        self.state = state
        self.refusal: dict[str, Any] | None = None
        self.kicked: list[str] = []

    def stub(self) -> Stub:
        """Return the stub daemon."""
        usage = {"op": "usage", "client_id": "admin", "days": []}
        account = {"op": "auth_success", "client_id": "admin", "max_sessions": 16, "priority": "normal", "limits": {}}
        return Stub(
            answers={
                "auth": lambda _: account | {"scopes": ["user", "operator", "admin"]},
                "metrics": lambda _: READINGS,
                "subscribe_metrics": lambda _: {"op": "metrics_subscribed", "interval_ms": 1000},
                "usage": lambda _: usage,
                "status": self._status,
                "list_clients": lambda _: {"op": "clients", "clients": self.clients},
                "kick": self._kick,
            }
        )

    def _status(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["type"] != "model":
            return {"op": "status", "type": asked["type"], "values": {"sessions": 3}}
        values = MODEL | {"state": self.state}
        return {"op": "status", "type": "model", "values": values} | ({"plan": self.plan} if self.plan else {})

    def _kick(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.kicked.append(asked["client_id"])
        if self.refusal is not None:
            return self.refusal
        self.clients = [each for each in self.clients if each["client_id"] != asked["client_id"]]
        return {"op": "kicked", "client_id": asked["client_id"], "connections": 1}


@asynccontextmanager
async def open_dashboard(browser: Browser, daemon: Daemon, admin: AdminStub, **options: Any) -> AsyncIterator[Visit]:
    """Open the dashboard of a stub daemon."""
    async with visiting(browser, origin_of(daemon), **options) as visit:
        await admin.stub().take_over(visit.page)
        await visit.go(f"#token={daemon.admin_token}")
        await expect(visit.composer).to_be_visible()
        await visit.go("#/dashboard")
        await expect(visit.page.get_by_role("heading", name=re.compile("^Model"))).to_be_visible()
        yield visit


async def test_plan_by_device(browser: Browser, daemon: Daemon) -> None:
    """Each GPU has a bar with proportional parts and an accessible row; the reasons can be read."""
    name = "NVIDIA " + "very long " * 20
    told = plan(device(0, used_bytes=5 * GIB), device(1, layers=15, name=name))
    async with open_dashboard(browser, daemon, AdminStub(told), viewport=PHONE) as visit:
        bars = visit.page.locator(".place-bar")
        await expect(bars).to_have_count(3)
        whole = await bars.first.evaluate("(bar) => bar.getBoundingClientRect().width")
        weights = await bars.first.locator(".part-weights").evaluate("(part) => part.getBoundingClientRect().width")
        assert weights / whole == pytest.approx(3 / 8, abs=0.03)
        table = visit.page.get_by_role("table", name="Memory by device")
        row = table.get_by_role("row", name="NVIDIA GeForce RTX 3070")
        for words in ("14 of 29 layers", "4.79 GiB planned", "5 GiB used, 4 % more", "3 GiB", "300 MiB", "2.21 GiB"):
            await expect(row).to_contain_text(words)
        await expect(table.get_by_role("row", name=re.compile("Main memory"))).to_contain_text("30.9 GiB")
        why = visit.page.get_by_text("all layers and the output matrix fit")
        await expect(why).to_be_hidden()
        await visit.page.get_by_text("Why", exact=True).click()
        await expect(why).to_be_visible()
        assert await visit.page.evaluate("() => document.querySelector('.page').scrollWidth <= innerWidth")
        assert not await barriers(visit)


async def test_client_list(browser: Browser, daemon: Daemon) -> None:
    """An administrator disconnects a client after a confirmation; their own is marked; a refusal is shown."""
    admin = AdminStub(None, client("admin"), client("ada", connections=3))
    async with open_dashboard(browser, daemon, admin) as visit:
        table = visit.page.get_by_role("region", name="Connected clients as a table")
        await expect(table.get_by_role("row", name="admin You")).to_be_visible()
        dialog = visit.page.get_by_role("dialog")
        await visit.button("Disconnect admin").click()
        await expect(dialog).to_contain_text("This is your own account, and this page will be signed out.")
        await visit.button("Cancel", inside=dialog).click()
        await visit.button("Disconnect ada").click()
        await expect(dialog).to_contain_text("3 connections will be closed.")
        assert not await barriers(visit)
        assert admin.kicked == []
        await visit.button("Disconnect", inside=dialog).click()
        await expect(visit.page.get_by_text("ada was disconnected: 1 connection closed.")).to_be_visible()
        await expect(table.get_by_role("row", name="ada")).to_have_count(0)
        admin.refusal = {"op": "error", "code": "forbidden", "message": "not you", "error": "not you", "hint": "Ask.",
                         "retryable": False}  # fmt: skip
        await visit.button("Disconnect admin").click()
        await visit.button("Disconnect", inside=dialog).click()
        await expect(visit.page.get_by_text("not you Ask.")).to_be_visible()
        assert admin.kicked == ["ada", "admin"]


async def test_dashboard_of_a_real_daemon(browser: Browser, daemon: Daemon) -> None:
    """An administrator sees plan and clients; a user sees the model only."""
    made = await asyncio.to_thread(command_line, daemon, "token", "create", "onlooker")
    async with visiting(browser, origin_of(daemon)) as visit:
        await visit.sign_in(made["token"])
        await visit.button("Dashboard").click()
        await expect(visit.page.get_by_role("heading", name="Model", exact=True)).to_be_visible()
        await expect(visit.page.get_by_text("Architecture")).to_be_visible()
        for title in ("Model and plan", "Connected clients"):
            await expect(visit.page.get_by_role("heading", name=title)).to_have_count(0)
        async with signed_in(browser, daemon) as other:
            await other.button("Dashboard").click()
            await expect(other.page.get_by_text("Everything is on the CPU: ")).to_be_visible()
            await other.button("Disconnect onlooker").click()
            await other.button("Disconnect", inside=other.page.get_by_role("dialog")).click()
            await expect(other.page.get_by_text("onlooker was disconnected: 1 connection closed.")).to_be_visible()
        await expect(visit.token).to_be_visible()


async def test_dashboard_shows_the_past(browser: Browser, echo: Daemon) -> None:
    """It shows the time before the page was opened, by model and client, as charts or a table, for a chosen range."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Hello")
        await visit.answered()
    async with signed_in(browser, echo) as visit:
        await visit.go("#/dashboard")
        panel = visit.page.get_by_role("region", name="History", exact=True)
        await expect(panel.get_by_role("figure", name="Tokens per minute by model")).to_be_visible()
        await expect(panel.get_by_role("figure", name="Turns", exact=True)).to_be_visible()
        await panel.get_by_role("button", name="by client").click()
        await expect(panel.get_by_role("figure", name="Tokens per minute by client")).to_be_visible()
        await panel.get_by_role("button", name="24 h").click()
        await expect(panel.get_by_role("button", name="24 h")).to_have_attribute("aria-pressed", "true")
        await panel.get_by_role("button", name="History as a table").click()
        row = panel.get_by_role("row").filter(has_text="Time to first token")
        await expect(row).to_contain_text(re.compile(r"\d+ ms"))
        assert await barriers(visit) == []
