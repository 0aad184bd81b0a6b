"""The log of a session's turns."""

from __future__ import annotations

from inferencecenter.protocol.events import End, Error
from inferencecenter.protocol.values import TurnStats, Usage
from inferencecenter.sessions.history import MAX_FAILURES, MAX_TURN_KEYS, MAX_TURNS, TurnFailure, TurnLog


def end(number: int) -> End:
    """The end of a turn with one token."""
    return End(
        session_id="s",
        seq=number,
        turn_id=f"t{number}",
        finish_reason="stop",
        warnings=(),
        usage=Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=1),
        stats=TurnStats(
            ttft_ms=0, total_ms=0, tokens=1, tps=0, prompt_tokens=2, cached_tokens=1, queue_ms=0, preempted=0
        ),
    )


def test_old_turns_are_dropped_but_counted() -> None:
    """Lists and keys are bounded; the usage is not."""
    turn_log = TurnLog()
    for number in range(1, MAX_TURNS + 11):
        turn_log.record_end(f"k{number}", end(number), n_messages=2 * number)
    assert [turn.turn_id for turn in turn_log.turns][:1] == ["t11"]
    assert len(turn_log.turns) == MAX_TURNS
    assert turn_log.usage.prompt_tokens == 2 * (MAX_TURNS + 10)
    newest = MAX_TURNS + 10
    assert turn_log.find_end(f"k{newest - MAX_TURN_KEYS}") is None
    found = turn_log.find_end(f"k{newest - MAX_TURN_KEYS + 1}")
    assert found is not None
    assert found.turn_id == f"t{newest - MAX_TURN_KEYS + 1}"


def test_no_key_finds_nothing() -> None:
    """Turns without a key are never confused."""
    turn_log = TurnLog()
    turn = turn_log.record_end(None, end(1), n_messages=3)
    assert (turn.turn_id, turn.messages) == ("t1", 3)
    assert turn_log.find_end(None) is None


def test_restored_ends_are_found() -> None:
    """Keys of an earlier daemon are found up to the limit."""
    ends = {f"k{number}": end(number) for number in range(1, MAX_TURN_KEYS + 2)}
    turn_log = TurnLog((), ends)
    assert turn_log.find_end("k1") is None
    assert turn_log.find_end("k2") == ends["k2"]


def test_failures_are_remembered_up_to_a_limit() -> None:
    """Their notes are kept, too; failed turns are not listed."""
    turn_log = TurnLog()
    failure = Error(code="internal", message="no", error="no", session_id="s", turn_id="t", retryable=False)
    for number in range(MAX_FAILURES + 1):
        turn_log.record_failure(f"t{number}", TurnFailure(failure, f"n{number}"))
    assert turn_log.failure("t0") is None
    assert turn_log.failure("t1") == TurnFailure(failure, "n1")
    assert turn_log.turns == ()


def test_rewind_drops_failed_turns() -> None:
    """A failed turn has no position in the history."""
    failure = Error(code="internal", message="no", error="no", session_id="s", turn_id="t2", retryable=False)
    turn_log = TurnLog(failures={"t2": TurnFailure(failure, "")})
    turn_log.record_end(None, end(1), n_messages=2)
    turn_log.rewind("t1")
    assert turn_log.failure("t2") is None
    assert [turn.turn_id for turn in turn_log.turns] == ["t1"]
