"""What tests of daemons on GPUs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.e2e.recording_client import RecordingClient
from tests.rpc.server import settings_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.hardware.placement import Device
    from tests.e2e.harness import Message, SocketClient

SETTINGS: Final = {
    "INFERENCECENTER_MODEL__NAME": "demo",
    "INFERENCECENTER_ENGINE__SLOTS": "2",
    "INFERENCECENTER_ENGINE__N_CTX": "256",
    "INFERENCECENTER_ENGINE__N_BATCH": "64",
    "INFERENCECENTER_ENGINE__N_UBATCH": "64",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.5",
}
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 24}
STATEMENT: Final = "My name is Ada. I live in Vienna."
QUESTION: Final = "What is my name?"


def settings_on(devices: Iterable[Device]) -> dict[str, str]:
    """Return the settings of a daemon that uses these devices, the only ones there are."""
    return SETTINGS | settings_for(*dict.fromkeys(device.name for device in devices if device.remote))


async def plan_of(client: SocketClient) -> Message:
    """Return the plan of the engine's last start."""
    plan: Message = (await client.ask(op="status", type="model"))["plan"]
    return plan


async def unload(client: SocketClient) -> None:
    """Have the engine park its KV and end."""
    assert (await client.ask(op="unload_model", name="demo"))["op"] == "model_unloaded"
    await client.until(lambda message: message["op"] == "engine" and message["state"] == "asleep")


async def told_name(client: SocketClient) -> RecordingClient:
    """Open a session that knows a name."""
    recorder = await RecordingClient.open(client)
    await recorder.turn(STATEMENT, **GREEDY)
    return recorder
