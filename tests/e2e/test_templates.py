"""A model file whose chat template never ends costs the turns that run into it, and nothing else."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.harness import run_daemon, start_daemon, talk
from tests.e2e.other_model import write_other_model
from tests.e2e.witness import Witness

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Talk

TEMPLATE: Final = (
    "{% if messages[-1].content == 'go' %}{% set all = range(99999) %}"
    "{% for a in all %}{% for b in all %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}[turn]{{ m.role }}\n{{ m.content }}[over]\n{% endfor %}[turn]assistant\n"
)
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 8}
STREAM: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 300}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> dict[str, str]:
    """Settings of a daemon with the demo and a model with such a template."""
    folder = tmp_path_factory.mktemp("models")
    write_other_model(demo_model_path, folder / "odd.gguf", template=TEMPLATE)
    return {"INFERENCECENTER_MODELS_DIR": str(folder), "INFERENCECENTER_MODEL__NAME": "demo"}


async def opened(client: Talk, model: str) -> Witness:
    """Open a session of a model, as soon as that is loaded."""
    while (created := await client.ask(op="create_session", model=model))["op"] == "error":
        assert created["code"] == "model_loading", created
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "ready")
    witness = Witness(client, created["session_id"], created["epoch"])
    client.listeners.append(witness.see)
    return witness


@pytest.mark.slow
async def test_a_template_that_never_ends_fails_its_turn_alone(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """The turn ends with an error that names the model; a neighbour's answer and the session's next turn are whole."""
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client, talk(daemon) as other:
            odd, alone, beside = await opened(client, "odd"), await Witness.open(other), await Witness.open(other)
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
async def test_a_stored_turn_of_such_a_template_is_set_aside_at_the_next_start(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """A daemon that was killed over it starts, ends the turn with an error, and serves everything else."""
    first = start_daemon(tmp_path / "state", demo_model_path, **settings)
    try:
        first.wait_ready()
        async with talk(first) as client:
            odd, good = await opened(client, "odd"), await Witness.open(client)
            await good.turn("My name is Ada.", **GREEDY)
            await odd.infer("go", **GREEDY)
            await odd.until("queued")
            first.process.send_signal(signal.SIGKILL)
            await odd.drain()
    finally:
        first.process.kill()
        first.process.wait()
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            await odd.resume(client)
            await good.resume(client)
            await good.turn("What is my name?", **GREEDY)
            await odd.finish()
            assert (odd.end["op"], odd.end["code"]) == ("error", "internal")
            await odd.turn("Hello", **GREEDY)
