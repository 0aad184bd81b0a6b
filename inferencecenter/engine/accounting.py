"""What a step did, in figures for those who measure the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.parking import is_prefix_key
from inferencecenter.engine.scheduler.plan import Copy, Restore
from inferencecenter.ipc.messages import TokenSources, Work

if TYPE_CHECKING:
    from inferencecenter.engine.scheduler.plan import Outcome, Plan


def work_of(plan: Plan, outcome: Outcome, *, step_s: float) -> Work | None:
    """Return what came of a plan that took ``step_s``; ``None`` if there was nothing to do."""
    if plan.empty and not plan.fetches:
        return None
    return Work(
        step_s=step_s,
        rows=sum(len(each.rows) for each in plan.passes if not each.prefill),
        decode_s=outcome.decode_s,
        prefill_tokens=outcome.prefill_tokens,
        prefill_s=outcome.prefill_s,
        fetches=len(plan.fetches),
        sources=_sources(plan, outcome) if plan.admissions else None,
        moves=outcome.move_times,
        drafted=outcome.drafted,
        accepted=sum(map(len, outcome.accepted.values())),
    )


def _sources(plan: Plan, outcome: Outcome) -> TokenSources:
    """Count the tokens of the turns that were admitted by where they were found; what got lost on the way was not."""
    filled = {move.turn_id: move for move in plan.moves if isinstance(move, Restore | Copy)}
    tokens = dict.fromkeys(TokenSources.__struct_fields__, 0)
    for admission in plan.admissions:
        cached = 0 if admission.turn_id in outcome.emptied else admission.cached_tokens
        tokens[_source(filled.get(admission.turn_id))] += cached
        tokens["computed"] += len(admission.prompt) - cached
    return TokenSources(**tokens)


def _source(move: Restore | Copy | None) -> str:
    match move:
        case None:
            return "slot"
        case Copy():
            return "neighbour"
        case Restore(key=key):
            return "prefix" if is_prefix_key(key) else "parked"
