"""``doctor`` finds mistakes of a cluster, each with what to do."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter import __version__
from inferencecenter.cli import cluster_checks
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.cli.cluster_checks import (
    FILES,
    HOSTS,
    RPC,
    ClusterReport,
    authentication,
    authority,
    front_checks,
    head,
    node_checks,
    nodes,
    packages,
    public_addresses,
    token,
    unreachable,
)
from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.node import Node
from inferencecenter.cluster.ray_cluster import NodeFacts, ProbeReply, RayNode
from inferencecenter.config.settings import ClusterSettings, Settings
from inferencecenter.hardware import ggml
from inferencecenter.ipc.link import ModelFile, file_digest
from inferencecenter.models.registry import read_registry
from tests.cli.test_doctor import quick

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.cli.conftest import Cli

__all__ = ["quick"]
BINDINGS = cluster_checks._bindings()
GOOD = NodeFacts(name="box2", version=__version__, llama_cpp=BINDINGS, clock_offset_s=0.5, clock_error_s=0.01)
JOINED = ProbeReply(nodes=(RayNode(name="box2", address="10.0.0.2", alive=True),))
REFUSED = ProbeReply(refused=True, error="InvalidAuthToken")
PRIVATE = "10.0.0.1:6380"


def report(*facts: NodeFacts, probe: ProbeReply = JOINED) -> ClusterReport:
    """Return a report about these nodes."""
    return ClusterReport(probe, REFUSED, facts, ports=(HOSTS, FILES, RPC))


def found(check: Check) -> tuple[CheckResult, str]:
    """Return a check's verdict and its texts; one that passes has no hint, and each other one has."""
    assert bool(check.hint) == (check.verdict is not CheckResult.OK)
    assert (check.code is not None) or check.verdict is not CheckResult.FAILED
    return check.verdict, f"{check.detail} {check.hint}"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A token that only its owner reads."""
    path = tmp_path / "auth_token"
    path.write_text("0123abcd")
    path.chmod(0o600)
    return path


def test_token_file(token_file: Path) -> None:
    """It must be there, have a token, and be closed to others."""
    assert found(token(token_file))[0] is CheckResult.OK
    for mode in (0o640, 0o604, 0o644):
        token_file.chmod(mode)
        verdict, text = found(token(token_file))
        assert verdict is CheckResult.WARNING
        assert f"{mode:04o}" in text
        assert f"chmod 600 {token_file}" in text
    token_file.write_text(" \n")
    assert found(token(token_file))[0] is CheckResult.FAILED
    token_file.unlink()
    verdict, text = found(token(token_file))
    assert verdict is CheckResult.FAILED
    assert "Copy the token file" in text


@pytest.mark.parametrize(
    ("address", "listen", "texts"),
    [
        (PRIVATE, None, ()),
        (PRIVATE, "192.168.1.7", ()),
        ("127.0.0.1:6380", "127.0.0.1", ()),
        ("8.8.8.8:6380", "8.8.8.8", ("the head is at 8.8.8.8, which is a public address",)),
        ("0.0.0.0:6380", None, ("the head is at 0.0.0.0, which is every address of this machine",)),
        (PRIVATE, "8.8.4.4", ("hosts connect to 8.8.4.4, which is a public address",)),
    ],
)
def test_public_addresses(address: str, listen: str | None, texts: tuple[str, ...]) -> None:
    """The head and the listener belong into a private network."""
    checks = public_addresses(address, listen)
    assert tuple(check.detail for check in checks) == texts
    for check in checks:
        verdict, text = found(check)
        assert verdict is CheckResult.WARNING
        assert "private network" in text


def test_certificates(tmp_path: Path) -> None:
    """There are none before the first start; they are reported before they expire, and if others can read them."""
    assert authority(tmp_path) is None
    ClusterCertificates(tmp_path / "cluster")
    check = authority(tmp_path)
    assert check is not None
    assert found(check)[0] is CheckResult.OK
    now = datetime.now(UTC)
    for days, verdict in ((3600, CheckResult.OK), (3640, CheckResult.WARNING), (3660, CheckResult.FAILED)):
        check = authority(tmp_path, now=now + timedelta(days=days))
        assert check is not None
        assert found(check)[0] is verdict
        assert ("expire" in check.detail) == (verdict is not CheckResult.OK)
    (tmp_path / "cluster/authority.pem").chmod(0o644)
    check = authority(tmp_path)
    assert check is not None
    assert found(check) == (check.verdict, f"{check.detail} chmod 600 {tmp_path / 'cluster/authority.pem'}")
    (tmp_path / "cluster/authority.pem").chmod(0o600)
    (tmp_path / "cluster/authority.pem").write_bytes(b"no certificate")
    check = authority(tmp_path)
    assert check is not None
    assert found(check)[0] is CheckResult.FAILED


@pytest.mark.parametrize(
    ("probe", "verdict", "text"),
    [
        (JOINED, CheckResult.OK, "nodes: box2"),
        (ProbeReply(), CheckResult.OK, "nodes: none"),
        (REFUSED, CheckResult.FAILED, "refuses the token"),
        (ProbeReply(error="no reply within 20 s"), CheckResult.FAILED, "no reply within 20 s"),
    ],
)
def test_head(probe: ProbeReply, verdict: CheckResult, text: str) -> None:
    """Its answer is reported."""
    assert found(head(PRIVATE, probe))[0] is verdict
    assert text in head(PRIVATE, probe).detail


@pytest.mark.parametrize(
    ("anonymous", "verdict"), [(REFUSED, CheckResult.OK), (JOINED, CheckResult.FAILED)], ids=["on", "off"]
)
def test_token_authentication(anonymous: ProbeReply, verdict: CheckResult) -> None:
    """A head that serves processes without a token is a failure."""
    check_verdict, text = found(authentication(anonymous))
    assert check_verdict is verdict
    assert ("RAY_AUTH_MODE=token" in text) == (verdict is CheckResult.FAILED)


def test_unknown_authentication_is_a_warning() -> None:
    """The head did not answer."""
    assert authentication(ProbeReply(error="no reply")).verdict is CheckResult.WARNING


def test_good_node() -> None:
    """Its figures are shown."""
    (check,) = nodes(report(GOOD), {}, {})
    assert found(check)[0] is CheckResult.OK
    assert check.name == "node box2"
    assert f"version {__version__}" in check.detail
    assert "clock +0.500 s" in check.detail


@pytest.mark.parametrize(
    ("change", "verdict", "texts"),
    [
        ({"version": "0.1.9"}, CheckResult.FAILED, ("has version 0.1.9", "Install the same version")),
        ({"llama_cpp": "0.2.0"}, CheckResult.WARNING, ("llama-cpp-python 0.2.0", "Install the same version")),
        ({"llama_cpp": ""}, CheckResult.WARNING, ("llama-cpp-python not",)),
        ({"clock_offset_s": 5.0}, CheckResult.WARNING, ("5.0 s ahead", "Synchronize the clocks")),
        ({"clock_offset_s": -5.0}, CheckResult.WARNING, ("5.0 s behind",)),
        ({"clock_offset_s": -90_000.0}, CheckResult.FAILED, ("certificates are refused",)),
        ({"unreachable": ("refused", "", "")}, CheckResult.FAILED, ("refused", "Open cluster.port", "engines connect")),
        (
            {"unreachable": ("", "timed out", "")},
            CheckResult.FAILED,
            ("timed out", "cluster.files_port", "copied"),
        ),
        ({"unreachable": ("", "", "refused")}, CheckResult.FAILED, ("cluster.rpc_port", "refused", "`rpc_nodes`")),
        ({"error": "no worker"}, CheckResult.FAILED, ("no worker", "Ray's log")),
    ],
)
def test_mistakes_of_a_node(change: Mapping[str, Any], verdict: CheckResult, texts: tuple[str, ...]) -> None:
    """Each is named, with what to do."""
    (check,) = nodes(report(msgspec.structs.replace(GOOD, **change)), {}, {})
    check_verdict, text = found(check)
    assert check_verdict is verdict
    for each in texts:
        assert each in text


def test_inexact_clock_is_no_difference() -> None:
    """A reading that took as long as the difference says nothing."""
    facts = NodeFacts(name="box2", version=__version__, llama_cpp=BINDINGS, clock_offset_s=5.0, clock_error_s=4.0)
    (check,) = nodes(report(facts), {}, {})
    assert check.verdict is CheckResult.OK


def test_models_and_their_nodes(tmp_path: Path) -> None:
    """Nodes that models name must have joined, and have the same files; other nodes need none."""
    model = tmp_path / "big.gguf"
    model.write_bytes(b"GGUF")
    settings = Settings.model_validate(
        {
            "state_dir": tmp_path,
            "cluster": {"address": PRIVATE},
            "models": {"big": {"path": model, "nodes": ["local", "box2", "box3", "box4"]}},
            "model": {"name": "big"},
        }
    )
    spec = read_registry(settings).models["big"]
    wanted = {name: (spec,) for name in ("box2", "box3", "box4")}
    probe = ProbeReply(nodes=(*JOINED.nodes, RayNode(name="box3", address="10.0.0.3", alive=False)))
    files = {path: ModelFile(str(path), path.stat().st_size, file_digest(path)) for path in spec.files}
    facts = NodeFacts(name="box2", version=__version__, llama_cpp=BINDINGS, files=("different",))
    spare = NodeFacts(name="spare", version=__version__, llama_cpp=BINDINGS, files=("missing",))
    checks = {check.name: check for check in nodes(report(facts, spare, probe=probe), wanted, files)}
    assert "has left; it was at 10.0.0.3" in checks["node box3"].detail
    assert checks["node box4"].detail == "has not joined"
    assert "take it out of `nodes` of big" in checks["node box4"].hint
    assert checks["node box2"].verdict is CheckResult.WARNING
    assert "has another" in checks["node box2"].detail
    assert checks["node spare"].verdict is CheckResult.OK
    facts = NodeFacts(name="box2", version=__version__, llama_cpp=BINDINGS, files=("missing",))
    checks = {check.name: check for check in nodes(report(facts, probe=probe), wanted, files)}
    assert found(checks["node box2"])[0] is CheckResult.WARNING


def test_files_are_compared_on_the_node(tmp_path: Path) -> None:
    """By size and digest, at the daemon's path or in the node's directory."""
    node = Node(tmp_path / "node")
    node.models.mkdir(parents=True)
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF and weights")
    file = ModelFile(str(path), path.stat().st_size, file_digest(path))
    elsewhere = ModelFile("/nowhere/big.gguf", file.size_bytes, file.digest)
    assert node.compare(file) == "same"
    assert node.compare(elsewhere) == "missing"
    (node.models / "big.gguf").write_bytes(b"GGUF and WEIGHTS")
    assert node.compare(elsewhere) == "different"
    (node.models / "big.gguf").write_bytes(path.read_bytes())
    assert node.compare(elsewhere) == "same"


def test_head_that_is_not_there(tmp_path: Path, token_file: Path) -> None:
    """It ends the checks of nodes; the listener's port is found free."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert unreachable(address) == "Connection refused"
    cluster = ClusterSettings(address=address, token_file=token_file, port=0, files_port=0)
    checks = {check.name: check for check in front_checks(Settings(state_dir=tmp_path, cluster=cluster))}
    assert list(checks) == ["cluster token", "cluster listener", "cluster files listener", "cluster head"]
    assert found(checks["cluster head"])[0] is CheckResult.FAILED
    assert "node head" in checks["cluster head"].hint
    assert "is free" in checks["cluster listener"].detail
    port = int(address.rsplit(":", 1)[1])
    nothing = node_checks(address, token_file, address, files_port=port, rpc_port=port)
    checks = {check.name: check for check in nothing}
    assert list(checks) == ["cluster token", "daemon", "daemon files", "daemon RPC", "cluster head"]
    assert found(checks["daemon"])[0] is CheckResult.WARNING
    verdict, text = found(checks["daemon files"])
    assert verdict is CheckResult.WARNING
    assert "open cluster.files_port for this machine" in text
    assert "--files-port" in text


def test_ports_of_the_daemon_as_a_node_sees_them(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of RPC may be closed until an engine needs it, but not be filtered."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        closed_port = closed.getsockname()[1]
    address = f"127.0.0.1:{closed_port}"
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        port = daemon.getsockname()[1]
        result = node_checks(address, token_file, f"127.0.0.1:{port}", files_port=port, rpc_port=closed_port)
    checks = {check.name: check for check in result}
    assert [found(checks[name])[0] for name in ("daemon", "daemon files", "daemon RPC")] == [CheckResult.OK] * 3
    assert "opens it for the first engine" in checks["daemon RPC"].detail
    monkeypatch.setattr(cluster_checks, "unreachable", lambda _: "timed out")
    checks = {check.name: check for check in node_checks(address, token_file, None)}
    verdict, text = found(checks["daemon RPC"])
    assert verdict is CheckResult.WARNING
    assert "127.0.0.1:6383: timed out" in text
    assert "open cluster.rpc_port" in text


def test_port_of_rpc_is_checked_where_a_model_needs_it(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of such a model have to join, and need no files."""
    model = tmp_path / "big.gguf"
    model.write_bytes(b"GGUF")
    settings = Settings.model_validate(
        {
            "state_dir": tmp_path,
            "cluster": {"address": "127.0.0.1:1", "token_file": token_file, "port": 0, "files_port": 0, "rpc_port": 0},
            "models": {"big": {"path": model, "rpc_nodes": ["box3"]}},
            "model": {"name": "big"},
        }
    )
    monkeypatch.setattr(ggml, "reaches_servers", lambda: True)
    spec = read_registry(settings).models["big"]
    checks = {check.name: check for check in front_checks(settings)}
    assert "is free" in checks["cluster RPC listener"].detail
    (check,) = nodes(report(), {"box3": (spec,)}, {})
    assert check.detail == "has not joined"
    assert "take it out of `rpc_nodes` of big" in check.hint


def test_listener_of_another_machine_fails(tmp_path: Path, token_file: Path) -> None:
    """The address is none of this machine; one in use is the daemon's."""
    cluster = ClusterSettings(address="127.0.0.1:1", token_file=token_file, listen="192.0.2.77")
    checks = {check.name: check for check in front_checks(Settings(state_dir=tmp_path, cluster=cluster))}
    assert found(checks["cluster listener"])[0] is CheckResult.FAILED
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        port = daemon.getsockname()[1]
        cluster = ClusterSettings(address="127.0.0.1:1", token_file=token_file, port=port)
        checks = {check.name: check for check in front_checks(Settings(state_dir=tmp_path, cluster=cluster))}
    assert "is in use" in checks["cluster listener"].detail


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra nothing else is checked, and without a cluster nothing at all."""
    assert packages() is None
    monkeypatch.setattr(cluster_checks, "PACKAGES", ("no_such_package",))
    assert front_checks(Settings(state_dir=tmp_path)) == []
    (check,) = front_checks(Settings(state_dir=tmp_path, cluster=ClusterSettings(address=PRIVATE)))
    assert "no_such_package" in check.detail
    assert "pip install" in check.hint
    assert node_checks(PRIVATE, None, None) == [check]


@pytest.mark.usefixtures("quick")
def test_doctor_of_a_node(cli: Cli, token_file: Path) -> None:
    """It needs no settings, and its options belong together."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    result = cli.run("doctor", "--node", address, "--token-file", str(token_file), "--front", address, "--json")
    found_checks = {check["name"]: check["verdict"] for check in json.loads(result.out)}
    assert found_checks["cluster token"] == "ok"
    assert found_checks["daemon"] == "warning"
    assert found_checks["cluster head"] == "failed"
    assert "settings" not in found_checks
    assert result.code != 0
    assert cli.run("doctor", "--front", address).code == 2
