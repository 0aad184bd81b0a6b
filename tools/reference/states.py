"""The page of lifecycles: a diagram drawn from each transition table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inferencecenter.engine.scheduler.state import REQUEST
from inferencecenter.hardware.pressure import PRESSURE
from inferencecenter.hardware.thermal import THERMAL
from inferencecenter.server.states import CONNECTION
from inferencecenter.sessions.states import SESSION, TURN
from inferencecenter.supervisor.states import ENGINE
from tools.reference import markdown

if TYPE_CHECKING:
    from inferencecenter.core.state_machine import StateMachine

_INTRODUCTION: Final = """\
Each lifecycle is a transition table with one writer; a transition that is not in the table raises. The diagrams are
generated from the tables."""


def page() -> str:
    """Return ``docs/states.md``."""
    return markdown.page(
        "States",
        _INTRODUCTION,
        "## Connection",
        _diagram(CONNECTION),
        "## Session",
        _diagram(SESSION),
        "## Turn",
        "Exactly one terminal event is sent, on the way into the last state.",
        _diagram(TURN),
        "## Engine process",
        _diagram(ENGINE),
        "## Request in the engine",
        _diagram(REQUEST),
        "## Heat of the GPUs",
        _diagram(THERMAL),
        "## Memory pressure",
        _diagram(PRESSURE),
    )


def _diagram(lifecycle: StateMachine[Any, Any]) -> str:
    """A Mermaid state diagram; the first row's state is where it begins, states that nothing leaves are its ends."""
    left = {state for state, _ in lifecycle.rows}
    ends = dict.fromkeys(after for after in lifecycle.rows.values() if after not in left)
    lines = [f"[*] --> {next(iter(lifecycle.rows))[0]}"]
    lines += [f"{state} --> {after}: {change}" for (state, change), after in lifecycle.rows.items()]
    lines += [f"{end} --> [*]" for end in ends]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])
