"""The C library against servers that break the protocol: each call fails with a reason, without a fault or a leak."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.c_library.conftest import INVALID_ARGUMENT, RUNTIME_ERROR, SECURITY, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
HELLO: Final = {"op": "hello", "server": "inferencecenter", "protocol": 1, "limits": {"max_frame_bytes": 100_000}}
TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA


class Peer:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pongs: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.connection.sendall(data)

    def exactly(self, length: int) -> bytes:
        """Receive bytes."""
        data = b""
        while len(data) < length:
            piece = self.connection.recv(length - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def head(self) -> bytes:
        """Receive the request of the handshake; return the value for its response."""
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            data += self.exactly(1)
        (key,) = (line.split(b": ")[1] for line in data.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
        assert len(base64.b64decode(key)) == 16
        return base64.b64encode(hashlib.sha1(key + MAGIC).digest())

    def upgrade(self) -> None:
        """Complete the handshake."""
        accept = self.head()
        self.send(b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\nsec-websocket-accept: " + accept + b"\r\n\r\n")

    def frame(self, payload: bytes, opcode: int = TEXT, *, first: int = 0x80) -> None:
        """Send a frame."""
        head = bytes([first | opcode])
        if len(payload) < 126:
            head += bytes([len(payload)])
        elif len(payload) < 65536:
            head += b"\x7e" + struct.pack("!H", len(payload))
        else:
            head += b"\x7f" + struct.pack("!Q", len(payload))
        self.send(head + payload)

    def say(self, **message: Any) -> None:
        """Send a message."""
        self.frame(json.dumps(message).encode())

    def hear(self) -> dict[str, Any]:
        """Receive the next message, which is masked; pongs are kept."""
        while True:
            opcode, length = self.exactly(2)
            assert length & 0x80
            length &= 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", self.exactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self.exactly(8))
            mask = self.exactly(4)
            payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.exactly(length)))
            if opcode == 0x80 | PONG:
                self.pongs.append(payload)
            elif opcode == 0x80 | TEXT:
                message: dict[str, Any] = json.loads(payload)
                return message
            else:
                raise EOFError

    def welcome(self) -> None:
        """Greet and authenticate."""
        self.upgrade()
        self.say(**HELLO)
        self.say(op="auth_success", id=self.hear()["id"])


@contextmanager
def served(path: Path, serve: Callable[[Peer], None]) -> Iterator[None]:
    """Serve one connection."""

    def run() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(EOFError, OSError):
            connection.settimeout(60)
            serve(Peer(connection))

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def after_upgrade(send: Callable[[Peer], None]) -> Callable[[Peer], None]:
    """Complete the handshake before."""

    def serve(peer: Peer) -> None:
        peer.upgrade()
        send(peer)

    return serve


def answered(response: bytes) -> Callable[[Peer], None]:
    """Answer the handshake otherwise."""

    def serve(peer: Peer) -> None:
        peer.head()
        peer.send(response)

    return serve


def interrupt(peer: Peer) -> None:
    """Begin a message within another one."""
    peer.frame(b"{", first=0)
    peer.frame(b"}")


DEEP: Final = b"[" * 100_000
MANY: Final = b"[" + b"0," * 70_000 + b"0]"

OPENINGS: Final[dict[str, tuple[Callable[[Peer], None], str]]] = {
    "nothing": (lambda _peer: None, "the connection"),
    "no HTTP": (answered(b"220 mail.example.org\r\n\r\n"), "refuses: 220"),
    "endless head": (answered(b"HTTP/1.1 101 Go\r\n" + b"x" * 10_000), "does not speak HTTP"),
    "refused": (answered(b"HTTP/1.1 429 Too Many Requests\r\n\r\n"), "429 Too Many"),
    "no proof": (answered(b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\n\r\n"), "no WebSocket server"),
    "wrong proof": (answered(b"HTTP/1.1 101 Go\r\nSec-WebSocket-Accept: AAAA\r\n\r\n"), "no WebSocket server"),
    "cut head": (answered(b"HTTP/1.1 101 Go\r\n"), "closed the connection"),
    "masked": (after_upgrade(lambda peer: peer.send(b"\x81\x85abcdefghi")), "masked"),
    "extension": (after_upgrade(lambda peer: peer.send(b"\xc1\x00")), "extension"),
    "binary": (after_upgrade(lambda peer: peer.frame(b"x", BINARY)), "not text"),
    "opcode": (after_upgrade(lambda peer: peer.frame(b"x", 0xB)), "opcode"),
    "continuation": (after_upgrade(lambda peer: peer.frame(b"x", 0)), "fragmented"),
    "interrupted": (after_upgrade(interrupt), "fragmented"),
    "long control": (after_upgrade(lambda peer: peer.frame(b"x" * 126, PING)), "control frame"),
    "cut control": (after_upgrade(lambda peer: peer.frame(b"", PING, first=0)), "control frame"),
    "huge": (after_upgrade(lambda peer: peer.send(b"\x81\x7f" + b"\xff" * 8)), "too large"),
    "large": (after_upgrade(lambda peer: peer.send(b"\x81\x7f" + struct.pack("!Q", 2**24 + 1))), "too large"),
    "cut frame": (after_upgrade(lambda peer: peer.send(b"\x81\x7e\x01\x00abc")), "closed the connection"),
    "cut length": (after_upgrade(lambda peer: peer.send(b"\x81\x7f\x00")), "closed the connection"),
    "close": (after_upgrade(lambda peer: peer.frame(b"\x03\xf4go away", CLOSE)), "1012 go away"),
    "strange close": (after_upgrade(lambda peer: peer.frame(b"\x03\xf4\xff\x1b[2J\n", CLOSE)), "1012 ??[2J?"),
    "long close": (after_upgrade(lambda peer: peer.frame(b"\x03\xf4" + "\u00e9".encode() * 61, CLOSE)), "1012 \u00e9"),
    "empty close": (after_upgrade(lambda peer: peer.frame(b"", CLOSE)), "closed the connection"),
    "empty message": (after_upgrade(lambda peer: peer.frame(b"")), "invalid JSON"),
    "no JSON": (after_upgrade(lambda peer: peer.frame(b"hello")), "invalid JSON"),
    "no UTF-8": (after_upgrade(lambda peer: peer.frame(b'"\xff"')), "not UTF-8"),
    "deep": (after_upgrade(lambda peer: peer.frame(DEEP)), "nested"),
    "many": (after_upgrade(lambda peer: peer.frame(MANY)), "too many values"),
    "list": (after_upgrade(lambda peer: peer.frame(b"[1]")), "not InferenceCenter"),
    "another server": (after_upgrade(lambda peer: peer.say(op="hello", server="other")), "not InferenceCenter"),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_invalid_opening(program: Path, tmp_path: Path, name: str) -> None:
    """There is no backend, and the reason says what is wrong."""
    serve, words = OPENINGS[name]
    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        reply = driver.call("init", "")
        assert (reply.error, words in reply.text) == (RUNTIME_ERROR, True), reply


def test_refused_user(program: Path, tmp_path: Path) -> None:
    """The daemon's reason is in the message."""

    def serve(peer: Peer) -> None:
        peer.upgrade()
        peer.say(**HELLO)
        peer.say(op="auth_failed", id=peer.hear()["id"], reason="no account")

    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        reply = driver.call("init", "")
        assert (reply.error, "no account" in reply.text) == (SECURITY, True)


@pytest.mark.parametrize(
    ("created", "words"),
    [
        ({"op": "session_created", "session_id": "x" * 100}, "session id"),
        ({"op": "session_created", "session_id": 7}, "session id"),
        ({"op": "session_created"}, "session id"),
        ({"op": "surprise"}, "unexpected"),
        ({"op": "error", "code": 5, "message": [], "field": {}}, ""),
        ({"op": "error", "code": "internal", "message": "x" * 50_000}, "internal: xxx"),
        ({"op": "error", "code": "internal", "message": "\u00e9" * 50_000}, "internal: \u00e9"),
        ({"op": "error", "code": "internal", "message": "\u00e9\u00e9\u00e9 \u001b[2J\n" * 99}, "\u00e9 ?[2J?"),
    ],
)
def test_invalid_reply(program: Path, tmp_path: Path, created: dict[str, Any], words: str) -> None:
    """The call fails, and the connection stays usable."""

    def serve(peer: Peer) -> None:
        peer.welcome()
        peer.say(**created, id=peer.hear()["id"])
        peer.say(op="status", id=peer.hear()["id"], values={"a": "b"})
        peer.hear()

    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        reply = driver.call("load", "", "")
        assert (reply.error, words in reply.text) == (RUNTIME_ERROR, True), reply
        assert json.loads(driver.must("status", 0, 100)) == {"a": "b"}
        driver.must("deinit")


def test_fragments_and_pings_in_between(program: Path, tmp_path: Path) -> None:
    """A message in frames of one byte, with a ping after each; messages to others are skipped."""

    def serve(peer: Peer) -> None:
        peer.welcome()
        request = peer.hear()
        peer.say(op="thermal", state="hot")
        reply = json.dumps({"op": "status", "id": request["id"], "values": {"text": "caf\u00e9"}}, ensure_ascii=False)
        data = reply.encode()
        for at in range(len(data)):
            peer.frame(data[at : at + 1], TEXT if at == 0 else 0, first=0x80 if at == len(data) - 1 else 0)
            peer.frame(str(at).encode(), PING)
        peer.say(op="status", id=peer.hear()["id"], values={})
        pongs.extend(peer.pongs)
        peer.hear()

    pongs: list[bytes] = []
    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        assert json.loads(driver.must("status", 0, 100)) == {"text": "caf\u00e9"}
        assert driver.must("status", 1, 100) == "{}"
        driver.must("deinit")
    assert pongs == [str(at).encode() for at in range(len(pongs))]
    assert len(pongs) > 50


def test_endless_answer_is_aborted(program: Path, tmp_path: Path) -> None:
    """Text beyond 8 MiB is not kept, and the turn is aborted."""

    def serve(peer: Peer) -> None:
        peer.welcome()
        for op in ("session_created", "session_closed", "session_created"):
            peer.say(op=op, id=peer.hear()["id"], session_id="s")
        infer = peer.hear()
        peer.say(op="queued", id=infer["id"], session_id="s", turn_id="t")
        for _ in range(100):
            peer.say(op="token", session_id="s", turn_id="t", content="x" * 100_000)
        abort = peer.hear()
        assert abort["op"] == "abort"
        peer.say(op="end", session_id="s", turn_id="t", finish_reason="aborted", usage={"prompt_tokens": 1e99})
        aborted.append(abort["session_id"])
        peer.hear()

    aborted: list[str] = []
    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        driver.must("load", "", "")
        context = driver.must("open", 0)
        driver.must("input", context, 0, "go on")
        reply = driver.call("compute", context)
        assert (reply.error, "8388608" in reply.text) == (6, True)
        assert len(driver.must("output", context, 0, 2**24)) <= 2**23
        driver.must("deinit")
    assert aborted == ["s"]


def test_message_that_begins_between_calls_is_skipped(program: Path, tmp_path: Path) -> None:
    """Also if its last fragment arrives during the next call."""

    def serve(peer: Peer) -> None:
        peer.pongs = pongs
        peer.welcome()
        peer.say(op="status", id=peer.hear()["id"], values={})
        peer.frame(b'{"op": ', first=0)
        peer.frame(b"", PING)
        request = peer.hear()
        peer.frame(b'"thermal"}', 0)
        peer.say(op="status", id=request["id"], values={"n": 2})
        peer.hear()

    pongs: list[bytes] = []
    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        assert driver.must("status", 0, 100) == "{}"
        while not pongs:  # the library has read the first fragment
            time.sleep(0.01)
        assert json.loads(driver.must("status", 0, 100)) == {"n": 2}
        driver.must("deinit")


def open_context(peer: Peer) -> None:
    """Welcome a client, which loads a model and opens a context."""
    peer.welcome()
    for op in ("session_created", "session_closed", "session_created"):
        peer.say(op=op, id=peer.hear()["id"], session_id="s")


def test_context_that_cannot_be_closed_stays_open(program: Path, tmp_path: Path) -> None:
    """The daemon refuses for now, and would keep its session; the second attempt closes it."""

    def serve(peer: Peer) -> None:
        open_context(peer)
        peer.say(op="error", id=peer.hear()["id"], code="rate_limited", message="later", session_id="s")
        closing.append(peer.hear())
        peer.say(op="session_closed", id=closing[0]["id"], session_id="s")
        peer.hear()

    closing: list[dict[str, Any]] = []
    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        driver.must("load", "", "")
        context = driver.must("open", 0)
        assert driver.call("close", context).error == RUNTIME_ERROR
        driver.must("close", context)
        driver.must("deinit")
    assert (closing[0]["op"], closing[0]["session_id"]) == ("close_session", "s")


def test_abort_of_a_refused_turn_does_not_reach_the_next(program: Path, tmp_path: Path) -> None:
    """It is not sent, since the daemon has begun no turn."""

    def serve(peer: Peer) -> None:
        open_context(peer)
        infer = peer.hear()
        time.sleep(0.3)  # meanwhile the other thread aborts it
        peer.say(op="error", id=infer["id"], code="invalid_request", message="no")
        infer = peer.hear()
        assert infer["op"] == "infer"
        peer.say(op="queued", id=infer["id"], session_id="s", turn_id="t")
        peer.say(op="token", session_id="s", turn_id="t", content="yes")
        peer.say(op="end", session_id="s", turn_id="t", finish_reason="stop")
        peer.hear()

    path = tmp_path / "s"
    with served(path, serve), running((program,), path, tmp_path / "log") as driver:
        driver.must("init", "")
        driver.must("load", "", "")
        context = driver.must("open", 0)
        driver.must("input", context, 0, "go on")
        assert driver.call("interrupt", context).error == INVALID_ARGUMENT
        assert driver.must("run", context, "again", 100) == "yes"
        driver.must("deinit")


def test_signals_interrupt_no_call(program: Path, tmp_path: Path) -> None:
    """A connection that waits for its turn, and waits for bytes."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening, running((program,), path, tmp_path / "log") as driver:
        listening.bind(str(path))
        listening.listen(0)
        listening.settimeout(60)

        def serve() -> None:
            with contextlib.ExitStack() as opened:
                first, _ = listening.accept()  # frees the place for the driver
                opened.enter_context(first)
                peer = Peer(opened.enter_context(listening.accept()[0]))
                peer.welcome()
                request = peer.hear()
                time.sleep(0.1)
                peer.say(op="status", id=request["id"], values={})
                with contextlib.suppress(EOFError):
                    peer.hear()

        with socket.socket(socket.AF_UNIX) as filler:
            filler.connect(str(path))
            driver.must("alarms")
            timer = threading.Timer(0.2, serve)
            timer.start()
            driver.must("init", "")
            assert driver.must("status", 0, 100) == "{}"
            driver.must("deinit")
            timer.join()
