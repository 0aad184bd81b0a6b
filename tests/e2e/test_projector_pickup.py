"""A projector beside a model is used without a setting."""

from __future__ import annotations

import base64
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import connect_client, run_daemon
from tests.engine.llama.tiny_projectors import ROWS, write_projector
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from pathlib import Path

DEMO_WIDTH = 192


@pytest.mark.slow
async def test_projector_beside_a_model_is_used_after_a_reload(tmp_path: Path, demo_model_path: Path) -> None:
    """The model is loaded anew with it, and sessions that were open take images."""
    models = tmp_path / "models"
    models.mkdir()
    model = models / "seeing.gguf"
    model.symlink_to(demo_model_path)
    data = base64.b64encode(image_file((64, 48))).decode()
    messages: Any = [{"role": "user", "content": [{"type": "image", "data": data}]}]
    with run_daemon(tmp_path / "state", model, INFERENCECENTER_MODELS_DIR=str(models)) as running:
        async with connect_client(running) as client:

            async def vision() -> bool:
                listed = (await client.ask(op="list_models"))["models"]
                return any(each["name"] == "seeing" and each["vision"] for each in listed)

            session = await client.create()
            assert not await vision()
            write_projector(models / "mmproj-seeing.gguf", n_embd=DEMO_WIDTH)
            running.process.send_signal(signal.SIGHUP)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert await vision()
            await client.send(op="infer", session_id=session, messages=messages, params={"max_tokens": 4})
            end = await client.until(lambda message: message["op"] in ("end", "error"))
            assert end["usage"]["prompt_tokens"] > ROWS
