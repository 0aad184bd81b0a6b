"""Tests of what is read again; that it reaches clients is in tests/service."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.reload import changed_settings
from inferencecenter.settings import Settings, setting_fields

BOOLEANS = sorted(name for name, field in setting_fields() if field.annotation is bool)


def test_nothing_has_changed_between_equal_settings() -> None:
    """Defaults that were read twice are the same."""
    assert changed_settings(Settings(), Settings()) == frozenset()


@given(st.sets(st.sampled_from(BOOLEANS)))
def test_what_has_changed_is_named(names: set[str]) -> None:
    """Each by its dotted name, and no other."""
    tables: dict[str, dict[str, bool]] = {}
    before = Settings()
    for name in names:
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = not getattr(getattr(before, section), key)
    assert changed_settings(before, Settings.model_validate(tables)) == names
