"""Presets of clients: named conversation settings and named prompts, the same on all devices.

They are few and small, so all are held in memory; changes are records in the client's journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from pydantic_core import PydanticSerializationError

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.params import parse_params
from inferencecenter.sessions.journal import PresetRemoved, PresetStored, check_writable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.protocol.values import Preset
    from inferencecenter.sessions.context import EventSink, Principal
    from inferencecenter.sessions.event_log import SessionNotifier
    from inferencecenter.sessions.journal import Journal

MAX_PRESETS: Final = 200
"""Maximum number of presets of a client."""
MAX_PRESET_CHARS: Final = 262_144
"""Maximum number of characters of all presets of a client, as JSON."""

_Change = TypeVar("_Change", events.PresetSaved, events.PresetDeleted)


class PresetLibrary:
    """The presets of all clients, by type and name.

    Args:
        journal: Records changes.
        notifier: Notifies a client's other sockets of changes.
        stored: Whether presets survive a restart.
    """

    def __init__(self, journal: Journal, notifier: SessionNotifier, *, stored: bool) -> None:
        self._journal = journal
        self._notifier = notifier
        self._stored = stored
        self._presets: dict[str, dict[tuple[str, str], Preset]] = {}

    def restore(self, stored: Iterable[tuple[str, Preset]]) -> None:
        """Add stored presets, each with its client."""
        for client_id, preset in stored:
            self._of(client_id)[preset.preset_type, preset.name] = preset

    def list(self, client: Principal) -> events.Presets:
        """Return the client's presets by type and name."""
        own = self._presets.get(client.client_id, {})
        return events.Presets(
            presets=tuple(own[key] for key in sorted(own)),
            stored=self._stored,
            max_presets=MAX_PRESETS,
            max_preset_chars=MAX_PRESET_CHARS,
        )

    def save(self, client: Principal, preset: Preset, sink: EventSink | None = None) -> events.PresetSaved:
        """Save a preset, replacing the one with its type and name; ``sink`` is the requester.

        Raises:
            InferenceCenterError: ``invalid_request`` for parameters that do not exist and for a preset that is nested
                too deep, ``quota_exceeded``, or ``storage_unavailable``.
        """
        parse_params(preset.params or {}, path="preset.params")
        journal = self._journal.of_client(client.client_id)
        check_writable(journal)
        own, key = self._of(client.client_id), (preset.preset_type, preset.name)
        others = [each for each in own if each != key]
        if len(others) >= MAX_PRESETS:
            raise _too_many(f"this client has {len(others)} presets; {MAX_PRESETS} are allowed")
        n_chars = sum(_size(own[each]) for each in others) + _size(preset)
        if n_chars > MAX_PRESET_CHARS:
            raise _too_many(
                f"the presets of this client would have {n_chars} characters; {MAX_PRESET_CHARS} are allowed"
            )
        own[key] = preset
        journal.write(PresetStored(client_id=client.client_id, preset=preset), flush=True)
        return self._changed(client, events.PresetSaved(preset=preset), sink)

    def delete(
        self, client: Principal, preset_type: str, name: str, sink: EventSink | None = None
    ) -> events.PresetDeleted:
        """Delete a preset; ``sink`` is the requester.

        Raises:
            InferenceCenterError: ``invalid_request`` if the client has none of this name, or ``storage_unavailable``.
        """
        journal = self._journal.of_client(client.client_id)
        check_writable(journal)
        own = self._presets.get(client.client_id, {})
        preset = own.get((preset_type, name))
        if preset is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"this client has no preset with this name and preset_type {preset_type}",
                field="name",
                hint="list_presets returns those that exist.",
            )
        del own[preset_type, name]
        journal.write(PresetRemoved(client_id=client.client_id, preset_type=preset_type, name=name), flush=True)
        return self._changed(client, events.PresetDeleted(preset_type=preset.preset_type, name=name), sink)

    def forget(self, client_id: str) -> None:
        """Drop the presets of a client that is deleted from the store."""
        self._presets.pop(client_id, None)

    def _of(self, client_id: str) -> dict[tuple[str, str], Preset]:
        return self._presets.setdefault(client_id, {})

    def _changed(self, client: Principal, event: _Change, sink: EventSink | None) -> _Change:
        self._notifier.notify_client(
            client.client_id, event, journal=self._journal.of_client(client.client_id), by=sink
        )
        return event


def _size(preset: Preset) -> int:
    """Return the characters of a preset in JSON.

    Raises:
        InferenceCenterError: ``invalid_request`` if it is nested too deep to be written.
    """
    try:
        return len(preset.model_dump_json(exclude_none=True))
    except PydanticSerializationError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "the preset is nested too deep to be stored", field="preset"
        ) from error


def _too_many(message: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.QUOTA_EXCEEDED,
        message,
        field="preset",
        hint="Delete presets that are no longer needed (delete_preset).",
    )
