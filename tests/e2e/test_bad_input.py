"""Bad input gets a clear error, and the socket, the session and other clients keep working."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from inferencecenter.protocol.codec import REQUESTS
from tests.e2e.harness import ENDLESS, REPLY_TIMEOUT_S, SocketClient, connect_client
from tests.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

FRAMES = [
    ("", "invalid_json"),
    ("{", "invalid_json"),
    ("[]", "invalid_json"),
    ("null", "invalid_json"),
    ('{"op": "ping", "n": NaN}', "invalid_json"),
    ('{"op": "ping", "text": "\\ud800"}', "invalid_json"),
    ("[" * 100_000, "invalid_json"),
    ('{"op": "ping", "x": ' + "[" * 500 + "]" * 500 + "}", "invalid_request"),
    ("{}", "invalid_request"),
    ('{"op": 5}', "invalid_request"),
    ('{"op": "nonsense"}', "unknown_op"),
    ('{"op": "resume_session", "session_id": "x"}', "session_not_found"),
    ('{"op": "load_model", "name": "x"}', "model_not_found"),
    ('{"op": "ping", "extra": 1}', "invalid_request"),
    ('{"op": "ping", "id": 5}', "invalid_request"),
    ('{"op": "ping", "id": "' + "x" * 65 + '"}', "invalid_request"),
    ('{"op": "create_session", "on_full": "drop"}', "invalid_request"),
    ('{"op": "fork_session", "session_id": "x"}', "session_not_found"),
    ('{"op": "rewind_session", "session_id": "x"}', "invalid_request"),
    ('{"op": "rewind_session", "session_id": "x", "turn": null}', "invalid_request"),
    ('{"op": "create_session", "on_disconnect": "wait"}', "invalid_request"),
    ('{"op": "create_session", "model": "no-such-model"}', "model_not_found"),
    ('{"op": "create_session", "ttl_s": "5"}', "invalid_request"),
    ('{"op": "create_session", "params": {"temperature": 9}}', "invalid_request"),
    ('{"op": "subscribe_metrics", "interval_ms": 1}', "invalid_request"),
    ('{"op": "status", "type": "weather"}', "invalid_request"),
    ('{"op": "list_sessions", "limit": 0}', "invalid_request"),
]

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "params.temperature"),
    ({"temperature": 5.01}, "params.temperature"),
    ({"temperature": "0.5"}, "params.temperature"),
    ({"temperature": True}, "params.temperature"),
    ({"temp": 1, "temperature": 1}, "params.temp"),
    ({"top_p": 1.5}, "params.top_p"),
    ({"top_k": 1.5}, "params.top_k"),
    ({"mirostat": 3}, "params.mirostat"),
    ({"tfs_z": 0.5}, "params.tfs_z"),
    ({"stop": [""]}, "params.stop"),
    ({"stop_regex": ["("]}, "params.stop_regex"),
    ({"samplers": ["magic"]}, "params.samplers"),
    ({"max_tokens": 0}, "params.max_tokens"),
    ({"max_time_ms": 0}, "params.max_time_ms"),
    ({"sampling": {"warmth": 1}}, "params.sampling.warmth"),
    ({"temprature": 1}, "params.temprature"),
]


async def _still_works(client: SocketClient, session: str) -> None:
    text, end = await client.turn(session, "What is the capital of France?", temperature=0.0, max_tokens=40)
    assert "Paris" in text
    assert end["finish_reason"] == "stop"


async def test_malformed_frames_get_their_error_codes(daemon: Daemon) -> None:
    """Every malformed frame gets its code, and the same socket and session keep working."""
    async with connect_client(daemon) as client:
        session = await client.create()
        for frame, code in FRAMES:
            await client.socket.send(frame)
            reply = await client.receive()
            assert (reply["op"], reply["code"]) == ("error", code), f"{frame[:80]} -> {reply}"
            assert reply["message"]
        await client.socket.send(b'{"op": "ping"}')
        assert (await client.receive())["code"] == "invalid_request"
        await _still_works(client, session)


async def test_parameter_errors_name_the_field(daemon: Daemon) -> None:
    """Each invalid parameter is refused by name and nothing is generated."""
    async with connect_client(daemon) as client:
        session = await client.create()
        for params, field in BAD_PARAMS:
            reply = await client.ask(op="infer", session_id=session, prompt="Hi", params=params)
            assert reply["code"] == "invalid_request", f"{params} -> {reply}"
            assert reply["field"].startswith(field), f"{params} -> {reply}"
        assert (await client.ask(op="get_session", session_id=session))["transcript"] == []
        await _still_works(client, session)


async def test_prompt_length_limits(daemon: Daemon) -> None:
    """Empty, too long and special-token prompts get different results and lose nothing."""
    async with connect_client(daemon) as client:
        session = await client.create()
        assert (await client.ask(op="infer", session_id=session, prompt=""))["field"] == "prompt"
        await client.send(op="infer", session_id=session, prompt="word " * 20_000, id="long")
        error = await client.until(lambda message: message["op"] == "error")
        assert error["code"] == "prompt_too_long"
        assert error["hint"]
        assert (await client.ask(op="get_session", session_id=session))["transcript"] == []
        await _still_works(client, session)


async def test_oversized_frame_closes_with_1009(daemon: Daemon) -> None:
    """A 10 MB prompt closes its own socket with 1009; another socket is unaffected."""
    async with connect_client(daemon) as neighbor:
        session = await neighbor.create()
        # No context manager: its exit would abort a transport that the lost connection has closed already.
        client = SocketClient(await connect(daemon.url))
        with pytest.raises(ConnectionClosed) as closed:
            await client.ask(op="infer", session_id="s", prompt="x" * 10_000_000)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await _still_works(neighbor, session)


async def test_second_infer_and_idle_abort_are_refused(daemon: Daemon) -> None:
    """A second infer is refused while a turn runs, and abort without a turn is refused."""
    async with connect_client(daemon) as client:
        session = await client.create()
        assert (await client.ask(op="abort", session_id=session))["code"] == "nothing_to_abort"
        await client.send(op="infer", session_id=session, prompt="Count from 1 to 20.", params=ENDLESS)
        await client.until(lambda message: message["op"] == "token")
        assert (await client.ask(op="infer", session_id=session, prompt="Hi"))["code"] == "session_busy"
        wrong = await client.ask(op="abort", session_id=session, turn_id="t_other")
        assert wrong["code"] == "turn_not_found"
        end = await client.ask(op="abort", session_id=session)
        assert (end["op"], end["finish_reason"]) == ("end", "aborted")


REQUIRED: dict[str, dict[str, Any]] = {
    "infer": {"prompt": "Hi"},
    "append": {"messages": [{"role": "user", "content": "x"}]},
    "rewind_session": {"turn": "start"},
    "set_metadata": {"metadata": {"title": "x"}},
    "call_mcp_tool": {"call_id": "c", "server": "m"},
}
"""What an op needs besides a session."""
SESSION_FIELDS = [
    (op, "session_id") for op, kind in REQUESTS.items() if "session_id" in kind.model_fields and op != "purge_session"
] + [("list_sessions", "after")]
"""Every op of a session's owner that names one, and the field by which it does."""


@pytest.fixture
def foreign_token(daemon: Daemon) -> str:
    """A token of another client."""
    created = subprocess.run(
        [sys.executable, "-m", "inferencecenter", "token", "create", "stranger", "--json"],
        env={"INFERENCECENTER_STATE_DIR": str(daemon.state_dir), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    token: str = json.loads(created.stdout)["token"]
    return token


async def test_foreign_session_is_indistinguishable_from_a_missing_one(daemon: Daemon, foreign_token: str) -> None:
    """For every op, another client's session id and an unknown one get byte-identical answers."""
    async with connect_client(daemon) as owner, connect(daemon.url) as stranger:
        session = await owner.create()
        await stranger.send(json.dumps({"op": "auth", "token": foreign_token, "protocol": 1}))
        await stranger.recv()
        await stranger.recv()
        for op, field in SESSION_FIELDS:
            answers = []
            for session_id in (session, "s_" + "A" * (len(session) - 2)):
                await stranger.send(json.dumps({"op": op, **REQUIRED.get(op, {}), field: session_id, "id": "same"}))
                answers.append(await asyncio.wait_for(stranger.recv(), REPLY_TIMEOUT_S))
            assert answers[0] == answers[1], op
            assert json.loads(answers[0])["code"] == "session_not_found", op
        await _still_works(owner, session)


@pytest.mark.slow
def test_bad_model_file_fails_the_start(tmp_path: Path) -> None:
    """A truncated model file gives exit code 66, the path and the reason."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    ended = _serve(tmp_path, "--model", str(model))
    assert ended.returncode == 66, ended.stderr
    # Rich wraps long lines: line breaks are ignored.
    told = " ".join(ended.stderr.split())
    assert "ends inside its header" in told
    assert model.name in told


@pytest.mark.slow
def test_port_in_use_fails_the_start(daemon: Daemon, demo_model_path: Path, tmp_path: Path) -> None:
    """A port in use gives exit code 69 and a message with the port."""
    ended = _serve(tmp_path, "--model", str(demo_model_path), port=daemon.port)
    assert ended.returncode == 69, ended.stderr
    assert str(daemon.port) in ended.stderr


def test_invalid_toml_fails_the_start(tmp_path: Path) -> None:
    """A configuration that is not TOML gives exit code 78 with file and line."""
    config = tmp_path / "broken.toml"
    config.write_text("[server\nport = 1\n")
    ended = _serve(tmp_path, "--config", str(config))
    assert ended.returncode == 78, ended.stderr
    assert "broken.toml" in ended.stderr


def _serve(tmp_path: Path, *arguments: str, port: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``serve``, which is expected to fail."""
    return subprocess.run(
        [sys.executable, "-m", "inferencecenter", "serve", "--port", str(port or free_port()), *arguments],
        env={"INFERENCECENTER_STATE_DIR": str(tmp_path / "state"), "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
