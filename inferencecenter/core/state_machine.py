"""Lifecycles as tables: every state machine of the daemon is a ``Lifecycle``, and a step it does not list raises."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

State = TypeVar("State", bound=StrEnum)
Change = TypeVar("Change", bound=StrEnum)


class IllegalTransitionError(Exception):
    """A change that the table does not list: a defect of the code that asked for it."""


class StateMachine(Generic[State, Change]):
    """A transition table.

    Args:
        name: What lives this life, for messages and documentation.
        rows: What follows each state on each change; a pair that is not there is illegal.
    """

    def __init__(self, name: str, rows: Mapping[tuple[State, Change], State]) -> None:
        self.name = name
        self.rows: Mapping[tuple[State, Change], State] = MappingProxyType(dict(rows))

    def next(self, state: State, change: Change) -> State:
        """Return the state that follows.

        Raises:
            IllegalTransitionError: The table has no such row.
        """
        try:
            return self.rows[state, change]
        except KeyError:
            raise IllegalTransitionError(f"{self.name}: {change.value} while {state.value}") from None
