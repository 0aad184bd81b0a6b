"""Fuzzed frames with a valid token: each is answered or closes its socket, and the daemon survives."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from inferencecenter.protocol.close import CLOSE_CODES, CloseCode
from inferencecenter.protocol.codec import REQUESTS
from tests.fuzz.budget import examples
from tests.fuzz.json_document import ODD_VALUES, changed
from tests.fuzz.test_http import BODIES, INTERNAL, SCHEMA
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

SESSION: Final = "SESSION"
"""Stands for the id of the session that the socket has."""
PARAMS: Final = {"temperature": 0.5, "max_tokens": 4, "stop": ["x"], "stop_regex": ["a+"], "logit_bias": {"5": 1.5}}
HISTORY: Final = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "name": "now", "arguments": "{}"}]},
    {"role": "tool", "content": "noon", "tool_call_id": "c1"},
]
LOOK: Final = {
    "role": "user",
    "content": [
        {"type": "text", "text": "Look: "},
        {"type": "image", "data": b64encode(image_file()).decode()},
        {"type": "image", "digest": "0" * 64},
    ],
}
TURN: Final = {"session_id": SESSION, "prompt": "Hi", "params": {"max_tokens": 4}}
FRAMES: Final[dict[str, list[dict[str, Any]]]] = {
    "hello": [{}],
    "auth": [{"token": "none", "protocol": 1}, {"client_id": "ada", "api_key": "none"}],
    "create_session": [
        {"system": "Be brief.", "params": PARAMS, "metadata": {"a": "b"}, "ttl_s": 5, "on_disconnect": "close"},
        {"mode": "raw", "priority": "batch", "on_full": "stop", "store": False, "on_disconnect": "close"},
    ],
    "infer": [
        TURN | {"params": PARAMS, "turn_key": "k", "n_probs": 1, "thinking": False, "priority": "normal"},
        {"session_id": SESSION, "messages": HISTORY, "params": {"max_tokens": 4}},
        {"session_id": SESSION, "messages": [LOOK], "params": {"max_tokens": 4}},
        TURN | {"tools": [{"name": "now", "parameters": SCHEMA}], "tool_choice": {"name": "now"}},
        TURN | {"json_schema": SCHEMA},
        TURN | {"regex": "[a-z]+"},
        TURN | {"grammar": 'root ::= "a" | "b"'},
    ],
    "abort": [{"session_id": SESSION}, {"session_id": SESSION, "turn_id": "t", "discard": True}],
    "close_session": [{"session_id": SESSION}],
    "resume_session": [{"session_id": SESSION, "epoch": "e", "last_seq": 5}],
    "create_share": [{"session_id": SESSION, "expires_in_s": 60}],
    "list_shares": [{}],
    "revoke_share": [{"share_id": "sh_none"}],
    "list_mcp_tools": [{}, {"server": "none"}],
    "call_mcp_tool": [{"session_id": SESSION, "call_id": "c1", "server": "none", "tool": "now"}],
    "append": [{"session_id": SESSION, "messages": HISTORY}, {"session_id": SESSION, "messages": [LOOK]}],
    "get_image": [{"digest": "0" * 64}],
    "fork_session": [{"session_id": SESSION, "turn": "start"}],
    "rewind_session": [{"session_id": SESSION, "turn": "start"}],
    "set_metadata": [{"session_id": SESSION, "metadata": {"a": "b"}}],
    "set_model": [{"session_id": SESSION, "model": "none"}],
    "get_session": [{"session_id": SESSION}],
    "list_sessions": [{"limit": 5, "after": SESSION}],
    "search_sessions": [{"query": 'word "a phrase"', "limit": 5, "after": SESSION}],
    "list_presets": [{}],
    "save_preset": [
        {"preset": {"preset_type": "prompt", "name": "a", "text": "b"}},
        {"preset": {"preset_type": "settings", "name": "a", "params": PARAMS, "json_schema": SCHEMA}},
        {"preset": {"preset_type": "settings", "name": "b", "tools": [{"name": "now", "parameters": SCHEMA}]}},
    ],
    "delete_preset": [{"preset_type": "prompt", "name": "a"}],
    "list_models": [{}],
    "embed": [{"texts": ["a", "b"]}],
    "rerank": [{"query": "a", "documents": ["a", "b"], "top_n": 1}],
    "load_model": [{"name": "none"}],
    "unload_model": [{"name": "none"}],
    "pull_model": [{"reference": "none/none:Q0"}],
    "list_pulls": [{}],
    "cancel_pull": [{"reference": "none/none:Q0"}],
    "remove_model": [{"name": "none"}],
    "metrics": [{}],
    "subscribe_metrics": [{"interval_ms": 1000}],
    "unsubscribe_metrics": [{}],
    "metrics_history": [{"range_s": 3600, "resolution_s": 60, "group_by": "client"}],
    "status": [{"type": "queue"}],
    "usage": [{"client_id": "ada", "days": 5}],
    "list_usage": [{"days": 5}],
    "subscribe_log": [{"level": "warning"}],
    "unsubscribe_log": [{}],
    "list_clients": [{}],
    "list_nodes": [{}],
    "drain_node": [{"node": "none"}],
    "undrain_node": [{"node": "none"}],
    "kick": [{"client_id": "ada"}],
    "list_accounts": [{"limit": 5, "after": "ada"}],
    "create_account": [{"client_id": "eve", "scopes": ["user"], "access_limits": {"max_tokens": 5}}],
    "get_account": [{"client_id": "eve"}],
    "delete_account": [{"client_id": "eve", "sessions": "keep"}],
    "change_account": [{"client_id": "eve", "max_sessions": 3, "access_limits": {"models": ["a"]}}],
    "list_tokens": [{"client_id": "ada", "limit": 5}],
    "create_token": [{"client_id": "eve", "name": "phone", "expires_in_s": 60}],
    "change_token": [{"token_id": "000000000000", "access_limits": {"tokens_per_day": None}}],
    "rotate_token": [{"token_id": "000000000000"}],
    "revoke_token": [{"token_id": "000000000000"}],
    "list_all_sessions": [{"client_id": "ada", "archived": True, "limit": 5}, {"after": SESSION}],
    "purge_session": [{"session_id": "none"}],
    "read_audit": [{"client_id": "ada", "event": "login", "limit": 5, "before": 9}],
    "drain": [],
    "ping": [{}],
}
NAMES: Final = {op: sorted(kind.model_fields.keys() - {"op"}) for op, kind in REQUESTS.items()}
NOT_UTF8: Final = 1007
PATIENT: Final[dict[str, Any]] = {"max_size": None, "open_timeout": 60, "ping_interval": None}
"""A client that waits for a busy machine."""
CLOSED: Final = {int(spec.code) for spec in CLOSE_CODES} - {int(CloseCode.INTERNAL)} | {NOT_UTF8}


def test_every_operation_is_fuzzed() -> None:
    """Only the operation that stops the daemon has no frames."""
    assert FRAMES.keys() == REQUESTS.keys()
    assert [op for op, frames in FRAMES.items() if not frames] == ["drain"]


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op, frames in FRAMES.items() if frames])
@examples(50)
@given(data=st.data())
def test_any_frame_is_answered_or_closes_its_socket(fuzzed: Daemon, op: str, data: st.DataObject) -> None:
    """A socket gets mutated frames of one operation, among others, bytes and invalid text."""
    own = changed(
        st.sampled_from([{"op": op, "id": "i", **frame} for frame in FRAMES[op]]), names=st.sampled_from(NAMES[op])
    )
    others = st.sampled_from([{"op": name, **frame} for name, frames in FRAMES.items() for frame in frames])
    frames = st.lists(own | own | own | others.map(encode_frame) | NOISE, min_size=1, max_size=8)
    with connect(fuzzed.url, **PATIENT) as socket:
        request(socket, op="auth", token=fuzzed.admin_token, protocol=1)
        session_id = request(socket, op="create_session", on_disconnect="close")["session_id"]
        own_frames = [frame.replace(SESSION.encode(), session_id.encode()) for frame in data.draw(frames)]
        exchange(socket, own_frames, binary=data.draw(st.sampled_from([None, None, None, 0])))


@pytest.mark.slow
@examples(200)
@given(data=st.data())
def test_any_responses_frame_is_answered_or_closes_its_socket(fuzzed: Daemon, data: st.DataObject) -> None:
    """A Responses socket gets mutated requests, bytes and invalid text."""
    bodies = [{"type": "response.create", "stream_id": "s", **body} for body in BODIES["/v1/responses"]]
    frames = st.lists(
        changed(st.sampled_from([*bodies, {"type": "response.cancel", "stream_id": "s"}])) | NOISE, max_size=6
    )
    headers = {"Authorization": f"Bearer {fuzzed.admin_token}"}
    with connect(f"{fuzzed.url}v1/responses", additional_headers=headers, **PATIENT) as socket:
        exchange(socket, data.draw(frames), answers_pings=False)


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Return a frame as text."""
    return json.dumps(frame).encode()


NOISE: Final = ODD_VALUES | st.binary(max_size=60) | st.text(max_size=60).map(str.encode)


def exchange(
    socket: ClientConnection, frames: list[bytes], *, binary: int | None = None, answers_pings: bool = True
) -> None:
    """Send frames as text, or one as bytes, and receive until all are answered or the socket is closed."""
    closed: ConnectionClosed | None = None
    try:
        for number, frame in enumerate(frames):
            socket.send(frame, text=number != binary)
        if answers_pings:
            request(socket, op="ping")
        assert socket.ping(ack_on_close=True).wait(60)
    except ConnectionClosed as error:
        closed = error
    assert closed is None or (closed.rcvd is not None and closed.rcvd.code in CLOSED), closed
    while (message := receive_frame(socket)) is not None:
        check_frame(message)


def receive_frame(socket: ClientConnection) -> str | bytes | None:
    """Return a received frame; ``None`` if there is none."""
    try:
        return socket.recv(timeout=0)
    except (TimeoutError, ConnectionClosed):
        return None


def check_frame(message: str | bytes) -> dict[str, Any]:
    """Return a frame of the daemon, which must not report an internal error."""
    frame = json.loads(message)
    assert isinstance(frame, dict)
    assert not INTERNAL.search(message if isinstance(message, bytes) else message.encode()), message
    return frame


def request(socket: ClientConnection, **frame: Any) -> dict[str, Any]:
    """Send a frame and return the reply with its id."""
    socket.send(json.dumps({"id": "own", **frame}))
    while (reply := check_frame(socket.recv(timeout=60))).get("id") != "own":
        pass
    return reply
