"""Lifecycles as tables: every one is a ``StateMachine``, and a transition that is not listed raises."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

State = TypeVar("State", bound=StrEnum)
Change = TypeVar("Change", bound=StrEnum)


class IllegalTransitionError(Exception):
    """A transition that is not in the table: a defect of the caller."""


class StateMachine(Generic[State, Change]):
    """A transition table.

    Args:
        name: The subject of the states, for messages and documentation.
        rows: The next state for each state and change; a missing pair is illegal.
    """

    def __init__(self, name: str, rows: Mapping[tuple[State, Change], State]) -> None:
        self.name = name
        self.rows: Mapping[tuple[State, Change], State] = MappingProxyType(dict(rows))

    def next(self, state: State, change: Change) -> State:
        """Return the next state.

        Raises:
            IllegalTransitionError: The table has no such row.
        """
        try:
            return self.rows[state, change]
        except KeyError:
            raise IllegalTransitionError(f"{self.name}: {change.value} while {state.value}") from None
