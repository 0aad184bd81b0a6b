"""Tests of what is read again; that it reaches clients is in tests/service."""

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
    from inferencecenter.models.registry import Registry

BOOLEANS = sorted(name for name, field in setting_fields() if field.annotation is bool)
UNREADABLE = InferenceCenterError(ErrorCode.INVALID_CONFIG, "the file is broken", hint="Mend it.", field="server.port")


@dataclass
class World:
    """A daemon that takes down what it is told; ``now`` is what its configuration says, or why it cannot be read."""

    now: Settings | InferenceCenterError
    told: list[str] = field(default_factory=list)
    registries: list[Registry] = field(default_factory=list)
    limits: list[AccessLimits] = field(default_factory=list)
    reports: list[ReloadReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert isinstance(self.now, Settings)
        self.reload = ConfigReloader(
            started_with=self.now,
            read=self.read,
            accounts=cast("Accounts", self),
            certificate=None,
            close_clients=lambda clients: self.told.append(f"close {sorted(clients)}"),
            limits_changed=self.limits.append,
            announced=self.announced,
            apply_models=self.registries.append,
        )

    def read(self) -> Settings:
        """Read the configuration."""
        if isinstance(self.now, Settings):
            return self.now
        raise self.now

    def replace_static(self, clients: Mapping[str, StaticClient]) -> Collection[str]:
        """Stand in for ``Accounts``."""
        return set(clients)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Note the beginning and the end."""
        self.told.append("begin")
        yield
        self.told.append("end")

    def run(self, now: Settings | InferenceCenterError) -> Sequence[Mapping[str, Any]]:
        """Read again what is ``now`` there, and return the lines of the log."""
        self.now = now
        with capture_logs() as logs:
            self.reports.append(self.reload.run())
        return logs


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A daemon whose log stays where it is."""
    monkeypatch.setattr("inferencecenter.telemetry.logs.apply", lambda _settings: None)
    return World(_settings(tmp_path))


def _settings(folder: Path, **tables: Any) -> Settings:
    return Settings.model_validate({"models_dir": folder, "engine": {"backend": "echo"}, **tables})


def _not_reloaded(lines: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    return {line["what"]: line["field"] for line in lines if line["event"] == "not_reloaded"}


def _waiting(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for line in lines if line["event"] == "settings_need_restart" for name in line["settings"]]


def test_nothing_has_changed_between_equal_settings() -> None:
    """Defaults that were read twice are the same."""
    assert changed_settings(Settings(), Settings()) == frozenset()


@given(st.sets(st.sampled_from(BOOLEANS)))
def test_what_has_changed_is_named(names: set[str]) -> None:
    """Each by its dotted name, and no other."""
    tables: dict[str, dict[str, bool]] = {}
    before = Settings()
    for name in names:
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = not getattr(getattr(before, section), key)
    assert changed_settings(before, Settings.model_validate(tables)) == names


def test_models_are_applied(world: World, tmp_path: Path) -> None:
    """Entries, the default, and what lies in the directory by now; nothing of it waits for a restart."""
    (tmp_path / "pulled.gguf").write_bytes(b"GGUF")
    now = _settings(
        tmp_path, models={"phi": {"slots": 2}}, model={"name": "phi"}, engine={"backend": "echo", "slots": 3}
    )
    lines = world.run(now)
    (registry,) = world.registries
    assert registry.default == "phi"
    assert {name: spec.engine.slots for name, spec in registry.models.items()} == {"phi": 2, "pulled": 3}
    assert (_not_reloaded(lines), _waiting(lines)) == ({}, [])
    assert world.told == ["begin", "close []", "end"]


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
def test_what_is_wrong_with_models_changes_none(
    world: World, tmp_path: Path, tables: dict[str, Any], wrong: str
) -> None:
    """It is told by name; what else was changed takes effect."""
    lines = world.run(_settings(tmp_path, **tables, limits={"concurrent_turns": 2}))
    assert _not_reloaded(lines) == {"models": wrong}
    assert world.registries == []
    assert [limits.concurrent_turns for limits in world.limits] == [2]
    assert world.told[-1] == "end"


def test_settings_that_cannot_be_read_leave_what_was_read_last(world: World, tmp_path: Path) -> None:
    """And not what the daemon was started with: that may be long gone."""
    world.run(_settings(tmp_path, models={"phi": {}}, limits={"concurrent_turns": 2}))
    lines = world.run(UNREADABLE)
    assert _not_reloaded(lines) == {"settings": "server.port"}
    assert world.registries[0] == world.registries[1]
    assert sorted(world.registries[1].models) == ["echo", "phi"]
    assert [limits.concurrent_turns for limits in world.limits] == [2, 2]


def test_settings_that_never_could_be_read(world: World) -> None:
    """Are those of the start."""
    assert _not_reloaded(world.run(UNREADABLE)) == {"settings": "server.port"}
    assert [registry.default for registry in world.registries] == ["echo"]


def test_the_report_has_what_was_not_taken(world: World, tmp_path: Path) -> None:
    """The log says that all was reloaded only when it was."""
    lines = world.run(UNREADABLE)
    assert "reloaded" not in [line["event"] for line in lines]
    assert [(each.what, each.code, each.message, each.hint) for each in world.reports[-1].problems] == [
        ("settings", ErrorCode.INVALID_CONFIG, "the file is broken", "Mend it.")
    ]
    lines = world.run(_settings(tmp_path, server={"port": 4000}))
    assert [line["event"] for line in lines] == ["settings_need_restart", "reloaded"]
    assert world.reports[-1] == ReloadReport(needs_restart=("server.port",))


def test_an_unexpected_failure_of_one_part_is_reported_and_keeps_none_back(world: World, tmp_path: Path) -> None:
    """Any exception of a reader becomes a problem of that part, and models are applied all the same."""

    def fail(_clients: Mapping[str, StaticClient]) -> Collection[str]:
        raise RuntimeError("unforeseen")

    vars(world)["replace_static"] = fail
    world.run(_settings(tmp_path))
    assert [(each.what, each.code) for each in world.reports[-1].problems] == [("clients", ErrorCode.INTERNAL)]
    assert "unforeseen" in world.reports[-1].problems[0].message
    assert len(world.registries) == 1


def test_what_waits_for_a_restart_is_named(world: World, tmp_path: Path) -> None:
    """As long as it waits, and nothing that has taken effect; what concerns no single engine waits too."""
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
    assert _waiting(world.run(now)) == waiting
    assert _waiting(world.run(now)) == waiting
    assert _waiting(world.run(_settings(tmp_path))) == []


def test_what_waits_for_a_restart_runs_no_model_otherwise(world: World, tmp_path: Path) -> None:
    """Engines that are the same go on."""
    world.run(_settings(tmp_path))
    world.run(_settings(tmp_path, engine={"backend": "echo", "max_resident": 2, "exit_when_failed": True}))
    assert world.registries[0] == world.registries[1]


def test_what_is_odd_in_the_models_directory_is_logged(world: World, tmp_path: Path) -> None:
    """One line at each reload."""
    (tmp_path / "My Model.gguf").write_bytes(b"GGUF")
    reasons = [line["reason"] for line in world.run(_settings(tmp_path)) if line["event"] == "models_dir"]
    assert len(reasons) == 1
    assert "'My Model'" in reasons[0]
