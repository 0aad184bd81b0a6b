"""The session database cannot be written or read: no data is lost, and nothing is published before it is stored."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import SocketClient, connect_client, mounted
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import ECHO, LINE, SHORT_SHUTDOWN, daemon_harness, logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.harness import DaemonHarness

SENTENCES = [f"This is sentence {number} of a story." for number in range(3)]
FILE = "sessions.sqlite3"


@pytest.fixture
def own_daemon(tmp_path: Path, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """A daemon of the test's own, not yet started."""
    with daemon_harness(tmp_path, demo_model_path, **ECHO) as found:
        yield found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a write lock from another process."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Fill the disk, and keep filling what becomes free."""
    filler = directory / "filler"
    over = threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not over.wait(0.001):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * 4096)

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        over.set()
        filling.join()
        filler.unlink()


async def wait_refused(client: SocketClient, **request: Any) -> None:
    """Send a request that needs storage until the daemon refuses it."""
    while True:
        answer = await client.ask(**request)
        if answer["op"] == "error":
            assert answer["code"] == "storage_unavailable", answer
            assert answer["retryable"] is True
            assert FILE in answer["message"]
            return


async def assert_unstored_session_works(client: SocketClient) -> None:
    """An unstored session is created and answers, whatever state the file is in."""
    private = await RecordingClient.open(client, store=False)
    assert await private.turn("Between us.") == "Between us."


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Bind-mount a file read-only; skip the test where that is not permitted."""
    try:
        subprocess.run(["mount", "--bind", path, path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def stored_text(path: Path) -> str:
    """Return the stored text of the unfinished turn."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return "".join(text for (text,) in database.execute("SELECT text FROM said ORDER BY rowid"))


async def run_held_back_turn(
    daemon: DaemonHarness, recorder: RecordingClient, fault: contextlib.AbstractContextManager[None]
) -> None:
    """Run a turn while nothing can be written; its events are published once they can be stored."""
    async with connect_client(daemon.daemon) as other:
        with fault:
            await recorder.infer(LINE * 40, key="k", max_tokens=50)
            while not logged(daemon.daemon, "store_fault"):
                await assert_unstored_session_works(other)
            await assert_unstored_session_works(other)
            await wait_storage_state(other, "unavailable")
            hello = await other.ask(op="hello")
            assert hello["status"] == "degraded"
            await wait_refused(other, op="create_session")
            await recorder.client.ask(op="ping")
            shown = "" if recorder.asked or recorder.is_over else recorder.text
            assert stored_text(daemon.state_dir / FILE).startswith(shown), "an event was published before it was stored"
        assert await recorder.finish() == (LINE * 40)[:50]
        assert recorder.end["finish_reason"] == "length"
        await wait_storage_state(other, "ok")
        assert logged(daemon.daemon, "store_mended")
        assert await recorder.turn("Next.") == "Next."
        assert len((await recorder.described())["turns"]) == 3


async def assert_survives_kill(found: DaemonHarness, recorder: RecordingClient) -> None:
    """The session is complete after a kill and restart."""
    found.kill()
    found.start()
    async with connect_client(found.daemon) as client:
        await recorder.resume(client)
        assert await recorder.turn("And after that?") == "And after that?"
        await recorder.described()


@pytest.mark.slow
async def test_locked_database_delays_stored_sessions_only(echo: DaemonHarness) -> None:
    """Stored sessions wait for the lock, others do not, and all continue afterwards."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(SENTENCES[0]) == SENTENCES[0]
        await run_held_back_turn(echo, recorder, locked(echo.state_dir / FILE))
    await assert_survives_kill(echo, recorder)


@pytest.mark.slow
async def test_full_disk_holds_back_events(own_daemon: DaemonHarness) -> None:
    """Events are held back until there is room, and new turns are refused."""
    with mounted(own_daemon.state_dir, "-o", "size=16m"):
        own_daemon.start()
        async with connect_client(own_daemon.daemon) as client:
            recorder = await RecordingClient.open(client)
            assert await recorder.turn(SENTENCES[0]) == SENTENCES[0]
            await run_held_back_turn(own_daemon, recorder, filled(own_daemon.state_dir))
        await assert_survives_kill(own_daemon, recorder)
        own_daemon.close()


@pytest.mark.slow
async def test_shutdown_on_a_full_disk(own_daemon: DaemonHarness) -> None:
    """It stops in time; only text that was never published may be lost."""
    with mounted(own_daemon.state_dir, "-o", "size=16m"):
        own_daemon.start(**SHORT_SHUTDOWN)  # type: ignore[arg-type]
        async with connect_client(own_daemon.daemon) as client:
            recorder = await RecordingClient.open(client)
            assert await recorder.turn(SENTENCES[0]) == SENTENCES[0]
            await recorder.infer(LINE * 20)
            await recorder.until("token")
            with filled(own_daemon.state_dir):
                while not logged(own_daemon.daemon, "store_fault"):
                    await assert_unstored_session_works(client)
                assert own_daemon.daemon.stop() in (0, 1)
                await recorder.drain()
        own_daemon.start()
        async with connect_client(own_daemon.daemon) as client:
            answer = await recorder.resume(client)
            assert answer["reason"] == "other_epoch"
            assert await recorder.finish() == LINE * 20
            assert await recorder.turn("Next.") == "Next."
            await recorder.described()
        own_daemon.close()


async def wait_storage_state(client: SocketClient, state: str) -> None:
    """Wait until the daemon reports this storage state."""
    while not any(frame["op"] == "storage" and frame["state"] == state for frame in client.seen):
        await client.receive()


def command(found: DaemonHarness, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``inferencecenter`` on the daemon's state directory."""
    environment = {
        "INFERENCECENTER_STATE_DIR": str(found.state_dir),
        "INFERENCECENTER_SERVER__PORT": str(found.daemon.port),
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "PATH": "/usr/bin:/bin",
    }
    return subprocess.run(
        [sys.executable, "-m", "inferencecenter", *arguments],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def unlink(path: Path, *, keeping: Path) -> None:
    """Delete a file and keep it under another name."""
    keeping.hardlink_to(path)
    path.unlink()


def restore_file(kept: Path, path: Path) -> None:
    """Give a file its name back."""
    kept.rename(path)


@pytest.mark.slow
async def test_deleted_database_is_noticed(own_daemon: DaemonHarness, tmp_path: Path) -> None:
    """Nothing is acknowledged that is not stored, requests are refused, and all resumes once it is back."""
    path, elsewhere = own_daemon.state_dir / FILE, tmp_path / "elsewhere"
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client, connect_client(own_daemon.daemon) as other:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(SENTENCES[0]) == SENTENCES[0]
        unlink(path, keeping=elsewhere)
        await recorder.infer(SENTENCES[1])
        await wait_storage_state(other, "unavailable")
        assert recorder.asked, "a turn was acknowledged that is not stored"
        await wait_refused(other, op="create_session")
        await assert_unstored_session_works(other)
        status, body = own_daemon.daemon.get("/readyz")
        assert (status, json.loads(body)["storage"]) == (503, "unavailable")
        backup = await asyncio.to_thread(command, own_daemon, "backup", str(tmp_path / "backup"))
        assert backup.returncode == 73, backup.stdout
        assert not (tmp_path / "backup").exists()
        doctor = await asyncio.to_thread(command, own_daemon, "doctor", "--json")
        assert doctor.returncode == 73, doctor.stdout
        restore_file(elsewhere, path)
        await wait_storage_state(other, "ok")
        assert await recorder.finish() == SENTENCES[1]
    assert own_daemon.daemon.ready()
    await assert_survives_kill(own_daemon, recorder)


async def stored_sessions(found: DaemonHarness, *, sessions: int = 1, text: str = "") -> list[RecordingClient]:
    """Store sessions of three turns, and stop their daemon."""
    found.start()
    async with connect_client(found.daemon) as client:
        recorders = [await RecordingClient.open(client) for _ in range(sessions)]
        for recorder in recorders:
            for sentence in SENTENCES:
                assert await recorder.turn(text + sentence, max_tokens=40) == (text + sentence)[:40]
    found.daemon.stop()
    return recorders


def wipe(directory: Path) -> None:
    """Delete everything in a state directory."""
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)


@pytest.mark.slow
async def test_restore_from_a_backup(own_daemon: DaemonHarness, tmp_path: Path) -> None:
    """A backup taken online is restored, not while a daemon runs; clients resume in another epoch."""
    backup = tmp_path / "backup"
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(SENTENCES[0]) == SENTENCES[0]
        taken = await asyncio.to_thread(command, own_daemon, "backup", str(backup))
        assert taken.returncode == 0, taken.stderr
        refused = await asyncio.to_thread(command, own_daemon, "restore", str(backup), "--replace")
        assert refused.returncode == 73, refused.stderr
        token = own_daemon.daemon.admin_token
    assert own_daemon.daemon.stop() == 0
    wipe(own_daemon.state_dir)
    restored = await asyncio.to_thread(command, own_daemon, "restore", str(backup))
    assert restored.returncode == 0, restored.stderr
    (own_daemon.state_dir / "admin.token").write_text(token)
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        assert (await recorder.resume(client))["reason"] == "other_epoch"
        assert await recorder.turn("Next.") == "Next."
        assert len((await recorder.described())["turns"]) == 2


def digest(path: Path) -> str:
    """Return a hash of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def assert_read_only(found: DaemonHarness, readable: list[RecordingClient], *, absent: str = "none") -> None:
    """Run on a file that cannot be written: readable sessions are served, and the file does not change."""
    path = found.state_dir / FILE
    before = digest(path)
    found.start(storage="unavailable")
    async with connect_client(found.daemon) as client:
        (line,) = logged(found.daemon, "store_read_only")
        assert FILE in line["reason"]
        assert line["hint"]
        await wait_refused(client, op="create_session")
        await assert_unstored_session_works(client)
        assert (await client.ask(op="get_session", session_id=absent))["code"] == "session_not_found"
        for recorder in readable:
            assert (await recorder.resume(client))["state"] == "idle"
            session = await recorder.described()
            assert len(session["turns"]) == len(SENTENCES)
            await wait_refused(client, op="infer", session_id=recorder.session_id, prompt="More?")
    assert found.daemon.stop() == 0
    assert digest(path) == before


@pytest.mark.slow
async def test_read_only_database(own_daemon: DaemonHarness) -> None:
    """Stored sessions can be read, and new ones work without storage."""
    recorders = await stored_sessions(own_daemon)
    with read_only(own_daemon.state_dir / FILE):
        await assert_read_only(own_daemon, recorders)


def damage_header(path: Path) -> None:
    """Overwrite the header of SQLite's file."""
    with path.open("r+b") as file:
        file.write(b"This is no database, and never was one. " * 3)


def damage_page(path: Path) -> None:
    """Overwrite a page that is full of a long message."""
    page = 4096
    content = path.read_bytes()
    at = content.rindex(b"needle " * 100) // page * page
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * page)


async def test_file_that_is_no_database_is_left_alone(own_daemon: DaemonHarness) -> None:
    """The daemon runs without its sessions."""
    (recorder,) = await stored_sessions(own_daemon)
    damage_header(own_daemon.state_dir / FILE)
    await assert_read_only(own_daemon, [], absent=recorder.session_id)


@pytest.mark.slow
async def test_damaged_page_is_salvaged(own_daemon: DaemonHarness) -> None:
    """Sessions on other pages are readable; after a salvage every session continues."""
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        safe = await RecordingClient.open(client)
        for sentence in SENTENCES:
            await safe.turn(sentence)
        damaged = await RecordingClient.open(client)
        await damaged.turn("needle " * 500, max_tokens=4)
    own_daemon.daemon.stop()
    damage_page(own_daemon.state_dir / FILE)
    await assert_read_only(own_daemon, [safe])
    salvaged = await asyncio.to_thread(command, own_daemon, "session", "salvage")
    assert salvaged.returncode == 0, salvaged.stderr
    assert "2 sessions are complete, 0 truncated, 0 lost." in salvaged.stdout, "only tokens were on that page"
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        for recorder, n_turns in ((safe, len(SENTENCES)), (damaged, 1)):
            assert (await recorder.resume(client))["reason"] == "other_epoch"
            assert await recorder.turn("Next.") == "Next."
            assert len((await recorder.described())["turns"]) == n_turns + 1


@pytest.mark.slow
async def test_lock_at_the_start_fails_the_start(own_daemon: DaemonHarness) -> None:
    """The daemon names the other program and exits; later it starts with all sessions."""
    (recorder,) = await stored_sessions(own_daemon)
    with locked(own_daemon.state_dir / FILE):
        own_daemon.start(ready=False)
        status = await asyncio.to_thread(own_daemon.daemon.process.wait, 30)
        assert status != 0
        assert "Another program has it open" in own_daemon.daemon.log.read_text()
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        assert (await recorder.resume(client))["resumed"] is True
        assert await recorder.turn("Next.") == "Next."


def tear(path: Path) -> None:
    """Truncate to the first half."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle of the payload."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes((byte ^ 1,)))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("damage", [tear, pytest.param(flip, marks=SLOW), pytest.param(Path.unlink, marks=SLOW)])
async def test_damaged_kv_files_are_recomputed(own_daemon: DaemonHarness, damage: Callable[[Path], None]) -> None:
    """A truncated, changed or missing file is dropped and recomputed, and the answer is right."""
    (recorder,) = await stored_sessions(own_daemon, text=LINE * 4)
    files = [path for path in (own_daemon.state_dir / "kv").rglob("*") if path.is_file() and path.stat().st_size > 100]
    assert files, "no KV was offloaded"
    for path in files:
        damage(path)
    own_daemon.start()
    async with connect_client(own_daemon.daemon) as client:
        assert (await recorder.resume(client))["resumed"] is True
        assert await recorder.turn("Next.") == "Next."
        assert recorder.end["stats"]["cached_tokens"] == 0
        assert await recorder.turn("And next.") == "And next."
        assert recorder.end["stats"]["cached_tokens"] > 0
        await recorder.described()
