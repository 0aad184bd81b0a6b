"""Where a daemon's engines park KV."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inferencecenter.config.sections import EngineSettings, LoraSettings
from inferencecenter.config.settings import KvSettings
from inferencecenter.models.registry import ModelSpec
from inferencecenter.supervisor.engine_options import kv_cache_paths, remove_ram_cache, remove_stale_caches

MIB = 2**20
SPEC = ModelSpec(name="a", path=Path("/models/a.gguf"), engine=EngineSettings(), params={}, lora=())


def settings(tmp_path: Path, **values: object) -> KvSettings:
    """Return settings with a RAM directory that is not there yet."""
    return KvSettings.model_validate({"ram_dir": tmp_path / "ram", "ram_mib": 8, "disk_mib": 16} | values)


@pytest.fixture
def free_mib(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system with 100 MiB free, or as many as the test puts in."""
    free = [100]

    class System:
        f_frsize = 4096

        @property
        def f_bavail(self) -> int:
            return free[0] * MIB // self.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: System())
    return free


def test_daemons_have_separate_directories(tmp_path: Path, free_mib: list[int]) -> None:
    """Two state directories have two places under the same settings; the same one has the same."""
    chosen = settings(tmp_path, disk_dir=tmp_path / "disk")
    one, again, other = (kv_cache_paths(chosen, tmp_path / name, SPEC) for name in ("one", "one", "other"))
    assert one == again
    assert len({one.ram_dir, other.ram_dir, one.disk_dir, other.disk_dir}) == 4
    assert {one.ram_dir.parent.parent, other.ram_dir.parent.parent} == {tmp_path / "ram"}
    assert {one.disk_dir.parent.parent, other.disk_dir.parent.parent} == {tmp_path / "disk"}
    assert (one.ram_bytes, one.disk_bytes) == (8 * MIB, 16 * MIB)


def test_disk_directory_is_in_the_state_directory(tmp_path: Path, free_mib: list[int]) -> None:
    """Another one may be configured."""
    assert (
        kv_cache_paths(settings(tmp_path), tmp_path / "state", SPEC).disk_dir.parent.parent == tmp_path / "state" / "kv"
    )


def test_disabled_tiers_have_no_bytes(tmp_path: Path) -> None:
    """This holds for both tiers."""
    places = kv_cache_paths(settings(tmp_path, parking=False), tmp_path, SPEC)
    assert (places.ram_bytes, places.disk_bytes) == (0, 0)


def test_ram_budget_is_clipped_to_free_memory(tmp_path: Path, free_mib: list[int]) -> None:
    """One log line says so; the disk budget, where a failing write is harmless, is not clipped."""
    free_mib[0] = 3
    with capture_logs() as logs:
        places = kv_cache_paths(settings(tmp_path), tmp_path, SPEC)
    assert (places.ram_bytes, places.disk_bytes) == (3 * MIB, 16 * MIB)
    assert [(line["event"], line["wanted_mib"], line["free_mib"]) for line in logs] == [("kv_ram_clipped", 8, 3)]


def test_leftovers_count_as_free(tmp_path: Path, free_mib: list[int]) -> None:
    """The first engine deletes them."""
    left = kv_cache_paths(settings(tmp_path), tmp_path, SPEC).ram_dir
    left.mkdir(parents=True)
    (left / "old").write_bytes(b"x" * 2 * MIB)
    free_mib[0] = 3
    assert kv_cache_paths(settings(tmp_path), tmp_path, SPEC).ram_bytes == 5 * MIB


def test_failing_file_system_disables_the_ram_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon continues without it, and logs the reason."""

    def refuse(path: Path) -> os.statvfs_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "statvfs", refuse)
    with capture_logs() as logs:
        assert kv_cache_paths(settings(tmp_path), tmp_path, SPEC).ram_bytes == 0
    assert [line["event"] for line in logs] == ["kv_ram_unavailable"]


def test_ram_directory_is_removed_at_the_end(tmp_path: Path, free_mib: list[int]) -> None:
    """Its files are deleted with it, files beside it stay; a second removal does nothing."""
    places = kv_cache_paths(settings(tmp_path), tmp_path, SPEC)
    places.ram_dir.mkdir(parents=True)
    (places.ram_dir / "session").touch()
    (tmp_path / "ram" / "other").touch()
    remove_ram_cache(settings(tmp_path), tmp_path)
    remove_ram_cache(settings(tmp_path), tmp_path)
    assert [path.name for path in (tmp_path / "ram").iterdir()] == ["other"]


def test_models_have_separate_directories(tmp_path: Path, free_mib: list[int]) -> None:
    """A model with changed options keeps its directory while its KV is compatible; other KV has another."""
    chosen = settings(tmp_path)
    own = kv_cache_paths(chosen, tmp_path, SPEC)
    longer = replace(SPEC, engine=EngineSettings(n_ctx=512))
    others = [
        replace(SPEC, name="b"),
        replace(SPEC, path=Path("/models/b.gguf")),
        replace(SPEC, engine=EngineSettings(kv_type_k="q8_0")),
        replace(SPEC, lora=(LoraSettings(path=Path("/models/l.gguf")),)),
    ]
    assert kv_cache_paths(chosen, tmp_path, longer) == own
    assert len({own.ram_dir, *(kv_cache_paths(chosen, tmp_path, other).ram_dir for other in others)}) == 5


def test_replicas_have_directories_of_their_own(tmp_path: Path, free_mib: list[int]) -> None:
    """The first has those of the model alone, they divide its budgets, and those of removed replicas are deleted."""
    chosen, several = settings(tmp_path), replace(SPEC, nodes=("local",) * 3)
    alone = kv_cache_paths(chosen, tmp_path, SPEC)
    places = [kv_cache_paths(chosen, tmp_path, several, replica=index) for index in range(3)]
    assert (places[0].ram_dir, places[0].disk_dir) == (alone.ram_dir, alone.disk_dir)
    assert len({each.ram_dir for each in places}) == len({each.disk_dir for each in places}) == 3
    assert {(each.ram_bytes, each.disk_bytes) for each in places} == {(alone.ram_bytes // 3, alone.disk_bytes // 3)}
    for each in places:
        each.disk_dir.mkdir(parents=True)
    remove_stale_caches(chosen, tmp_path, [replace(SPEC, nodes=("local",) * 2)])
    assert [each.disk_dir.exists() for each in places] == [True, True, False]


def test_replicas_of_other_machines_take_no_part_of_the_budgets(tmp_path: Path, free_mib: list[int]) -> None:
    """Each machine has the whole; what is free in memory there is for its host to find out."""
    free_mib[:] = [1]
    chosen, spread = settings(tmp_path, ram_mib=8, disk_mib=10), replace(SPEC, nodes=("local", "box", "box", "spare"))
    budgets = [
        (places.ram_bytes // MIB, places.disk_bytes // MIB)
        for index, node in enumerate((*spread.nodes, "joined"))
        for places in [kv_cache_paths(chosen, tmp_path, spread, replica=index, node=node)]
    ]
    assert budgets == [(1, 10), (4, 5), (4, 5), (8, 10), (8, 10)]


def test_kv_of_removed_models_is_deleted(tmp_path: Path, free_mib: list[int]) -> None:
    """It is deleted in RAM and on disk; a model that still exists keeps its files."""
    chosen, gone = settings(tmp_path), replace(SPEC, name="gone")
    for spec in (SPEC, gone):
        for directory in (
            kv_cache_paths(chosen, tmp_path, spec).ram_dir,
            kv_cache_paths(chosen, tmp_path, spec).disk_dir,
        ):
            directory.mkdir(parents=True)
            (directory / "session").touch()
    remove_stale_caches(chosen, tmp_path, [SPEC])
    kept, deleted = kv_cache_paths(chosen, tmp_path, SPEC), kv_cache_paths(chosen, tmp_path, gone)
    assert (kept.ram_dir / "session").exists()
    assert (kept.disk_dir / "session").exists()
    assert not deleted.ram_dir.exists()
    assert not deleted.disk_dir.exists()
