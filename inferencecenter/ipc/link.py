"""Messages between the front and the host of an engine on another machine, beside those of the engine itself.

A host connects to the front, sends ``HostHello`` and gets ``HostWelcome`` or ``HostRefused``. From then on the
connection carries the engine's messages, each in a frame of its own as on a socket pair, and those of this module
between them. Both ends send a message at least every ``BEAT_S`` seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from inferencecenter.ipc.framing import Decoder
from inferencecenter.ipc.messages import FromEngine, ToEngine

BEAT_S: Final = 1.0
"""Seconds between two heartbeats of each end."""
MAX_HELLO_BYTES: Final = 4096
"""Largest frame that the front accepts before it has accepted the host."""


_DIGESTED_BYTES: Final = 4 * 2**20


def file_digest(path: Path) -> str:
    """Return the SHA-256 in hex of the first and the last 4 MiB of a file: of model files the header and last weights.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_DIGESTED_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - _DIGESTED_BYTES))
        digest.update(file.read(_DIGESTED_BYTES))
    return digest.hexdigest()


class LinkTicket(msgspec.Struct, frozen=True, kw_only=True):
    """What a host needs to connect to the front; handed over by what starts the host, once.

    ``key`` is valid for one connection. ``certificate`` and ``certificate_key`` identify the host, ``authority`` signed
    them and the front's certificate; all are PEM. A host that has had no connection for ``orphan_s`` ends its engine.
    ``node`` is the name of its machine in the cluster, empty where there is none.
    """

    engine: str
    epoch: int
    key: str
    address: tuple[str, int]
    authority: str
    certificate: str
    certificate_key: str
    lost_after_s: float
    orphan_s: float
    node: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine}, epoch={self.epoch})"


# --- host to front


class HostHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of a connection. ``key`` is the ticket's, or ``resume_key`` of an earlier ``HostWelcome``."""

    version: str
    engine: str
    epoch: int
    key: str
    node: str


class HostBeat(msgspec.Struct, frozen=True, tag=True):
    """The host is there; ``ticks`` is its engine's progress counter, ``monotonic_s`` its machine's monotonic clock."""

    ticks: int = 0
    monotonic_s: float = 0.0


class NodeGpu(msgspec.Struct, frozen=True, array_like=True):
    """A GPU of a machine: its memory, and what NVML reports of its state."""

    name: str
    used_bytes: int
    total_bytes: int
    utilization_percent: float | None = None
    temperature_c: float | None = None


class NodeResources(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The memory and the GPUs of the host's machine, sent every few seconds; ``None`` is unknown."""

    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    gpus: tuple[NodeGpu, ...] = ()


class HostedEngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine's process runs, perhaps since an earlier connection."""

    pid: int


class HostedEngineEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine has ended, and the host ends too; the fields are those of ``supervisor.process.EngineExit``."""

    detail: str
    suspects: tuple[str, ...] = ()
    by_itself: bool = True
    from_outside: bool = False


# --- front to host


class HostWelcome(msgspec.Struct, frozen=True, tag=True):
    """The host is accepted; ``resume_key`` is valid for its later connections."""

    resume_key: str


class HostRefused(msgspec.Struct, frozen=True, tag=True):
    """The host is not accepted, and ends with its engine."""

    reason: str


class FrontBeat(msgspec.Struct, frozen=True, tag=True):
    """The front is there."""


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that an engine reads: its path on the front's machine, its size, and the digest of ``file_digest``.

    ``mtime_ns`` is the time of its last change there, and ``group`` the first part of a split model.
    """

    path: str
    size_bytes: int
    digest: str
    mtime_ns: int = 0
    group: str = ""


class StartEngine(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start an engine with these ``EngineOptions`` as JSON, or continue with one that has the same options.

    The host finds the ``files`` on its machine, and completes the options for it: what the model's ``EngineSettings``
    in ``engine_json`` leave open is planned there. Files that are missing there it copies from the front's
    ``files_port``, if there is one. The reply is that of an engine that loads a model, with ``Ready`` or ``LoadFailed``
    at the end.
    """

    options_json: bytes
    engine_json: bytes
    files: tuple[ModelFile, ...] = ()
    files_port: int = 0


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """End the engine: close its channel, or with ``kill`` kill it. The reply is ``HostedEngineEnded``."""

    kill: bool = False


FromHost: TypeAlias = FromEngine | HostHello | HostBeat | NodeResources | HostedEngineStarted | HostedEngineEnded
ToHost: TypeAlias = ToEngine | HostWelcome | HostRefused | FrontBeat | StartEngine | EndEngine


def from_host_decoder(*, max_frame_bytes: int) -> Decoder[FromHost]:
    """Return the decoder of the front's end."""
    return Decoder(FromHost, max_frame_bytes=max_frame_bytes)


def to_host_decoder(*, max_frame_bytes: int) -> Decoder[ToHost]:
    """Return the decoder of the host's end."""
    return Decoder(ToHost, max_frame_bytes=max_frame_bytes)
