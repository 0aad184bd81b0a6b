"""Every command reaches the daemon that its settings describe: below a base path, over TLS, on all interfaces."""

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
from tests.e2e.harness import free_port
from tests.service.harness import ServiceManager, StartedDaemon, start_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Cli


def certificate(folder: Path, name: str = "tls") -> tuple[Path, Path]:
    """Write a certificate for another name, with the authority's behind it, and its key; return their paths."""
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
def test_the_address_follows_from_the_settings(server: dict[str, object], url: str) -> None:
    """Host, port, base path and TLS are those of the daemon; pages have the scheme of browsers."""
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
def test_the_own_certificate_is_trusted_at_the_own_address_only(
    tmp_path: Path, url: str | None, *, trusted: bool
) -> None:
    """Any other address needs an authority of the system and the right name."""
    certfile, keyfile = certificate(tmp_path)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(keyfile)}})
    assert (reach_daemon(settings, url=url, token="t", token_file=None).tls is not None) == trusted


def test_authorities_behind_the_certificate_are_not_trusted(tmp_path: Path) -> None:
    """They vouch for other machines too, and no name is compared."""
    certfile, keyfile = certificate(tmp_path)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(keyfile)}})
    tls = own_tls(settings)
    assert tls is not None
    assert tls.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize(
    "content", [None, "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    """The message has the file, and the hint says who can read it."""
    certfile = tmp_path / "tls.crt"
    if content is not None:
        certfile.write_text(content)
    settings = Settings.model_validate({"server": {"certfile": str(certfile), "keyfile": str(certfile)}})
    with pytest.raises(InferenceCenterError, match=r"tls\.crt cannot be read") as caught:
        own_tls(settings)
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert caught.value.field == "server.certfile"


@dataclass(frozen=True)
class Box:
    """A daemon below a base path that speaks TLS, and its configuration."""

    folder: Path
    port: int
    daemon: StartedDaemon


@pytest.fixture
def box(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> Iterator[Box]:
    """A daemon with a certificate that no authority of this machine knows, in the configuration of the command line."""
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
        yield Box(tmp_path, port, daemon)
    manager.close()


def test_every_command_finds_a_daemon_with_tls_below_a_base_path(
    cli: Cli, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``doctor``, ``healthcheck``, ``stats``, ``chat`` and ``model`` need no option and trust its own certificate."""
    checked = cli.run("doctor", "--json")
    (port,) = (check for check in json.loads(checked.out) if check["name"] == "port")
    assert (checked.code, port["detail"]) == (0, f"a daemon answers at https://127.0.0.1:{box.port}/inference/healthz")
    for arguments in (["healthcheck"], ["healthcheck", "--ready"]):
        health = cli.run(*arguments)
        assert (health.code, health.out, health.err) == (0, "", "")
    stats = cli.run("stats", "--once", "--json")
    assert (stats.code, stats.err) == (0, "")
    assert json.loads(stats.out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    said = cli.run("chat")
    assert (said.code, said.err) == (0, "")
    assert "Hello." in said.out
    models = cli.run("model", "list", "--json")
    assert (models.code, models.err) == (0, "")
    assert [model["served"]["state"] for model in json.loads(models.out)] == ["loaded"]


def test_another_certificate_at_the_own_address_is_told(cli: Cli, box: Box) -> None:
    """A renewed file that the daemon has not read again, or another program: nothing is sent to it."""
    certificate(box.folder)
    checked = cli.run("doctor", "--json")
    (port,) = (check for check in json.loads(checked.out) if check["name"] == "port")
    assert checked.code == 69
    assert "is not the one in server.certfile" in port["detail"]
    assert "inferencecenter reload" in port["hint"]
    assert cli.run("healthcheck").code == 69


def test_health_without_a_daemon(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was asked is in the message, and the exit code is that of an unreachable daemon."""
    port = free_port()
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", str(port))
    result = cli.run("healthcheck")
    assert result.code == 69
    assert f"http://127.0.0.1:{port}/healthz: Connection refused" in result.err
