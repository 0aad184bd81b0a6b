"""Constraints of turns whose grammar may not be compiled yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.engine.grammar_cache import GrammarCache
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.messages import Grammar


def constraint_of(
    grammars: GrammarCache, grammar: Grammar, markers: Sequence[str] = (), answer: Sequence[int] = ()
) -> Constraint:
    """Compile a grammar if it is not cached, and return the constraint of a turn that begins with ``answer``."""
    return grammars.constraint(grammars.compile(grammar, markers), answer)
