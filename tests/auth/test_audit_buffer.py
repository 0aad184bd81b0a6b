"""The buffer of audit entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth.audit import MAX_BUFFERED, AuditBatch, AuditBuffer, AuditEntry, AuditEvent, EventCount

ADA = AuditEntry(AuditEvent.LOGIN, client_id="ada", address="192.0.2.1")
BOB = AuditEntry(AuditEvent.LOGIN, client_id="bob", address="192.0.2.1")


def test_equal_entries_are_merged() -> None:
    """They become one tally with first and last time; different entries stay separate."""
    buffer = AuditBuffer()
    for at in (1.0, 2.0, 5.0):
        buffer.add(ADA, at=at)
    buffer.add(BOB, at=3.0)
    assert buffer.drain().tallies == {ADA: EventCount(1.0, 5.0, 3), BOB: EventCount(3.0, 3.0)}


def test_take_empties_the_buffer() -> None:
    """An empty buffer is false."""
    buffer = AuditBuffer()
    buffer.add_use("t", at=1.0)
    taken = buffer.drain()
    assert taken
    assert taken.last_uses == {"t": 1.0}
    assert buffer.drain() == AuditBatch()
    assert not buffer.drain()


def test_requeued_tallies_are_merged_with_newer_ones() -> None:
    """The later use of a token stays the last."""
    buffer = AuditBuffer()
    buffer.add_use("t", at=1.0)
    buffer.add_use("u", at=1.0)
    buffer.add(ADA, at=1.0)
    taken = buffer.drain()
    buffer.add_use("t", at=9.0)
    buffer.add(ADA, at=9.0)
    buffer.requeue(taken)
    assert buffer.drain() == AuditBatch({ADA: EventCount(1.0, 9.0, 2)}, {"t": 9.0, "u": 1.0})


def test_distinct_entries_are_bounded() -> None:
    """Beyond the bound only kind and number are kept, also for requeued entries; known ones are still counted."""
    buffer = AuditBuffer()
    for number in range(MAX_BUFFERED + 5):
        buffer.add(AuditEntry(AuditEvent.LOGIN_REFUSED, client_id=str(number)), at=1.0)
    buffer.add(AuditEntry(AuditEvent.LOGIN_REFUSED, client_id="0"), at=2.0)
    taken = buffer.drain()
    assert len(taken.tallies) == MAX_BUFFERED + 1
    assert taken.tallies[AuditEntry(AuditEvent.LOGIN_REFUSED)].times == 5
    assert taken.tallies[AuditEntry(AuditEvent.LOGIN_REFUSED, client_id="0")].times == 2
    for number in range(MAX_BUFFERED):
        buffer.add(AuditEntry(AuditEvent.LOGIN, client_id=str(number)), at=3.0)
    buffer.requeue(taken)
    assert len(buffer.drain().tallies) == MAX_BUFFERED + 1


@given(st.lists(st.sampled_from([ADA, BOB, "take", "put back"]), max_size=40))
def test_no_entry_is_lost_or_counted_twice(steps: list[AuditEntry | str]) -> None:
    """Tallies add up to the entries for any sequence of takes and requeues."""
    buffer, held, notes = AuditBuffer(), AuditBatch(), 0
    for at, step in enumerate(steps):
        if isinstance(step, AuditEntry):
            buffer.add(step, at=at)
            notes += 1
        else:
            buffer.requeue(held)
            held = buffer.drain() if step == "take" else AuditBatch()
    buffer.requeue(held)
    assert sum(tally.times for tally in buffer.drain().tallies.values()) == notes
