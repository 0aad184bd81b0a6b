"""Traces of a real daemon, as a collector gets them."""

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

from tests.e2e.harness import ENDLESS, Daemon, Talk, run_daemon, talk
from tests.telemetry.collector import Collector, Seen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OF_SOCKET, OF_TURN = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE[::-1]}-{SPAN}-01"
SECRET = "hunter2hunter2"

pytestmark = pytest.mark.slow


def traced(address: str) -> dict[str, str]:
    """Return the settings of a daemon that sends its traces there."""
    return {
        "INFERENCECENTER_TELEMETRY__OTLP_ENDPOINT": address,
        "INFERENCECENTER_TELEMETRY__OTLP_HEADERS": json.dumps({"authorization": f"Bearer {SECRET}"}),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def turns(n_turns: int) -> Callable[[list[Seen]], bool]:
    """Return the condition that so many turns have come."""
    return lambda spans: sum(span.name == "turn" for span in spans) >= n_turns


def tree(spans: list[Seen], turn_id: str) -> tuple[Seen, list[Seen]]:
    """Return a turn's span and those under it, in their order."""
    (root,) = (span for span in spans if span.attributes.get("gen_ai.response.id") == turn_id)
    return root, sorted((span for span in spans if span.parent_id == root.span_id), key=lambda span: span.began_ns)


async def one_turn(conversation: Talk, session_id: str, **fields: str) -> str:
    """Run a short turn and return its id."""
    request = {"op": "infer", "session_id": session_id, "prompt": "Count to ten.", "params": {"max_tokens": 8}}
    await conversation.send(**request, **fields)
    end = await conversation.until(lambda message: message["op"] in ("end", "error"))
    assert end["op"] == "end", end
    turn_id: str = end["turn_id"]
    return turn_id


async def test_one_trace_spans_both_processes(tmp_path: Path, demo_model_path: Path) -> None:
    """Under the turn are the engine's stages; a client's span is above it; a lost engine is an event of it."""
    with (
        Collector() as collector,
        run_daemon(tmp_path / "state", demo_model_path, **traced(collector.address)) as daemon,
    ):
        headers = {"Authorization": f"Bearer {daemon.admin_token}", "traceparent": OF_SOCKET}
        async with connect(daemon.url, additional_headers=headers, subprotocols=["inferencecenter.v1"]) as socket:  # type: ignore[list-item]
            conversation = Talk(socket)
            session_id = await conversation.create(system="Secret system")
            of_socket = await one_turn(conversation, session_id)
            of_turn = await one_turn(conversation, session_id, traceparent=OF_TURN)
            refusal = await conversation.ask(op="infer", session_id=session_id, prompt="x", traceparent="00-zz")
            assert (refusal["code"], refusal["field"]) == ("invalid_request", "traceparent")
        async with talk(daemon) as conversation:
            lost = await lose_the_engine(conversation, daemon)
        spans = collector.wait(turns(3))
    check_tree(spans, of_socket, trace_id=TRACE)
    check_tree(spans, of_turn, trace_id=TRACE[::-1])
    root, _ = tree(spans, lost)
    assert (root.parent_id, root.events) == ("", ("interrupted",))
    assert root.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert collector.headers["authorization"] == f"Bearer {SECRET}"
    sent = b"".join(collector.bodies)
    assert not any(said in sent for said in (b"Count to", b"Secret system", b"one two"))
    assert SECRET not in daemon.log.read_text()


def check_tree(spans: list[Seen], turn_id: str, *, trace_id: str) -> None:
    """Check a turn that went well."""
    root, stages = tree(spans, turn_id)
    assert (root.service, root.trace_id, root.parent_id) == ("inferencecenter", trace_id, SPAN)
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert [stage.name for stage in stages if stage.name not in ("copy", "restore")] == ["queue", "prefill", "decode"]
    for stage in stages:
        assert (stage.service, stage.trace_id) == ("inferencecenter-engine", trace_id)
        assert root.began_ns <= stage.began_ns <= stage.ended_ns <= root.ended_ns
    assert stages[-1].attributes == {"inferencecenter.tokens": 8}


async def lose_the_engine(conversation: Talk, daemon: Daemon) -> str:
    """Kill the engine under a turn, abort that when it goes on, and return its id."""
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


async def test_a_turn_that_the_daemon_leaves_unfinished(tmp_path: Path, demo_model_path: Path) -> None:
    """Both daemons tell of it, in the client's trace: the one that it was suspended, the other that it went on."""
    with Collector() as collector:
        settings = traced(collector.address) | {"INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0"}
        with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
            async with talk(daemon) as conversation:
                session_id = await conversation.create()
                params = ENDLESS | {"max_tokens": 2000}  # so that it is stopped before its end
                await conversation.send(
                    op="infer", session_id=session_id, prompt="Count.", params=params, traceparent=OF_TURN
                )
                await conversation.until(lambda message: message["op"] == "token")
                assert await asyncio.to_thread(daemon.stop) == 0
            (suspended,) = (span for span in collector.wait(turns(1)) if span.name == "turn")
        with run_daemon(tmp_path / "state", demo_model_path, **settings):
            spans = await asyncio.to_thread(collector.wait, turns(2))
    (continued,) = (span for span in spans if span.name == "turn" and span != suspended)
    assert (suspended.events, continued.events) == (("interrupted", "suspended"), ("continued",))
    assert suspended.attributes["gen_ai.response.id"] == continued.attributes["gen_ai.response.id"]
    assert suspended.trace_id == continued.trace_id == TRACE[::-1]


async def test_a_collector_that_is_down_costs_one_line(tmp_path: Path, demo_model_path: Path) -> None:
    """Turns run as ever, and the daemon ends as fast."""
    with Collector() as gone:
        address = gone.address
    with run_daemon(tmp_path / "state", demo_model_path, **traced(address)) as daemon:
        async with talk(daemon) as conversation:
            session_id = await conversation.create()
            for _ in range(3):
                await one_turn(conversation, session_id)
        assert daemon.stop() == 0
        log = daemon.log.read_text()
    assert log.count("traces_not_sent") <= 1
    assert "Traceback" not in log
    assert "opentelemetry" not in log


def test_without_the_extra_the_start_says_so(tmp_path: Path) -> None:
    """With the status of a wrong setting, and what to install."""
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from inferencecenter.cli import main\n"
        "sys.argv = ['inferencecenter', 'serve', '--backend', 'echo', '--port', '0']\n"
        "main()"
    )
    environment = os.environ | {"INFERENCECENTER_STATE_DIR": str(tmp_path)} | traced("http://127.0.0.1:9")
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 78, ended.stderr
    assert "inferencecenter[otel]" in ended.stderr
