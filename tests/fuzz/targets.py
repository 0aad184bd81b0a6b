"""Fuzz targets: each passes bytes to one parser of external input.

The fuzzers and the committed corpus run these. A target returns when the input is accepted, or refused as documented.
It raises on anything else: an undocumented exception, an error without a message, a number that no JSON parser reads.
"""

from __future__ import annotations

import ipaddress
import json
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import httpx2
import structlog
from huggingface_hub import hf_api
from starlette.datastructures import Headers

from inferencecenter.auth.authentication import AuthUnavailableError
from inferencecenter.auth.clients_file import load_clients
from inferencecenter.auth.external import ExternalAuth
from inferencecenter.config.loader import load_settings
from inferencecenter.config.sections import AuthSettings, ExternalAuthSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import gguf, memory
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.placement import MIB, Device, Host, PlacementConstraints
from inferencecenter.hardware.split import plan
from inferencecenter.hardware.vram_calibration import VramCalibration
from inferencecenter.models import hub
from inferencecenter.models.files import find_model, read_facts
from inferencecenter.models.pull import pull
from inferencecenter.protocol.codec import read_frame
from inferencecenter.server.handshake import TrustedProxies, origin_allowed
from inferencecenter.supervisor.planning import plan_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CORPUS: Final = Path(__file__).with_name("corpus")
WEIGHTS: Final = b"weights of a tiny model"
"""What the hub of ``hub_listing`` sends of every file."""

_GIB: Final = 1024 * MIB
_MACHINES: Final = ((), (8,), (3, 24))
_HOST: Final = Host(available_bytes=32 * _GIB, cores=6)
_MAX_MESSAGE_CHARS: Final = 1000
_MAX_ADDRESS_CHARS: Final = 45
_MAX_INTEGER: Final = 2**63
_OF_A_PULL: Final = (
    ErrorCode.HUB_UNREACHABLE,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.INVALID_MODEL_FILE,
    ErrorCode.STORAGE_UNAVAILABLE,
    ErrorCode.FORBIDDEN,
)


def model_file(data: bytes) -> None:
    """Read and describe a GGUF file, and plan for it as the daemon does."""
    with _file(data) as path:
        gguf.read_summary(path)
        with _refused_as(ErrorCode.INVALID_MODEL_FILE) as refused:
            read_facts(path)
            shape = describe(gguf.read_gguf(path))
    if refused:
        return
    for sizes in _MACHINES:
        devices = tuple(_device(number, gib) for number, gib in enumerate(sizes))
        for constraints in (PlacementConstraints(), PlacementConstraints(prefer="long", quantized_kv=True)):
            made = plan(shape, devices, _HOST, constraints)
            report = plan_report(made, model=shape, host=_HOST, constraints=constraints).model_dump(mode="json")
            assert all(abs(number) < _MAX_INTEGER for number in _integers(report))


def hub_listing(data: bytes) -> None:
    """Pull a model from a hub with this listing of a repository."""
    client = httpx2.Client(transport=httpx2.MockTransport(lambda request: _hub_answer(request, data)))
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(hf_api, "get_session", return_value=client),
        mock.patch.object(hub, "get_session", return_value=client),
    ):
        models = Path(folder) / "models"
        with _refused_as(*_OF_A_PULL):
            pulled = pull(
                hub.ModelHub("http://hub.test"), "ada/tiny", directory=models, sleep=lambda _s: None, clock=lambda: 0.0
            )
            assert all(path.parent == models for path in pulled.model.paths)
        assert {path.name for path in Path(folder).iterdir()} <= {"models"}


def manifest_file(data: bytes) -> None:
    """Look up a model with this manifest."""
    with _file(data) as path:
        (path.parent / "model.gguf").touch()
        path.rename(path.parent / "model.json")
        found = find_model(path.parent, "model").manifest
    if found is not None:
        assert all(isinstance(digest, str) for digest in found.sha256.values())


def plan_file(data: bytes) -> None:
    """Start with this ``plan.json``, and write to it."""
    with _file(data) as path:
        kept = VramCalibration(path)
        assert abs(kept.extra_bytes("model", "gpu")) < _MAX_INTEGER
        kept.put("model", "gpu", estimated_bytes=1000, used_bytes=1200)
        assert VramCalibration(path).extra_bytes("model", "gpu") == 200


def settings_file(data: bytes) -> None:
    """Read this configuration."""
    with _file(data) as path, _refused_as(ErrorCode.INVALID_CONFIG):
        load_settings(path)


def clients_file(data: bytes) -> None:
    """Read this ``clients.toml``."""
    with _file(data) as path, _refused_as(ErrorCode.INVALID_CONFIG):
        load_clients(AuthSettings(clients_file=path))


def kernel_files(data: bytes) -> None:
    """Read these files of ``/proc`` and of a control group."""
    with _file(data) as path:
        folder = path.parent
        for name in ("meminfo", "self/cgroup", "7/status", "memory.max", "memory.current", "memory.stat"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        for share in (memory.machine_memory(folder), memory.cgroup_memory(folder, folder)):
            assert share is None or share.total_bytes > 0
        assert memory.resident_memory(7, folder).own_bytes >= 0
        assert (memory.available_memory_bytes(folder, folder) or 0) >= 0


def external_answer(data: bytes) -> None:
    """Parse this answer of an external authentication program."""
    account = None
    with suppress(AuthUnavailableError):
        account = _external_auth()._read((200, data), "ada")
    assert account is None or account.client_id == "ada"


def caller_headers(data: bytes) -> None:
    """Determine the client's address from these headers: Origin, Host and forwarding headers."""
    lines = [line.decode("latin-1") for line in data.split(b"\n")]
    lines += [""] * (2 - len(lines))
    forwarded = [("x-forwarded-for", hop) for hop in lines[2:]]
    headers = Headers(
        raw=[(name.encode(), value.encode("latin-1")) for name, value in [("host", lines[1]), *forwarded]]
    )
    proxies = TrustedProxies(["10.0.0.0/8", "::1"])
    for peer in ("10.0.0.1", "::1", "192.0.2.1", "127.0.0.1", "", lines[1]):
        caller = proxies.peer_info(peer, headers)
        assert caller.address == peer or ipaddress.ip_address(caller.address)
        assert len(caller.address) <= max(_MAX_ADDRESS_CHARS, len(peer))
        assert isinstance(caller.on_this_machine, bool)
    assert isinstance(origin_allowed(lines[0], lines[1], ["http://a"]), bool)


def request_frame(data: bytes) -> None:
    """Parse a text frame of the WebSocket protocol."""
    with _refused_as(*(code for code in ErrorCode if code is not ErrorCode.INTERNAL)):
        read_frame(data.decode("utf-8", errors="replace")).parse()


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    target.__name__: target
    for target in (
        model_file,
        hub_listing,
        manifest_file,
        plan_file,
        settings_file,
        clients_file,
        kernel_files,
        external_answer,
        caller_headers,
        request_frame,
    )
}


def corpus(target: str) -> dict[str, bytes]:
    """Return the committed inputs of a target by name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target).iterdir())}


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """Yield a file with this content in a directory of its own, with logging suppressed."""
    with TemporaryDirectory() as folder, structlog.testing.capture_logs():
        path = Path(folder) / "meminfo"
        path.write_bytes(data)
        yield path


@contextmanager
def _refused_as(*codes: ErrorCode) -> Iterator[list[InferenceCenterError]]:
    """Accept errors of these codes that have a message; yield what was raised."""
    refused: list[InferenceCenterError] = []
    try:
        yield refused
    except InferenceCenterError as error:
        refused.append(error)
    for each in refused:
        assert each.code in codes, repr(each)
        assert 0 < len(each.message) <= _MAX_MESSAGE_CHARS
        json.dumps([each.message, each.hint, each.field], ensure_ascii=False).encode()


def _device(number: int, gib: int) -> Device:
    return Device(id=str(number), name=f"GPU {number}", free_bytes=gib * _GIB, total_bytes=gib * _GIB, index=number)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _integers(inner)


def _hub_answer(request: httpx2.Request, listing: bytes) -> httpx2.Response:
    if "/api/models/" in request.url.path:
        return httpx2.Response(200, content=listing)
    first = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
    headers = {"Content-Range": f"bytes {first}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"}
    return httpx2.Response(206, headers=headers, content=WEIGHTS[first:])


@cache
def _external_auth() -> ExternalAuth:
    settings = ExternalAuthSettings(url="http://127.0.0.1:9/")
    return ExternalAuth(settings, defaults=AuthSettings(), clock=lambda: 0.0)
