"""Tests of what logins leave to be written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth.audit import MAX_NOTED, AuditBatch, AuditBuffer, AuditEntry, AuditEvent, EventCount

ADA = AuditEntry(AuditEvent.LOGIN, client_id="ada", address="192.0.2.1")
BOB = AuditEntry(AuditEvent.LOGIN, client_id="bob", address="192.0.2.1")


def test_the_same_is_added_up() -> None:
    """Equal entries are one tally from the first to the last; different ones are their own."""
    noted = AuditBuffer()
    for at in (1.0, 2.0, 5.0):
        noted.add(ADA, at=at)
    noted.add(BOB, at=3.0)
    assert noted.drain().tallies == {ADA: EventCount(1.0, 5.0, 3), BOB: EventCount(3.0, 3.0)}


def test_what_was_taken_is_noted_no_longer() -> None:
    """Taking leaves nothing, and nothing is false."""
    noted = AuditBuffer()
    noted.add_use("t", at=1.0)
    taken = noted.drain()
    assert taken
    assert taken.last_uses == {"t": 1.0}
    assert noted.drain() == AuditBatch()
    assert not noted.drain()


def test_what_is_put_back_does_not_hide_what_came_since() -> None:
    """Tallies go together, and the later use of a token stays the last."""
    noted = AuditBuffer()
    noted.add_use("t", at=1.0)
    noted.add_use("u", at=1.0)
    noted.add(ADA, at=1.0)
    taken = noted.drain()
    noted.add_use("t", at=9.0)
    noted.add(ADA, at=9.0)
    noted.requeue(taken)
    assert noted.drain() == AuditBatch({ADA: EventCount(1.0, 9.0, 2)}, {"t": 9.0, "u": 1.0})


def test_a_flood_of_different_entries_is_counted_and_not_kept() -> None:
    """Beyond the bound only kind and number are known, also when what was taken comes back; known ones go on."""
    noted = AuditBuffer()
    for number in range(MAX_NOTED + 5):
        noted.add(AuditEntry(AuditEvent.LOGIN_REFUSED, client_id=str(number)), at=1.0)
    noted.add(AuditEntry(AuditEvent.LOGIN_REFUSED, client_id="0"), at=2.0)
    taken = noted.drain()
    assert len(taken.tallies) == MAX_NOTED + 1
    assert taken.tallies[AuditEntry(AuditEvent.LOGIN_REFUSED)].times == 5
    assert taken.tallies[AuditEntry(AuditEvent.LOGIN_REFUSED, client_id="0")].times == 2
    for number in range(MAX_NOTED):
        noted.add(AuditEntry(AuditEvent.LOGIN, client_id=str(number)), at=3.0)
    noted.requeue(taken)
    assert len(noted.drain().tallies) == MAX_NOTED + 1


@given(st.lists(st.sampled_from([ADA, BOB, "take", "put back"]), max_size=40))
def test_nothing_is_lost_or_counted_twice(steps: list[AuditEntry | str]) -> None:
    """Whatever is taken and put back in between, the tallies add up to the notes."""
    noted, held, notes = AuditBuffer(), AuditBatch(), 0
    for at, step in enumerate(steps):
        if isinstance(step, AuditEntry):
            noted.add(step, at=at)
            notes += 1
        else:
            noted.requeue(held)
            held = noted.drain() if step == "take" else AuditBatch()
    noted.requeue(held)
    assert sum(tally.times for tally in noted.drain().tallies.values()) == notes
