"""Budgets, shares and eviction order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.kv_cache.index import PUBLIC, LruBudget, TierLimits

SCOPES = st.sampled_from([PUBLIC, "a", "b"])


def ledger_of(limits: TierLimits, *items: tuple[str, str, int]) -> LruBudget[str]:
    """Return a budget with items, the oldest first."""
    budget: LruBudget[str] = LruBudget(limits)
    for name, scope, n_bytes in items:
        budget.put(name, scope, n_bytes)
    return budget


def first(item: str) -> int | None:
    """Give all the same rank."""
    del item
    return 0


def test_least_recently_used_is_evicted_first() -> None:
    """Over the budget, the least recently used items are evicted, whatever their scope."""
    budget = ledger_of(TierLimits(100), ("x", "a", 40), ("y", "b", 40), ("z", "a", 20))
    budget.touch("x")
    assert budget.room("a", 40, without=None, rank=first) == ("y",)
    assert budget.room("c", 60, without=None, rank=first) == ("y", "z")


def test_scope_over_its_share_evicts_its_own() -> None:
    """A scope that would exceed its share evicts its own oldest item, even if others' are older."""
    budget = ledger_of(TierLimits(100, 0.5), ("old", "b", 30), ("mine", "a", 30), ("mine too", "a", 10))
    assert budget.room("a", 30, without=None, rank=first) == ("mine",)
    assert budget.room("a", 51, without=None, rank=first) is None


def test_public_scope_has_no_share() -> None:
    """Public items may take the whole budget."""
    budget = ledger_of(TierLimits(100, 0.5), ("x", "a", 30))
    assert budget.room(PUBLIC, 100, without=None, rank=first) == ("x",)
    assert budget.room(PUBLIC, 101, without=None, rank=first) is None


def test_lower_rank_is_evicted_first() -> None:
    """A lower rank is evicted before an older item; an item without a rank is kept."""
    budget = ledger_of(TierLimits(90), ("pinned", "a", 30), ("late", "a", 30), ("soon", "a", 30))
    ranks = {"pinned": None, "late": 1, "soon": 0}
    assert budget.room("a", 30, without=None, rank=ranks.get) == ("soon",)
    assert budget.room("a", 60, without=None, rank=ranks.get) == ("soon", "late")
    assert budget.room("a", 90, without=None, rank=ranks.get) is None


def test_number_of_items_is_limited() -> None:
    """Small items are evicted too when there are too many, unless one is replaced."""
    budget = ledger_of(TierLimits(90, max_items=2), ("x", "a", 1), ("y", "a", 1))
    assert budget.room("a", 1, without=None, rank=first) == ("x",)
    assert budget.room("a", 1, without="y", rank=first) == ()
    assert ledger_of(TierLimits(90, max_items=0)).room("a", 1, without=None, rank=first) is None


@given(
    limits=st.builds(TierLimits, st.integers(0, 60), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 6)),
    puts=st.lists(st.tuples(SCOPES, st.integers(0, 30), st.sampled_from([None, 0, 1])), max_size=25),
    touched=st.integers(0, 25),
    replace=st.booleans(),
)
def test_eviction_keeps_all_limits(
    limits: TierLimits, puts: list[tuple[str, int, int | None]], touched: int, *, replace: bool
) -> None:
    """Evicting what ``room`` returns keeps all limits; no item is evicted needlessly, and it fails only if it must."""
    budget: LruBudget[int] = LruBudget(limits)
    ranks: dict[int, int | None] = {}
    for number, (scope, n_bytes, rank) in enumerate(puts):
        budget.touch(touched)
        without = next(iter(budget), None) if replace else None
        ranks[number] = rank
        victims = budget.room(scope, n_bytes, without=without, rank=ranks.__getitem__)
        if without is not None:
            budget.drop(without)
        if victims is None:
            for item in [item for item in budget if ranks[item] is not None]:
                budget.drop(item)
            assert budget.free_bytes(scope) < n_bytes or len(budget) >= limits.max_items
            continue
        for count, victim in enumerate(victims):
            assert ranks[victim] is not None
            full = len(budget) + 1 > limits.max_items
            assert budget.free_bytes(scope) < n_bytes or full, f"victim {count} is evicted without need"
            budget.drop(victim)
        assert budget.free_bytes(scope) >= n_bytes
        budget.put(number, scope, n_bytes)
        budget.check_integrity()


def test_integrity_check_detects_an_overfull_budget() -> None:
    """An overfull budget is detected."""
    budget = ledger_of(TierLimits(10), ("x", "a", 11))
    with pytest.raises(AssertionError, match="bytes are wrong"):
        budget.check_integrity()
