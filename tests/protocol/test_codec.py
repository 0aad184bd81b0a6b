"""Tests of the way from text to requests and from events to text."""

from __future__ import annotations

import json
import typing
from typing import Any, Final, get_args, get_origin

import pytest
from pydantic import BaseModel

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import Dagger, Event
from inferencecenter.protocol.codec import REQUESTS, FrameError, encode, read_frame
from inferencecenter.protocol.events import AnyEvent
from inferencecenter.protocol.values import ChatMessage, TokenLogprobs

EVENTS: tuple[type[Event], ...] = get_args(AnyEvent)


def refused(text: str) -> InferenceCenterError:
    """Return the error that a frame causes."""
    with pytest.raises(InferenceCenterError) as caught:
        read_frame(text).parse()
    return caught.value


# What is not a frame.


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"op": "ping"', '{"op": "ping",}', "{'op': 'ping'}", "ping", '{"op": "ping"} x', "\x00",
        '{"op": NaN}', '{"op": Infinity}', '{"op": "ping", "id": -Infinity}', '{"op": "ping", "x": 01}',
        '{"op": "\\ud800"}', '{"op": "ping", "id": "\\udc00\\ud800"}', '{"op": "ping", "id": "\ud800"}',
        '{"op": "a\nb"}', '{"op": "ping", "x": 1e}',
    ],
)  # fmt: skip
def test_what_is_not_json_is_said_to_be(text: str) -> None:
    """Malformed text, NaN, infinities and lone surrogates are ``invalid_json`` with a position."""
    error = refused(text)
    assert error.code is ErrorCode.INVALID_JSON
    assert "at character" in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[]", "array"), ('"ping"', "string"), ("1", "number"), ("1.5", "number"), ("true", "boolean"), ("null", "null")],
)
def test_what_is_not_an_object_is_said_to_be(text: str, kind: str) -> None:
    """The message names what it is instead."""
    error = refused(text)
    assert error.code is ErrorCode.INVALID_JSON
    assert f"JSON {kind}, not an object" in error.message


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [2_000, 90_000])
def test_deep_nesting_is_refused(opening: str, depth: int) -> None:
    """However deep, closed or not, it is an error and not the end of the process."""
    closing = "]" if opening == "[" else "}"
    assert refused('{"op": "ping", "x": ' + opening * depth).code is ErrorCode.INVALID_JSON
    whole = '{"op": "ping", "x": ' + opening * depth + "1" + closing * depth + "}"
    assert refused(whole).code in (ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST)


def test_a_long_value_is_shown_short() -> None:
    """A megabyte of nonsense does not come back as a megabyte of error."""
    error = refused(json.dumps({"op": "x" * 1_000_000}))
    assert error.code is ErrorCode.UNKNOWN_OP
    assert len(error.message) < 200


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500])
def test_a_deep_value_of_a_known_field_is_refused(value: str) -> None:
    """What can be read but not written again is described instead of shown."""
    error = refused('{"op": "infer", "session_id": ' + value + "}")
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "session_id")
    assert "of many levels" in error.message


def test_a_long_name_is_shown_short() -> None:
    """Neither the message nor the field has all of it."""
    error = refused(json.dumps({"op": "ping", "k" * 100_000: 1}))
    assert str(error.field).startswith("kkk")
    assert len(error.message) + len(str(error.field)) < 300


def test_many_faults_are_counted_and_not_listed() -> None:
    """Saying what is wrong takes no longer than finding it."""
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
def test_the_first_fault_ends_the_validation(frame: dict[str, Any], field: str) -> None:
    """A list of faults costs what one costs: of thousands only the first is looked for."""
    assert refused(json.dumps(frame)).field == field


# The op and the id.


@pytest.mark.parametrize(
    ("frame", "words"),
    [({}, "op is missing"), ({"op": None}, "op is missing"), ({"op": 1}, "op is a JSON number, not a string"),
     ({"op": ["ping"]}, "op is a JSON array, not a string"), ({"op": True}, "op is a JSON boolean, not a string")],
)  # fmt: skip
def test_an_op_must_be_there(frame: dict[str, Any], words: str) -> None:
    """The error names the field, lists the ops and keeps the id."""
    error = refused(json.dumps({**frame, "id": "7"}))
    assert isinstance(error, FrameError)
    assert (error.code, error.field, error.request_id) == (ErrorCode.INVALID_REQUEST, "op", "7")
    assert words in error.message
    assert "create_session" in str(error.hint)


@pytest.mark.parametrize("op", ["ping", "PING", "Ping"])
def test_ops_are_read_in_any_case(op: str) -> None:
    """A client of the first protocol may shout."""
    assert isinstance(read_frame(json.dumps({"op": op})).parse(), requests.Ping)


def test_an_unknown_op_is_answered_with_the_nearest() -> None:
    """The hint is what was probably meant."""
    error = refused('{"op": "infre"}')
    assert (error.code, error.field, error.hint) == (ErrorCode.UNKNOWN_OP, "op", "Did you mean infer?")
    assert "infer" in str(refused('{"op": "zzz"}').hint)


@pytest.mark.parametrize(
    ("value", "known"), [("", ""), ("a", "a"), ("x" * 64, "x" * 64), ("x" * 65, None), (7, None), (None, None)]
)
def test_the_id_is_known_before_anything_fails(value: object, known: str | None) -> None:
    """A usable id is there to echo even when the op is unknown; an unusable one is not echoed."""
    assert read_frame(json.dumps({"op": "nonsense", "id": value})).id == known


@pytest.mark.parametrize("value", ["x" * 65, 7, 1.5, True, [], {}])
def test_an_unusable_id_is_an_error(value: object) -> None:
    """Of type or length."""
    error = refused(json.dumps({"op": "ping", "id": value}))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "id")


# Fields.


@pytest.mark.parametrize("op", REQUESTS)
def test_unknown_fields_are_refused_in_every_request(op: str) -> None:
    """Nothing is ignored."""
    special: dict[str, dict[str, Any]] = {
        "auth": {"token": "t"},
        "infer": {"session_id": "s", "prompt": "p"},
        "append": {"session_id": "s", "messages": [{"role": "user", "content": "c"}]},
        "rewind_session": {"session_id": "s", "turn": "start"},
        "set_metadata": {"session_id": "s", "metadata": {}},
        "load_model": {"name": "m"},
        "unload_model": {"name": "m"},
        "kick": {"client_id": "c"},
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
def test_a_wrong_field_is_named(frame: dict[str, Any], field: str) -> None:
    """Missing, of another type, out of range: nothing is coerced, and the error names the field."""
    error = refused(json.dumps(frame))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field)
    assert field in error.message


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"op": "infer", "session_id": "s"}, "either prompt or messages"),
        (
            {"op": "infer", "session_id": "s", "prompt": "p", "messages": [{"role": "user", "content": "c"}]},
            "either prompt or messages",
        ),
        ({"op": "infer", "session_id": "s", "messages": [{"role": "assistant", "content": "c"}]}, "user or tool"),
        ({"op": "auth"}, "either token, or client_id and api_key"),
        ({"op": "auth", "client_id": "a"}, "either token, or client_id and api_key"),
        ({"op": "auth", "token": "t", "client_id": "a", "api_key": "k"}, "either token, or client_id and api_key"),
    ],
)
def test_fields_that_do_not_go_together_are_said_to_be(frame: dict[str, Any], words: str) -> None:
    """What is allowed stands in the message."""
    error = refused(json.dumps(frame))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert words in error.message


@pytest.mark.parametrize("field", ["token", "api_key"])
def test_secrets_are_not_repeated(field: str) -> None:
    """A secret of the wrong form does not come back in the error."""
    error = refused(json.dumps({"op": "auth", "client_id": "a", field: ["hunter2"]}))
    assert error.field == field
    assert "hunter2" not in error.message


# Events.


_OF_ONE_ROLE: Final[dict[str, Any]] = {"role": "assistant", "tool_call_id": None}


def sample(annotation: Any) -> Any:  # a value of any type that events are made of
    """Return some value for a field, with every optional part filled."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return (sample(arguments[0]),)
    if origin is dict:
        return {"key": 1 if arguments[1] is not str else "value"}
    if arguments:
        return sample(next(each for each in arguments if each is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        values = {name: sample(field.annotation) for name, field in annotation.model_fields.items()}
        return annotation(**values | _OF_ONE_ROLE if annotation is ChatMessage else values)
    return {str: "text", int: 3, float: 0.5, bool: True}[annotation]


def marked(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the names that the first protocol knows, nested as the message is."""
    names: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if any(isinstance(mark, Dagger) for mark in field.metadata):
            nested = field.annotation
            is_model = isinstance(nested, type) and issubclass(nested, BaseModel)
            names[name] = marked(typing.cast("type[BaseModel]", nested)) if is_model else None
    return names


def shape(value: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return the names in ``value``, as deep as ``like`` goes."""
    return {name: shape(value[name], like[name]) if like.get(name) else None for name in value}


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_in_both_protocols(kind: type[Event]) -> None:
    """v1 sockets get every field; old ones the marked ones exactly, or nothing of an op that is not marked."""
    event = kind(**{name: sample(field.annotation) for name, field in kind.model_fields.items()})
    whole = encode(event)
    assert whole is not None
    assert json.loads(whole) == json.loads(event.model_dump_json(exclude_none=True))
    old = encode(event, dagger_only=True)
    if not kind.dagger:
        assert old is None
        return
    assert old is not None
    expected = {"op": None, **marked(kind)}
    assert shape(json.loads(old), expected) == expected
    assert json.loads(old).items() <= json.loads(whole).items() or any(expected.values())


def test_ops_of_the_first_protocol() -> None:
    """These, as its clients know them, and no others."""
    assert {kind.model_fields["op"].default for kind in EVENTS if kind.dagger} == {
        "hello", "auth_success", "auth_failed", "session_created", "session_error", "token", "end", "abort",
        "session_closed", "metrics", "metrics_subscribed", "metrics_unsubscribed", "error",
    }  # fmt: skip


def test_absent_values_are_left_out() -> None:
    """Except readings, which are null."""
    assert encode(events.Pong()) == '{"op":"pong"}'
    assert encode(events.Pong(id="x")) == '{"op":"pong","id":"x"}'
    assert encode(events.AuthFailed(reason="no"), dagger_only=True) == '{"op":"auth_failed","reason":"no"}'


def test_text_comes_through_whole() -> None:
    """Quotes, controls, emoji and null characters survive; the frame stays one line."""
    content = 'é"\\\n\x00\U0001f600\u2028'
    frame = encode(events.Token(session_id="s", seq=1, turn_id="t", content=content))
    assert frame is not None
    assert json.loads(frame)["content"] == content
    assert "\n" not in frame


def test_logprobs_are_not_of_the_first_protocol() -> None:
    """An old socket gets the text alone."""
    logprobs = (TokenLogprobs(token="a", token_id=1, logprob=-0.1, top=()),)
    event = events.Token(session_id="s", seq=1, turn_id="t", content="a", logprobs=logprobs)
    assert json.loads(encode(event) or "")["logprobs"][0]["logprob"] == -0.1
    assert encode(event, dagger_only=True) == '{"op":"token","session_id":"s","content":"a"}'
