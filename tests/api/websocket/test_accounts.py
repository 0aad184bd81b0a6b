"""Accounts and tokens over the protocol: the same effects as those of the command line, for administrators only."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.websocket.commands import COMMANDS
from inferencecenter.auth import accounts as accounts_module
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import CreateSession
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import AccessLimitChanges
from inferencecenter.sessions.context import Principal
from tests.api.websocket.test_administration import connect
from tests.server.harness import Running, ask, close_code, receive
from tests.sessions.conftest import FakeSink

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.sessions.store.recorder import PurgeKind

LEAST: dict[str, dict[str, Any]] = {
    "kick": {"client_id": "ada"},
    "drain_node": {"node": "box"},
    "undrain_node": {"node": "box"},
    "load_model": {"name": "stub"},
    "unload_model": {"name": "stub"},
    "pull_model": {"reference": "ada/tiny:Q8_0"},
    "cancel_pull": {"reference": "ada/tiny:Q8_0"},
    "remove_model": {"name": "stub"},
    "create_account": {"client_id": "new"},
    "change_account": {"client_id": "ada", "max_sessions": 1},
    "get_account": {"client_id": "ada"},
    "delete_account": {"client_id": "ada", "sessions": "keep"},
    "create_token": {"client_id": "ada"},
    "change_token": {"token_id": "t", "access_limits": {}},
    "rotate_token": {"token_id": "t"},
    "revoke_token": {"token_id": "t"},
    "purge_session": {"session_id": "s"},
}
"""Required fields of the ops that need a scope."""
GUARDED = [(op, command.scope) for op, command in COMMANDS.items() if command.scope not in (None, Scope.USER)]


@pytest.mark.parametrize(("op", "scope"), GUARDED)
async def test_every_guarded_op_is_refused_without_its_scope(server: Running, op: str, scope: Scope) -> None:
    """A valid request with all other scopes is refused, and nothing is written to the audit log."""
    others = {str(each) for each in Scope} - {str(scope)}
    fields = {name: server.token_id if name == "token_id" else value for name, value in LEAST.get(op, {}).items()}
    async with connect(server, "eve", *others) as socket:
        await receive(socket)
        before = [line.event for line in server.accounts.audit_lines(last=1000)]
        refused = await ask(socket, op=op, id="1", **fields)
        assert (refused["op"], refused["code"], refused["id"]) == ("error", "forbidden", "1")
        assert str(scope) in refused["message"]
        assert [line.event for line in server.accounts.audit_lines(last=1000)] == before


async def test_account_is_created_with_the_defaults(server: Running) -> None:
    """It is listed after the earlier ones; the audit log names the account and the administrator."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        made = await ask(root, op="create_account", client_id="bob", id="7")
        assert made["id"] == "7"
        assert made["account"] == {
            "client_id": "bob",
            "source": "database",
            "scopes": ["user"],
            "priority": "normal",
            "max_sessions": 16,
            "created_at": made["account"]["created_at"],
            "unrevoked_tokens": 0,
            "access_limits": {},
        }
        first = await ask(root, op="list_accounts", limit=2)
        assert ([each["client_id"] for each in first["accounts"]], first["next"]) == (["ada", "root"], "root")
        rest = await ask(root, op="list_accounts", limit=2, after="root")
        assert ([each["client_id"] for each in rest["accounts"]][:1], rest.get("next")) == (["bob"], None)
    line = server.accounts.audit_lines(last=1, event=AuditEvent.CLIENT_CREATED)[0]
    assert (line.client_id, line.actor, line.address, line.detail) == ("bob", "root", "127.0.0.1", "scopes user")


async def test_accounts_of_the_file_are_listed_last(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """They have no token and cannot be changed."""
    async with serve() as server, connect(server, "root", "user", "admin") as root:
        await receive(root)
        listed = (await ask(root, op="list_accounts"))["accounts"]
        in_file = [each["client_id"] for each in listed if each["source"] == "file"]
        assert in_file == [each["client_id"] for each in listed[-len(in_file) :]] == ["kitchen", "desk"]
        refused = await ask(root, op="change_account", client_id="kitchen", max_sessions=2)
        assert (refused["code"], refused["field"]) == ("invalid_request", "client_id")
        taken = await ask(root, op="create_account", client_id="kitchen")
        assert (taken["code"], taken["field"]) == ("invalid_request", "client_id")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_id": "no spaces"}, "client_id"),
        ({"client_id": "ada"}, "client_id"),
        ({"client_id": "bob", "scopes": ["root"]}, "scopes"),
        ({"client_id": "bob", "scopes": []}, "scopes"),
        ({"client_id": "bob", "max_sessions": 0}, "max_sessions"),
        ({"client_id": "bob", "retention_days": 0}, "retention_days"),
        ({"client_id": "bob", "archive_mib": 0}, "archive_mib"),
        ({"client_id": "bob", "priority": "high"}, "priority"),
        ({"client_id": "bob", "access_limits": {"max_tokens": 0}}, "access_limits.max_tokens"),
        ({"client_id": "bob", "access_limits": {"max_tokens": "5"}}, "access_limits.max_tokens"),
        ({"client_id": "bob", "access_limits": {"addresses": ["here"]}}, "access_limits.addresses.0"),
        ({"client_id": "bob", "access_limits": {"per_day": 5}}, "access_limits.per_day"),
    ],
)
async def test_invalid_account_is_refused_by_field(server: Running, fields: dict[str, Any], field: str) -> None:
    """The account is not created."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        refused = await ask(root, op="create_account", **fields)
        assert (refused["code"], refused["field"]) == ("invalid_request", field)
    assert not server.accounts.has_client("bob")


def test_wire_has_all_limits() -> None:
    """The fields of the request are those that the accounts know."""
    assert AccessLimitChanges.model_fields.keys() == AccessLimits.model_fields.keys()


async def test_limits_of_an_account_apply_at_once(server: Running) -> None:
    """Null is no limit, an absent one is inherited; the client's socket stays open."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        limits = {"concurrent_turns": 1, "max_tokens": None}
        changed = await ask(root, op="change_account", client_id="ada", max_sessions=2, access_limits=limits)
        assert (changed["account"]["max_sessions"], changed["account"]["access_limits"]) == (2, limits)
        sessions = [(await ask(ada, op="create_session"))["session_id"] for _ in range(2)]
        turn_id = (await ask(ada, op="infer", session_id=sessions[0], prompt="Hi"))["turn_id"]
        refused = await ask(ada, op="infer", session_id=sessions[1], prompt="Hi")
        assert refused["code"] == "rate_limited"
        server.engine.finish(turn_id)
    line = server.accounts.audit_lines(last=1, event=AuditEvent.CLIENT_CHANGED)[0]
    assert (line.actor, line.detail) == ("root", "max_sessions=2 limits concurrent_turns=1 max_tokens=none")


async def test_limits_of_an_account_end_with_it(server: Running) -> None:
    """After a deletion by a command its sessions have the daemon's limits; those of an external service stay."""
    context, sessions = server.context, server.context.sessions
    server.accounts.create_client("bob", max_sessions=4, priority="normal", retention_days=2.5, archive_mib=3)
    external = Principal("eve", 4, "normal", frozenset({"user"}), retention_days=1.5)
    sessions.create(external, CreateSession(op="create_session"), FakeSink())

    def limits() -> dict[str, tuple[float | None, int]]:
        usages = {name: sessions.archive.usage(replace(external, client_id=name)) for name in ("bob", "eve")}
        return {name: (each.retention_days, each.max_stored_chars // 2**20) for name, each in usages.items()}

    context.tokens_changed()
    assert limits() == {"bob": (2.5, 3), "eve": (1.5, 1024)}
    assert server.accounts.remove_client("bob", detail="")
    context.tokens_changed()
    assert limits() == {"bob": (None, 1024), "eve": (1.5, 1024)}


async def test_limits_of_stored_sessions_apply_at_once(server: Running) -> None:
    """They apply to open sockets, too; null selects the daemon's limit, absent fields stay."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        await ask(ada, op="create_session")
        changed = await ask(root, op="change_account", client_id="ada", retention_days=2.5, archive_mib=3)
        assert (changed["account"]["retention_days"], changed["account"]["archive_mib"]) == (2.5, 3)
        for _ in range(2):  # a new session keeps them
            usage = (await ask(ada, op="list_sessions"))["session_usage"]
            assert (usage["retention_days"], usage["max_stored_chars"]) == (2.5, 3 * 1024 * 1024)
            await ask(ada, op="create_session")
        changed = await ask(root, op="change_account", client_id="ada", retention_days=None)
        assert ("retention_days" in changed["account"], changed["account"]["archive_mib"]) == (False, 3)
        usage = (await ask(ada, op="list_sessions"))["session_usage"]
        assert ("retention_days" in usage, usage["max_stored_chars"]) == (False, 3 * 1024 * 1024)
        refused = await ask(root, op="change_account", client_id="ada", retention_days=0)
        assert (refused["code"], refused["field"]) == ("invalid_request", "retention_days")
    lines = server.accounts.audit_lines(last=2, event=AuditEvent.CLIENT_CHANGED)
    assert [line.detail for line in lines] == ["retention_days=2.5 archive_mib=3", "retention_days=default"]


@pytest.mark.parametrize("fate", ["delete", "keep"])
async def test_account_is_deleted_with_its_tokens(server: Running, fate: str) -> None:
    """It is told before what is lost; sockets are closed, and its sessions end only if that is wanted."""
    server.accounts.create_token("ada", name="second")
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        session = (await ask(ada, op="create_session", system="x" * 1000))["session_id"]
        described = await ask(root, op="get_account", client_id="ada", id="g")
        assert (described["op"], described["id"]) == ("account", "g")
        assert described["account"]["unrevoked_tokens"] == 2
        usage = described["session_usage"]
        assert (usage["live"], usage["archived"], usage["stored_chars"]) == (1, 0, 1000)
        deleted = await ask(root, op="delete_account", client_id="ada", sessions=fate, id="d")
        assert deleted == {
            "op": "account_deleted",
            "id": "d",
            "client_id": "ada",
            "sessions": fate,
            "revoked_tokens": 2,
        }
        assert await close_code(ada) == 4401
        assert not server.accounts.has_client("ada")
        assert server.accounts.list_tokens("ada") == []
        left = (await ask(root, op="list_all_sessions", client_id="ada"))["all_sessions"]
        assert [each["session_id"] for each in left] == ([] if fate == "delete" else [session])
        again = await ask(root, op="delete_account", client_id="ada", sessions=fate)
        assert (again["code"], again["field"]) == ("invalid_request", "client_id")
    lines = [line for line in server.accounts.audit_lines(last=20) if line.client_id == "ada" and line.actor == "root"]
    assert [(line.event, line.detail) for line in lines] == [
        (AuditEvent.TOKEN_REVOKED, "all tokens (2)"),
        (AuditEvent.CLIENT_REMOVED, "sessions deleted" if fate == "delete" else "sessions kept"),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_id": "root", "sessions": "keep"}, "client_id"),
        ({"client_id": "kitchen", "sessions": "keep"}, "client_id"),
        ({"client_id": "missing", "sessions": "delete"}, "client_id"),
        ({"client_id": "ada"}, "sessions"),
        ({"client_id": "ada", "sessions": "all"}, "sessions"),
    ],
)
async def test_account_is_not_deleted(
    serve: Callable[..., AbstractAsyncContextManager[Running]], fields: dict[str, Any], field: str
) -> None:
    """The own account and accounts of the file are refused, and so is a request without ``sessions``."""
    async with serve() as server, connect(server, "root", "user", "admin") as root:
        await receive(root)
        refused = await ask(root, op="delete_account", **fields)
        assert (refused["code"], refused["field"]) == ("invalid_request", field)
        assert {"ada", "root"} <= {client.client_id for client in server.accounts.clients()}
        assert server.accounts.account_of("kitchen") is not None


async def test_account_whose_sessions_cannot_be_deleted_stays(server: Running) -> None:
    """Its tokens are revoked, and deletion can be repeated."""

    async def purge(_kind: str, _name: str) -> bool:
        raise InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, "sessions cannot be deleted at the moment")

    object.__setattr__(server.context, "purge", purge)
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        refused = await ask(root, op="delete_account", client_id="ada", sessions="delete", id="d")
        assert (refused["code"], refused["id"]) == ("storage_unavailable", "d")
        assert (await ask(root, op="get_account", client_id="ada"))["account"]["unrevoked_tokens"] == 0
        assert (await ask(root, op="delete_account", client_id="ada", sessions="keep"))["op"] == "account_deleted"


async def test_token_that_is_created_during_a_deletion_is_closed(server: Running) -> None:
    """Its socket is closed, and the session that it opened is deleted."""
    late: list[ClientConnection] = []
    purge_now = server.context.purge

    async def purge(kind: PurgeKind, name: str) -> bool:
        purged = await purge_now(kind, name)
        if not late:
            late.append(await connect(server, "ada"))
            await receive(late[0])
            await ask(late[0], op="create_session")
        return purged

    object.__setattr__(server.context, "purge", purge)
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        assert (await ask(root, op="delete_account", client_id="ada", sessions="delete"))["op"] == "account_deleted"
        assert await close_code(late[0]) == 4401
        assert (await ask(root, op="list_all_sessions", client_id="ada"))["all_sessions"] == []


async def test_request_of_a_revoked_token_does_nothing(server: Running) -> None:
    """A request that was admitted before the revocation is refused when its body arrives, and opens no session."""
    body = json.dumps({"input": "Hi", "store": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\nConnection: close\r\n"
    writer.write(f"POST /v1/responses HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body[:1])
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        while not server.context.hub.participants_of("ada"):  # noqa: ASYNC110 - the daemon reads the head
            await asyncio.sleep(0)
        await ask(root, op="revoke_token", token_id=server.token_id)
        writer.write(body[1:])
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        assert (await ask(root, op="list_all_sessions", client_id="ada"))["all_sessions"] == []


async def test_page_after_a_deleted_entry_is_refused(server: Running) -> None:
    """It would look like the end of the list."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        for op in ("list_accounts", "list_tokens"):
            refused = await ask(root, op=op, after="missing")
            assert (refused["code"], refused["field"]) == ("invalid_request", "after")


async def test_changed_scopes_reach_open_sockets(server: Running) -> None:
    """The client's sockets are closed as for a restart; the next one has the new scopes."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        await ask(root, op="change_account", client_id="ada", scopes=["user", "operator"])
        assert await close_code(ada) == 1012
        async with server.v1() as back:
            assert (await receive(back))["scopes"] == ["operator", "user"]
        unchanged = await ask(root, op="change_account", client_id="root", scopes=["user", "admin"])
        assert unchanged["op"] == "account"
        assert (await ask(root, op="ping"))["op"] == "pong"


async def test_administrator_keeps_its_own_scope(server: Running) -> None:
    """The refusal names the field."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        refused = await ask(root, op="change_account", client_id="root", scopes=["user"])
        assert (refused["code"], refused["field"]) == ("invalid_request", "scopes")
        assert (await ask(root, op="list_accounts"))["op"] == "accounts"


async def test_token_is_shown_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """It authenticates, and neither the list, the audit log nor the log has its secret."""
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        made = await ask(root, op="create_token", client_id="ada", name="phone", expires_in_s=60)
        secret = made["token"].rpartition("_")[2]
        account = server.accounts.verify_token(made["token"])
        assert account is not None
        assert account.client_id == "ada"
        lifetime = made["access_token"]["expires_at"] - made["access_token"]["created_at"]
        assert lifetime == pytest.approx(60, abs=1)
        listed = await ask(root, op="list_tokens", client_id="ada")
        assert listed["access_tokens"][-1] == made["access_token"] | {
            "last_used_at": listed["access_tokens"][-1]["last_used_at"]
        }
        assert secret not in str(listed)
    lines = server.accounts.audit_lines(last=100)
    created = [line for line in lines if line.event == "token_created" and line.actor == "root"]
    assert [(line.client_id, line.token_id, line.detail) for line in created] == [
        ("ada", made["access_token"]["token_id"], "phone")
    ]
    assert secret not in str(lines) + caplog.text


async def test_tokens_are_listed_by_windows(server: Running) -> None:
    """Each page continues after the cursor of the page before, and every token is listed once."""
    made = [server.accounts.create_token("ada", name=str(number)).token_id for number in range(4)]
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        found: list[str] = []
        page = await ask(root, op="list_tokens", client_id="ada", limit=2)
        found += [each["token_id"] for each in page["access_tokens"]]
        while "next" in page:
            page = await ask(root, op="list_tokens", client_id="ada", limit=2, after=page["next"])
            found += [each["token_id"] for each in page["access_tokens"]]
    assert set(found) == {server.token_id, *made}
    assert len(found) == 5


async def test_rotated_token_is_replaced(server: Running) -> None:
    """The new one has name and limits; sockets of the old one are closed, which no longer authenticates."""
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        server.accounts.limit_token(server.token_id, AccessLimits(max_tokens=9))
        rotated = await ask(root, op="rotate_token", token_id=server.token_id)
        assert rotated["access_token"]["access_limits"] == {"max_tokens": 9}
        assert await close_code(ada) == 4401
        assert server.accounts.verify_token(server.token) is None
        account = server.accounts.verify_token(rotated["token"])
        assert account is not None
        assert account.client_id == "ada"
        again = await ask(root, op="rotate_token", token_id=server.token_id)
        assert (again["code"], again["field"]) == ("invalid_request", "token_id")
    lines = [line for line in server.accounts.audit_lines(last=100) if line.actor == "root" and line.token_id]
    assert [(line.event, line.token_id) for line in lines] == [
        ("token_created", rotated["access_token"]["token_id"]),
        ("token_revoked", server.token_id),
    ]


async def test_revoked_token_closes_its_sockets(server: Running) -> None:
    """The requesting socket closes after the reply."""
    token_id = server.accounts.create_token("ada").token_id
    async with connect(server, "root", "user", "admin") as root, server.v1() as ada:
        await receive(root)
        await receive(ada)
        revoked = await ask(root, op="revoke_token", token_id=server.token_id)
        assert revoked["access_token"]["revoked"] is True
        assert await close_code(ada) == 4401
        own = (await ask(root, op="list_tokens", client_id="root"))["access_tokens"][0]["token_id"]
        assert (await ask(root, op="revoke_token", token_id=own))["op"] == "access_token"
        assert await close_code(root) == 4401
    assert token_id in server.accounts.valid_tokens()


async def test_token_limits_are_replaced(server: Running) -> None:
    """Limits that are not given are inherited again."""
    server.accounts.limit_token(server.token_id, AccessLimits(max_tokens=9))
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        limits = {"tokens_per_day": 100}
        changed = await ask(root, op="change_token", token_id=server.token_id, access_limits=limits)
        assert changed["access_token"]["access_limits"] == limits
        assert server.context.limits_of("ada", server.token_id).tokens_per_day == 100
        refused = await ask(root, op="change_token", token_id="nothing", access_limits=limits)
        assert (refused["code"], refused["field"]) == ("invalid_request", "token_id")


@pytest.mark.parametrize(("limit", "op"), [("MAX_CLIENTS", "create_account"), ("MAX_TOKENS", "create_token")])
async def test_numbers_of_accounts_and_tokens_are_bounded(
    server: Running, monkeypatch: pytest.MonkeyPatch, limit: str, op: str
) -> None:
    """Further ones are refused."""
    monkeypatch.setattr(accounts_module, limit, 3)
    async with connect(server, "root", "user", "admin") as root:
        await receive(root)
        answers = [
            await ask(root, op=op, client_id=f"c{number}" if op == "create_account" else "ada") for number in range(3)
        ]
        assert answers[-1]["code"] == "quota_exceeded"
        assert re.search(r"at most 3 are kept", answers[-1]["message"])
        assert answers[0]["op"] in ("account", "new_token")
