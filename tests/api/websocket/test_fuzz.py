"""Random frames: the decoder and the connection fail only in the documented way."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.api.websocket.commands import COMMANDS
from inferencecenter.api.websocket.connection import Connection
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import REQUESTS, read_frame
from inferencecenter.server.states import ConnectionState
from tests.server.harness import StubWire, stub_context

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(sorted({name for kind in REQUESTS.values() for name in kind.model_fields} | {"extra"}))
OPS = st.sampled_from([*COMMANDS, "HELLO", "resume_session", ""])
LIKELY: st.SearchStrategy[object] = st.sampled_from(
    ["s", "ada", 1, "user", "x" * 65, None, [], {}, 99, "key", "normal", True]
)
REQUEST_LIKE = st.builds(
    lambda op, fields: json.dumps({"op": op, **fields}), OPS, st.dictionaries(FIELDS, LIKELY | JSON, max_size=5)
)
FRAMES = st.text(max_size=200) | JSON.map(json.dumps) | REQUEST_LIKE


@settings(max_examples=300, deadline=None)
@given(FRAMES)
def test_decoder_raises_only_protocol_errors(text: str) -> None:
    """Any text is a request or a client error."""
    error: InferenceCenterError | None = None
    try:
        request = read_frame(text).parse()
    except InferenceCenterError as raised:
        error = raised
    if error is None:
        assert request.op in REQUESTS
    else:
        assert error.spec.on_wire
        assert error.message


RIGHT = json.dumps({"op": "auth", "client_id": "kitchen", "api_key": "key", "protocol": 1})
EVENTS = st.one_of(FRAMES, FRAMES, FRAMES, st.sampled_from([None, RIGHT, "#drain", "#pause", "#resume"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=12), st.booleans())
async def test_connection_answers_any_frame(frames: list[str | None], v1: bool) -> None:
    """Every frame is answered or executed, and none causes ``internal``."""
    wire = StubWire()
    context = stub_context()
    connection = Connection(context, wire, address="192.0.2.1", v1=v1)
    connection.accepted()
    for frame in frames:
        match frame:
            case "#drain":
                connection.drain(1.0)
            case "#pause":
                wire.takes_frames = False
            case "#resume":
                wire.takes_frames = True
                if wire.on_writable is not None:
                    wire.on_writable()
            case _:
                await connection.receive(frame)
    codes = [_code(written) for written in wire.frames]
    assert ErrorCode.INTERNAL not in codes
    connection.lost()
    assert connection.state is ConnectionState.CLOSED
    assert context.metrics.registry.get_sample_value("inferencecenter_outbox_bytes") == 0
    count = len(wire.written)
    await connection.receive('{"op": "hello"}')
    assert len(wire.written) == count, "a closed connection says nothing"
    await context.close()


def _code(frame: dict[str, Any]) -> str | None:
    code = frame.get("code")
    return code if isinstance(code, str) else None
