"""The checks of ``doctor`` for engines on other machines: on the daemon's machine, and on a node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import importlib.util
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter import __version__
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.cli.node import token_path
from inferencecenter.config.settings import ClusterSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, reason_of
from inferencecenter.ipc.link import ModelFile, file_digest
from inferencecenter.models.registry import LOCAL_NODE, read_registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inferencecenter.cluster.ray_cluster import FileVerdict, NodeFacts, ProbeReply, RayNode
    from inferencecenter.config.settings import Settings
    from inferencecenter.hardware.placement import Device
    from inferencecenter.models.registry import ModelSpec

PACKAGES: Final = ("ray", "cryptography")
MAX_CLOCK_DIFFERENCE_S: Final = 2.0
REFUSED_CLOCK_DIFFERENCE_S: Final = 86_400.0
"""Certificates are refused by a machine whose clock is behind by more."""
EXPIRES_SOON: Final = timedelta(days=30)
_CONNECT_TIMEOUT_S: Final = 5.0
_OTHERS_BITS: Final = 0o077
_PRIVATE_HINT: Final = (
    "Use an address of a private network: the cluster's token permits to run code on every node, and Ray's own "
    "connections are not encrypted."
)


@dataclass(frozen=True, slots=True)
class DaemonPort:
    """A port at which the daemon listens for other machines: its setting, the names of its checks, and its purpose."""

    setting: str
    listener: str
    reach: str
    purpose: str


HOSTS: Final = DaemonPort("cluster.port", "cluster listener", "daemon", "engines connect to it")
FILES: Final = DaemonPort(
    "cluster.files_port", "cluster files listener", "daemon files", "missing model files are copied from it"
)
RPC: Final = DaemonPort(
    "cluster.rpc_port", "cluster RPC listener", "daemon RPC", "engines use devices of `rpc_nodes` through it"
)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What was found out about a cluster; ``anonymous`` is the head's answer to a process without the token.

    Nodes were asked whether they reach ``ports``.
    """

    probe: ProbeReply
    anonymous: ProbeReply
    facts: tuple[NodeFacts, ...] = ()
    problem: str = ""
    ports: tuple[DaemonPort, ...] = ()


def devices_of_nodes(settings: Settings, spec: ModelSpec) -> tuple[Device, ...]:
    """Return the devices that a model may use on other machines, by RPC servers that are started for that.

    Raises:
        InferenceCenterError: ``invalid_config`` if a package is missing; ``engine_unavailable`` for a node without a
            server.
    """
    if (missing := packages()) is not None:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, missing.detail, hint=missing.hint, field="cluster.address")
    from inferencecenter.cluster.engine_cluster import EngineCluster  # noqa: PLC0415 - needs them

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # A running daemon has the configured port.
    cluster = EngineCluster(settings.cluster.model_copy(update={"rpc_port": 0}), settings.state_dir)
    devices, failed = asyncio.run(cluster.rpc_devices(spec))
    if failed:
        why = "; ".join(f"the node {node} has no RPC server: {reason}" for node, reason in failed.items())
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, why)
    return devices


def front_checks(settings: Settings) -> list[Check]:
    """Check the cluster of the daemon's settings; nothing without one."""
    address = settings.cluster.address
    if address is None:
        return []
    if (missing := packages()) is not None:
        return [missing]
    token_file = token_path(settings.cluster.token_file)
    host = settings.cluster.listen or address.rsplit(":", 1)[0]
    results = [token(token_file), *public_addresses(address, host)]
    if (certificates := authority(settings.state_dir)) is not None:
        results.append(certificates)
    specs = _specs(settings)
    ports = {HOSTS: settings.cluster.port, FILES: settings.cluster.files_port}
    if any(spec.rpc_nodes for spec in specs):
        ports[RPC] = settings.cluster.rpc_port
    with contextlib.ExitStack() as held:
        listening = [held.enter_context(_Listening(port, host, number)) for port, number in ports.items()]
        results.extend(each.check for each in listening)
        listeners = {each.port: each.address for each in listening if each.address is not None}
        results.extend(_cluster(address, token_file, listeners=listeners, specs=specs))
    return results


def node_checks(
    address: str,
    token_file: Path | None,
    front: str | None,
    *,
    files_port: int | None = None,
    rpc_port: int | None = None,
) -> list[Check]:
    """Check this machine as a node of the cluster with this head; the daemon's listener is at ``front``."""
    if (missing := packages()) is not None:
        return [missing]
    path = token_path(token_file)
    defaults = ClusterSettings()
    front = front or f"{address.rsplit(':', 1)[0]}:{defaults.port}"
    host = front.rsplit(":", 1)[0]
    return [
        token(path),
        *public_addresses(address, None),
        _reach(HOSTS, front, "--front if cluster.listen or cluster.port is set"),
        _reach(FILES, f"{host}:{files_port or defaults.files_port}", "--files-port if cluster.files_port is set"),
        _reach(RPC, f"{host}:{rpc_port or defaults.rpc_port}", "--rpc-port if cluster.rpc_port is set"),
        *_cluster(address, path, listeners={}, specs=()),
    ]


def _reach(port: DaemonPort, address: str, option: str) -> Check:
    """Check that this machine reaches a port of the daemon."""
    problem = unreachable(address)
    if not problem:
        return Check(port.reach, CheckResult.OK, f"{address} can be reached")
    if port is RPC and problem == os.strerror(errno.ECONNREFUSED):
        detail = f"{address}: {problem}; the daemon opens it for the first engine with `rpc_nodes`"
        return Check(port.reach, CheckResult.OK, detail)
    hint = (
        f"Start the daemon, and open {port.setting} for this machine: {port.purpose}. Name another one with {option}."
    )
    return Check(port.reach, CheckResult.WARNING, f"{address}: {problem}", hint)


def packages() -> Check | None:
    """Return the problem if a package of the extra is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    hint = "pip install 'inferencecenter[server,cluster]'"
    detail = f"engines on other machines need the package {missing[0]}"
    return Check("cluster", CheckResult.FAILED, detail, hint, ErrorCode.INVALID_CONFIG)


def token(path: Path) -> Check:
    """Check that the cluster's token is there, and readable by its owner only."""
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = "Copy the token file of the cluster's head to this machine, readable by this user only."
        detail = f"{path}: {reason_of(error)}"
        return Check("cluster token", CheckResult.FAILED, detail, hint, ErrorCode.INVALID_CONFIG)
    if not text:
        hint = "Copy the token file of the cluster's head to this machine."
        return Check("cluster token", CheckResult.FAILED, f"{path} is empty", hint, ErrorCode.INVALID_CONFIG)
    if mode & _OTHERS_BITS:
        detail = f"{path} can be used by other users (mode {mode & 0o777:04o})"
        hint = f"chmod 600 {path}; if others may have read it, replace the token on all machines."
        return Check("cluster token", CheckResult.WARNING, detail, hint)
    return Check("cluster token", CheckResult.OK, str(path))


def public_addresses(head: str, listen: str | None) -> list[Check]:
    """Warn about addresses that are not of a private network."""
    results = []
    host = head.rsplit(":", 1)[0]
    if (kind := _exposure(host)) is not None:
        results.append(Check("cluster address", CheckResult.WARNING, f"the head is at {host}, {kind}", _PRIVATE_HINT))
    if listen is not None and listen != host and (kind := _exposure(listen)) is not None:
        detail = f"hosts connect to {listen}, {kind}"
        results.append(Check("cluster address", CheckResult.WARNING, detail, f"Set cluster.listen. {_PRIVATE_HINT}"))
    return results


def _exposure(host: str) -> str | None:
    """Return how exposed an address is, if it is not one of a private network."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None  # found by connecting to it
    for *_, address in found:
        parsed = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if parsed.is_unspecified:
            return "which is every address of this machine"
        if parsed.is_global:
            return "which is a public address"
    return None


def authority(state_dir: Path, *, now: datetime | None = None) -> Check | None:
    """Check the certificates between the daemon and its hosts; ``None`` before the first start creates them."""
    path = state_dir / "cluster" / "authority.pem"
    try:
        pem, mode = path.read_bytes(), path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        detail, hint = f"{path}: {reason_of(error)}", "The daemon's user must be able to read it."
        return Check("cluster certificates", CheckResult.FAILED, detail, hint, ErrorCode.INVALID_CONFIG)
    if mode & _OTHERS_BITS:
        detail = f"{path} can be used by other users (mode {mode & 0o777:04o})"
        return Check("cluster certificates", CheckResult.WARNING, detail, f"chmod 600 {path}")
    return _validity(path, pem, now or datetime.now(UTC))


def _validity(path: Path, pem: bytes, now: datetime) -> Check:
    from cryptography import x509  # noqa: PLC0415 - of the extra

    name = "cluster certificates"
    renew = f"Stop the daemon, remove {path.parent}, and start it: engines on other machines are loaded again."
    try:
        until = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    except ValueError as error:
        return Check(name, CheckResult.FAILED, f"{path}: {reason_of(error)}", renew, ErrorCode.INVALID_CONFIG)
    if until <= now:
        return Check(name, CheckResult.FAILED, f"expired on {until:%Y-%m-%d}", renew, ErrorCode.INVALID_CONFIG)
    if until - now < EXPIRES_SOON:
        return Check(name, CheckResult.WARNING, f"expire on {until:%Y-%m-%d}", renew)
    return Check(name, CheckResult.OK, f"valid until {until:%Y-%m-%d}")


class _Listening:
    """Listens where the daemon will, unless it does: so nodes can try to connect meanwhile."""

    def __init__(self, port: DaemonPort, host: str, number: int) -> None:
        self.port = port
        self._host = host
        self._number = number
        self._socket: socket.socket | None = None
        self.address: tuple[str, int] | None = None
        self.check = Check(port.listener, CheckResult.OK, f"{host}:{number} is free")

    def __enter__(self) -> _Listening:
        where = f"{self._host}:{self._number}"
        name = self.port.listener
        try:
            self._socket = socket.create_server((self._host, self._number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self.address = (self._host, self._number)
                self.check = Check(name, CheckResult.OK, f"{where} is in use, by the daemon if it runs")
            else:
                hint = (
                    f"Set cluster.listen to an address of this machine, and {self.port.setting} to a port that it may "
                    "use."
                )
                detail = f"{where}: {error.strerror or error}"
                self.check = Check(name, CheckResult.FAILED, detail, hint, ErrorCode.INVALID_CONFIG)
        else:
            self.address = (self._host, self._socket.getsockname()[1])
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def unreachable(address: str) -> str:
    """Return why an address cannot be reached from here; empty if it can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def _specs(settings: Settings) -> tuple[ModelSpec, ...]:
    """Return the models that use other machines; a registry that cannot be read has its own check."""
    with contextlib.suppress(InferenceCenterError):
        specs = read_registry(settings).models.values()
        return tuple(each for each in specs if set(each.nodes) != {LOCAL_NODE} or each.rpc_nodes)
    return ()


def _cluster(
    address: str,
    token_file: Path,
    *,
    listeners: Mapping[DaemonPort, tuple[str, int]],
    specs: Sequence[ModelSpec],
) -> list[Check]:
    """Check the head, and through it the nodes."""
    if problem := unreachable(address):
        hint = "Start `inferencecenter node head` there, and open its ports for this machine."
        detail = f"{address}: {problem}"
        return [Check("cluster head", CheckResult.FAILED, detail, hint, ErrorCode.ENGINE_UNAVAILABLE)]
    files = _files([spec for spec in specs if not spec.rpc_nodes])
    report = asyncio.run(_examine(address, token_file, tuple(files.values()), listeners))
    results = [head(address, report.probe), authentication(report.anonymous)]
    if report.problem:
        hint = "This machine must be a node too: run `inferencecenter node head` or `node join` here."
        results.append(Check("cluster node", CheckResult.FAILED, report.problem, hint, ErrorCode.ENGINE_UNAVAILABLE))
    named = {node for each in specs for node in (*each.nodes, *each.rpc_nodes)} - {LOCAL_NODE}
    wanted = {node: [each for each in specs if node in (*each.nodes, *each.rpc_nodes)] for node in named}
    return [*results, *nodes(report, wanted, files)]


def _files(specs: Sequence[ModelSpec]) -> dict[Path, ModelFile]:
    """Return the readable files of the models; those that are not have their own check."""
    found = {}
    for path in dict.fromkeys(path for spec in specs if spec.engine.backend == "llama" for path in spec.files):
        with contextlib.suppress(OSError):
            found[path] = ModelFile(str(path), path.stat().st_size, file_digest(path))
    return found


async def _examine(
    address: str, token_file: Path, files: tuple[ModelFile, ...], listeners: Mapping[DaemonPort, tuple[str, int]]
) -> ClusterReport:
    from inferencecenter.cluster.ray_cluster import RayCluster, probe_head  # noqa: PLC0415 - only for a cluster

    probe, anonymous = await asyncio.gather(
        probe_head(address, token_file=token_file),
        probe_head(address, token_file=token_file, authenticates=False),
    )
    if probe.error:
        return ClusterReport(probe, anonymous)
    cluster = RayCluster(address, token_file=token_file)
    try:
        facts = await cluster.examine(files=files, listeners=tuple(listeners.values()))
        return ClusterReport(probe, anonymous, facts, ports=tuple(listeners))
    except OSError as error:
        return ClusterReport(probe, anonymous, problem=reason_of(error))
    finally:
        await cluster.close()


def head(address: str, probe: ProbeReply) -> Check:
    """Report the head's answer."""
    if probe.refused:
        hint = "Copy the token file of the cluster's head to this machine, or set cluster.token_file."
        detail = f"{address} refuses the token"
        return Check("cluster head", CheckResult.FAILED, detail, hint, ErrorCode.INVALID_CONFIG)
    if probe.error:
        hint = "Another program may listen there, or a Ray of another version."
        detail = f"{address}: {probe.error}"
        return Check("cluster head", CheckResult.FAILED, detail, hint, ErrorCode.ENGINE_UNAVAILABLE)
    names = ", ".join(sorted(each.name for each in probe.nodes if each.alive)) or "none"
    return Check("cluster head", CheckResult.OK, f"{address}; nodes: {names}")


def authentication(anonymous: ProbeReply) -> Check:
    """Report whether the head serves a process without the token."""
    if anonymous.refused:
        return Check("cluster authentication", CheckResult.OK, "the head demands the token")
    if anonymous.error:
        return Check("cluster authentication", CheckResult.WARNING, f"not known: {anonymous.error}")
    return Check(
        "cluster authentication",
        CheckResult.FAILED,
        "the head serves processes without a token: everything that reaches it can run code on all nodes",
        "Start the cluster by `inferencecenter node head`, or Ray with RAY_AUTH_MODE=token on all machines.",
        ErrorCode.INVALID_CONFIG,
    )


def nodes(
    report: ClusterReport, wanted: Mapping[str, Sequence[ModelSpec]], files: Mapping[Path, ModelFile]
) -> list[Check]:
    """Check each node that has joined, and each that a model names."""
    results = []
    joined = {each.name for each in report.probe.nodes if each.alive}
    if not report.probe.error:
        for name in sorted(wanted.keys() - joined):
            known: RayNode | None = next((each for each in report.probe.nodes if each.name == name), None)
            detail = f"has left; it was at {known.address}" if known else "has not joined"
            settings = sorted({"rpc_nodes" if each.rpc_nodes else "nodes" for each in wanted[name]})
            models = ", ".join(each.name for each in wanted[name])
            hint = (
                f"Start `inferencecenter node join` there, or take it out of `{'` and `'.join(settings)}` of {models}."
            )
            results.append(Check(f"node {name}", CheckResult.WARNING, detail, hint))
    for facts in report.facts:
        own = {str(path) for spec in wanted.get(facts.name, ()) if not spec.rpc_nodes for path in spec.files}
        verdicts = dict(zip(map(str, files), facts.files, strict=False))
        own_verdicts = {path: verdict for path, verdict in verdicts.items() if path in own}
        problems = tuple(_problems(facts, own_verdicts, report.ports))
        bindings = f"llama-cpp-python {facts.llama_cpp}" if facts.llama_cpp else "no llama.cpp"
        described = f"version {facts.version}, {bindings}, clock {facts.clock_offset_s:+.3f} s"
        results.extend(problems or [Check(f"node {facts.name}", CheckResult.OK, described)])
    return results


def _bindings() -> str:
    """Return the version of llama.cpp's bindings here, empty without any."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("llama-cpp-python")
    return ""


def _problems(facts: NodeFacts, files: Mapping[str, FileVerdict], ports: Sequence[DaemonPort]) -> Iterator[Check]:
    name = f"node {facts.name}"
    unavailable = ErrorCode.ENGINE_UNAVAILABLE
    if facts.error:
        hint = "Nothing can be started there; see Ray's log on that machine, in /tmp/ray/session_latest/logs."
        yield Check(name, CheckResult.FAILED, facts.error, hint, unavailable)
        return
    if facts.version != __version__:
        detail = f"has version {facts.version}, this machine {__version__}"
        yield Check(name, CheckResult.FAILED, detail, "Install the same version: others are refused.", unavailable)
    if facts.llama_cpp != (here := _bindings()):
        detail = f"has llama-cpp-python {facts.llama_cpp or 'not'}, this machine {here or 'not'}"
        hint = "Install the same version, so that answers do not depend on the machine."
        yield Check(name, CheckResult.WARNING, detail, hint)
    behind_s = abs(facts.clock_offset_s) - facts.clock_error_s
    if behind_s > MAX_CLOCK_DIFFERENCE_S:
        which = "ahead" if facts.clock_offset_s > 0 else "behind"
        refused = behind_s > REFUSED_CLOCK_DIFFERENCE_S
        verdict = CheckResult.FAILED if refused else CheckResult.WARNING
        effect = "certificates are refused" if refused else "times in logs do not match"
        detail = f"its clock is {abs(facts.clock_offset_s):.1f} s {which}: {effect}"
        yield Check(name, verdict, detail, "Synchronize the clocks, for example by chrony.", unavailable)
    for port, why in zip(ports, facts.unreachable, strict=False):
        if why:
            detail = f"cannot connect to {port.setting} of this machine: {why}"
            hint = (
                f"Open {port.setting} of this machine for it, or set cluster.listen to an address that it reaches: "
                f"{port.purpose}."
            )
            yield Check(name, CheckResult.FAILED, detail, hint, unavailable)
    for path, found in files.items():
        if found == "different":
            hint = "The first engine there copies the daemon's file, and leaves this one as it is."
            yield Check(name, CheckResult.WARNING, f"has another {Path(path).name}", hint)
        elif found == "missing":
            hint = "The first engine there copies it from the daemon, unless that was done before."
            yield Check(name, CheckResult.WARNING, f"has no {Path(path).name}", hint)
