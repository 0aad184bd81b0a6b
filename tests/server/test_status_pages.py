"""The health, readiness and metrics pages."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import inferencecenter
from inferencecenter.config.settings import ServerSettings
from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.server.status_pages import show_gpus
from inferencecenter.sessions.journal import StorageFault
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.server.harness import Running, StubJournal, ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

PROXIED = "X-Forwarded-For: 192.0.2.1\r\n"


@pytest.mark.parametrize("path", ["/", "/ws", "/api/inference"])
async def test_plain_get_describes_the_server(server: Running, path: str) -> None:
    """The request has no upgrade."""
    status, _, body = await server.http(path)
    assert (status, json.loads(body)["server"]) == (200, "inferencecenter")


async def test_health_does_not_depend_on_the_engine(server: Running) -> None:
    """The process is healthy while the engine is dead."""
    server.engine.status = ready(state=EngineState.FAILED)
    assert (await server.http("/healthz"))[0] == 200


@pytest.mark.parametrize("state", EngineState)
async def test_readiness_follows_the_engine(server: Running, state: EngineState) -> None:
    """The status is 200 if a turn can run, also after a wake-up; the body has the reason and the load progress."""
    server.engine.status = ready(state=state, load_fraction=0.25, detail="because")
    status, _, body = await server.http("/readyz")
    serves = state in (EngineState.READY, EngineState.SUSPENDING, EngineState.ASLEEP)
    assert status == (200 if serves else 503)
    answer = json.loads(body)
    assert (answer["state"], answer["load_fraction"]) == (state.value, 0.25)
    assert answer["detail"] == {
        EngineState.READY: "stub is ready",
        EngineState.STARTING: "loading the model: 25%",
        EngineState.SUSPENDING: "stub is asleep, and wakes for the next turn",
        EngineState.ASLEEP: "stub is asleep, and wakes for the next turn",
    }.get(state, f"the engine is {state}: because")


async def test_readiness_needs_storage(serve: Serve) -> None:
    """While sessions cannot be stored it is 503, without the reason."""
    journal = StubJournal()
    async with serve(journal=journal) as server:
        assert json.loads((await server.http("/readyz"))[2])["storage"] == "ok"
        journal.fault = StorageFault("the secret disk is full")
        status, _, body = await server.http("/readyz")
        answer = json.loads(body)
        assert (status, answer["state"], answer["storage"]) == (503, "ready", "unavailable")
        assert "secret" not in answer["detail"]


async def test_readiness_needs_accounts(server: Running, tmp_path: Path) -> None:
    """With the accounts file deleted no login is accepted."""
    (tmp_path / "accounts.sqlite3").unlink()
    status, _, body = await server.http("/readyz")
    assert (status, json.loads(body)["storage"]) == (503, "unavailable")


async def page_samples(server: Running, headers: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples on the page by name and labels."""
    status, head, body = await server.http("/metrics", headers)
    assert (status, "text/plain; version=" in head) == (200, True)
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def sample_key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return the key of a sample."""
    return f"inferencecenter_{name}", frozenset(labels.items())


async def test_metrics_are_in_prometheus_format(server: Running) -> None:
    """Engine series are by model, with current values."""
    server.engine.status = ready(
        restarts=3, running=1, waiting=2, parked_sessions=5, parked_bytes=9, parked_ram_bytes=4
    )
    found = await page_samples(server)
    expected = {
        sample_key("engine_restarts_total", model="stub"): 3,
        sample_key("engine_ready", model="stub"): 1,
        sample_key("engine_state", model="stub", state="ready"): 1,
        sample_key("engine_state", model="stub", state="failed"): 0,
        sample_key("slots", model="stub"): 4,
        sample_key("running_turns", model="stub"): 1,
        sample_key("waiting_turns", model="stub"): 2,
        sample_key("parked_sessions", model="stub"): 5,
        sample_key("parked_bytes", model="stub", tier="ram"): 4,
        sample_key("parked_bytes", model="stub", tier="disk"): 5,
        sample_key("model_info", model="stub", architecture="stub", backend="stub", library="stub"): 1,
        sample_key("storage_failing"): 0,
        sample_key("build_info", version=inferencecenter.__version__, python=platform.python_version()): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_unloaded_engine_has_a_state(server: Running) -> None:
    """Series of a loaded model are absent."""
    server.engine.status = EngineStatus(state=EngineState.STARTING)
    found = await page_samples(server)
    assert found[sample_key("engine_state", model="stub", state="starting")] == 1
    assert found[sample_key("engine_ready", model="stub")] == 0
    assert sample_key("slots", model="stub") not in found


async def test_process_metrics(server: Running) -> None:
    """The daemon and each engine have their memory and CPU time; an engine that has exited has none."""
    server.engine.status = ready(pid=os.getppid())
    found = await page_samples(server)
    for process, model in (("front", ""), ("engine", "stub")):
        assert found[sample_key("process_resident_memory_bytes", process=process, model=model)] > 0
        assert found[sample_key("process_cpu_seconds_total", process=process, model=model)] >= 0
    server.engine.status = ready(pid=2**30)
    assert sample_key("process_resident_memory_bytes", process="engine", model="stub") not in await page_samples(server)


def test_gpu_metrics() -> None:
    """They have the index of the GPU; missing readings and lost GPUs are absent."""
    metrics = DaemonMetrics()
    readings = (
        GpuReading(index=0, name="One", uuid="GPU-1", temperature_c=60, slowdowns=("power_cap",)),
        GpuReading(index=1, power_watts=45.5),
    )

    def shown(metric: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"inferencecenter_gpu_{metric}", labels)

    show_gpus(metrics.machine, Gpus(readings, driver_version="580.1"))
    assert shown("info", gpu="0", name="One", uuid="GPU-1", driver="580.1") == 1
    assert (shown("temperature_celsius", gpu="0"), shown("temperature_celsius", gpu="1")) == (60, None)
    assert (shown("power_watts", gpu="0"), shown("power_watts", gpu="1")) == (None, 45.5)
    assert [shown("slowdown", gpu="0", reason=reason) for reason in ("power_cap", "hw_thermal")] == [1, 0]
    assert shown("slowdown", gpu="1", reason="power_cap") is None
    show_gpus(metrics.machine, Gpus())
    assert shown("temperature_celsius", gpu="0") is None


async def test_openmetrics_by_accept_header(server: Running) -> None:
    """Its parser accepts the page."""
    accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2\r\n"
    status, head, body = await server.http("/metrics", accept)
    assert status == 200
    assert "application/openmetrics-text; version=1.0.0" in head
    families = list(openmetrics_parser.text_string_to_metric_families(body.decode()))  # type: ignore[no-untyped-call]
    assert "inferencecenter_frames_out" in {family.name for family in families}


@pytest.mark.parametrize(
    "accept", ["text/plain;version=x", "application/openmetrics-text;version=..", "*/*;version", ";;,=", "x" * 4000]
)
async def test_invalid_accept_header_gets_the_plain_page(server: Running, accept: str) -> None:
    """It is no error."""
    assert sample_key("connections") in await page_samples(server, f"Accept: {accept}\r\n")


@pytest.mark.parametrize(
    ("access", "headers", "status"),
    [
        ("loopback", "", 200),
        ("loopback", PROXIED, 403),
        ("loopback", PROXIED + "Authorization: Bearer {operator}\r\n", 403),
        ("either", "", 200),
        ("either", PROXIED, 401),
        ("either", "Host: chat.example.org\r\n", 401),
        ("either", "Via: 1.1 proxy\r\n", 401),
        ("loopback", "Host: chat.example.org\r\n", 403),
        (None, "", 401),
        (None, "Authorization: Bearer {operator}\r\n", 200),
        ("either", PROXIED + "Authorization: Bearer {operator}\r\n", 200),
        ("either", PROXIED + "Authorization: Bearer {user}\r\n", 403),
        ("either", PROXIED + "Authorization: Bearer wrong\r\n", 401),
        ("token", "", 401),
        ("token", "Authorization: Bearer {operator}\r\n", 200),
        ("token", "X-Client-ID: desk\r\nX-API-Key: desk-key\r\n", 200),
    ],
)
async def test_metrics_access_setting(serve: Serve, access: str | None, headers: str, status: int) -> None:
    """By default a token is needed; clients of a proxy are not local."""
    default = ServerSettings().metrics_access
    async with serve(metrics_access=access or default) as server:
        server.accounts.ensure_client("op", max_sessions=1, priority="normal", scopes=["operator"])
        operator = server.accounts.create_token("op").token
        answer = await server.http("/metrics", headers.format(operator=operator, user=server.token))
        assert answer[0] == status
        assert (status == 200) == (b"inferencecenter_connections" in answer[2])


async def test_token_in_the_metrics_url_is_refused(serve: Serve) -> None:
    """Sockets refuse it, too."""
    async with serve(metrics_access="token") as server:
        assert (await server.http(f"/metrics?token={server.token}"))[0] == 400


async def test_untrusted_proxy_is_reported_locally(server: Running) -> None:
    """It is logged once, and only a local client sees it in the readiness page."""

    async def told(headers: str = "") -> str | None:
        found: str | None = json.loads((await server.http("/readyz", headers))[2]).get("proxy")
        return found

    assert await told() is None
    with capture_logs() as logs:
        for _ in range(3):
            assert await told("Host: chat.example.org\r\n") is None
    assert [(line["event"], line["host"]) for line in logs] == [("proxy_not_trusted", "chat.example.org")]
    assert await told() == "not_trusted"


async def test_trusted_proxy_is_not_reported(serve: Serve) -> None:
    """A local program is not reported, either."""
    async with serve(trusted_proxies=("127.0.0.1",)) as server:
        await server.http("/readyz", "Host: chat.example.org\r\n" + PROXIED)
        assert not server.context.proxies.sees_untrusted
