"""Budgets, shares and who has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.kv.ledger import PUBLIC, Ledger, Limits

SCOPES = st.sampled_from([PUBLIC, "a", "b"])


def ledger_of(limits: Limits, *items: tuple[str, str, int]) -> Ledger[str]:
    """Return a ledger with items, the oldest first."""
    ledger: Ledger[str] = Ledger(limits)
    for name, scope, n_bytes in items:
        ledger.put(name, scope, n_bytes)
    return ledger


def first(item: str) -> int | None:
    """Rank all alike."""
    del item
    return 0


def test_the_least_recently_used_goes_first() -> None:
    """Over the budget, items go in the order in which they were used, whoever they belong to."""
    ledger = ledger_of(Limits(100), ("x", "a", 40), ("y", "b", 40), ("z", "a", 20))
    ledger.touch("x")
    assert ledger.room("a", 40, without=None, rank=first) == ("y",)
    assert ledger.room("c", 60, without=None, rank=first) == ("y", "z")


def test_a_scope_over_its_share_gives_up_its_own() -> None:
    """A scope that would exceed its share loses its own oldest, though others' are older."""
    ledger = ledger_of(Limits(100, 0.5), ("old", "b", 30), ("mine", "a", 30), ("mine too", "a", 10))
    assert ledger.room("a", 30, without=None, rank=first) == ("mine",)
    assert ledger.room("a", 51, without=None, rank=first) is None


def test_the_public_scope_has_no_share() -> None:
    """Public items may take the whole budget."""
    ledger = ledger_of(Limits(100, 0.5), ("x", "a", 30))
    assert ledger.room(PUBLIC, 100, without=None, rank=first) == ("x",)
    assert ledger.room(PUBLIC, 101, without=None, rank=first) is None


def test_rank() -> None:
    """A lower rank goes before an older item, and what has none stays."""
    ledger = ledger_of(Limits(90), ("pinned", "a", 30), ("late", "a", 30), ("soon", "a", 30))
    ranks = {"pinned": None, "late": 1, "soon": 0}
    assert ledger.room("a", 30, without=None, rank=ranks.get) == ("soon",)
    assert ledger.room("a", 60, without=None, rank=ranks.get) == ("soon", "late")
    assert ledger.room("a", 90, without=None, rank=ranks.get) is None


def test_number_of_items() -> None:
    """Small items have to go too when there are too many, unless one is replaced."""
    ledger = ledger_of(Limits(90, max_items=2), ("x", "a", 1), ("y", "a", 1))
    assert ledger.room("a", 1, without=None, rank=first) == ("x",)
    assert ledger.room("a", 1, without="y", rank=first) == ()
    assert ledger_of(Limits(90, max_items=0)).room("a", 1, without=None, rank=first) is None


@given(
    limits=st.builds(Limits, st.integers(0, 60), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 6)),
    puts=st.lists(st.tuples(SCOPES, st.integers(0, 30), st.sampled_from([None, 0, 1])), max_size=25),
    touched=st.integers(0, 25),
    replace=st.booleans(),
)
def test_limits_hold(limits: Limits, puts: list[tuple[str, int, int | None]], touched: int, *, replace: bool) -> None:
    """Whoever follows ``room`` never exceeds a limit; it names nobody in vain, and gives up only when it must."""
    ledger: Ledger[int] = Ledger(limits)
    ranks: dict[int, int | None] = {}
    for number, (scope, n_bytes, rank) in enumerate(puts):
        ledger.touch(touched)
        without = next(iter(ledger), None) if replace else None
        ranks[number] = rank
        victims = ledger.room(scope, n_bytes, without=without, rank=ranks.__getitem__)
        if without is not None:
            ledger.drop(without)
        if victims is None:
            for item in [item for item in ledger if ranks[item] is not None]:
                ledger.drop(item)
            assert ledger.spare_bytes(scope) < n_bytes or len(ledger) >= limits.max_items
            continue
        for count, victim in enumerate(victims):
            assert ranks[victim] is not None
            full = len(ledger) + 1 > limits.max_items
            assert ledger.spare_bytes(scope) < n_bytes or full, f"victim {count} goes in vain"
            ledger.drop(victim)
        assert ledger.spare_bytes(scope) >= n_bytes
        ledger.put(number, scope, n_bytes)
        ledger.check_integrity()


def test_check_integrity() -> None:
    """A ledger over its budget is noticed."""
    ledger = ledger_of(Limits(10), ("x", "a", 11))
    with pytest.raises(AssertionError, match="bytes are wrong"):
        ledger.check_integrity()
