"""Tests of a model's entry in ``status``."""

from __future__ import annotations

import msgspec
import pytest

from inferencecenter.api.websocket.status import client_status
from inferencecenter.ipc.messages import Adapter
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.sessions.context import Principal
from tests.server.harness import MODEL


@pytest.mark.parametrize(
    ("adapters", "shown"),
    [
        ((), None),
        ((Adapter("/srv/private/tone.gguf", 0.5),), "tone x 0.5"),
        ((Adapter("a.gguf"), Adapter("b.gguf", -1.0)), "a x 1, b x -1"),
    ],
)
def test_adapters_are_listed(adapters: tuple[Adapter, ...], shown: str | None) -> None:
    """Each is listed with its scale and without its path."""
    client = Principal("ada", 4, "normal", frozenset({"user"}))
    engine = EngineStatus(state=EngineState.READY, model=msgspec.structs.replace(MODEL, lora=adapters))
    values = client_status("model", client=client, sessions=(), engine=engine, storable=True)
    assert values["lora"] == shown


@pytest.mark.parametrize(("projector", "shown"), [("", None), ("/srv/private/mmproj-eyes.gguf", "mmproj-eyes.gguf")])
def test_projector_is_named(projector: str, shown: str | None) -> None:
    """A model without one takes no images; its path is not shown."""
    client = Principal("ada", 4, "normal", frozenset({"user"}))
    engine = EngineStatus(state=EngineState.READY, model=msgspec.structs.replace(MODEL, projector=projector))
    values = client_status("model", client=client, sessions=(), engine=engine, storable=True)
    assert values["projector"] == shown
