"""What administrators see of all clients: sessions without their contents, and the audit log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog

from inferencecenter.ipc.link import NodeGpu, NodeResources
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.sessions.store.archive import SessionLine, UsageLine, UsagePage
from inferencecenter.supervisor.nodes import HostLink, NodeEngine, NodeStatus
from inferencecenter.supervisor.rpc_nodes import RpcServerStatus
from inferencecenter.telemetry import logs
from tests.api.websocket.test_administration import audit_entries, connect
from tests.server.harness import Running, ask, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    from tests.server.harness import StubEngine

STORED = [SessionLine(f"s_{number}", "bob", "", 2, 1, 30, 5.0, 6.0, answering=False, archived=True) for number in "abc"]


async def windows(socket: ClientConnection, **fields: Any) -> list[str]:
    """Return the ids of all sessions, read two at a time."""
    found: list[str] = []
    page = await ask(socket, op="list_all_sessions", limit=2, **fields)
    while True:
        found += [each["session_id"] for each in page["all_sessions"]]
        if "next" not in page:
            return found
        page = await ask(socket, op="list_all_sessions", limit=2, after=page["next"], **fields)


async def test_live_sessions_of_all_clients_are_listed(server: Running) -> None:
    """Pages are read in sequence, of all clients or of one, without text or title."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        created = [
            (await ask(ada, op="create_session", metadata={"title": "A secret"}, store=number > 0))["session_id"]
            for number in range(3)
        ]
        own = (await ask(root, op="create_session"))["session_id"]
        assert await windows(root) == [*created, own]
        assert await windows(root, client_id="ada") == created
        assert await windows(root, client_id="missing") == []
        turn_id = (await ask(ada, op="infer", session_id=created[0], prompt="Another secret"))["turn_id"]
        first = (await ask(root, op="list_all_sessions"))["all_sessions"][0]
        assert first == {
            "session_id": created[0],
            "client_id": "ada",
            "model": "stub",
            "messages": first["messages"],
            "tokens": first["tokens"],
            "created_at": first["created_at"],
            "last_used_at": first["last_used_at"],
            "state": "busy",
            "archived": False,
            "stored": False,
            "attached": True,
        }
        assert "secret" not in str(first)
        gone = await ask(root, op="list_all_sessions", after="missing")
        assert (gone["code"], gone["field"]) == ("session_not_found", "after")
        server.engine.finish(turn_id)
    assert ("root", "127.0.0.1", "ada") in audit_entries(server, "sessions_listed")


async def test_archived_sessions_are_listed_by_windows(server: Running) -> None:
    """The command line reads the same pages."""

    def read(client_id: str | None, after: str | None, limit: int) -> list[SessionLine]:
        assert client_id == "bob"
        return [each for each in STORED if after is None or each.session_id > after][:limit]

    object.__setattr__(server.context, "read_sessions", read)
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        assert await windows(root, client_id="bob", archived=True) == ["s_a", "s_b", "s_c"]


async def test_session_of_another_client_is_purged(server: Running) -> None:
    """Its client is told as if it had closed it; the audit log names the administrator."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        session_id = (await ask(ada, op="create_session"))["session_id"]
        purged = await ask(root, op="purge_session", session_id=session_id, id="p")
        assert purged == {"op": "session_purged", "id": "p", "session_id": session_id}
        assert (await receive(ada))["op"] == "session_closed"
        assert (await ask(ada, op="get_session", session_id=session_id))["code"] == "session_not_found"
        again = await ask(root, op="purge_session", session_id=session_id)
        assert (again["code"], again["field"]) == ("session_not_found", "session_id")
    assert audit_entries(server, "session_purged") == [("root", "127.0.0.1", session_id)]


async def test_audit_log_is_read_by_windows(server: Running) -> None:
    """Pages have the newest lines first, each line once."""
    for number in range(5):
        server.accounts.create_token("ada", name=f"token {number}")
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        found: list[str] = []
        page = await ask(root, op="read_audit", event="token_created", client_id="ada", limit=2)
        assert "token_created" in page["audit_events"]
        while True:
            found += [each["detail"] for each in page["audit_lines"]]
            if "older" not in page:
                break
            page = await ask(
                root, op="read_audit", event="token_created", client_id="ada", limit=2, before=page["older"]
            )
    assert found[:5] == [f"token {number}" for number in reversed(range(5))]
    assert len(found) == len(set(found))


async def test_audit_log_finds_what_an_administrator_did(server: Running) -> None:
    """The filter matches the account concerned and the acting account."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        await ask(root, op="create_account", client_id="bob")
        for client_id in ("bob", "root"):
            lines = (await ask(root, op="read_audit", client_id=client_id))["audit_lines"]
            found = next(each for each in lines if each["event"] == "client_created" and each["client_id"] == "bob")
            assert (found["actor"], found["address"], found["count"]) == ("root", "127.0.0.1", 1)
        refused = await ask(root, op="read_audit", event="weather")
        assert (refused["code"], refused["field"]) == ("invalid_request", "event")
        assert "login" in refused["hint"]


async def test_usage_of_all_accounts_is_ordered_and_bounded(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """Accounts have the order of the page that is read; further ones are counted, and begin the next page."""
    first = (
        UsageLine("bob", "2026-11-21", 1, 500, 0, 10),
        UsageLine("ada", "2026-11-20", 2, 100, 60, 30),
        UsageLine("ada", "2026-11-22", 1, 50, 0, 10),
    )
    last = (UsageLine("cay", "2026-11-22", 1, 5, 0, 1),)
    asked: list[tuple[str | None, int]] = []

    def read(since: str, after: str | None, limit: int) -> UsagePage:
        assert len(since) == 10
        asked.append((after, limit))
        return UsagePage(first, 1) if after is None else UsagePage(last, 0)

    async with serve(read_usage_page=read) as server, connect(server, "op", "user", "operator") as operator:
        await receive(operator)
        report = await ask(operator, op="list_usage", id="u", limit=2)
        following = await ask(operator, op="list_usage", after=report["next"])
        await ask(operator, op="list_usage", days=366)
    assert asked == [(None, 2), ("ada", 50), (None, 10)], "at most 4,000 days in a page"
    assert [each["client_id"] for each in following["usage_by_account"]] == ["cay"]
    assert (following["omitted_accounts"], "next" in following) == (0, False)
    assert report["id"] == "u"
    assert [(each["client_id"], [day["turns"] for day in each["days"]]) for each in report["usage_by_account"]] == [
        ("bob", [1]),
        ("ada", [2, 1]),
    ]
    assert report["omitted_accounts"] == 1


@pytest.fixture
def configured_log() -> Iterator[None]:
    """The log of a daemon, in place of that of the tests."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers, root.level
    logs.configure(level="debug", log_format="json")
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**before)


@pytest.mark.usefixtures("configured_log")
async def test_log_is_followed_from_a_level_on(server: Running) -> None:
    """Recent lines come first, then new ones; secrets are redacted, and the subscription ends on request."""
    log = structlog.get_logger()
    secret = server.token.rpartition("_")[2]
    log.warning("before_the_subscription", token=server.token)
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        assert (await ask(root, op="subscribe_log", level="warning", id="l"))["op"] == "log_subscribed"
        first = await receive(root)
        assert first["op"] == "log"
        assert first["log_lines"][-1]["text"].startswith("before_the_subscription token=***")
        log.info("below_the_level")
        log.error("after_it", note=f"a token {server.token} in a text", items=[server.token], long="x" * 5000)
        lines = (await receive(root))["log_lines"]
        assert [(line["level"], line["text"].split()[0]) for line in lines] == [("error", "after_it")]
        assert secret not in str(first) + str(lines)
        assert len(lines[0]["text"]) == 1000
        assert (await ask(root, op="unsubscribe_log"))["op"] == "log_unsubscribed"
        log.error("unheard")
        assert (await ask(root, op="ping"))["op"] == "pong"
    assert ("root", "127.0.0.1", "") in audit_entries(server, "log_read")


async def test_operators_list_nodes(server: Running) -> None:
    """With what is known of them; users may not."""
    resources = NodeResources(ram_used_bytes=2**30, ram_total_bytes=2**31, gpus=(NodeGpu("gpu", 2**20, 2**21),))
    link = HostLink(0.123, "1.0", resources)
    engine = NodeEngine(node="box", model="m", replica=1, status=EngineStatus(state=EngineState.READY), link=link)
    stub = cast("StubEngine", server.context.models)
    stub.nodes = (
        NodeStatus(name="local", address=None, state="up"),
        NodeStatus(
            name="box",
            address="10.0.0.2",
            state="up",
            drain="draining",
            engines=(engine,),
            rpc_servers=(RpcServerStatus(node="box", model="large", state="ready", running=2),),
            beat_age_s=link.beat_age_s,
            version=link.version,
            resources=resources,
        ),
    )
    async with connect(server, "root", "user", "operator") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        assert (await ask(ada, op="list_nodes"))["code"] == "forbidden"
        local, box = (await ask(root, op="list_nodes"))["nodes"]
    assert (local["name"], local["drain"], local["engines"]) == ("local", "none", [])
    assert local["ram_total_mb"] > 0
    assert box == {
        "name": "box",
        "address": "10.0.0.2",
        "state": "up",
        "drain": "draining",
        "drain_waits_for": ["2 running turns of large"],
        "version": "1.0",
        "heartbeat_age_s": 0.12,
        "sessions": 0,
        "engines": [
            {
                "model": "m",
                "replica": 1,
                "state": "ready",
                "detail": "",
                "load_fraction": 0.0,
                "running": 0,
                "waiting": 0,
                "sessions": 0,
            }
        ],
        "rpc_servers": [{"model": "large", "state": "ready", "detail": "", "running": 2}],
        "ram_used_mb": 1024.0,
        "ram_total_mb": 2048.0,
        "gpus": [{"name": "gpu", "used_mb": 1.0, "total_mb": 2.0}],
    }


async def test_administrators_drain_nodes(server: Running) -> None:
    """Operators may not; both are recorded."""
    stub = cast("StubEngine", server.context.models)
    async with connect(server, "root", "user", "admin") as root, connect(server, "op", "user", "operator") as op:
        await receive(root)
        await receive(op)
        assert (await ask(op, op="drain_node", node="box"))["code"] == "forbidden"
        assert (await ask(root, op="drain_node", node="box"))["op"] == "nodes"
        assert stub.drained_nodes == ["box"]
        assert (await ask(root, op="undrain_node", node="box"))["op"] == "nodes"
        assert stub.drained_nodes == []
    for event in ("node_drained", "node_undrained"):
        assert audit_entries(server, event) == [("root", "127.0.0.1", "box")]
