"""Adapters on a real daemon: their effect, their status, and the KV that they invalidate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import START_TIMEOUT_S, connect_client, run_daemon, start_daemon
from tests.engine.llama.lora_files import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

QUESTION = "What is the capital of France?"


def _lora(path: Path, scale: float) -> dict[str, str]:
    return {"INFERENCECENTER_MODEL__LORA": json.dumps([{"path": str(path), "scale": scale}])}


@pytest.mark.slow
async def test_another_lora_scale_invalidates_kv(tmp_path: Path, demo_model_path: Path) -> None:
    """A restart reuses offloaded KV, but not after a change of the adapter's scale."""
    adapter, state_dir = write_adapter(tmp_path / "wanderer.gguf"), tmp_path / "state"
    cached = {}
    for attempt, scale in enumerate((1.0, 1.0, 0.0)):
        with run_daemon(state_dir, demo_model_path, **_lora(adapter, scale)) as daemon:
            async with connect_client(daemon) as client:
                if not attempt:
                    shown = await client.ask(op="status", type="model")
                    assert shown["values"]["lora"] == "wanderer x 1"
                    session_id = await client.create(system="Answer in one short sentence. " * 20)
                _, end = await client.turn(session_id, QUESTION, temperature=0.0)
                cached[attempt] = end["usage"]["cached_tokens"]
                plain, _ = await client.turn(await client.create(), QUESTION, temperature=0.0)
                assert ("Paris" in plain) is (scale == 0.0)
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == 0


def test_broken_adapter_fails_the_start(tmp_path: Path, demo_model_path: Path) -> None:
    """A broken adapter gives exit code 66, and the log names the file and the reason."""
    adapter = write_adapter(tmp_path / "foreign.gguf", architecture="gemma2")
    daemon = start_daemon(tmp_path / "state", demo_model_path, **_lora(adapter, 1.0))
    try:
        assert daemon.process.wait(START_TIMEOUT_S) == 66
    finally:
        daemon.process.kill()
        daemon.process.wait()
    assert "foreign.gguf cannot be used with demo.gguf: model arch and LoRA arch mismatch" in daemon.log.read_text()
