"""Names of responses and of their items. Pure.

A response's name holds the names of its session and its turn, so that nothing has to be looked up. Its items are named
after the turn.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from inferencecenter.errors import ErrorCode, InferenceCenterError

_PART: Final = r"[A-Za-z0-9_-]{22}"
_NAME: Final = re.compile(rf"resp_({_PART})({_PART})")


class Place(NamedTuple):
    """Where a response is: a session, and a turn of it."""

    session_id: str
    turn_id: str


def response_id(place: Place) -> str:
    """Return the name of the response of a turn."""
    return f"resp_{place.session_id.removeprefix('s_')}{place.turn_id.removeprefix('t_')}"


def read_response_id(name: str) -> Place:
    """Return where the response of a name is, if it is anywhere.

    Raises:
        InferenceCenterError: ``turn_not_found`` for what is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, "No such response.")
    session, turn = match.groups()
    return Place(f"s_{session}", f"t_{turn}")


def item_id(kind: str, turn_id: str, index: int = 0) -> str:
    """Return the name of an item: ``kind`` is ``msg``, ``rs`` or ``fc``, ``index`` counts those of a kind."""
    return f"{kind}_{turn_id.removeprefix('t_')}_{index}"
