"""Reloading of the configuration; tests/service covers its effect on clients."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.config.settings import Settings, setting_fields
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.reload import ConfigReloader, changed_settings
from inferencecenter.server.control import ReloadReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from inferencecenter.auth.account import StaticClient
    from inferencecenter.auth.accounts import Accounts
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.config.sections import McpServerSettings
    from inferencecenter.models.registry import Registry

BOOLEANS = sorted(name for name, field in setting_fields() if field.annotation is bool)
UNREADABLE = InferenceCenterError(ErrorCode.INVALID_CONFIG, "the file is broken", hint="Mend it.", field="server.port")


@dataclass
class ReloadHarness:
    """A daemon that records its reloads; ``now`` is the configuration, or the error of reading it."""

    now: Settings | InferenceCenterError
    events: list[str] = field(default_factory=list)
    registries: list[Registry] = field(default_factory=list)
    limits: list[AccessLimits] = field(default_factory=list)
    mcp: list[dict[str, McpServerSettings]] = field(default_factory=list)
    reports: list[ReloadReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert isinstance(self.now, Settings)
        self.reload = ConfigReloader(
            started_with=self.now,
            read=self.read,
            accounts=cast("Accounts", self),
            certificate=None,
            close_clients=lambda clients: self.events.append(f"close {sorted(clients)}"),
            limits_changed=self.limits.append,
            announced=self.announced,
            apply_models=self.registries.append,
            apply_mcp=lambda settings: self.mcp.append(settings.mcp),
        )

    def read(self) -> Settings:
        """Read the configuration."""
        if isinstance(self.now, Settings):
            return self.now
        raise self.now

    def replace_static(self, clients: Mapping[str, StaticClient]) -> Collection[str]:
        """Implement the method of ``Accounts``."""
        return set(clients)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Record begin and end."""
        self.events.append("begin")
        yield
        self.events.append("end")

    def run(self, now: Settings | InferenceCenterError) -> Sequence[Mapping[str, Any]]:
        """Reload with this configuration, and return the log records."""
        self.now = now
        with capture_logs() as logs:
            self.reports.append(self.reload.run())
        return logs


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReloadHarness:
    """A harness that does not change the log."""
    monkeypatch.setattr("inferencecenter.telemetry.logs.apply", lambda _settings: None)
    return ReloadHarness(_settings(tmp_path))


def _settings(folder: Path, **tables: Any) -> Settings:
    return Settings.model_validate({"models_dir": folder, "engine": {"backend": "echo"}, **tables})


def _not_reloaded(lines: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    return {line["what"]: line["field"] for line in lines if line["event"] == "not_reloaded"}


def _waiting(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for line in lines if line["event"] == "settings_need_restart" for name in line["settings"]]


def test_equal_settings_have_no_changes() -> None:
    """Defaults that were read twice are equal."""
    assert changed_settings(Settings(), Settings()) == frozenset()


@given(st.sets(st.sampled_from(BOOLEANS)))
def test_changed_settings_are_named(names: set[str]) -> None:
    """Exactly the changed settings are listed, by their dotted names."""
    tables: dict[str, dict[str, bool]] = {}
    before = Settings()
    for name in names:
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = not getattr(getattr(before, section), key)
    assert changed_settings(before, Settings.model_validate(tables)) == names


def test_mcp_servers_are_applied(harness: ReloadHarness, tmp_path: Path) -> None:
    """None of it needs a restart."""
    lines = harness.run(_settings(tmp_path, mcp={"weather": {"url": "https://x/"}}))
    assert [list(servers) for servers in harness.mcp] == [["weather"]]
    assert (_not_reloaded(lines), _waiting(lines)) == ({}, [])


def test_models_are_applied(harness: ReloadHarness, tmp_path: Path) -> None:
    """Entries, the default and files of the directory apply without a restart."""
    (tmp_path / "pulled.gguf").write_bytes(b"GGUF")
    now = _settings(
        tmp_path, models={"phi": {"slots": 2}}, model={"name": "phi"}, engine={"backend": "echo", "slots": 3}
    )
    lines = harness.run(now)
    (registry,) = harness.registries
    assert registry.default == "phi"
    assert {name: spec.engine.slots for name, spec in registry.models.items()} == {"phi": 2, "pulled": 3}
    assert (_not_reloaded(lines), _waiting(lines)) == ({}, [])
    assert harness.events == ["begin", "close []", "end"]


@pytest.mark.parametrize(
    ("tables", "wrong"),
    [
        ({"models": {"phi": {"params": {"temperature": 9.0}}}}, "models.phi.params.temperature"),
        ({"models": {"phi": {"params": {"heat": 1.0}}}}, "models.phi.params.heat"),
        ({"params": {"temperature": 9.0}}, "params.temperature"),
        ({"models": {"phi": {"keep_alive_s": -0.5}}}, "models.phi"),
        ({"models": {"phi": {}}, "model": {"name": "phi", "lora": [{"path": "/a"}]}}, "model.lora"),
        ({"model": {"name": "phi"}, "engine": {"backend": "llama"}}, "model.name"),
    ],
)
def test_invalid_models_change_none(harness: ReloadHarness, tmp_path: Path, tables: dict[str, Any], wrong: str) -> None:
    """The problem is reported, and other changes take effect."""
    lines = harness.run(_settings(tmp_path, **tables, limits={"concurrent_turns": 2}))
    assert _not_reloaded(lines) == {"models": wrong}
    assert harness.registries == []
    assert [limits.concurrent_turns for limits in harness.limits] == [2]
    assert harness.events[-1] == "end"


def test_unreadable_settings_keep_the_last_ones(harness: ReloadHarness, tmp_path: Path) -> None:
    """They are those of the last reload, not of the start."""
    harness.run(_settings(tmp_path, models={"phi": {}}, limits={"concurrent_turns": 2}))
    lines = harness.run(UNREADABLE)
    assert _not_reloaded(lines) == {"settings": "server.port"}
    assert harness.registries[0] == harness.registries[1]
    assert sorted(harness.registries[1].models) == ["echo", "phi"]
    assert [limits.concurrent_turns for limits in harness.limits] == [2, 2]


def test_without_a_successful_reload_the_first_settings_stay(harness: ReloadHarness) -> None:
    """The settings of the start apply."""
    assert _not_reloaded(harness.run(UNREADABLE)) == {"settings": "server.port"}
    assert [registry.default for registry in harness.registries] == ["echo"]


def test_report_lists_rejected_parts(harness: ReloadHarness, tmp_path: Path) -> None:
    """The log reports a full reload only if every part was applied."""
    lines = harness.run(UNREADABLE)
    assert "reloaded" not in [line["event"] for line in lines]
    assert [(each.what, each.code, each.message, each.hint) for each in harness.reports[-1].problems] == [
        ("settings", ErrorCode.INVALID_CONFIG, "the file is broken", "Mend it.")
    ]
    lines = harness.run(_settings(tmp_path, server={"port": 4000}))
    assert [line["event"] for line in lines] == ["settings_need_restart", "reloaded"]
    assert harness.reports[-1] == ReloadReport(needs_restart=("server.port",))


def test_failure_of_one_part_does_not_block_others(harness: ReloadHarness, tmp_path: Path) -> None:
    """Any exception becomes a problem of that part, and models are still applied."""

    def fail(_clients: Mapping[str, StaticClient]) -> Collection[str]:
        raise RuntimeError("unforeseen")

    vars(harness)["replace_static"] = fail
    harness.run(_settings(tmp_path))
    assert [(each.what, each.code) for each in harness.reports[-1].problems] == [("clients", ErrorCode.INTERNAL)]
    assert "unforeseen" in harness.reports[-1].problems[0].message
    assert len(harness.registries) == 1


def test_settings_that_need_a_restart_are_named(harness: ReloadHarness, tmp_path: Path) -> None:
    """They are named as long as they differ from the running ones, also if they concern no single engine."""
    now = _settings(
        tmp_path,
        engine={
            "backend": "echo",
            "max_resident": 2,
            "max_client_crashes": 9,
            "exit_when_failed": True,
            "n_threads": 2,
        },
        kv={"ram_mib": 7},
        server={"port": 4000},
        params={"temperature": 0.5},
        log={"level": "debug"},
        model={"name": "parrot"},
        limits={"concurrent_turns": 2},
    )
    engine = ["engine.exit_when_failed", "engine.max_client_crashes", "engine.max_resident"]
    waiting = [*engine, "kv.ram_mib", "params", "server.port"]
    assert _waiting(harness.run(now)) == waiting
    assert _waiting(harness.run(now)) == waiting
    assert _waiting(harness.run(_settings(tmp_path))) == []


def test_restart_settings_do_not_change_running_engines(harness: ReloadHarness, tmp_path: Path) -> None:
    """Engines with equal settings continue."""
    harness.run(_settings(tmp_path))
    harness.run(_settings(tmp_path, engine={"backend": "echo", "max_resident": 2, "exit_when_failed": True}))
    assert harness.registries[0] == harness.registries[1]


def test_models_directory_problems_are_logged(harness: ReloadHarness, tmp_path: Path) -> None:
    """Each reload logs one line."""
    (tmp_path / "My Model.gguf").write_bytes(b"GGUF")
    reasons = [line["reason"] for line in harness.run(_settings(tmp_path)) if line["event"] == "models_dir"]
    assert len(reasons) == 1
    assert "'My Model'" in reasons[0]
