"""The table of operations and the error boundary around handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from inferencecenter.api.websocket.commands import COMMANDS
from inferencecenter.protocol.codec import REQUESTS
from inferencecenter.protocol.values import PlanReason, StatusType
from inferencecenter.sessions.archive import SessionArchive
from tests.plans import engine_plan
from tests.server.harness import Running, ask, receive

if TYPE_CHECKING:
    from inferencecenter.protocol.requests import ListSessions
    from inferencecenter.sessions.context import Principal


def test_every_request_has_a_handler() -> None:
    """The protocol's requests equal the table's operations."""
    assert set(COMMANDS) == set(REQUESTS)


def test_only_hello_and_auth_need_no_scope() -> None:
    """Every other operation requires one."""
    assert {op for op, command in COMMANDS.items() if command.scope is None} == {"hello", "auth"}


@pytest.mark.parametrize("op", ["no_such_op", "kick_off"])
async def test_unknown_op_is_refused(server: Running, op: str) -> None:
    """The error names the field and echoes the id."""
    async with server.v1() as socket:
        await receive(socket)
        error = await ask(socket, op=op, id="1", session_id="s")
        assert (error["code"], error["field"], error["id"]) == ("unknown_op", "op", "1")


async def test_missing_scope_is_refused(server: Running) -> None:
    """A client without ``user`` may only send hello."""
    server.accounts.ensure_client("idle", max_sessions=1, priority="normal", scopes=["operator"])
    token = server.accounts.create_token("idle").token
    async with server.connect(additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        await receive(socket)
        await ask(socket, op="hello", protocol=1)
        error = await ask(socket, op="create_session")
        assert (error["code"], error["message"]) == ("forbidden", "this requires the scope user")


@pytest.mark.parametrize(
    "op",
    [
        "infer",
        "abort",
        "close_session",
        "append",
        "fork_session",
        "rewind_session",
        "set_metadata",
        "set_model",
        "get_session",
    ],
)
async def test_foreign_and_unknown_sessions_are_indistinguishable(server: Running, op: str) -> None:
    """The errors are equal byte for byte."""
    extra: dict[str, dict[str, Any]] = {
        "infer": {"prompt": "x"},
        "append": {"messages": [{"role": "user", "content": "x"}]},
        "rewind_session": {"turn": "start"},
        "set_metadata": {"metadata": {}},
    }
    fields = extra.get(op, {})
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    async with server.v1() as owner, server.connect(additional_headers=key) as other:
        await receive(owner)
        await receive(other)
        await ask(other, op="hello", protocol=1)
        sid = (await ask(owner, op="create_session"))["session_id"]
        answers = []
        for target in (sid, "s_AAAAAAAAAAAAAAAAAAAAAA"):
            await ask(other, op="ping")
            answers.append(await ask(other, op=op, session_id=target, **fields))
        assert answers[0] == answers[1]
        assert answers[0]["code"] == "session_not_found"
        assert "session_id" not in answers[0]


async def test_session_errors_name_the_session(server: Running) -> None:
    """The client knows which of its sessions failed."""
    async with server.v1() as socket:
        await receive(socket)
        sid = (await ask(socket, op="create_session"))["session_id"]
        error = await ask(socket, op="abort", session_id=sid, id="a")
        assert (error["code"], error["session_id"], error["id"]) == ("nothing_to_abort", sid, "a")


async def test_internal_error_leaves_the_socket_open(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client learns nothing internal, and the next request works."""

    async def broken(_client: Principal, _request: ListSessions) -> None:
        raise ZeroDivisionError("inside")

    async with server.v1() as socket:
        await receive(socket)
        with monkeypatch.context() as patched:
            patched.setattr(server.context.sessions.archive, "list", broken)
            error = await ask(socket, op="list_sessions", id="x")
        assert (error["code"], error["id"]) == ("internal", "x")
        assert "inside" not in str(error)
        assert (await ask(socket, op="list_sessions"))["op"] == "sessions"
    assert server.context.metrics.registry.get_sample_value("inferencecenter_errors_total", {"code": "internal"}) == 1


async def test_search_without_a_store_is_refused(server: Running) -> None:
    """The error is that of an unknown op."""
    async with server.v1() as socket:
        await receive(socket)
        error = await ask(socket, op="search_sessions", query="hello", id="x")
        assert (error["code"], error["id"]) == ("unknown_op", "x")
        error = await ask(socket, op="search_sessions", query="")
        assert (error["code"], error["field"]) == ("invalid_request", "query")


async def test_search_is_charged_by_texts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of all texts of a large archive uses up the operations of its client for a while."""
    monkeypatch.setattr(SessionArchive, "searched_chars", lambda _archive, _client_id, _query: 10**10)
    async with server.v1() as socket:
        await receive(socket)
        assert (await ask(socket, op="search_sessions", query="hello"))["code"] == "unknown_op"
        assert (await ask(socket, op="search_sessions", query="hello"))["code"] == "rate_limited"


@pytest.mark.parametrize("kind", get_args(StatusType))
async def test_status_shows_own_or_all_sessions(server: Running, kind: str) -> None:
    """A user sees its own sessions only, an operator sees those of all clients."""
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    async with server.v1() as user, server.connect(additional_headers=key) as operator:
        await receive(user)
        await receive(operator)
        await ask(operator, op="hello", protocol=1)
        for socket in (user, operator):
            await ask(socket, op="create_session")
        own = await ask(user, op="status", type=kind)
        whole = await ask(operator, op="status", type=kind)
    assert own["type"] == whole["type"] == kind
    assert own["values"]
    if kind == "sessions":
        assert (own["values"]["sessions"], whole["values"]["sessions"]) == (1, 2)
    elif kind == "model":
        assert own["values"] == whole["values"]
        assert own["values"]["name"] == "stub"
    else:
        assert own["values"] != whole["values"]


async def test_only_operators_see_the_placement_plan(server: Running) -> None:
    """It is part of the model's status, and absent without a plan."""
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    async with server.v1() as user, server.connect(additional_headers=key) as operator:
        await receive(user)
        await receive(operator)
        await ask(operator, op="hello", protocol=1)
        assert "plan" not in await ask(operator, op="status", type="model")
        reason = PlanReason(name="n_gpu_layers", value="0 of 2", why="there is no GPU", explicit=False)
        server.engine.plan = engine_plan(weight_bytes=7, reasons=(reason,))
        reply = (await ask(operator, op="status", type="model"))["plan"]
        assert (reply["host"]["weight_bytes"], reply["reasons"][0]["why"]) == (7, "there is no GPU")
        assert "plan" not in await ask(operator, op="status", type="memory")
        assert "plan" not in await ask(user, op="status", type="model")


async def test_turn_on_a_v1_socket(server: Running) -> None:
    """It is acknowledged with the id, numbered, and ended once."""
    async with server.v1() as socket:
        await receive(socket)
        sid = (await ask(socket, op="create_session", id="c"))["session_id"]
        queued = await ask(socket, op="infer", session_id=sid, prompt="hi", id="i")
        assert (queued["op"], queued["id"], queued["position"], queued["seq"]) == ("queued", "i", 0, 1)
        turn = queued["turn_id"]
        server.engine.begin(turn)
        server.engine.say(turn, "Hé")
        server.engine.finish(turn)
        token = await receive(socket)
        assert token == {"op": "token", "session_id": sid, "seq": 2, "turn_id": turn, "content": "Hé"}
        end = await receive(socket)
        assert (end["op"], end["seq"], end["turn_id"], end["finish_reason"]) == ("end", 3, turn, "stop")
        assert (await ask(socket, op="close_session", session_id=sid))["op"] == "session_closed"


async def test_fork_and_rewind(server: Running) -> None:
    """The fork names its parent and the rewind its turn; a running or unknown turn refuses them."""
    async with server.v1() as socket:
        await receive(socket)
        sid = (await ask(socket, op="create_session"))["session_id"]
        turn = (await ask(socket, op="infer", session_id=sid, prompt="hi"))["turn_id"]
        busy = await ask(socket, op="fork_session", session_id=sid, id="b")
        assert (busy["code"], busy["id"], busy["retryable"]) == ("session_busy", "b", True)
        server.engine.begin(turn)
        server.engine.finish(turn)
        await receive(socket, "end")
        created = await ask(socket, op="fork_session", session_id=sid, turn=turn, id="f")
        assert (created["op"], created["id"], created["parent"]) == ("session_created", "f", sid)
        rewound = await ask(socket, op="rewind_session", session_id=sid, turn="start", id="r")
        assert rewound == {
            "op": "session_rewound", "id": "r", "session_id": sid, "seq": 3, "turn": "start", "messages": 0,
        }  # fmt: skip
        unknown = await ask(socket, op="rewind_session", session_id=sid, turn=turn)
        assert (unknown["code"], unknown["session_id"], unknown["field"]) == ("turn_not_found", sid, "turn")
        fork = await ask(socket, op="get_session", session_id=created["session_id"])
        assert [message["content"] for message in fork["transcript"]] == ["hi", ""]


async def test_context_shift_is_sent_to_v1_sockets_only(server: Running) -> None:
    """A socket of the first protocol sees its answer continue and end."""
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    async with server.v1() as new, server.connect(additional_headers=key) as old:
        for socket, expected in ((new, ["context_shifted", "token", "end"]), (old, ["token", "end"])):
            await receive(socket)
            sid = (await ask(socket, op="create_session"))["session_id"]
            for number in range(3):
                server.engine.submitted.clear()
                await socket.send(f'{{"op": "infer", "session_id": "{sid}", "prompt": "q{number}"}}')
                await server.engine.submitted.wait()
                turn = next(reversed(server.engine.turns))
                if number == 2:
                    server.engine.overflow(turn, n_tokens=5000)
                    server.engine.begin(turn)
                    server.engine.say(turn, "x")
                else:
                    server.engine.begin(turn)
                server.engine.finish(turn)
                frames = [await receive(socket)]
                while frames[-1]["op"] != "end":
                    frames.append(await receive(socket))
            assert [frame["op"] for frame in frames if frame["op"] != "queued"] == expected


async def test_metadata_change_reaches_all_v1_sockets_of_the_client(server: Running) -> None:
    """Sockets of the first protocol and of other clients receive nothing."""
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    old = server.connect(additional_headers={"Authorization": f"Bearer {server.token}"})
    async with (
        server.v1() as first,
        server.v1() as second,
        old as plain,
        server.connect(additional_headers=key) as other,
    ):
        for socket in (first, second, plain, other):
            await receive(socket)
        await ask(other, op="hello", protocol=1)
        sid = (await ask(first, op="create_session"))["session_id"]
        expected = {"op": "metadata_set", "session_id": sid, "metadata": {"title": "Über"}}
        reply = await ask(second, op="set_metadata", id="m", session_id=sid, metadata={"title": "Über"})
        assert reply == {**expected, "id": "m"}
        assert await receive(first) == expected
        assert (await ask(other, op="ping"))["op"] == "pong"
        assert (await ask(plain, op="metrics"))["op"] == "metrics"
        assert (await ask(first, op="get_session", session_id=sid))["metadata"] == {"title": "Über"}
