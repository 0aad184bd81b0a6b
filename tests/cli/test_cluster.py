"""``inferencecenter cluster``: what it requests, and how it shows machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from inferencecenter.cli import cluster
from inferencecenter.cli.app import app
from inferencecenter.protocol.values import ClusterEngine, ClusterNode, ClusterRpcServer

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.protocol.base import Request

ENGINE = ClusterEngine(model="m", replica=0, state="ready", load_fraction=1.0, running=0, waiting=0, sessions=0)
NODES = (
    ClusterNode(name="local", state="up", drain="none", sessions=0, engines=(ENGINE,)),
    ClusterNode(
        name="box",
        state="up",
        drain="draining",
        drain_waits_for=("2 running turns of large",),
        sessions=0,
        engines=(),
        rpc_servers=(
            ClusterRpcServer(model="large", state="ready", running=2),
            ClusterRpcServer(model="other", state="missing", detail="it is drained"),
        ),
    ),
)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests to a daemon with two machines."""
    sent: list[Request] = []

    def exchange(_daemon: object, request: Request) -> tuple[ClusterNode, ...]:
        sent.append(request)
        return NODES

    monkeypatch.setattr(cluster, "_exchange", exchange)
    return sent


def run(folder: Path, *arguments: str) -> str:
    """Return the output of a command."""
    done = CliRunner().invoke(app, ["cluster", *arguments, "--state-dir", str(folder), "--token", "t"])
    assert done.exit_code == 0, done.output
    return done.output


def test_status_shows_engines_and_rpc_servers(tmp_path: Path, sent: list[Request]) -> None:
    """And what a drain waits for."""
    shown = " ".join(run(tmp_path, "status").split())
    assert "m/0 ready" in shown
    assert "up, draining (waits for 2 running turns of large)" in shown
    assert "RPC server of large ready; RPC server of other missing (it is drained)" in shown
    assert [each.op for each in sent] == ["list_nodes"]


@pytest.mark.parametrize(("command", "op"), [("drain", "drain_node"), ("undrain", "undrain_node")])
def test_machines_are_drained_and_used_again(tmp_path: Path, sent: list[Request], command: str, op: str) -> None:
    """The reply has all machines."""
    shown = json.loads(run(tmp_path, command, "box", "--json"))
    assert [(each["name"], each["drain_waits_for"]) for each in shown] == [
        ("local", []),
        ("box", ["2 running turns of large"]),
    ]
    assert [each.model_dump(include={"op", "node"}) for each in sent] == [{"op": op, "node": "box"}]
