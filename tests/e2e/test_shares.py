"""Share links on a real daemon: created, opened by another account, ended in every way, and kept over a kill."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import sqlite3
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import pytest
from websockets.asyncio.client import connect

from inferencecenter.cli.share import share_link
from tests.e2e.harness import Daemon, Message, SocketClient, command_line, connect_client, run_daemon
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARING: Final = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_SERVER__SHARE_LINKS": "true",
    "INFERENCECENTER_SERVER__MAX_SHARE_LINKS": "3",
}
MESSAGES: Final = [
    {"role": "user", "content": "Look it up."},
    {
        "role": "assistant",
        "content": "I do.",
        "reasoning": "hm",
        "tool_calls": [{"call_id": "c1", "name": "f", "arguments": "{}"}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 42."},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon that allows share links."""
    with run_daemon(tmp_path_factory.mktemp("shares") / "state", demo_model_path, **SHARING) as running:
        yield running


@pytest.fixture(scope="module")
def reader(daemon: Daemon) -> str:
    """The token of another account."""
    made: Message = command_line(daemon, "token", "create", "reader")
    return str(made["token"])


def opened(daemon: Daemon, share_id: str, secret: str | None, token: str | None, *, image: str = "") -> tuple[int, Any]:
    """Open a share, or an image of it; return the status, and the answer or the error."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if secret is not None:
        headers["X-Share-Token"] = secret
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30)
    connection.request("GET", f"/shares/{share_id}{image and '/images/'}{image}", headers=headers)
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


async def conversation(client: SocketClient) -> str:
    """Create a session with messages."""
    session = await client.create(system="A secret prompt.", metadata={"title": "About 42"})
    appended = await client.ask(op="append", session_id=session, messages=MESSAGES)
    assert appended["op"] == "appended", appended
    return session


def numbered(client: SocketClient) -> list[Message]:
    """Return the replies to requests whose id is ``s`` and a number."""
    return [reply for reply in client.seen if re.fullmatch(r"s\d", reply.get("id", ""))]


async def revoke_all(client: SocketClient) -> None:
    """End all shares of earlier tests."""
    for each in (await client.ask(op="list_shares"))["shares"]:
        await client.ask(op="revoke_share", share_id=each["share_id"])


async def test_another_account_reads_the_snapshot(daemon: Daemon, reader: str) -> None:
    """It has neither the system prompt nor later messages; without an account or the right secret it is not found."""
    async with connect_client(daemon) as client:
        await revoke_all(client)
        session = await conversation(client)
        made = await client.ask(op="create_share", session_id=session)
        share, secret = made["share"], made["share_token"]
        await client.ask(op="append", session_id=session, messages=[{"role": "user", "content": "A later secret."}])
        status, found = opened(daemon, share["share_id"], secret, reader)
        assert (status, found["title"], found["client_id"]) == (200, "About 42", "admin")
        assert found["transcript"] == MESSAGES
        assert "expires_at" not in share
        for wrong_id, wrong, token in [
            (share["share_id"], secret[:-1], reader),
            (share["share_id"], None, daemon.admin_token),
            (share["share_id"], "é", reader),
            ("sh_none", secret, reader),
        ]:
            status, error = opened(daemon, wrong_id, wrong, token)
            assert (status, error["error"]["code"]) == (404, "share_not_found")
        assert opened(daemon, share["share_id"], secret, None)[0] == 401
        assert (await client.ask(op="list_shares"))["shares"] == [share]


async def test_images_are_read_with_the_link(daemon: Daemon, reader: str) -> None:
    """Those of the snapshot only, with its secret, until the link is revoked."""
    files = [image_file(color=color) for color in ("red", "blue")]
    digests = [hashlib.sha256(file).hexdigest() for file in files]
    async with connect_client(daemon) as client:
        await revoke_all(client)
        session = await client.create()
        for file, digest in zip(files, digests, strict=True):
            content = [{"type": "image", "data": b64encode(file).decode()}, {"type": "text", "text": digests[1]}]
            await client.ask(op="append", session_id=session, messages=[{"role": "user", "content": content}])
            if digest == digests[0]:
                made = await client.ask(op="create_share", session_id=session)
        share_id, secret = made["share"]["share_id"], made["share_token"]
        _, found = opened(daemon, share_id, secret, reader)
        (image,) = found["transcript"][0]["images"]
        status, read = opened(daemon, share_id, secret, reader, image=digests[0])
        assert (status, read) == (200, {**image, "data": b64encode(files[0]).decode()})
        for wrong, named in ((secret[:-1], digests[0]), (None, digests[0]), (secret, digests[1]), (secret, "0" * 64)):
            status, error = opened(daemon, share_id, wrong, reader, image=named)
            assert (status, error["error"]["code"]) == (404, "share_not_found")
        assert opened(daemon, share_id, secret, None, image=digests[0])[0] == 401
        await client.ask(op="revoke_share", share_id=share_id)
        assert opened(daemon, share_id, secret, reader, image=digests[0])[0] == 404


@pytest.mark.slow
async def test_secret_is_nowhere_on_disk(tmp_path: Path, demo_model_path: Path) -> None:
    """Neither the daemon's files nor its log contain it; the audit log names the action and the account."""
    with run_daemon(tmp_path / "state", demo_model_path, **SHARING) as daemon:
        reader = command_line(daemon, "token", "create", "reader")["token"]
        async with connect_client(daemon) as client:
            made = await client.ask(op="create_share", session_id=await conversation(client))
            share_id, secret = made["share"]["share_id"], made["share_token"]
            assert opened(daemon, share_id, secret, reader)[0] == 200
            files = [daemon.log, *(path for path in daemon.state_dir.rglob("*") if path.is_file())]
            assert len(files) > 3
            assert len(secret) >= 43
            assert [path for path in files if secret.encode() in path.read_bytes()] == []
            await client.ask(op="revoke_share", share_id=share_id)
    lines = [line for line in command_line(daemon, "audit") if share_id in line["detail"]]
    assert [(line["event"], line["client_id"]) for line in lines] == [
        ("share_created", "admin"),
        ("share_opened", "reader"),
        ("share_revoked", "admin"),
    ]
    assert secret.encode() not in daemon.log.read_bytes()


async def test_share_ends(daemon: Daemon, reader: str) -> None:
    """It ends at its expiry, when its owner revokes it, and with its session."""
    async with connect_client(daemon) as client, connect(daemon.url) as socket:
        await revoke_all(client)
        other = SocketClient(socket)
        await other.ask(op="auth", token=reader, protocol=1)
        session = await conversation(client)
        short = await client.ask(op="create_share", session_id=session, expires_in_s=1)
        revoked = await client.ask(op="create_share", session_id=session)
        left = await client.ask(op="create_share", session_id=session)
        refused = await other.ask(op="revoke_share", share_id=revoked["share"]["share_id"])
        assert refused["code"] == "share_not_found"
        assert (await other.ask(op="create_share", session_id=session))["code"] == "session_not_found"
        assert (await other.ask(op="list_shares"))["shares"] == []
        assert opened(daemon, revoked["share"]["share_id"], revoked["share_token"], reader)[0] == 200
        await client.ask(op="revoke_share", share_id=revoked["share"]["share_id"])
        assert opened(daemon, revoked["share"]["share_id"], revoked["share_token"], reader)[0] == 404
        while opened(daemon, short["share"]["share_id"], short["share_token"], reader)[0] == 200:
            await client.ask(op="ping")
        assert (await client.ask(op="list_shares"))["shares"] == [left["share"]]
        await client.ask(op="close_session", session_id=session)
        assert opened(daemon, left["share"]["share_id"], left["share_token"], reader)[0] == 404
        assert (await client.ask(op="list_shares"))["shares"] == []
    with sqlite3.connect(daemon.state_dir / "sessions.sqlite3") as database:
        assert database.execute("SELECT count(*) FROM shares").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False], ids=["daemon", "file"])
async def test_purge_deletes_shares(tmp_path: Path, demo_model_path: Path, *, running: bool) -> None:
    """The daemon deletes those of the account, as does the command on the file of a stopped one."""
    with run_daemon(tmp_path / "state", demo_model_path, **SHARING) as daemon:
        async with connect_client(daemon) as client:
            made = await client.ask(op="create_share", session_id=await conversation(client))
            assert made["op"] == "share_created"
            if not running:
                daemon.stop()
            command_line(daemon, "session", "purge", "--client", "admin", "--yes")
    with sqlite3.connect(tmp_path / "state/sessions.sqlite3") as database:
        assert database.execute("SELECT count(*) FROM shares").fetchone() == (0,)


async def test_shares_are_limited(daemon: Daemon) -> None:
    """Their number and their content are limited, also when several are created at once."""
    async with connect_client(daemon) as client, connect_client(daemon) as second:
        await revoke_all(client)
        session = await conversation(client)
        for number in range(4):
            for each in (client, second):
                await each.send(op="create_share", session_id=session, id=f"s{number}")
        codes: list[str] = []
        for each in (client, second):
            while len(numbered(each)) < 4:
                await each.receive()
            codes += [str(reply.get("code", reply["op"])) for reply in numbered(each)]
        assert sorted(codes) == ["quota_exceeded"] * 5 + ["share_created"] * 3
        await revoke_all(client)
        unstored = await client.create(store=False)
        await client.ask(op="append", session_id=unstored, messages=MESSAGES)
        empty = await client.create(system="Only a prompt.")
        long = await client.create()
        for _ in range(5):
            await client.ask(op="append", session_id=long, messages=[{"role": "user", "content": "x" * 500_000}])
        for refused, reason in ((unstored, "not stored"), (empty, "no messages"), (long, "can be shared")):
            error = await client.ask(op="create_share", session_id=refused)
            assert (error["code"], error["field"]) == ("invalid_request", "session_id")
            assert reason in error["message"]
        assert (await client.ask(op="list_shares"))["shares"] == []


@pytest.mark.slow
async def test_shares_survive_a_kill(tmp_path: Path, demo_model_path: Path) -> None:
    """Acknowledged ones survive; the command line creates, lists and revokes them, and a setting disables them."""
    with run_daemon(tmp_path / "state", demo_model_path, **SHARING) as daemon:
        async with connect_client(daemon) as client:
            session = await conversation(client)
        address = ("--url", daemon.url)
        made = command_line(daemon, "share", "create", session, "--expires-in", "1d", *address)
        share_id, secret = made["link"].split("/")[-2:]
        assert made["link"] == share_link(daemon.url, share_id, secret)
        daemon.process.kill()
        daemon.process.wait()
    with run_daemon(tmp_path / "state", demo_model_path, **SHARING) as daemon:
        address = ("--url", daemon.url)
        assert opened(daemon, share_id, secret, daemon.admin_token)[1]["transcript"] == MESSAGES
        (listed,) = command_line(daemon, "share", "list", *address)
        assert (listed["share_id"], listed["session_id"], listed["messages"]) == (share_id, session, 4)
    with run_daemon(tmp_path / "state", demo_model_path, INFERENCECENTER_ENGINE__BACKEND="echo") as daemon:
        assert opened(daemon, share_id, secret, daemon.admin_token)[0] == 403
        async with connect_client(daemon) as client:
            assert (await client.ask(op="create_share", session_id=session))["code"] == "forbidden"
            (listed,) = (await client.ask(op="list_shares"))["shares"]
            assert (await client.ask(op="revoke_share", share_id=listed["share_id"]))["op"] == "share_revoked"
            assert (await client.ask(op="hello"))["limits"]["max_share_links"] == 0


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("ws://127.0.0.1:3000/ws", "http://127.0.0.1:3000/#/s/a/b"),
        ("wss://example.org/inference/ws", "https://example.org/inference/#/s/a/b"),
        ("http://127.0.0.1:3000", "http://127.0.0.1:3000/#/s/a/b"),
    ],
)
def test_link_is_that_of_the_page(url: str, link: str) -> None:
    """The secret is in the fragment, which browsers do not send."""
    assert share_link(url, "a", "b") == link
