"""The blocking end of the pipe."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.framing import BlockingChannel, FramingError, encode, from_engine_decoder
from inferencecenter.ipc.messages import AbortTurn, LogLine, ReleaseSession

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[BlockingChannel, socket.socket]]:
    """A channel and the raw socket at its other end."""
    ours, theirs = socket.socketpair()
    pipe = BlockingChannel(ours)
    yield pipe, theirs
    pipe.close()
    theirs.close()


def test_frames_in_one_segment_are_read_in_order(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """Several frames in one segment are read one by one."""
    pipe, peer = ends
    peer.sendall(encode(AbortTurn("a")) + encode(ReleaseSession("b")))
    assert pipe.read() == AbortTurn("a")
    assert pipe.read() == ReleaseSession("b")


def test_partial_frame_is_completed(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """Reading continues until the frame is complete."""
    pipe, peer = ends
    frame = encode(AbortTurn("turn"))
    peer.sendall(frame[:3])
    rest = threading.Timer(0.01, peer.sendall, [frame[3:]])
    rest.start()
    assert pipe.read() == AbortTurn("turn")
    rest.join()


@pytest.mark.parametrize("left", [b"", b"\x05\0", encode(AbortTurn("turn"))[:-1]])
def test_end_of_file_returns_none(ends: tuple[BlockingChannel, socket.socket], left: bytes) -> None:
    """A closed peer ends the messages, also in the middle of a frame."""
    pipe, peer = ends
    peer.sendall(encode(AbortTurn("a")) + left)
    peer.close()
    assert pipe.read() == AbortTurn("a")
    assert pipe.read() is None
    assert pipe.read() is None


def test_connection_reset_returns_none(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """A peer that died with unread bytes resets the connection."""
    pipe, peer = ends
    pipe.send(LogLine("info", "never read", "engine"))
    peer.close()
    assert pipe.read() is None


def test_invalid_frame_raises(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """Bytes that are no frame cannot be skipped."""
    pipe, peer = ends
    peer.sendall(b"\x03\0\0\0abc")
    with pytest.raises(FramingError):
        pipe.read()


def test_write_to_a_closed_peer_fails(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """The writer detects that the peer does not read."""
    pipe, peer = ends
    peer.close()
    with pytest.raises(ConnectionError):
        pipe.send(LogLine("info", "x", "engine"))


def test_concurrent_writers_keep_frames_whole(ends: tuple[BlockingChannel, socket.socket]) -> None:
    """Frames larger than the socket's buffer arrive complete."""
    pipe, peer = ends
    sent = [LogLine("info", letter * 500_000, "engine") for letter in "abcd"]
    threads = [threading.Thread(target=pipe.send, args=(message,)) for message in sent]
    for thread in threads:
        thread.start()
    decoder = from_engine_decoder()
    received: list[object] = []
    while len(received) < len(sent):
        received += decoder.feed(peer.recv(65_536))
    for thread in threads:
        thread.join()
    assert sorted(map(repr, received)) == sorted(map(repr, sent))
