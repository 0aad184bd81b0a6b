"""Traces of a real daemon, as a collector receives them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect

from tests.e2e.harness import ENDLESS, Daemon, SocketClient, connect_client, run_daemon
from tests.telemetry.collector import Collector, ReceivedSpan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OF_SOCKET, OF_TURN = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE[::-1]}-{SPAN}-01"
SECRET = "hunter2hunter2"

pytestmark = pytest.mark.slow


def trace_settings(address: str) -> dict[str, str]:
    """Return settings of a daemon that exports its traces there."""
    return {
        "INFERENCECENTER_TELEMETRY__OTLP_ENDPOINT": address,
        "INFERENCECENTER_TELEMETRY__OTLP_HEADERS": json.dumps({"authorization": f"Bearer {SECRET}"}),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def turn_count(n_turns: int) -> Callable[[list[ReceivedSpan]], bool]:
    """Return a predicate for this number of turns."""
    return lambda spans: sum(span.name == "turn" for span in spans) >= n_turns


def span_tree(spans: list[ReceivedSpan], turn_id: str) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """Return a turn's span and its descendants in order."""
    (root,) = (span for span in spans if span.attributes.get("gen_ai.response.id") == turn_id)
    return root, sorted((span for span in spans if span.parent_id == root.span_id), key=lambda span: span.began_ns)


async def one_turn(conversation: SocketClient, session_id: str, **fields: str) -> str:
    """Run a short turn and return its id."""
    request = {"op": "infer", "session_id": session_id, "prompt": "Count to ten.", "params": {"max_tokens": 8}}
    await conversation.send(**request, **fields)
    end = await conversation.until(lambda message: message["op"] in ("end", "error"))
    assert end["op"] == "end", end
    turn_id: str = end["turn_id"]
    return turn_id


async def test_one_trace_spans_both_processes(tmp_path: Path, demo_model_path: Path) -> None:
    """The engine's stages are under the turn, the client's span above it, and a lost engine is an event."""
    with (
        Collector() as collector,
        run_daemon(tmp_path / "state", demo_model_path, **trace_settings(collector.address)) as daemon,
    ):
        headers = {"Authorization": f"Bearer {daemon.admin_token}", "traceparent": OF_SOCKET}
        async with connect(daemon.url, additional_headers=headers, subprotocols=["inferencecenter.v1"]) as socket:  # type: ignore[list-item]
            conversation = SocketClient(socket)
            session_id = await conversation.create(system="Secret system")
            of_socket = await one_turn(conversation, session_id)
            of_turn = await one_turn(conversation, session_id, traceparent=OF_TURN)
            refusal = await conversation.ask(op="infer", session_id=session_id, prompt="x", traceparent="00-zz")
            assert (refusal["code"], refusal["field"]) == ("invalid_request", "traceparent")
        async with connect_client(daemon) as conversation:
            lost = await lose_the_engine(conversation, daemon)
        spans = collector.wait(turn_count(3))
    check_tree(spans, of_socket, trace_id=TRACE)
    check_tree(spans, of_turn, trace_id=TRACE[::-1])
    root, _ = span_tree(spans, lost)
    assert (root.parent_id, root.events) == ("", ("interrupted",))
    assert root.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert collector.headers["authorization"] == f"Bearer {SECRET}"
    sent = b"".join(collector.bodies)
    assert not any(said in sent for said in (b"Count to", b"Secret system", b"one two"))
    assert SECRET not in daemon.log.read_text()


def check_tree(spans: list[ReceivedSpan], turn_id: str, *, trace_id: str) -> None:
    """Check the spans of a successful turn."""
    root, stages = span_tree(spans, turn_id)
    assert (root.service, root.trace_id, root.parent_id) == ("inferencecenter", trace_id, SPAN)
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert [stage.name for stage in stages if stage.name not in ("copy", "restore")] == ["queue", "prefill", "decode"]
    for stage in stages:
        assert (stage.service, stage.trace_id) == ("inferencecenter-engine", trace_id)
        assert root.began_ns <= stage.began_ns <= stage.ended_ns <= root.ended_ns
    assert stages[-1].attributes == {"inferencecenter.tokens": 8, "inferencecenter.node": "local"}


async def lose_the_engine(conversation: SocketClient, daemon: Daemon) -> str:
    """Kill the engine during a turn, abort the resumed turn, and return its id."""
    session_id = await conversation.create()
    await conversation.send(op="infer", session_id=session_id, prompt="Count to ten.", params=ENDLESS)
    first = await conversation.until(lambda message: message["op"] == "token")
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    await conversation.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
    await conversation.until(lambda message: message["op"] == "token")
    await conversation.send(op="abort", session_id=session_id)
    await conversation.until(lambda message: message["op"] == "end")
    turn_id: str = first["turn_id"]
    return turn_id


async def test_suspended_turn_is_traced_by_both_daemons(tmp_path: Path, demo_model_path: Path) -> None:
    """In the client's trace one daemon reports the suspension, the next the resumption."""
    with Collector() as collector:
        settings = trace_settings(collector.address) | {"INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0"}
        with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
            async with connect_client(daemon) as conversation:
                session_id = await conversation.create()
                params = ENDLESS | {"max_tokens": 2000}  # it must be stopped before its end
                await conversation.send(
                    op="infer", session_id=session_id, prompt="Count.", params=params, traceparent=OF_TURN
                )
                await conversation.until(lambda message: message["op"] == "token")
                assert await asyncio.to_thread(daemon.stop) == 0
            (suspended,) = (span for span in collector.wait(turn_count(1)) if span.name == "turn")
        with run_daemon(tmp_path / "state", demo_model_path, **settings):
            spans = await asyncio.to_thread(collector.wait, turn_count(2))
    (continued,) = (span for span in spans if span.name == "turn" and span != suspended)
    assert (suspended.events, continued.events) == (("interrupted", "suspended"), ("continued",))
    assert suspended.attributes["gen_ai.response.id"] == continued.attributes["gen_ai.response.id"]
    assert suspended.trace_id == continued.trace_id == TRACE[::-1]


async def test_unreachable_collector_costs_one_log_line(tmp_path: Path, demo_model_path: Path) -> None:
    """Turns run normally, and the daemon stops without delay."""
    with Collector() as gone:
        address = gone.address
    with run_daemon(tmp_path / "state", demo_model_path, **trace_settings(address)) as daemon:
        async with connect_client(daemon) as conversation:
            session_id = await conversation.create()
            for _ in range(3):
                await one_turn(conversation, session_id)
        assert daemon.stop() == 0
        log = daemon.log.read_text()
    assert log.count("traces_not_sent") <= 1
    assert "Traceback" not in log
    assert "opentelemetry" not in log


def test_missing_tracing_extra_fails_the_start(tmp_path: Path) -> None:
    """The exit code is that of a wrong setting, and the message says what to install."""
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from inferencecenter.cli import main\n"
        "sys.argv = ['inferencecenter', 'serve', '--backend', 'echo', '--port', '0']\n"
        "main()"
    )
    environment = os.environ | {"INFERENCECENTER_STATE_DIR": str(tmp_path)} | trace_settings("http://127.0.0.1:9")
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 78, ended.stderr
    assert "inferencecenter[otel]" in ended.stderr
