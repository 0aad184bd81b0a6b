"""Hiding of optional modules."""

from __future__ import annotations

import importlib
import sys

import pytest

from inferencecenter.core.hidden_modules import hidden_modules


def test_hidden_module_cannot_be_imported() -> None:
    """Afterwards it can be, and one that was imported before is the same."""
    import colorsys  # noqa: PLC0415
    import json  # noqa: PLC0415

    del sys.modules["colorsys"]
    with hidden_modules("colorsys", "json"):
        for name in ("colorsys", "json"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
    assert importlib.import_module("json") is json
    assert importlib.import_module("colorsys") is not colorsys
