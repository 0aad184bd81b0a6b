"""The file of sessions cannot be written, or not even read: nothing is lost, nothing is said that was not kept."""

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

from tests.e2e.harness import Talk, mounted, talk
from tests.e2e.witness import Witness
from tests.faults.harness import ECHO, IN_NO_HURRY, LINE, logged, site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.harness import Site

SENTENCES = [f"This is sentence {number} of a story." for number in range(3)]
FILE = "sessions.sqlite3"


@pytest.fixture
def apart(tmp_path: Path, demo_model_path: Path) -> Iterator[Site]:
    """A place for a daemon of the test's own, which does not run yet."""
    with site(tmp_path, demo_model_path, **ECHO) as found:
        yield found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have another program write to the file without an end."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Have a disk without room, and another program that takes what becomes free."""
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


async def is_refused(client: Talk, **request: Any) -> None:
    """Ask for something that has to be written down, until the daemon knows that it cannot."""
    while True:
        answer = await client.ask(**request)
        if answer["op"] == "error":
            assert answer["code"] == "storage_unavailable", answer
            assert answer["retryable"] is True
            assert FILE in answer["message"]
            return


async def private_works(client: Talk) -> None:
    """A session that is not to be stored is opened, and answers, whatever the file does."""
    private = await Witness.open(client, store=False)
    assert await private.turn("Between us.") == "Between us."


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Mount a file over itself for reading only; the test is skipped where that is not allowed."""
    try:
        subprocess.run(["mount", "--bind", path, path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def said_in(path: Path) -> str:
    """Return what the file has of the turn that has not ended."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return "".join(text for (text,) in database.execute("SELECT text FROM said ORDER BY rowid"))


async def held_back(daemon: Site, witness: Witness, fault: contextlib.AbstractContextManager[None]) -> None:
    """Run a turn while nothing can be written: it is told when it can be again, all of it."""
    async with talk(daemon.daemon) as other:
        with fault:
            await witness.infer(LINE * 40, key="k", max_tokens=50)
            while not logged(daemon.daemon, "store_fault"):
                await private_works(other)
            await private_works(other)
            await says(other, "unavailable")
            hello = await other.ask(op="hello")
            assert hello["status"] == "degraded"
            await is_refused(other, op="create_session")
            await witness.client.ask(op="ping")
            shown = "" if witness.asked or witness.is_over else witness.text
            assert said_in(daemon.state_dir / FILE).startswith(shown), "something was told that is in no file"
        assert await witness.finish() == (LINE * 40)[:50]
        assert witness.end["finish_reason"] == "length"
        await says(other, "ok")
        assert logged(daemon.daemon, "store_mended")
        assert await witness.turn("Next.") == "Next."
        assert len((await witness.described())["turns"]) == 3


async def survives_a_restart(found: Site, witness: Witness) -> None:
    """What the session has said is in the file."""
    found.kill()
    found.start()
    async with talk(found.daemon) as client:
        await witness.resume(client)
        assert await witness.turn("And after that?") == "And after that?"
        await witness.described()


@pytest.mark.slow
async def test_the_file_is_locked(echo: Site) -> None:
    """Another program holds it for seconds: stored sessions wait, others do not, and all goes on afterwards."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(SENTENCES[0]) == SENTENCES[0]
        await held_back(echo, witness, locked(echo.state_dir / FILE))
    await survives_a_restart(echo, witness)


async def test_the_disk_is_full(apart: Site) -> None:
    """Nothing fits any more: what was made is held back until there is room, new turns are refused."""
    with mounted(apart.state_dir, "-o", "size=16m"):
        apart.start()
        async with talk(apart.daemon) as client:
            witness = await Witness.open(client)
            assert await witness.turn(SENTENCES[0]) == SENTENCES[0]
            await held_back(apart, witness, filled(apart.state_dir))
        await survives_a_restart(apart, witness)
        apart.close()


@pytest.mark.slow
async def test_it_is_stopped_while_the_disk_is_full(apart: Site) -> None:
    """It ends in time; what was never shown may be missing, what was shown is there when there is room again."""
    with mounted(apart.state_dir, "-o", "size=16m"):
        apart.start(**IN_NO_HURRY)  # type: ignore[arg-type]
        async with talk(apart.daemon) as client:
            witness = await Witness.open(client)
            assert await witness.turn(SENTENCES[0]) == SENTENCES[0]
            await witness.infer(LINE * 20)
            await witness.until("token")
            with filled(apart.state_dir):
                while not logged(apart.daemon, "store_fault"):
                    await private_works(client)
                assert apart.daemon.stop() in (0, 1)
                await witness.drain()
        apart.start()
        async with talk(apart.daemon) as client:
            answer = await witness.resume(client)
            assert answer["reason"] == "other_epoch"
            assert await witness.finish() == LINE * 20
            assert await witness.turn("Next.") == "Next."
            await witness.described()
        apart.close()


async def says(client: Talk, state: str) -> None:
    """Listen until the daemon says that its storage is so."""
    while not any(frame["op"] == "storage" and frame["state"] == state for frame in client.seen):
        await client.receive()


def command(found: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``inferencecenter`` on the site's state directory."""
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


def delete(path: Path, *, keeping: Path) -> None:
    """Delete a file that stays under another name."""
    keeping.hardlink_to(path)
    path.unlink()


def put_back(kept: Path, path: Path) -> None:
    """Give a file its name back."""
    kept.rename(path)


@pytest.mark.slow
async def test_the_file_is_deleted(apart: Site, tmp_path: Path) -> None:
    """Nothing is acknowledged that the next daemon would not find; all who ask are told; put back, all goes on."""
    path, elsewhere = apart.state_dir / FILE, tmp_path / "elsewhere"
    apart.start()
    async with talk(apart.daemon) as client, talk(apart.daemon) as other:
        witness = await Witness.open(client)
        assert await witness.turn(SENTENCES[0]) == SENTENCES[0]
        delete(path, keeping=elsewhere)
        await witness.infer(SENTENCES[1])
        await says(other, "unavailable")
        assert witness.asked, "it was acknowledged, and the next daemon does not know of it"
        await is_refused(other, op="create_session")
        await private_works(other)
        status, body = apart.daemon.get("/readyz")
        assert (status, json.loads(body)["storage"]) == (503, "unavailable")
        backup = await asyncio.to_thread(command, apart, "backup", str(tmp_path / "backup"))
        assert backup.returncode == 73, backup.stdout
        assert not (tmp_path / "backup").exists()
        doctor = await asyncio.to_thread(command, apart, "doctor", "--json")
        assert doctor.returncode == 73, doctor.stdout
        put_back(elsewhere, path)
        await says(other, "ok")
        assert await witness.finish() == SENTENCES[1]
    assert apart.daemon.ready()
    await survives_a_restart(apart, witness)


async def has_a_past(found: Site, *, sessions: int = 1, text: str = "") -> list[Witness]:
    """Have sessions of three turns in the file, whose daemon has stopped."""
    found.start()
    async with talk(found.daemon) as client:
        witnesses = [await Witness.open(client) for _ in range(sessions)]
        for witness in witnesses:
            for sentence in SENTENCES:
                assert await witness.turn(text + sentence, max_tokens=40) == (text + sentence)[:40]
    found.daemon.stop()
    return witnesses


def wipe(directory: Path) -> None:
    """Delete all that a state directory holds."""
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)


@pytest.mark.slow
async def test_what_was_lost_is_restored(apart: Site, tmp_path: Path) -> None:
    """From a backup that was taken beside the daemon; not while one runs; clients learn that they must read anew."""
    backup = tmp_path / "backup"
    apart.start()
    async with talk(apart.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(SENTENCES[0]) == SENTENCES[0]
        taken = await asyncio.to_thread(command, apart, "backup", str(backup))
        assert taken.returncode == 0, taken.stderr
        refused = await asyncio.to_thread(command, apart, "restore", str(backup), "--replace")
        assert refused.returncode == 73, refused.stderr
        token = apart.daemon.admin_token
    assert apart.daemon.stop() == 0
    wipe(apart.state_dir)
    restored = await asyncio.to_thread(command, apart, "restore", str(backup))
    assert restored.returncode == 0, restored.stderr
    (apart.state_dir / "admin.token").write_text(token)
    apart.start()
    async with talk(apart.daemon) as client:
        assert (await witness.resume(client))["reason"] == "other_epoch"
        assert await witness.turn("Next.") == "Next."
        assert len((await witness.described())["turns"]) == 2


def digest(path: Path) -> str:
    """Return what tells whether a file has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def only_reads(found: Site, readable: list[Witness], *, absent: str = "none") -> None:
    """Run on a file that is not to be written: what can be read of it is there, and not a byte of it changes."""
    path = found.state_dir / FILE
    before = digest(path)
    found.start(storage="unavailable")
    async with talk(found.daemon) as client:
        (line,) = logged(found.daemon, "store_read_only")
        assert FILE in line["reason"]
        assert line["hint"]
        await is_refused(client, op="create_session")
        await private_works(client)
        assert (await client.ask(op="get_session", session_id=absent))["code"] == "session_not_found"
        for witness in readable:
            assert (await witness.resume(client))["state"] == "idle"
            session = await witness.described()
            assert len(session["turns"]) == len(SENTENCES)
            await is_refused(client, op="infer", session_id=witness.session_id, prompt="More?")
    assert found.daemon.stop() == 0
    assert digest(path) == before


@pytest.mark.slow
async def test_the_file_is_read_only(apart: Site) -> None:
    """On a file system that is mounted so, old sessions can be read, and new ones live without it."""
    witnesses = await has_a_past(apart)
    with read_only(apart.state_dir / FILE):
        await only_reads(apart, witnesses)


def damage_header(path: Path) -> None:
    """Make the file none of SQLite's."""
    with path.open("r+b") as file:
        file.write(b"This is no database, and never was one. " * 3)


def damage_page(path: Path) -> None:
    """Write over a page that is full of a long message."""
    page = 4096
    content = path.read_bytes()
    at = content.rindex(b"needle " * 100) // page * page
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * page)


async def test_the_file_is_no_database(apart: Site) -> None:
    """It is left alone; the daemon runs without its sessions."""
    (witness,) = await has_a_past(apart)
    damage_header(apart.state_dir / FILE)
    await only_reads(apart, [], absent=witness.session_id)


@pytest.mark.slow
async def test_a_page_of_the_file_is_damaged(apart: Site) -> None:
    """Sessions whose rows are elsewhere are read; the rest is kept until it is salvaged: then all go on."""
    apart.start()
    async with talk(apart.daemon) as client:
        safe = await Witness.open(client)
        for sentence in SENTENCES:
            await safe.turn(sentence)
        struck = await Witness.open(client)
        await struck.turn("needle " * 500, max_tokens=4)
    apart.daemon.stop()
    damage_page(apart.state_dir / FILE)
    await only_reads(apart, [safe])
    salvaged = await asyncio.to_thread(command, apart, "session", "salvage")
    assert salvaged.returncode == 0, salvaged.stderr
    assert "2 sessions are complete, 0 truncated, 0 lost." in salvaged.stdout, "only tokens were on that page"
    apart.start()
    async with talk(apart.daemon) as client:
        for witness, n_turns in ((safe, len(SENTENCES)), (struck, 1)):
            assert (await witness.resume(client))["reason"] == "other_epoch"
            assert await witness.turn("Next.") == "Next."
            assert len((await witness.described())["turns"]) == n_turns + 1


@pytest.mark.slow
async def test_the_file_is_locked_at_the_start(apart: Site) -> None:
    """The daemon says who is to blame and ends; when the other program has gone, it starts with all sessions."""
    (witness,) = await has_a_past(apart)
    with locked(apart.state_dir / FILE):
        apart.start(ready=False)
        status = await asyncio.to_thread(apart.daemon.process.wait, 30)
        assert status != 0
        assert "Another program has it open" in apart.daemon.log.read_text()
    apart.start()
    async with talk(apart.daemon) as client:
        assert (await witness.resume(client))["resumed"] is True
        assert await witness.turn("Next.") == "Next."


def tear(path: Path) -> None:
    """Leave the first half."""
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


@pytest.mark.parametrize("hurt", [tear, pytest.param(flip, marks=SLOW), pytest.param(Path.unlink, marks=SLOW)])
async def test_kv_on_disk_is_damaged(apart: Site, hurt: Callable[[Path], None]) -> None:
    """Torn, changed or missing: it is dropped and computed again, and the answer is right."""
    (witness,) = await has_a_past(apart, text=LINE * 4)
    files = [path for path in (apart.state_dir / "kv").rglob("*") if path.is_file() and path.stat().st_size > 100]
    assert files, "nothing was parked"
    for path in files:
        hurt(path)
    apart.start()
    async with talk(apart.daemon) as client:
        assert (await witness.resume(client))["resumed"] is True
        assert await witness.turn("Next.") == "Next."
        assert witness.end["stats"]["cached_tokens"] == 0
        assert await witness.turn("And next.") == "And next."
        assert witness.end["stats"]["cached_tokens"] > 0
        await witness.described()
