"""The accounting of a step."""

from __future__ import annotations

import pytest

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.executor import stats_of
from inferencecenter.engine.scheduler.placement import prefix_key
from inferencecenter.engine.scheduler.plan import (
    Admission,
    CopySlot,
    DecodePass,
    DecodeRow,
    KvMove,
    RestoreSlot,
    StepOutcome,
    StepPlan,
    TruncateSlot,
)
from inferencecenter.ipc.messages import MoveTime, StepStats, TokenSources

PROMPT = tuple(range(10))


def rows(*turn_ids: str, prefill: bool) -> DecodePass:
    """Return a pass of one token for each turn."""
    return DecodePass(
        tuple(DecodeRow(turn_id, Chunk(i, 0, [1], sample=True)) for i, turn_id in enumerate(turn_ids)), prefill
    )


def restore(key: str) -> RestoreSlot:
    """Return a move of four tokens into the slot of turn ``t``."""
    return RestoreSlot(0, key, 4, b"", "t")


def test_empty_plan_is_not_counted() -> None:
    """A step without work reports nothing."""
    assert stats_of(StepPlan(reasons=("no turn",)), StepOutcome(), step_s=1.0) is None


def test_fetch_alone_is_counted() -> None:
    """A step that only fetches from disk is reported."""
    assert stats_of(StepPlan(fetches=("s", "t")), StepOutcome(), step_s=0.5) == StepStats(0.5, fetches=2)


def test_decode_and_prefill_are_separate() -> None:
    """Rows are those of the decode pass; prefilled tokens and times are as the executor measured them."""
    plan = StepPlan(passes=(rows("a", "b", prefill=False), rows("c", prefill=True)))
    outcome = StepOutcome(prefill_tokens=7, prefill_s=0.5, decode_s=0.25, move_times=[MoveTime("park", 0.125)])
    assert stats_of(plan, outcome, step_s=1.0) == StepStats(
        1.0, rows=2, decode_s=0.25, prefill_tokens=7, prefill_s=0.5, moves=(MoveTime("park", 0.125),)
    )


@pytest.mark.parametrize(
    ("moves", "sources"),
    [
        ((), TokenSources(slot=4, computed=6)),
        ((TruncateSlot(0, 4, "t"),), TokenSources(slot=4, computed=6)),
        ((CopySlot(1, 0, 4, "t"),), TokenSources(neighbour=4, computed=6)),  # codespell:ignore neighbour
        ((restore("session"), TruncateSlot(0, 4, "t")), TokenSources(parked=4, computed=6)),
        ((restore(prefix_key("", [1])),), TokenSources(prefix=4, computed=6)),
        ((RestoreSlot(1, "other", 4, b"", "u"),), TokenSources(slot=4, computed=6)),
    ],
)
def test_prompt_tokens_are_counted_by_source(moves: tuple[KvMove, ...], sources: TokenSources) -> None:
    """Each is counted once: by its source in the plan, and the rest as computed."""
    plan = StepPlan(moves=moves, admissions=(Admission("t", PROMPT, 4),), passes=(rows("t", prefill=True),))
    work = stats_of(plan, StepOutcome(), step_s=1.0)
    assert work is not None
    assert work.sources == sources


def test_failed_restore_counts_as_computed() -> None:
    """A turn whose restore failed prefills its whole prompt."""
    plan = StepPlan(moves=(restore("session"),), admissions=(Admission("t", PROMPT, 4),))
    work = stats_of(plan, StepOutcome(emptied={"t"}), step_s=1.0)
    assert work is not None
    assert work.sources == TokenSources(computed=10)


def test_resumed_turn_is_not_counted_again() -> None:
    """It has moves and no admission."""
    work = stats_of(StepPlan(moves=(restore("session"),)), StepOutcome(), step_s=1.0)
    assert work is not None
    assert work.sources is None
