"""The page of lifecycles: a diagram drawn from each transition table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.cli.reference import markdown
from inferencecenter.engine.scheduler import request as engine_request
from inferencecenter.server import states as connection
from inferencecenter.sessions import states as session
from inferencecenter.supervisor import states as engine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import StrEnum

_INTRODUCTION: Final = """\
Each lifecycle is a table with one writer; a step that is not in the table raises. The diagrams are drawn from the
tables."""


def page() -> str:
    """Return ``docs/states.md``."""
    steps = [(state, "", after) for state, afters in engine_request.TRANSITIONS.items() for after in sorted(afters)]
    return markdown.page(
        "States",
        _INTRODUCTION,
        "## Connection",
        _diagram((state, event, after) for (state, event), after in connection.TRANSITIONS.items()),
        "## Session",
        _diagram((state, change, after) for (state, change), after in session.SESSION_TABLE.items()),
        "## Turn",
        "Exactly one terminal event is sent, on the way into the last state.",
        _diagram((state, change, after) for (state, change), after in session.TURN_TABLE.items()),
        "## Engine process",
        _diagram((state, event, after) for (state, event), after in engine.ENGINE_TABLE.items()),
        "## Request in the engine",
        _diagram(steps),
    )


def _diagram(steps: Iterable[tuple[StrEnum, StrEnum | str, StrEnum]]) -> str:
    """A Mermaid state diagram; the first step's state is where it begins, states that nothing leaves are its ends."""
    listed = [(state.value, str(event), after.value) for state, event, after in steps]
    left = {state for state, _, _ in listed}
    ends = dict.fromkeys(after for _, _, after in listed if after not in left)
    lines = [f"[*] --> {listed[0][0]}"]
    lines += [f"{state} --> {after}" + (f": {event}" if event else "") for state, event, after in listed]
    lines += [f"{end} --> [*]" for end in ends]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])
