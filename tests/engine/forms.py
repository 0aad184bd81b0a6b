"""What a turn is held to by a grammar that may not be compiled yet."""

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
    """Compile a grammar, if that is not known, and return what a turn is held to that has begun with ``answer``."""
    return grammars.constraint(grammars.compile(grammar, markers), answer)
