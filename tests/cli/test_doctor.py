"""The command ``inferencecenter doctor``."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.cli import checks
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.core.errors import ERRORS, ErrorCode
from inferencecenter.core.sqlite_file import FileIdentity
from inferencecenter.server import control
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.schema import DATABASE_NAME
from tests.sessions.store.values import opened

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


@pytest.fixture
def quick(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Skip the llama.cpp probe, use a free port, and create a model file with a valid header; returns the file."""
    monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and more")
    monkeypatch.setenv("INFERENCECENTER_MODEL__PATH", str(model))
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "0")
    return model


def _found(cli: Cli) -> tuple[int, dict[str, Any]]:
    result = cli.run("doctor", "--json")
    return result.code, {check["name"]: check for check in json.loads(result.out)}


def test_healthy_machine_passes(cli: Cli, quick: Path) -> None:
    """The exit code is 0, and the table has the same checks."""
    code, found = _found(cli)
    assert code == 0
    assert {name for name, check in found.items() if check["verdict"] == "failed"} == set()
    assert str(quick) in found["model file"]["detail"]
    assert "model file" in cli.run("doctor").out


def test_projector_is_named(cli: Cli, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it one sees that the model takes images."""
    monkeypatch.delenv("INFERENCECENTER_MODEL__PATH")
    _, found = _found(cli)
    assert "takes images by " in found["model file"]["detail"]
    assert "mmproj-demo.gguf" in found["model file"]["detail"]
    monkeypatch.setenv("INFERENCECENTER_MODEL__MMPROJ", "off")
    _, found = _found(cli)
    assert "mmproj" not in found["model file"]["detail"]


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04"])
def test_invalid_model_file_fails(cli: Cli, quick: Path, content: bytes | None) -> None:
    """A missing, empty or foreign file fails with the daemon's error code."""
    quick.unlink()
    if content is not None:
        quick.write_bytes(content)
    code, found = _found(cli)
    assert code == 66
    assert found["model file"]["code"] == ErrorCode.INVALID_MODEL_FILE
    assert str(quick) in found["model file"]["detail"]


def _configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    models_dir = tmp_path / "models"
    models_dir.mkdir()
    config = tmp_path / "test.toml"
    config.write_text(f'models_dir = "{models_dir}"\n{text}')
    monkeypatch.setenv("INFERENCECENTER_CONFIG", str(config))
    return models_dir


@pytest.mark.usefixtures("quick")
def test_all_models_are_checked(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Problems of models other than the default are warnings."""
    adapter = tmp_path / "lora.gguf"
    models_dir = _configure(
        monkeypatch,
        tmp_path,
        f'[models.gone]\n[models.tuned]\npath = "{tmp_path}/whole.gguf"\nlora = [{{path = "{adapter}"}}]',
    )
    (tmp_path / "whole.gguf").write_bytes(b"GGUF")
    (models_dir / "whole.gguf").write_bytes(b"GGUF")
    (models_dir / "foreign.gguf").write_bytes(b"PK")
    (models_dir / "My Model.gguf").write_bytes(b"GGUF")
    code, found = _found(cli)
    assert code == 0
    assert found["model file"]["verdict"] == "ok"
    assert {name: found[name]["verdict"] for name in ("model gone", "model tuned", "model foreign", "models_dir")} == {
        "model gone": "warning",
        "model tuned": "warning",
        "model foreign": "warning",
        "models_dir": "warning",
    }
    assert str(models_dir / "gone.gguf") in found["model gone"]["detail"]
    assert str(adapter) in found["model tuned"]["detail"]
    assert "is not a GGUF file" in found["model foreign"]["detail"]
    assert found["other models"]["detail"] == "whole"


@pytest.mark.usefixtures("quick")
def test_missing_adapter_of_the_default_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The daemon would not start."""
    monkeypatch.setenv("INFERENCECENTER_MODEL__LORA", '[{"path": "/nowhere/lora.gguf"}]')
    code, found = _found(cli)
    assert code == 66
    assert "/nowhere/lora.gguf" in found["model file"]["detail"]


def test_unknown_default_model_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is found before any file is checked."""
    monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "0")
    _configure(monkeypatch, tmp_path, '[model]\nname = "absent"')
    code, found = _found(cli)
    assert code == 78
    assert "'absent'" in found["model file"]["detail"]


def test_echo_backend_needs_no_file(cli: Cli, monkeypatch: pytest.MonkeyPatch, quick: Path) -> None:
    """No registered file is read."""
    quick.unlink()
    monkeypatch.setenv("INFERENCECENTER_ENGINE__BACKEND", "echo")
    code, found = _found(cli)
    assert code == 0
    assert found["model file"]["detail"] == "the echo backend uses none"


@pytest.mark.usefixtures("quick")
def test_port_used_by_another_program_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port is taken if what answers there is not the daemon."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(checks, "_HTTP_TIMEOUT_S", 0.1)
        monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", str(taken.getsockname()[1]))
        code, found = _found(cli)
    assert code == 69
    assert found["port"]["code"] == ErrorCode.ADDRESS_IN_USE


class _Healthy(http.server.BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.mark.usefixtures("quick")
def test_port_used_by_the_daemon_passes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running daemon of these settings is not a problem."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Healthy) as daemon:
        answering = threading.Thread(target=daemon.serve_forever)
        answering.start()
        try:
            monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", str(daemon.server_port))
            code, found = _found(cli)
        finally:
            daemon.shutdown()
            answering.join()
    assert code == 0
    assert "a daemon answers" in found["port"]["detail"]


class _BehindAProxy(_Healthy):
    """Answers like a daemon behind an untrusted proxy."""

    answer = b'{"state": "ready", "proxy": "not_trusted"}'


@pytest.mark.usefixtures("quick")
def test_unix_socket_is_checked(cli: Cli, monkeypatch: pytest.MonkeyPatch, quick: Path, tmp_path: Path) -> None:
    """A free path and a daemon pass; an unsuitable path and unknown users fail."""
    assert "unix socket" not in _found(cli)[1]
    path = tmp_path / "daemon.sock"
    monkeypatch.setenv("INFERENCECENTER_SERVER__UNIX_SOCKET", str(path))
    assert "is free" in _found(cli)[1]["unix socket"]["detail"]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert "listens" in _found(cli)[1]["unix socket"]["detail"]
    monkeypatch.setenv("INFERENCECENTER_AUTH__UNIX_USERS", '["no-such-user-here"]')
    code, found = _found(cli)
    assert (code, found["unix socket"]["verdict"]) == (ERRORS[ErrorCode.INVALID_CONFIG].exit_code, "failed")
    monkeypatch.delenv("INFERENCECENTER_AUTH__UNIX_USERS")
    monkeypatch.setenv("INFERENCECENTER_SERVER__UNIX_SOCKET", str(quick))
    assert "is no socket" in _found(cli)[1]["unix socket"]["detail"]


@pytest.mark.parametrize(("handler", "verdict"), [(_Healthy, "ok"), (_BehindAProxy, "warning")])
def test_untrusted_proxy_is_reported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, handler: type[_Healthy], verdict: str
) -> None:
    """The daemon is queried, and the hint names the setting."""
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as daemon:
        answering = threading.Thread(target=daemon.serve_forever)
        answering.start()
        try:
            monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", str(daemon.server_port))
            code, found = _found(cli)
        finally:
            daemon.shutdown()
            answering.join()
    assert (code, found["proxy"]["verdict"]) == (0, verdict)
    assert ("server.trusted_proxies" in found["proxy"]["hint"]) == (verdict == "warning")


@pytest.mark.usefixtures("quick")
def test_impossible_state_directory_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file is in place of a parent directory."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERENCECENTER_STATE_DIR", str(tmp_path / "file" / "state"))
    code, found = _found(cli)
    assert code == 73
    assert "cannot be written" in found["state directory"]["detail"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("quick")
def test_unwritable_state_directory_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its permissions deny writing."""
    (tmp_path / "sealed").mkdir(mode=0o500)
    monkeypatch.setenv("INFERENCECENTER_STATE_DIR", str(tmp_path / "sealed" / "state"))
    assert _found(cli)[0] == 73


@pytest.fixture
def sessions_file(quick: Path, state_dir: Path) -> Path:
    """A sessions file with two sessions that no daemon has open."""
    assert quick.exists()
    path = state_dir / DATABASE_NAME
    with contextlib.closing(open_writing(path)) as database:
        Recorder(database, {}).commit([opened("s_1"), opened("s_2")], durable=False)
    return path


def test_intact_files_pass(cli: Cli, sessions_file: Path) -> None:
    """Existing files are named; a missing accounts file is no problem."""
    code, found = _found(cli)
    assert code == 0
    assert (found["sessions"]["verdict"], found["sessions"]["detail"]) == ("ok", str(sessions_file))
    assert "none yet" in found["accounts"]["detail"]


def test_damaged_sessions_file_fails(cli: Cli, sessions_file: Path) -> None:
    """The hint names the salvage command."""
    content = bytearray(sessions_file.read_bytes())
    content[3 * 4096 : 6 * 4096] = bytes(3 * 4096)
    sessions_file.write_bytes(content)
    code, found = _found(cli)
    assert code == 73
    assert found["sessions"]["verdict"] == "failed"
    assert "session salvage" in found["sessions"]["hint"]


def test_unreadable_session_is_named(cli: Cli, sessions_file: Path) -> None:
    """The daemon starts without it."""
    with contextlib.closing(sqlite3.connect(sessions_file, isolation_level=None)) as database:
        database.execute("UPDATE sessions SET facts = '{}' WHERE session_id = 's_1'")
    code, found = _found(cli)
    assert code == 0
    assert found["sessions"]["verdict"] == "warning"
    assert "s_1" in found["sessions"]["detail"]
    assert "s_2" not in found["sessions"]["detail"]


def test_newer_file_is_not_called_damaged(cli: Cli, sessions_file: Path) -> None:
    """The finding names the version."""
    with contextlib.closing(sqlite3.connect(sessions_file, isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 99")
    code, found = _found(cli)
    assert code == 73
    assert "version 99" in found["sessions"]["detail"]
    assert "newer" in found["sessions"]["hint"] or "later" in found["sessions"]["hint"]


def test_moved_database_is_reported(cli: Cli, sessions_file: Path, state_dir: Path) -> None:
    """A running daemon whose file was deleted or moved is reported."""
    identity = FileIdentity.of(sessions_file)
    with control.try_lock_state_dir(state_dir):
        control.record_open_files(state_dir, [identity])
        sessions_file.unlink()
        code, found = _found(cli)
    assert code == 73
    assert DATABASE_NAME in found["open files"]["detail"]


def test_invalid_settings_end_the_checks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checks need settings."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "many")
    code, found = _found(cli)
    assert code == 78
    assert list(found) == ["python", "settings"]


def test_llama_cpp_is_probed_in_a_subprocess() -> None:
    """Its version is found without loading it here."""
    check = checks.llama_cpp(needed=True, gpu=False)
    assert check.verdict is CheckResult.OK
    assert "llama-cpp-python 0.3" in check.detail


@pytest.mark.parametrize(("needed", "verdict"), [(True, CheckResult.FAILED), (False, CheckResult.WARNING)])
def test_failing_llama_cpp_probe(monkeypatch: pytest.MonkeyPatch, *, needed: bool, verdict: CheckResult) -> None:
    """The subprocess's last output is the finding; it matters only where llama.cpp is needed."""
    monkeypatch.setattr(checks, "_PROBE", "raise ImportError('libcudart.so is missing')")
    check = checks.llama_cpp(needed=needed, gpu=False)
    assert check.verdict is verdict
    assert "libcudart.so is missing" in check.detail


def test_gpu_without_gpu_build_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint says how to build with GPU support."""
    monkeypatch.setattr(checks, "_PROBE", 'print(\'{"version": "1", "gpu": false}\')')
    check = checks.llama_cpp(needed=True, gpu=True)
    assert check.verdict is CheckResult.WARNING
    assert "CUDA=1" in check.hint
