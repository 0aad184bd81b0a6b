"""The OpenAPI document as it lies in the repository."""

from __future__ import annotations

import json

from inferencecenter.api import openapi
from inferencecenter.api.operations import OPERATIONS


def document() -> str:
    """Return ``docs/openapi.json``."""
    return json.dumps(openapi.document(OPERATIONS), indent=2, ensure_ascii=False) + "\n"
