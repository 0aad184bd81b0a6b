"""The checks of ``doctor``, one function each."""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import sqlite3
import ssl
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import orjson

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts_db import DAMAGED_HINT as ACCOUNTS_HINT
from inferencecenter.auth.accounts_db import MIGRATIONS as ACCOUNTS_STEPS
from inferencecenter.cli.reach import fetch, own_url
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import (
    DamagedFileError,
    FileMovedError,
    check_version,
    connect_reading,
    integrity_error,
    is_damage,
    version_of,
)
from inferencecenter.hardware.devices import find_devices
from inferencecenter.hardware.memory import read_host
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.split import plan
from inferencecenter.models.registry import default_model, read_registry
from inferencecenter.server.control import check_open_files
from inferencecenter.server.status_pages import PROXY_NOT_TRUSTED
from inferencecenter.server.unix_socket import check_path, is_listening, unix_accounts
from inferencecenter.sessions.store.database import DAMAGED_HINT, HINT, MOVED_HINT, reason_of
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.schema import DATABASE_NAME, MIGRATIONS
from inferencecenter.supervisor.planning import constraints_of, first_share, read_shape

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.config.settings import Settings
    from inferencecenter.core.sqlite_file import Steps
    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.models.registry import ModelSpec


_PROBE_TIMEOUT_S: Final = 60
_HTTP_TIMEOUT_S: Final = 3
_MB: Final = 10**6
# Loading llama.cpp may crash the process, so it is done in a child process.
_PROBE: Final = """
import json, sys
from importlib.metadata import version
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.engine.llama.library import load_library
try:
    load_library()
except InferenceCenterError as error:
    sys.exit(error.message)
from llama_cpp import llama_cpp
print(json.dumps({"version": version("llama-cpp-python"), "gpu": llama_cpp.llama_supports_gpu_offload()}))
"""


class CheckResult(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One result; a failed check has the error code that the daemon would report."""

    name: str
    verdict: CheckResult
    detail: str
    hint: str = ""
    code: ErrorCode | None = None


def python() -> Check:
    """Report the Python version."""
    return Check("python", CheckResult.OK, f"{platform.python_version()} at {sys.executable}")


def llama_cpp(*, needed: bool, gpu: bool) -> Check:
    """Load llama.cpp in a child process and report its version and GPU support."""
    failed = CheckResult.FAILED if needed else CheckResult.WARNING
    hint = "Install again with `make run`; CUDA=1 builds it for NVIDIA GPUs."
    try:
        done = subprocess.run(  # noqa: S603 - this Python and a constant
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        stderr = (getattr(error, "stderr", None) or "").strip().splitlines()
        return Check("llama.cpp", failed, stderr[-1] if stderr else str(error), hint, ErrorCode.ENGINE_UNAVAILABLE)
    detail = f"llama-cpp-python {answer['version']}, {'with' if answer['gpu'] else 'without'} GPU support"
    if gpu and not answer["gpu"]:
        return Check(
            "llama.cpp", CheckResult.WARNING, detail, "A GPU is available; `make run CUDA=1` builds with CUDA support."
        )
    return Check("llama.cpp", CheckResult.OK, detail)


def gpu() -> Check:
    """Report all GPUs found by NVML."""
    gpus = read_gpus()
    if not gpus.readings:
        problem = f": {gpus.problem}" if gpus.problem else ""
        return Check("gpu", CheckResult.WARNING, f"no NVIDIA GPU found by NVML{problem}", "The model runs on the CPU.")
    return Check("gpu", CheckResult.OK, "; ".join(map(_shown, gpus.readings)) + f"; driver {gpus.driver_version}")


def _shown(reading: GpuReading) -> str:
    used, total = reading.vram_used_bytes or 0, reading.vram_total_bytes or 0
    capability = ".".join(map(str, reading.compute_capability or ()))
    parts = [
        f"{reading.name}, {used // _MB} of {total // _MB} MB of memory in use",
        f"compute capability {capability}" if capability else "",
        "partitioned by MIG" if reading.mig else "",
    ]
    return ", ".join(filter(None, parts))


def placement(settings: Settings) -> list[Check]:
    """Plan the placement of the model on the GPUs that llama.cpp can use; no check without one."""
    if settings.engine.backend != "llama":
        return []
    try:
        devices = find_devices(settings.gpu.devices, settings.gpu.rpc_servers)
        if not devices:
            return []
        spec = default_model(settings)
        if spec.rpc_nodes:
            detail = f"each start is planned with the devices of {', '.join(spec.rpc_nodes)}"
            return [Check("plan", CheckResult.OK, detail, "`inferencecenter doctor --plan MODEL` asks these nodes.")]
        shape = read_shape(spec.path, spec.lora, spec.draft, spec.mmproj)
        devices, host = first_share(spec, settings.gpu, devices, read_host())
        placement_plan = plan(shape, devices, host, constraints_of(spec.engine, settings.gpu, shape, spec.kind))
    except InferenceCenterError as error:
        return [Check("plan", CheckResult.FAILED, error.message, error.hint or "", error.code)]
    detail = "; ".join(f"{reason.name}: {reason.value}" for reason in placement_plan.reasons)
    hint = (
        " ".join(placement_plan.advice)
        if not placement_plan.fits
        else "`inferencecenter doctor --plan MODEL` explains it."
    )
    return [Check("plan", CheckResult.OK if placement_plan.fits else CheckResult.WARNING, detail, hint)]


def cores() -> Check:
    """Report the CPU cores that this process may use."""
    return Check("cores", CheckResult.OK, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")


def model_files(settings: Settings) -> list[Check]:
    """Check the headers of all model files and adapters; only the default model's are required to start a daemon."""
    if settings.engine.backend != "llama":
        return [Check("model file", CheckResult.OK, f"the {settings.engine.backend} backend uses none")]
    try:
        registry = read_registry(settings)
    except InferenceCenterError as error:
        return [Check("model file", CheckResult.FAILED, error.message, error.hint or "", error.code)]
    default = registry.get(registry.default)
    results = [
        _broken(default, "model file", CheckResult.FAILED)
        or Check("model file", CheckResult.OK, "; ".join([_sized(default.path), *_projector(default)]))
    ]
    whole = []
    for name in sorted(registry.models.keys() - {registry.default}):
        if (broken := _broken(registry.get(name), f"model {name}", CheckResult.WARNING)) is not None:
            results.append(broken)
        else:
            whole.append(name)
    if whole:
        results.append(Check("other models", CheckResult.OK, ", ".join(whole)))
    return [*results, *(Check("models_dir", CheckResult.WARNING, remark) for remark in registry.remarks)]


def _sized(path: Path) -> str:
    return f"{path}, {path.stat().st_size / _MB:.1f} MB"


def _projector(spec: ModelSpec) -> list[str]:
    return [] if spec.mmproj is None else [f"takes images by {_sized(spec.mmproj)}"]


def _broken(spec: ModelSpec, name: str, verdict: CheckResult) -> Check | None:
    """Return the problem of the model's first invalid file, if any."""
    for path in spec.files:
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            hint = "Specify a readable GGUF file, with --model or in the configuration."
            return Check(name, verdict, f"{path}: {error.strerror}", hint, ErrorCode.INVALID_MODEL_FILE)
        if magic != b"GGUF":
            hint = "The daemon needs GGUF files, which start with the letters GGUF."
            return Check(name, verdict, f"{path}: is not a GGUF file", hint, ErrorCode.INVALID_MODEL_FILE)
    return None


def memory(settings: Settings) -> Check:
    """Compare the available memory with the size of the model file."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        needed = default_model(settings).path.stat().st_size if settings.engine.backend == "llama" else 0
    except (OSError, InferenceCenterError):
        needed = 0
    detail = f"{available // _MB} MB free, the model file takes {needed / _MB:.1f} MB"
    if needed > available:
        hint = "Page cache counts as used here; if loading fails, use a smaller model or fewer slots."
        return Check("memory", CheckResult.WARNING, detail, hint)
    return Check("memory", CheckResult.OK, detail)


def state_dir(path: Path) -> Check:
    """Check that the state directory, or its parent, is writable."""
    existing = next(place for place in (path, *path.parents) if os.path.exists(place))  # noqa: PTH110 - Path.exists raises
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        hint = "Choose another with --state-dir, or change the permissions."
        detail = f"{path}: {existing} cannot be written"
        return Check("state directory", CheckResult.FAILED, detail, hint, ErrorCode.STORAGE_UNAVAILABLE)
    return Check("state directory", CheckResult.OK, str(path) if existing == path else f"{path}, will be created")


def port(settings: Settings) -> Check:
    """Check that the port is free, or that the daemon of these settings answers there."""
    host, number = settings.server.host, settings.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken_port(settings)
        hint = "Choose another with --port or --host."
        return Check("port", CheckResult.FAILED, f"{host}:{number}: {error.strerror}", hint, ErrorCode.ADDRESS_IN_USE)
    return Check("port", CheckResult.OK, f"{host}:{number} is free")


def _taken_port(settings: Settings) -> Check:
    """Check whether the daemon of these settings owns the port; otherwise report the program that answers."""
    url = own_url(settings, "/healthz", scheme="http")
    try:
        status, _ = fetch(settings, "/healthz", timeout_s=_HTTP_TIMEOUT_S)
    except InferenceCenterError as error:
        return Check("port", CheckResult.FAILED, error.message, error.hint or "", error.code)
    except ssl.SSLCertVerificationError as error:
        finding = f"the certificate at {url} is not the one in server.certfile: {error.verify_message}"
        hint = "After a renewal run `inferencecenter reload`; otherwise another program listens there."
        return Check("port", CheckResult.FAILED, finding, hint, ErrorCode.ADDRESS_IN_USE)
    except OSError as error:
        finding = f"in use, and no daemon answers at {url}: {error.strerror or error}"
    else:
        if status == HTTPStatus.OK:
            return Check("port", CheckResult.OK, f"a daemon answers at {url}")
        finding = f"in use, and {url} answers {status}"
    hint = "Stop the program there, or choose another --port; a running daemon may have other settings."
    return Check("port", CheckResult.FAILED, finding, hint, ErrorCode.ADDRESS_IN_USE)


def unix_listener(settings: Settings) -> list[Check]:
    """Check that a Unix socket can be made, or that a daemon listens there; nothing without one in the settings."""
    path = settings.server.unix_socket
    if path is None:
        return []
    try:
        unix_accounts(settings.auth.unix_users)
        check_path(path)
        listens = is_listening(path)
    except InferenceCenterError as error:
        return [Check("unix socket", CheckResult.FAILED, error.message, error.hint or "", error.code)]
    except OSError as error:
        hint = "Run this as the daemon's user, or see server.unix_socket_mode."
        return [Check("unix socket", CheckResult.WARNING, f"{path}: {error.strerror}", hint)]
    if listens:
        return [Check("unix socket", CheckResult.OK, f"a daemon listens at {path}")]
    if not os.access(path.parent, os.W_OK):
        hint = "The daemon's user must be able to write there."
        return [
            Check("unix socket", CheckResult.FAILED, f"{path.parent} is not writable", hint, ErrorCode.ADDRESS_IN_USE)
        ]
    return [Check("unix socket", CheckResult.OK, f"{path} is free")]


_TIMEOUT_S: Final = 3


def proxy(settings: Settings) -> Check:
    """Report the trusted proxies, and warn if requests arrive through an untrusted one on this machine."""
    trusted = ", ".join(map(str, settings.server.trusted_proxies)) or "none"
    if _sees_untrusted(settings):
        return Check(
            "proxy",
            CheckResult.WARNING,
            f"requests come through a proxy on this machine; trusted: {trusted}",
            'Set server.trusted_proxies to its address, such as ["127.0.0.1"], and have it send X-Forwarded-For and'
            " Host; until then all clients behind it share the limits of one address.",
        )
    return Check("proxy", CheckResult.OK, f"trusted: {trusted}")


def _sees_untrusted(settings: Settings) -> bool:
    """Query a running daemon, if there is one."""
    try:
        _, body = fetch(settings, "/readyz", timeout_s=_TIMEOUT_S)
        page = orjson.loads(body)
    except (OSError, InferenceCenterError, orjson.JSONDecodeError):  # reported by the port check
        return False
    return isinstance(page, dict) and page.get("proxy") == PROXY_NOT_TRUSTED


_MAX_NAMED: Final = 3


def storage(settings: Settings) -> list[Check]:
    """Check the files of accounts and sessions, and whether a running daemon writes to them."""
    directory = settings.state_dir
    results = [
        _file("accounts", directory / ACCOUNTS_NAME, ACCOUNTS_STEPS, damaged_hint=ACCOUNTS_HINT),
        _file("sessions", directory / DATABASE_NAME, MIGRATIONS, damaged_hint=DAMAGED_HINT),
    ]
    try:
        check_open_files(directory)
    except FileMovedError as error:
        detail = f"{error} while a daemon has it open"
        results.append(Check("open files", CheckResult.FAILED, detail, MOVED_HINT, ErrorCode.STORAGE_UNAVAILABLE))
    except OSError:
        # The state directory has its own check.
        return results
    return results


def _file(name: str, path: Path, steps: Steps, *, damaged_hint: str) -> Check:
    try:
        if not path.exists():
            return Check(name, CheckResult.OK, f"{path}: none yet")
        with closing(connect_reading(path)) as database:
            check_version(database, steps, path=path)
            if (wrong := integrity_error(database)) is not None:
                raise DamagedFileError(wrong)
            unreadable = list(read_all(database).unreadable) if steps is MIGRATIONS and _is_current(database) else []
    except InferenceCenterError as error:
        return Check(name, CheckResult.FAILED, error.message, error.hint or "", error.code)
    except (sqlite3.Error, OSError) as error:
        detail, hint = f"{path}: {reason_of(error)}", damaged_hint if is_damage(error) else HINT
        return Check(name, CheckResult.FAILED, detail, hint, ErrorCode.STORAGE_UNAVAILABLE)
    if unreadable:
        named = ", ".join(unreadable[:_MAX_NAMED]) + (", …" if len(unreadable) > _MAX_NAMED else "")
        hint = "They stay in the file and are not loaded: restore a backup, or purge them."
        return Check(name, CheckResult.WARNING, f"{path}: sessions that cannot be read: {named}", hint)
    return Check(name, CheckResult.OK, str(path))


def _is_current(database: sqlite3.Connection) -> bool:
    """Return whether a sessions file has the tables of this version; an older one is migrated at the next start."""
    return version_of(database) == len(MIGRATIONS)
