"""Settings of logs and traces, above all the secrecy of headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.config.loader import InvalidSettingsError, read_layers
from inferencecenter.config.sections import TelemetrySettings
from inferencecenter.config.settings import Settings
from inferencecenter.telemetry import traces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli

SECRET = "hunter2hunter2"
WRONG = {
    "text instead of a table": f'telemetry.otlp_headers = "Bearer {SECRET}"',
    "a list as a value": f'telemetry.otlp_headers = {{authorization = ["{SECRET}"]}}',
    "two lines": f'telemetry.otlp_headers = {{authorization = "{SECRET}\\n"}}',
    "not ASCII": f'telemetry.otlp_headers = {{authorization = "{SECRET}ä"}}',
    "no name of a header": f'telemetry.otlp_headers = {{"a b" = "{SECRET}"}}',
    "text instead of the section": f'telemetry = "{SECRET}"',
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_invalid_header_is_refused_without_its_value(tmp_path: Path, text: str) -> None:
    """The error names only the setting."""
    path = tmp_path / "test.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettingsError) as refused:
        read_layers(path).settings()
    assert "telemetry" in str(refused.value.field)
    assert all(SECRET not in str(problem) for problem in refused.value.problems)


def test_headers_are_hidden() -> None:
    """Text and JSON hide them; the exporter reads the secret explicitly."""
    settings = Settings(telemetry=TelemetrySettings(otlp_headers={"Authorization": f"Bearer {SECRET}"}))
    assert SECRET not in repr(settings)
    assert SECRET not in settings.model_dump_json()
    assert settings.telemetry.otlp_headers["Authorization"].get_secret_value() == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("http://127.0.0.1:4318", True),
        ("https://collector.example/base", True),
        ("127.0.0.1:4318", False),
        ("grpc://collector:4317", False),
        ("http://", False),
        (f"http://me:{SECRET}@collector", False),
        ("http://collector/?key=1", False),
    ],
)
def test_collector_address(address: str, *, right: bool) -> None:
    """The address is HTTP or HTTPS, without credentials."""
    if right:
        assert TelemetrySettings(otlp_endpoint=address).otlp_endpoint == address
    else:
        with pytest.raises(ValueError, match="must"):
            TelemetrySettings(otlp_endpoint=address)


def test_other_values_are_shown(tmp_path: Path) -> None:
    """Only possible secrets are hidden."""
    path = tmp_path / "test.toml"
    path.write_text("telemetry.trace_ratio = 7\nlog.backups = 0\n")
    with pytest.raises(InvalidSettingsError) as refused:
        read_layers(path).settings()
    assert "telemetry.trace_ratio is 7" in str(refused.value.problems)
    assert "log.backups is 0" in str(refused.value.problems)


def test_config_show_hides_headers(cli: Cli, tmp_path: Path) -> None:
    """Headers are hidden in the table, the JSON and the errors of a check."""
    path = tmp_path / "test.toml"
    path.write_text(f'[telemetry]\notlp_headers = {{authorization = "Bearer {SECRET}"}}\n')
    shown = cli.run("config", "show", "--config", str(path))
    as_json = cli.run("config", "show", "--config", str(path), "--json")
    assert "telemetry.otlp_headers" in shown.out
    assert '"authorization"' in as_json.out
    path.write_text(f'[telemetry]\notlp_headers = "Bearer {SECRET}"\n')
    checked = cli.run("config", "check", str(path))
    assert checked.code == 78
    assert "telemetry.otlp_headers is ***" in checked.err
    assert not any(SECRET in text for run in (shown, as_json, checked) for text in (run.out, run.err))


def test_config_check_reports_missing_packages(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packages are reported before the daemon is started."""
    monkeypatch.setattr(traces, "find_spec", lambda _name: None)
    path = tmp_path / "test.toml"
    path.write_text('telemetry.otlp_endpoint = "http://127.0.0.1:4318"\n')
    checked = cli.run("config", "check", str(path))
    assert checked.code == 78
    assert "inferencecenter[otel]" in checked.err
