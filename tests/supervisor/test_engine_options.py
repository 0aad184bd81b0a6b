"""From a model's settings to the options that its engine process reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from inferencecenter.config.sections import EngineSettings, LoraSettings
from inferencecenter.ipc.engine_options import EngineOptions, KvCachePaths
from inferencecenter.models.registry import ModelSpec
from inferencecenter.supervisor.engine_options import engine_options


def spec(**engine: Any) -> ModelSpec:
    """Return a model with an adapter and these settings."""
    lora = (LoraSettings(path=Path("/models/l.gguf"), scale=0.5),)
    return ModelSpec(name="a", path=Path("/models/a.gguf"), engine=EngineSettings(**engine), params={}, lora=lora)


def test_every_setting_reaches_the_engine() -> None:
    """The engine gets every option unchanged through JSON, with adapters and KV directories."""
    kv = KvCachePaths(ram_dir=Path("/dev/shm/kv"), ram_bytes=5, client_share=0.25)
    given = spec(slots=3, n_batch=100, n_ubatch=50, kv_type_k="q8_0", kv_type_v="f32", worker_threads=7, ageing_s=2.5)
    options = EngineOptions.model_validate_json(engine_options(given, kv).model_dump_json())
    assert {name: getattr(options, name) for name in EngineSettings.model_fields} == dict(given.engine)
    assert (options.model_path, options.model_name, options.lora, options.kv) == (str(given.path), "a", given.lora, kv)


def test_unset_options_get_values() -> None:
    """The engine decides nothing that the plan may decide."""
    options = engine_options(spec(), KvCachePaths())
    assert (options.slots, options.n_batch, options.n_ubatch) == (8, 2048, 512)
    assert (options.kv_type_k, options.kv_type_v) == ("f16", "f16")
    assert options.worker_threads >= 1
    assert engine_options(spec(n_ubatch=4096), KvCachePaths()).n_batch == 4096
    assert engine_options(spec(n_batch=64), KvCachePaths()).n_ubatch == 64


@pytest.mark.parametrize("change", [{"slots": 0}, {"kv_type_k": "auto"}, {"split_mode": "row"}, {"no_such": 1}])
def test_changes_are_checked(change: dict[str, Any]) -> None:
    """A value that only a setting may have, or an unknown name, is refused at once."""
    with pytest.raises(ValidationError):
        EngineOptions().replace(**change)
