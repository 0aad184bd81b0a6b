"""Presets of clients: saved by name, bounded, and the same for all sockets of a client."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.codec import read_frame
from inferencecenter.protocol.requests import SavePreset
from inferencecenter.protocol.values import Preset, Tool
from inferencecenter.sessions.journal import PresetRemoved, PresetStored
from inferencecenter.sessions.presets import MAX_PRESET_CHARS, MAX_PRESETS
from inferencecenter.sessions.store.salvage import salvage
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.conftest import SessionHarness

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = Preset(preset_type="prompt", name="Summary", text="Summarize {{text}}.")
TOOL = Tool(name="look_up", parameters={"type": "object", "properties": {"key": {"type": "string"}}}, strict=False)
SETTINGS = Preset(
    preset_type="settings", name="Summary", system="Be brief.", params={"temperature": 0.2}, regex="a|b", tools=[TOOL]
)


def refused(call: Any) -> InferenceCenterError:
    """The error of a call."""
    with pytest.raises(InferenceCenterError) as caught:
        call()
    return caught.value


def test_preset_is_replaced_and_deleted(world: SessionHarness) -> None:
    """Type and name identify it; each change is recorded and sent to the client's other sockets."""
    told: list[Any] = []
    world.sessions.subscribe(lambda client, event, knowing: told.append((client, event, knowing)))
    library, client = world.sessions.presets, world.client
    library.save(client, PROMPT, world.sink)
    library.save(client, SETTINGS)
    changed = PROMPT.model_copy(update={"text": "Sum up."})
    assert library.save(client, changed) == events.PresetSaved(preset=changed)
    assert library.list(client).presets == (changed, SETTINGS)
    assert library.list(replace(client, client_id="eve")).presets == ()
    gone = library.delete(client, "prompt", "Summary")
    assert library.list(client).presets == (SETTINGS,)
    assert [event for _, event, _ in told] == [
        *(events.PresetSaved(preset=each) for each in (PROMPT, SETTINGS, changed)),
        gone,
    ]
    assert {owner for owner, _, _ in told} == {client.client_id}
    assert told[0][2] == (world.sink,)
    assert world.journal is not None
    assert [each.preset for each in world.journal.of(PresetStored)] == [PROMPT, SETTINGS, changed]
    assert [each.name for each in world.journal.of(PresetRemoved)] == ["Summary"]
    assert library.list(client).stored


def test_other_clients_presets_cannot_be_deleted(world: SessionHarness) -> None:
    """Presets of other clients appear not to exist."""
    library, eve = world.sessions.presets, replace(world.client, client_id="eve")
    library.save(world.client, PROMPT)
    error = refused(lambda: library.delete(eve, "prompt", "Summary"))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "name")
    assert library.list(world.client).presets == (PROMPT,)


def test_presets_are_bounded(world: SessionHarness) -> None:
    """Number and characters are bounded; a preset can be replaced at the limit, and other clients are unaffected."""
    library, client = world.sessions.presets, world.client
    for number in range(MAX_PRESETS):
        library.save(client, PROMPT.model_copy(update={"name": str(number)}))
    assert refused(lambda: library.save(client, PROMPT)).code is ErrorCode.QUOTA_EXCEEDED
    library.save(client, PROMPT.model_copy(update={"name": "0", "text": "Other"}))
    eve = replace(client, client_id="eve")
    large = PROMPT.model_copy(update={"text": "x" * 65_000})
    for number in range(MAX_PRESET_CHARS // 65_536):
        library.save(eve, large.model_copy(update={"name": str(number)}))
    error = refused(lambda: library.save(eve, large))
    assert (error.code, error.field) == (ErrorCode.QUOTA_EXCEEDED, "preset")
    assert "delete_preset" in (error.hint or "")


def test_unknown_parameter_is_refused(world: SessionHarness) -> None:
    """The error names the parameter."""
    wrong = SETTINGS.model_copy(update={"params": {"warmth": 1}})
    error = refused(lambda: world.sessions.presets.save(world.client, wrong))
    assert error.field == "preset.params.warmth"
    assert world.sessions.presets.list(world.client).presets == ()


def test_preset_that_is_nested_too_deep_is_refused(world: SessionHarness) -> None:
    """A frame may be nested deeper than what is written of it."""
    schema = '{"a":' * 300 + "{}" + "}" * 300
    frame = read_frame(
        f'{{"op":"save_preset","preset":{{"preset_type":"settings","name":"a","json_schema":{schema}}}}}'
    )
    request = frame.parse()
    assert isinstance(request, SavePreset)
    error = refused(lambda: world.sessions.presets.save(world.client, request.preset))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "preset")
    assert world.sessions.presets.list(world.client).presets == ()


@pytest.mark.parametrize(
    "fields",
    [
        '"preset_type": "prompt"',
        '"preset_type": "prompt", "text": "a", "system": "b"',
        '"preset_type": "settings", "text": "a"',
        '"preset_type": "settings", "regex": "a", "json_schema": {}',
        '"preset_type": "settings", "tools": [{"name": "a"}, {"name": "a"}]',
        '"preset_type": "settings", "tools": [{"name": "a b"}]',
        '"preset_type": "prompt", "text": "a", "tools": [{"name": "a"}]',
    ],
)
def test_preset_of_another_shape_is_refused(fields: str) -> None:
    """A prompt has a text and nothing else; settings have none, and tools with unique names."""
    frame = read_frame(f'{{"op": "save_preset", "preset": {{"name": "a", {fields}}}}}')
    assert refused(frame.parse).code is ErrorCode.INVALID_REQUEST


def test_daemon_without_a_store_says_so(world: SessionHarness) -> None:
    """Presets are kept until it ends."""
    world.journal = None
    presets = world.reopen().presets
    presets.save(world.client, PROMPT)
    assert (presets.list(world.client).presets, presets.list(world.client).stored) == ((PROMPT,), False)


async def test_presets_survive(tmp_path: Path) -> None:
    """They are in the file after a restart and after a salvage; a purge deletes those of its client only."""
    path = tmp_path / "sessions.sqlite3"
    store = SessionStore.open(path)
    for client_id in ("ada", "eve"):
        store.of_client(client_id).write(PresetStored(client_id=client_id, preset=PROMPT), flush=True)
    store.of_client("ada").write(PresetStored(client_id="ada", preset=SETTINGS), flush=True)
    store.of_client("eve").write(PresetStored(client_id="eve", preset=SETTINGS), flush=True)
    store.of_client("eve").write(PresetRemoved(client_id="eve", preset_type="prompt", name="Summary"), flush=True)
    await store.close()
    salvage(path, tmp_path / "made.sqlite3")
    for each in (path, tmp_path / "made.sqlite3"):
        again = SessionStore.open(each)
        assert again.presets == [("ada", PROMPT), ("ada", SETTINGS), ("eve", SETTINGS)]
        again.purge("client", "ada")
        await again.close()
        last = SessionStore.open(each)
        assert last.presets == [("eve", SETTINGS)]
        await last.close()
