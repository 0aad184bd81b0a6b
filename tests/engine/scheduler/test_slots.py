"""The slot table."""

from __future__ import annotations

import pytest

from inferencecenter.engine.scheduler.state import EngineRequest, SlotTable


def request(turn: str, *, session: str, client: str = "x") -> EngineRequest:
    """Return a turn of a session."""
    return EngineRequest(
        turn_id=turn, session_id=session, client_id=client, priority=0, arrival=1, submitted_s=0.0, tokens=[1]
    )


@pytest.fixture
def table() -> SlotTable:
    """Three slots; session a runs in 0, session b's tokens are idle in 1, 2 is empty."""
    table = SlotTable(3)
    table.assign(table[0], request("t1", session="a"), keep_tokens=0)
    table[0].tokens += [1, 2, 3]
    table.assign(table[1], request("t2", session="b"), keep_tokens=0)
    table[1].tokens += [4, 5]
    table.free(table[1], now=7.0)
    table.check_integrity(n_ctx=8)
    return table


def test_session_keeps_its_slot_after_its_turn(table: SlotTable) -> None:
    """An idle slot keeps its session's tokens and its time of use."""
    slot = table.of_session("b")
    assert slot is table[1]
    assert (slot.busy, slot.empty, slot.tokens, slot.used_s) == (False, False, [4, 5], 7.0)


def test_slot_without_tokens_has_no_owner(table: SlotTable) -> None:
    """A turn that ended before its first decode leaves an empty slot."""
    table.assign(table[2], request("t3", session="c"), keep_tokens=0)
    table.free(table[2], now=8.0)
    assert table[2].empty
    assert table.of_session("c") is None


def test_turn_keeps_its_matching_prefix(table: SlotTable) -> None:
    """The other tokens are removed."""
    table.assign(table[1], request("t4", session="b"), keep_tokens=1)
    assert table[1].tokens == [4]


def test_slot_keeps_tokens_of_one_client_only(table: SlotTable) -> None:
    """Keeping tokens for another client than their owner is refused; other sessions of the owner may use them."""
    with pytest.raises(ValueError, match="of client x, not of y"):
        table.assign(table[1], request("t4", session="c", client="y"), keep_tokens=1)
    table.assign(table[1], request("t4", session="c"), keep_tokens=1)
    assert table.of_session("b") is None
    assert table.of_session("c") is table[1]


def test_session_has_one_slot(table: SlotTable) -> None:
    """A turn whose session holds a slot gets no other."""
    with pytest.raises(ValueError, match="session b has a slot already"):
        table.assign(table[2], request("t4", session="b"), keep_tokens=0)


def test_busy_slot_is_not_reused(table: SlotTable) -> None:
    """A running turn's slot can be neither replaced nor discarded."""
    with pytest.raises(ValueError, match="runs turn t1"):
        table.assign(table[0], request("t4", session="c"), keep_tokens=0)
    with pytest.raises(ValueError, match="runs turn t1"):
        table.forget(table[0])


def test_discard_empties_a_slot(table: SlotTable) -> None:
    """A closed session's slot is free."""
    table.forget(table[1])
    assert table[1].empty
    assert not table[1].tokens


def test_swapping_moves_sessions_and_keeps_indexes(table: SlotTable) -> None:
    """Two slots exchange owners and tokens; indexes stay in order."""
    table.swap(0, 2)
    assert [slot.session_id for slot in table] == [None, "b", "a"]
    assert table.of_session("a") is table[2]
    assert table[2].tokens == [1, 2, 3]
    table.check_integrity(n_ctx=8)


def test_table_repr_is_short(table: SlotTable) -> None:
    """It has the session, whether it runs, and the number of tokens."""
    assert repr(table) == "SlotTable(a*:3 b:2 -:0)"


def test_inconsistent_table_is_detected(table: SlotTable) -> None:
    """A slot with too many tokens, tokens without an owner, and two slots of one session are errors."""
    with pytest.raises(AssertionError, match="more than 2"):
        table.check_integrity(n_ctx=2)
    table[2].tokens.append(1)
    with pytest.raises(AssertionError, match="not owned"):
        table.check_integrity(n_ctx=8)
    table[2].session_id = "a"
    with pytest.raises(AssertionError, match="two slots"):
        table.check_integrity(n_ctx=8)
