"""An endless chat template fails only the turns that use it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.harness import connect_client, run_daemon, start_daemon
from tests.e2e.other_model import write_other_model
from tests.e2e.recording_client import RecordingClient

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import SocketClient

TEMPLATE: Final = (
    "{% if messages[-1].content == 'go' %}{% set all = range(99999) %}"
    "{% for a in all %}{% for b in all %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}[turn]{{ m.role }}\n{{ m.content }}[over]\n{% endfor %}[turn]assistant\n"
)
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 8}
STREAM: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 300}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> dict[str, str]:
    """Settings with the demo and a model whose template never ends."""
    folder = tmp_path_factory.mktemp("models")
    write_other_model(demo_model_path, folder / "odd.gguf", template=TEMPLATE)
    return {"INFERENCECENTER_MODELS_DIR": str(folder), "INFERENCECENTER_MODEL__NAME": "demo"}


async def open_session(client: SocketClient, model: str) -> RecordingClient:
    """Create a session of a model once that is loaded."""
    while (created := await client.ask(op="create_session", model=model))["op"] == "error":
        assert created["code"] == "model_loading", created
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "ready")
    recorder = RecordingClient(client, created["session_id"], created["epoch"])
    client.listeners.append(recorder.see)
    return recorder


@pytest.mark.slow
async def test_endless_template_fails_only_its_turn(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """The error names the model; a concurrent answer and the session's next turn are complete."""
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client, connect_client(daemon) as other:
            odd, alone, beside = (
                await open_session(client, "odd"),
                await RecordingClient.open(other),
                await RecordingClient.open(other),
            )
            undisturbed = await alone.turn("Tell me a short story.", **STREAM)
            await odd.infer("go", **GREEDY)
            await beside.infer("Tell me a short story.", **STREAM)
            assert await beside.finish() == undisturbed
            await odd.finish()
            assert (odd.end["op"], odd.end["code"]) == ("error", "internal")
            assert "odd" in odd.end["message"]
            await odd.turn("Hello", **GREEDY)
            await odd.described()


@pytest.mark.slow
async def test_stored_turn_with_endless_template_fails_at_restart(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """After a kill the next daemon starts, fails the stored turn and serves all others."""
    first = start_daemon(tmp_path / "state", demo_model_path, **settings)
    try:
        first.wait_ready()
        async with connect_client(first) as client:
            odd, good = await open_session(client, "odd"), await RecordingClient.open(client)
            await good.turn("My name is Ada.", **GREEDY)
            await odd.infer("go", **GREEDY)
            await odd.until("queued")
            first.process.send_signal(signal.SIGKILL)
            await odd.drain()
    finally:
        first.process.kill()
        first.process.wait()
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            await odd.resume(client)
            await good.resume(client)
            await good.turn("What is my name?", **GREEDY)
            await odd.finish()
            assert (odd.end["op"], odd.end["code"]) == ("error", "internal")
            await odd.turn("Hello", **GREEDY)
