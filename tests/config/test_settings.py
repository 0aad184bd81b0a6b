"""The settings and their validation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from inferencecenter.config.sections import Section
from inferencecenter.config.settings import Settings, environment_name, setting_fields


def test_every_setting_is_described() -> None:
    """The generated documentation needs a sentence for each."""
    undescribed = [name for name, field in setting_fields() if not (field.description or "").endswith(".")]
    assert undescribed == []


def test_every_section_is_described() -> None:
    """Each table of the file has a sentence."""
    sections = [field.annotation for field in Settings.model_fields.values()]
    described = [
        kind.__doc__
        for kind in sections
        if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section
    ]
    assert len(described) >= 6
    assert all(described)


def test_numbers_have_bounds() -> None:
    """Every numeric setting is bounded."""
    unbounded = [
        name
        for name, field in setting_fields()
        if field.annotation in (int, float) and not any(hasattr(each, "le") for each in field.metadata)
    ]
    assert unbounded == []


def test_defaults_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``load_settings`` reads it."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "4000")
    settings = Settings()
    assert settings.server.port == 3000
    assert settings.model.path is None


def test_settings_are_immutable() -> None:
    """Components share them."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``~``, variables and relative paths become absolute."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("MODELS", "/srv/models")
    assert Settings(state_dir=Path("~/state")).state_dir == Path("/home/ada/state")
    settings = Settings(model={"path": "$MODELS/a.gguf"})
    assert settings.model.path == Path("/srv/models/a.gguf")
    assert Settings(state_dir=Path("state")).state_dir == Path.cwd() / "state"


def test_systemd_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``STATE_DIRECTORY`` overrides the user's directory; the first of several is used."""
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/inferencecenter:/var/lib/other")
    assert Settings().state_dir == Path("/var/lib/inferencecenter")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/ada/.state")
    assert Settings().state_dir == Path("/home/ada/.state/inferencecenter")


def test_systemd_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``RUNTIME_DIRECTORY`` overrides the user's directory in /dev/shm; the first of several is used."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/inferencecenter:/run/other")
    assert Settings().kv.ram_dir == Path("/run/inferencecenter/kv")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    assert Settings().kv.ram_dir == Path(f"/dev/shm/inferencecenter-{os.getuid()}")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("server", {"port": 65536}),
        ("server", {"port": -1}),
        ("server", {"host": ""}),
        ("server", {"base_path": "inference"}),
        ("server", {"base_path": "/inference/"}),
        ("server", {"trusted_proxies": ["localhost"]}),
        ("server", {"allowed_origins": ["example.org"]}),
        ("server", {"allowed_origins": ["https://example.org/path"]}),
        ("server", {"auth_timeout_s": 0}),
        ("server", {"auth_timeout_s": float("nan")}),
        ("server", {"ping_interval_s": float("inf")}),
        ("auth", {"default_priority": "urgent"}),
        ("sessions", {"default_ttl_s": 0}),
        ("engine", {"backend": "vllm"}),
        ("engine", {"slots": -1}),
        ("engine", {"n_gpu_layers": -2}),
        ("engine", {"kv_type_k": "q2"}),
        ("engine", {"n_batch": 128, "n_ubatch": 256}),
        ("engine", {"restart_backoff_min_s": 10, "restart_backoff_max_s": 5}),
        ("engine", {"quantum_tokens": -1}),
        ("engine", {"quantum_tokens": 1_000_001}),
        ("engine", {"ageing_s": 0}),
        ("engine", {"queue_timeout_s": 0}),
        ("engine", {"queue_warning": -1}),
        ("kv", {"ram_mib": -1}),
        ("kv", {"disk_mib": 2**31}),
        ("kv", {"client_share": 0}),
        ("kv", {"client_share": 1.01}),
        ("kv", {"tier": "ram"}),
        ("model", {"name": ""}),
        ("log", {"level": "trace"}),
    ],
)
def test_values_out_of_range_are_refused(section: str, values: dict[str, object]) -> None:
    """Each of these would fail later with a less specific error."""
    with pytest.raises(ValidationError):
        Settings(**{section: values})  # type: ignore[arg-type]


def test_environment_names() -> None:
    """A dotted name becomes upper case with two underscores between its parts."""
    assert environment_name("server.port") == "INFERENCECENTER_SERVER__PORT"
    assert environment_name("state_dir") == "INFERENCECENTER_STATE_DIR"


@pytest.mark.parametrize("sleep_after_s", [0, -0.5, -2, float("nan")])
def test_sleep_after_bounds(sleep_after_s: float) -> None:
    """-1 disables sleeping; other negative values are refused."""
    assert Settings.model_validate({"engine": {"sleep_after_s": -1}}).engine.sleep_after_s == -1
    assert Settings.model_validate({"engine": {"sleep_after_s": 0.5}}).engine.sleep_after_s == 0.5
    with pytest.raises(ValidationError, match="sleep_after_s"):
        Settings.model_validate({"engine": {"sleep_after_s": sleep_after_s}})


@pytest.mark.parametrize("given", [{"certfile": "tls.crt"}, {"keyfile": "tls.key"}])
def test_certificate_requires_its_key(given: dict[str, str]) -> None:
    """The message names both."""
    with pytest.raises(ValidationError, match="certfile and keyfile go together"):
        Settings.model_validate({"server": given})


def test_clients_file_defaults_to_the_systemd_credential(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The credential is used if it exists; an explicit path overrides it."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert Settings().auth.clients_file is None
    (tmp_path / "clients.toml").touch()
    assert Settings().auth.clients_file == tmp_path / "clients.toml"
    other = Settings.model_validate({"auth": {"clients_file": "/etc/clients.toml"}})
    assert other.auth.clients_file == Path("/etc/clients.toml")
