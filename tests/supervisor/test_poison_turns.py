"""Detection of turns that crash engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.supervisor.poison_turns import (
    PROVEN_TOKENS,
    PoisonTurnDetector,
    PoisonTurnStore,
    SuspectedTurns,
    Suspicion,
)

if TYPE_CHECKING:
    from pathlib import Path

NAMES = st.sampled_from("abcde")
NAMED = st.dictionaries(NAMES, st.integers(0, 100), max_size=5)


def test_no_turn_is_isolated_after_one_loss() -> None:
    """An engine may die of anything: its turns are suspected, and run together again."""
    suspects = PoisonTurnDetector()
    assert suspects.lost({"a": 3, "b": 0}) is None
    assert (len(suspects.suspicions), suspects.isolated) == (2, None)


def test_second_suspicion_isolates_and_third_loss_quarantines() -> None:
    """Turns named twice are isolated one by one; the one that is alone when the engine dies is quarantined."""
    suspects = PoisonTurnDetector()
    suspects.lost({"a": 3, "b": 0, "c": 1})
    assert suspects.lost({"a": 5, "b": 2}) is None
    assert suspects.isolated == "a"
    assert not suspects.clears("a", 5 + PROVEN_TOKENS - 1)
    assert suspects.isolated == "a"
    assert suspects.clears("a", 5 + PROVEN_TOKENS)
    assert suspects.isolated == "b"
    assert suspects.lost({"b": 2}) == "b"
    assert suspects.isolated is None
    assert len(suspects.suspicions) == 1


def test_progress_between_losses_clears_a_turn() -> None:
    """This holds for several turns: losses far apart have another cause."""
    suspects = PoisonTurnDetector()
    suspects.lost({"a": 3})
    assert suspects.clears("a", 3 + PROVEN_TOKENS)
    suspects.lost({"a": 30})
    assert suspects.isolated is None


def test_engine_loss_outside_a_step_quarantines_no_turn() -> None:
    """A kill before the isolated turn ran, or between two steps, is no proof."""
    suspects = PoisonTurnDetector()
    for _ in range(2):
        suspects.lost({"a": 0})
    assert suspects.lost({}) is None
    assert suspects.isolated == "a"


def test_second_external_kill_quarantines_the_turn() -> None:
    """The first may be chance, such as an operator killing engines."""
    suspects = PoisonTurnDetector()
    for _ in range(3):
        assert suspects.lost({"a": 0}, from_outside=True) is None
    assert suspects.isolated == "a"
    assert suspects.lost({"a": 0}, from_outside=True) == "a"


def test_ended_turn_is_dropped() -> None:
    """Its end and its suspicion do not matter."""
    suspects = PoisonTurnDetector()
    for _ in range(2):
        suspects.lost({"a": 0, "b": 0})
    suspects.forget("a")
    suspects.forget("unknown")
    assert suspects.isolated == "b"
    assert not suspects.clears("unknown", 1000)


def test_replicas_share_suspicions_and_isolate_their_own_turns() -> None:
    """A turn that moves takes its suspicion along, and is isolated where it is when it is named a second time."""
    shared: dict[str, Suspicion] = {}
    first, second = PoisonTurnDetector(shared), PoisonTurnDetector(shared)
    first.lost({"a": 0}, from_outside=True)
    assert not first.confines("a")
    first.leave("a")
    assert second.join("a")
    assert not second.join("unknown")
    second.lost({"a": 0}, from_outside=True)
    assert (first.isolated, second.isolated) == (None, "a")
    assert second.confines("a")
    second.leave("a")
    assert second.isolated is None
    assert first.join("a")
    assert first.lost({"a": 0}) == "a"
    assert (shared, first.isolated) == ({}, None)


def test_turn_that_may_have_crashed_an_engine_is_confined() -> None:
    """One kill from outside says nothing about its turns; a crash does, and is not forgotten."""
    suspects = PoisonTurnDetector()
    suspects.lost({"killed": 0}, from_outside=True)
    suspects.lost({"crashed": 0})
    suspects.restore("earlier", times=1, n_tokens=0)
    assert [suspects.confines(each) for each in ("killed", "crashed", "earlier", "other")] == [False, True, True, False]


def test_store_keeps_the_isolated_turn_of_another_replica(tmp_path: Path) -> None:
    """It stays until it is suspected no longer."""
    store = PoisonTurnStore(tmp_path / "suspects.json")
    store.put("model", SuspectedTurns({"a": 2}, {"a": 0}, "a"))
    store.put("model", SuspectedTurns({"a": 2, "b": 1}, {"a": 0, "b": 0}))
    assert PoisonTurnStore(tmp_path / "suspects.json").of("model").alone == "a"
    store.put("model", SuspectedTurns({"b": 1}, {"b": 0}))
    assert store.of("model").alone is None


def test_suspects_are_listed() -> None:
    """Each has the number of times it was named; the isolated one is marked."""
    suspects = PoisonTurnDetector()
    suspects.lost({"a": 0, "b": 0})
    suspects.lost({"b": 0})
    assert repr(suspects) == "PoisonTurnDetector({'a': 1, 'b': 2}, isolated=b)"


@given(losses=st.lists(NAMED))
def test_only_the_isolated_turn_is_quarantined(losses: list[dict[str, int]]) -> None:
    """It must be the only one named."""
    suspects = PoisonTurnDetector()
    for named in losses:
        isolated = suspects.isolated
        quarantined = suspects.lost(named)
        assert (quarantined is not None) == (isolated is not None and named.keys() == {isolated})
        assert quarantined in (None, isolated)


@given(losses=st.lists(NAMED, min_size=2), told=st.lists(st.tuples(NAMES, st.integers(0, 200))))
def test_isolation_ends(losses: list[dict[str, int]], told: list[tuple[str, int]]) -> None:
    """The isolated turn stays the same until it is cleared or ends; without suspects all run together."""
    suspects = PoisonTurnDetector()
    for named in losses:
        suspects.lost(named)
    for turn_id, n_tokens in told:
        before = suspects.isolated
        cleared = suspects.clears(turn_id, n_tokens)
        assert suspects.isolated == before or (cleared and turn_id == before)
    while (isolated := suspects.isolated) is not None:
        suspects.forget(isolated)
    assert len(suspects.suspicions) <= 5
