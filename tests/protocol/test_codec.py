"""Decoding requests from text and encoding events."""

from __future__ import annotations

import json
import typing
from typing import Any, Final, get_args, get_origin

import pytest
from pydantic import BaseModel

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import Event, FirstProtocol
from inferencecenter.protocol.codec import PIECE_BYTES, REQUESTS, FrameError, encode, encode_in_pieces, read_frame
from inferencecenter.protocol.events import AnyEvent
from inferencecenter.protocol.values import ChatMessage, MessageImage, Preset, TokenLogprobs

EVENTS: tuple[type[Event], ...] = get_args(AnyEvent)


def refused(text: str) -> InferenceCenterError:
    """Return the error of a frame."""
    with pytest.raises(InferenceCenterError) as caught:
        read_frame(text).parse()
    return caught.value


# Invalid frames.


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"op": "ping"', '{"op": "ping",}', "{'op': 'ping'}", "ping", '{"op": "ping"} x', "\x00",
        '{"op": NaN}', '{"op": Infinity}', '{"op": "ping", "id": -Infinity}', '{"op": "ping", "x": 01}',
        '{"op": "\\ud800"}', '{"op": "ping", "id": "\\udc00\\ud800"}', '{"op": "ping", "id": "\ud800"}',
        '{"op": "a\nb"}', '{"op": "ping", "x": 1e}',
    ],
)  # fmt: skip
def test_invalid_json_is_refused(text: str) -> None:
    """Malformed text, NaN, infinities and lone surrogates are ``invalid_json`` with a position."""
    error = refused(text)
    assert error.code is ErrorCode.INVALID_JSON
    assert "at character" in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[]", "array"), ('"ping"', "string"), ("1", "number"), ("1.5", "number"), ("true", "boolean"), ("null", "null")],
)
def test_frame_must_be_an_object(text: str, kind: str) -> None:
    """The message names the type."""
    error = refused(text)
    assert error.code is ErrorCode.INVALID_JSON
    assert f"JSON {kind}, not an object" in error.message


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [2_000, 90_000])
def test_deep_nesting_is_refused(opening: str, depth: int) -> None:
    """Any depth, closed or not, is an error and no crash."""
    closing = "]" if opening == "[" else "}"
    assert refused('{"op": "ping", "x": ' + opening * depth).code is ErrorCode.INVALID_JSON
    whole = '{"op": "ping", "x": ' + opening * depth + "1" + closing * depth + "}"
    assert refused(whole).code in (ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST)


def test_error_shortens_long_values() -> None:
    """A megabyte of input does not return as a megabyte of error."""
    error = refused(json.dumps({"op": "x" * 1_000_000}))
    assert error.code is ErrorCode.UNKNOWN_OP
    assert len(error.message) < 200


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500])
def test_deep_value_is_described(value: str) -> None:
    """A value that can be decoded but not encoded is described."""
    error = refused('{"op": "infer", "session_id": ' + value + "}")
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "session_id")
    assert "of many levels" in error.message


def test_error_shortens_long_names() -> None:
    """Long names are shortened in the message and in ``field``."""
    error = refused(json.dumps({"op": "ping", "k" * 100_000: 1}))
    assert str(error.field).startswith("kkk")
    assert len(error.message) + len(str(error.field)) < 300


def test_many_errors_are_counted() -> None:
    """The cost of reporting is bounded by that of validation."""
    message = {"role": "user", "content": "", **{f"k{n}": n for n in range(5000)}}
    error = refused(json.dumps({"op": "append", "session_id": "s", "messages": [message]}))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, None)
    assert error.message.startswith("5000 fields")


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"op": "ping", **{f"k{n}": n for n in range(5000)}}, "k0"),
        ({"op": "append", "session_id": "s", "messages": [0] * 5000}, "messages.0"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "tools": [0] * 5000}, "tools.0"),
        ({"op": "set_metadata", "session_id": "s", "metadata": {f"k{n}": n for n in range(5000)}}, "metadata.k0"),
        (
            {
                "op": "append",
                "session_id": "s",
                "messages": [{"role": "assistant", "content": "", "tool_calls": [0] * 5000}],
            },
            "messages.0.tool_calls.0",
        ),
    ],
)
def test_validation_stops_at_the_first_list_error(frame: dict[str, Any], field: str) -> None:
    """Thousands of errors cost as much as one."""
    assert refused(json.dumps(frame)).field == field


# The op and the id.


@pytest.mark.parametrize(
    ("frame", "words"),
    [({}, "op is missing"), ({"op": None}, "op is missing"), ({"op": 1}, "op is a JSON number, not a string"),
     ({"op": ["ping"]}, "op is a JSON array, not a string"), ({"op": True}, "op is a JSON boolean, not a string")],
)  # fmt: skip
def test_op_is_required(frame: dict[str, Any], words: str) -> None:
    """The error names the field, lists the ops and keeps the id."""
    error = refused(json.dumps({**frame, "id": "7"}))
    assert isinstance(error, FrameError)
    assert (error.code, error.field, error.request_id) == (ErrorCode.INVALID_REQUEST, "op", "7")
    assert words in error.message
    assert "create_session" in str(error.hint)


@pytest.mark.parametrize("op", ["ping", "PING", "Ping"])
def test_ops_are_case_insensitive(op: str) -> None:
    """Clients of protocol version 0 may send capitals."""
    assert isinstance(read_frame(json.dumps({"op": op})).parse(), requests.Ping)


def test_unknown_op_suggests_the_nearest() -> None:
    """The hint has the most similar op."""
    error = refused('{"op": "infre"}')
    assert (error.code, error.field, error.hint) == (ErrorCode.UNKNOWN_OP, "op", "Did you mean infer?")
    assert "infer" in str(refused('{"op": "zzz"}').hint)


@pytest.mark.parametrize(
    ("value", "known"), [("", ""), ("a", "a"), ("x" * 64, "x" * 64), ("x" * 65, None), (7, None), (None, None)]
)
def test_errors_echo_the_id(value: object, known: str | None) -> None:
    """The id is echoed even for an unknown op; an unusable id is not."""
    assert read_frame(json.dumps({"op": "nonsense", "id": value})).id == known


@pytest.mark.parametrize("value", ["x" * 65, 7, 1.5, True, [], {}])
def test_invalid_id_is_refused(value: object) -> None:
    """An id of another type, or too long, is refused."""
    error = refused(json.dumps({"op": "ping", "id": value}))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "id")


# Fields.


@pytest.mark.parametrize("op", REQUESTS)
def test_unknown_fields_are_refused(op: str) -> None:
    """Every request refuses unknown fields."""
    special: dict[str, dict[str, Any]] = {
        "auth": {"token": "t"},
        "infer": {"session_id": "s", "prompt": "p"},
        "append": {"session_id": "s", "messages": [{"role": "user", "content": "c"}]},
        "rewind_session": {"session_id": "s", "turn": "start"},
        "set_metadata": {"session_id": "s", "metadata": {}},
        "embed": {"texts": ["t"]},
        "save_preset": {"preset": {"preset_type": "prompt", "name": "n", "text": "t"}},
        "delete_preset": {"preset_type": "prompt", "name": "n"},
        "call_mcp_tool": {"session_id": "s", "call_id": "c", "server": "m"},
        "get_image": {"digest": "0" * 64},
        "rerank": {"query": "q", "documents": ["t"]},
        "search_sessions": {"query": "q"},
        "revoke_share": {"share_id": "h_0123456789abcdef"},
        "load_model": {"name": "m"},
        "unload_model": {"name": "m"},
        "kick": {"client_id": "c"},
        "drain_node": {"node": "n"},
        "undrain_node": {"node": "n"},
        "pull_model": {"reference": "r"},
        "cancel_pull": {"reference": "r"},
        "remove_model": {"name": "m"},
        "create_account": {"client_id": "c"},
        "change_account": {"client_id": "c"},
        "get_account": {"client_id": "c"},
        "delete_account": {"client_id": "c", "sessions": "keep"},
        "create_token": {"client_id": "c"},
        "change_token": {"token_id": "t", "access_limits": {}},
        "rotate_token": {"token_id": "t"},
        "revoke_token": {"token_id": "t"},
    }
    least = special.get(op, {"session_id": "s"} if "session_id" in REQUESTS[op].model_fields else {})
    assert read_frame(json.dumps({"op": op, **least})).parse().op == op
    error = refused(json.dumps({"op": op, **least, "sesion_id": 1}))
    assert (error.code, error.field, error.message) == (
        ErrorCode.INVALID_REQUEST,
        "sesion_id",
        "unknown field sesion_id",
    )
    assert error.hint


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"op": "infer", "prompt": "p"}, "session_id"),
        ({"op": "infer", "session_id": 1, "prompt": "p"}, "session_id"),
        ({"op": "infer", "session_id": "", "prompt": "p"}, "session_id"),
        ({"op": "infer", "session_id": "s" * 65, "prompt": "p"}, "session_id"),
        ({"op": "infer", "session_id": "s", "prompt": 5}, "prompt"),
        ({"op": "infer", "session_id": "s", "prompt": ""}, "prompt"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "params": []}, "params"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "n_probs": "3"}, "n_probs"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "n_probs": 3.0}, "n_probs"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "n_probs": True}, "n_probs"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "n_probs": 21}, "n_probs"),
        ({"op": "infer", "session_id": "s", "prompt": "p", "priority": "high"}, "priority"),
        ({"op": "infer", "session_id": "s", "messages": []}, "messages"),
        ({"op": "infer", "session_id": "s", "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"op": "infer", "session_id": "s", "messages": [{"role": "me", "content": "c"}]}, "messages.0.role"),
        ({"op": "append", "session_id": "s", "messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"op": "create_session", "ttl_s": "60"}, "ttl_s"),
        ({"op": "create_session", "ttl_s": 0}, "ttl_s"),
        ({"op": "create_session", "ttl_s": 1e300}, "ttl_s"),
        ({"op": "create_session", "on_full": "drop"}, "on_full"),
        ({"op": "create_session", "on_disconnect": "wait"}, "on_disconnect"),
        ({"op": "create_session", "store": 1}, "store"),
        ({"op": "create_session", "metadata": {"k": 1}}, "metadata.k"),
        ({"op": "subscribe_metrics", "interval_ms": 99}, "interval_ms"),
        ({"op": "status", "type": "weather"}, "type"),
        ({"op": "hello", "protocol": 2}, "protocol"),
        ({"op": "hello", "protocol": "1"}, "protocol"),
    ],
)
def test_field_errors_name_the_field(frame: dict[str, Any], field: str) -> None:
    """Missing, of another type, out of range: nothing is coerced."""
    error = refused(json.dumps(frame))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field)
    assert field in error.message


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (
            {"op": "infer", "session_id": "s", "prompt": "p", "messages": [{"role": "user", "content": "c"}]},
            "either prompt or messages",
        ),
        ({"op": "infer", "session_id": "s", "messages": [{"role": "assistant", "content": "c"}]}, "user or tool"),
        ({"op": "auth", "client_id": "a"}, "either token, or client_id and api_key"),
        ({"op": "auth", "token": "t", "client_id": "a", "api_key": "k"}, "either token, or client_id and api_key"),
    ],
)
def test_conflicting_fields_are_refused(frame: dict[str, Any], words: str) -> None:
    """The message has the valid combinations."""
    error = refused(json.dumps(frame))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert words in error.message


@pytest.mark.parametrize("field", ["token", "api_key"])
def test_errors_contain_no_secret(field: str) -> None:
    """A malformed secret is not echoed."""
    error = refused(json.dumps({"op": "auth", "client_id": "a", field: ["hunter2"]}))
    assert error.field == field
    assert "hunter2" not in error.message


# Events.


_OF_ONE_ROLE: Final[dict[str, Any]] = {"role": "assistant", "tool_call_id": None, "images": None}
_AN_IMAGE: Final[dict[str, Any]] = {"digest": "0" * 64}
_OF_ONE_TYPE: Final[dict[str, Any]] = {"text": None, "regex": None, "grammar": None}


def sample(annotation: Any) -> Any:  # a value of any type that events are made of
    """Return a value for a field, with every optional part filled."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Literal:
        return arguments[0]
    if origin in (tuple, list):
        return origin((sample(arguments[0]),))
    if origin is dict:
        is_column = get_origin(arguments[1]) is tuple
        return {"key": sample(arguments[1]) if is_column or arguments[1] is str else 1}
    if arguments:
        return sample(next(each for each in arguments if each is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        values = {name: sample(field.annotation) for name, field in annotation.model_fields.items()}
        special = {ChatMessage: _OF_ONE_ROLE, Preset: _OF_ONE_TYPE, MessageImage: _AN_IMAGE}.get(annotation, {})
        return annotation(**values | special)
    return {str: "text", int: 3, float: 0.5, bool: True}[annotation]


def marked(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the names that protocol version 0 knows, nested as the message is."""
    names: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if any(isinstance(mark, FirstProtocol) for mark in field.metadata):
            nested = field.annotation
            is_model = isinstance(nested, type) and issubclass(nested, BaseModel)
            names[name] = marked(typing.cast("type[BaseModel]", nested)) if is_model else None
    return names


def shape(value: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return the names in ``value``, to the depth of ``like``."""
    return {name: shape(value[name], like[name]) if like.get(name) else None for name in value}


@pytest.mark.parametrize("kind", EVENTS)
def test_events_of_both_protocol_versions(kind: type[Event]) -> None:
    """v1 sockets get every field; others exactly the marked ones of marked ops."""
    event = kind(**{name: sample(field.annotation) for name, field in kind.model_fields.items()})
    whole = encode(event)
    assert whole is not None
    assert json.loads(whole) == json.loads(event.model_dump_json(exclude_none=True))
    old = encode(event, first_protocol=True)
    if not kind.first_protocol:
        assert old is None
        return
    assert old is not None
    expected = {"op": None, **marked(kind)}
    assert shape(json.loads(old), expected) == expected
    assert json.loads(old).items() <= json.loads(whole).items() or any(expected.values())


def test_ops_of_protocol_version_0() -> None:
    """The list is complete."""
    assert {kind.model_fields["op"].default for kind in EVENTS if kind.first_protocol} == {
        "hello", "auth_success", "auth_failed", "session_created", "session_error", "token", "end", "abort",
        "session_closed", "metrics", "metrics_subscribed", "metrics_unsubscribed", "error",
    }  # fmt: skip


def test_absent_values_are_omitted() -> None:
    """Absent values are omitted, except readings, which are null."""
    assert encode(events.Pong()) == '{"op":"pong"}'
    assert encode(events.Pong(id="x")) == '{"op":"pong","id":"x"}'
    assert encode(events.AuthFailed(reason="no"), first_protocol=True) == '{"op":"auth_failed","reason":"no"}'


def test_text_round_trips() -> None:
    """Quotes, controls, emoji and null characters survive in one line."""
    content = 'é"\\\n\x00\U0001f600\u2028'
    frame = encode(events.Token(session_id="s", seq=1, turn_id="t", content=content))
    assert frame is not None
    assert json.loads(frame)["content"] == content
    assert "\n" not in frame


def test_version_0_omits_logprobs() -> None:
    """Such a socket gets the text alone."""
    logprobs = (TokenLogprobs(token="a", token_id=1, logprob=-0.1, top=()),)
    event = events.Token(session_id="s", seq=1, turn_id="t", content="a", logprobs=logprobs)
    assert json.loads(encode(event) or "")["logprobs"][0]["logprob"] == -0.1
    assert encode(event, first_protocol=True) == '{"op":"token","session_id":"s","content":"a"}'


@pytest.mark.parametrize(("n_chars", "fits"), [(131_072, True), (131_073, False)])
def test_description_of_a_tool_may_be_long(n_chars: int, fits: bool) -> None:
    """Agents explain a tool on pages: Claude Code has one of 18,780 characters."""
    tool = {"name": "work", "description": "x" * n_chars}
    frame = {"op": "infer", "session_id": "s", "prompt": "Hi", "tools": [tool]}
    if fits:
        read_frame(json.dumps(frame)).parse()
    else:
        assert refused(json.dumps(frame)).field == "tools.0.description"


@pytest.mark.parametrize("n_chars", [3, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_long_text_is_encoded_in_pieces(n_chars: int) -> None:
    """A file of several MiB blocks the event loop for one piece at a time; the frame is the same."""
    text = ('"é' * n_chars)[:n_chars]
    event = events.ImageFetched(digest="0" * 64, width=1, height=1, media_type="image/png", data=text)
    *pieces, last = encode_in_pieces(event)
    assert not any(is_last for _, is_last in pieces)
    assert all(len(piece) == PIECE_BYTES for piece, _ in pieces)
    assert len(last[0]) < 3 * PIECE_BYTES
    assert json.loads(b"".join([*(piece for piece, _ in pieces), last[0]])) == json.loads(encode(event) or "")
