"""Every command connects to the configured daemon: below a base path, over TLS, on all interfaces."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trustme

from inferencecenter.cli import checks
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.cli.reach import own_tls, own_url, reach_daemon
from inferencecenter.config.settings import Settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.ports import free_port
from tests.service.harness import ServiceManager, StartedDaemon, start_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Cli


def certificate(folder: Path, name: str = "tls") -> tuple[Path, Path]:
    """Write a certificate for another name with its chain and key; return their paths."""
    authority = trustme.CA()
    issued = authority.issue_cert("models.example.org")
    certfile, keyfile = folder / f"{name}.crt", folder / f"{name}.key"
    certfile.write_bytes(issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    keyfile.write_bytes(issued.private_key_pem.bytes())
    return certfile, keyfile


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ({}, "ws://127.0.0.1:3000/ws"),
        ({"host": "box.lan"}, "ws://box.lan:3000/ws"),
        ({"host": "0.0.0.0", "port": 80}, "ws://127.0.0.1:80/ws"),
        ({"host": "::", "base_path": "/inference"}, "ws://[::1]:3000/inference/ws"),
        ({"host": "::1", "certfile": "/a", "keyfile": "/b"}, "wss://[::1]:3000/ws"),
        ({"base_path": "/x", "certfile": "/a", "keyfile": "/b"}, "wss://127.0.0.1:3000/x/ws"),
    ],
)
def test_address_follows_from_the_settings(server: dict[str, object], url: str) -> None:
    """Host, port, base path and TLS determine it; addresses of pages have the schemes of HTTP."""
    settings = Settings.model_validate({"server": server})
    assert own_url(settings) == url
    assert own_url(settings, "/healthz", scheme="http") == url.replace("ws", "http", 1).replace("/ws", "/healthz")


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        (None, True),
        ("https://127.0.0.1:3000/", True),
        ("wss://localhost:3000/elsewhere", True),
        ("wss://127.0.0.1:3001/", False),
        ("wss://models.example.org:3000/", False),
        ("ws://127.0.0.1:3000/", False),
        ("wss://127.0.0.1:many/", False),
    ],
)
def test_own_certificate_is_trusted_at_the_own_address_only(tmp_path: Path, url: str | None, *, trusted: bool) -> None:
    """Any other address needs a system authority and the right name."""
    certfile, keyfile = certificate(tmp_path)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(keyfile)}})
    assert (reach_daemon(settings, url=url, token="t", token_file=None).tls is not None) == trusted


def test_authorities_of_the_chain_are_not_trusted(tmp_path: Path) -> None:
    """They also sign for other machines, and no name is compared."""
    certfile, keyfile = certificate(tmp_path)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(keyfile)}})
    tls = own_tls(settings)
    assert tls is not None
    assert tls.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize(
    "content", [None, "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_unreadable_certificate_is_named(tmp_path: Path, content: str | None) -> None:
    """The message has the file, the hint who can read it."""
    certfile = tmp_path / "tls.crt"
    if content is not None:
        certfile.write_text(content)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(certfile)}})
    with pytest.raises(InferenceCenterError, match=r"tls\.crt cannot be read") as caught:
        own_tls(settings)
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert caught.value.field == "server.certfile"


@dataclass(frozen=True)
class TlsDaemon:
    """A daemon with TLS below a base path, and its configuration."""

    folder: Path
    port: int
    daemon: StartedDaemon


@pytest.fixture
def tls_daemon(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> Iterator[TlsDaemon]:
    """A daemon with a certificate of an unknown authority in the configuration of the command line."""
    assert cli is not None  # it has taken this machine's settings away
    certfile, keyfile = certificate(tmp_path)
    port = free_port()
    config = tmp_path / "config.toml"
    config.write_text(
        f'[server]\nport = {port}\nbase_path = "/inference"\ncertfile = "{certfile}"\nkeyfile = "{keyfile}"\n'
        '[engine]\nbackend = "echo"\n'
    )
    manager = ServiceManager(tmp_path / "notify")
    with start_service(
        tmp_path,
        INFERENCECENTER_CONFIG=str(config),
        INFERENCECENTER_STATE_DIR=str(state_dir),
        INFERENCECENTER_SERVER__PORT=str(port),
        NOTIFY_SOCKET=str(manager.path),
    ) as daemon:
        manager.receive_until(lambda words: words.get("READY") == "1")
        monkeypatch.setenv("INFERENCECENTER_CONFIG", str(config))
        monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
        yield TlsDaemon(tmp_path, port, daemon)
    manager.close()


def test_every_command_reaches_a_tls_daemon_below_a_base_path(
    cli: Cli, tls_daemon: TlsDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without further options ``doctor``, ``healthcheck``, ``stats``, ``chat`` and ``model`` trust its certificate."""
    checked = cli.run("doctor", "--json")
    (port,) = (check for check in json.loads(checked.out) if check["name"] == "port")
    assert (checked.code, port["detail"]) == (
        0,
        f"a daemon answers at https://127.0.0.1:{tls_daemon.port}/inference/healthz",
    )
    for arguments in (["healthcheck"], ["healthcheck", "--ready"]):
        health = cli.run(*arguments)
        assert (health.code, health.out, health.err) == (0, "", "")
    stats = cli.run("stats", "--once", "--json")
    assert (stats.code, stats.err) == (0, "")
    assert json.loads(stats.out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    result = cli.run("chat")
    assert (result.code, result.err) == (0, "")
    assert "Hello." in result.out
    models = cli.run("model", "list", "--json")
    assert (models.code, models.err) == (0, "")
    assert [model["served"]["state"] for model in json.loads(models.out)] == ["loaded"]


def test_other_certificate_at_the_own_address_is_refused(cli: Cli, tls_daemon: TlsDaemon) -> None:
    """A renewed file or another program: nothing is sent."""
    certificate(tls_daemon.folder)
    checked = cli.run("doctor", "--json")
    (port,) = (check for check in json.loads(checked.out) if check["name"] == "port")
    assert checked.code == 69
    assert "is not the one in server.certfile" in port["detail"]
    assert "inferencecenter reload" in port["hint"]
    assert cli.run("healthcheck").code == 69


def test_health_without_a_daemon(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the address, with the exit code of an unreachable daemon."""
    port = free_port()
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", str(port))
    result = cli.run("healthcheck")
    assert result.code == 69
    assert f"http://127.0.0.1:{port}/healthz: Connection refused" in result.err
