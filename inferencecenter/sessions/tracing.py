"""What a turn tells of itself to whoever traces it: names and figures, never what was said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.ipc.messages import TraceStage
    from inferencecenter.sessions.facts import SessionFacts
    from inferencecenter.sessions.records import TurnOrder
    from inferencecenter.sessions.turn import Outcome, Turn

Figures: TypeAlias = "Mapping[str, str | bool | int | float | tuple[str, ...]]"


class TurnTrace(Protocol):
    """The trace of one turn from now to its end. Nothing in it waits or raises."""

    @property
    def wanted(self) -> bool:
        """Whether the turn is traced; if not, nothing need be told of it, and the engine takes no times."""

    def describe(self, figures: Figures) -> None:
        """Say what is asked for."""

    def spent(self, stages: Iterable[TraceStage]) -> None:
        """Take what the engine says of the turn's time."""

    def note(self, event: str, figures: Figures) -> None:
        """Take note of something that happens to the turn now."""

    def end(self, figures: Figures, *, error: str | None) -> None:
        """End the trace now, with the code of the error that the turn failed with, if it did."""


class Tracer(Protocol):
    """Whoever may want to trace turns."""

    def begin(self, traceparent: str | None) -> TurnTrace:
        """Begin the trace of a turn, inside the client's if it named a span of its own. Never blocks, never raises."""


class Untraced:
    """Traces nothing: both a ``Tracer`` and the ``TurnTrace`` of all its turns."""

    wanted = False

    def begin(self, traceparent: str | None) -> TurnTrace:
        """Return itself."""
        return self

    def describe(self, figures: Figures) -> None:
        """Do nothing."""

    def spent(self, stages: Iterable[TraceStage]) -> None:
        """Do nothing."""

    def note(self, event: str, figures: Figures) -> None:
        """Do nothing."""

    def end(self, figures: Figures, *, error: str | None) -> None:
        """Do nothing."""


def trace_turn(tracer: Tracer, facts: SessionFacts, order: TurnOrder, *, said_tokens: int) -> TurnTrace:
    """Begin the trace of a turn; ``said_tokens`` is what an earlier daemon left of its answer.

    Names are those of OpenTelemetry's conventions for generative AI, where these have one.
    """
    trace = tracer.begin(order.request.traceparent)
    if not trace.wanted:
        return trace
    params = order.params
    asked = {
        "gen_ai.operation.name": "chat" if facts.mode == "chat" else "text_completion",
        "gen_ai.provider.name": "inferencecenter",
        "gen_ai.request.model": order.model or facts.model,
        "gen_ai.conversation.id": facts.session_id,
        "gen_ai.response.id": order.turn_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "inferencecenter.client": facts.client_id,
        "inferencecenter.priority": order.rank,
    }
    trace.describe({name: value for name, value in asked.items() if value is not None})
    if said_tokens:
        trace.note("continued", {"inferencecenter.tokens": said_tokens})
    return trace


def end_trace(turn: Turn, outcome: Outcome, *, failed: bool = False) -> None:
    """End the trace of a turn that is over."""
    if not turn.trace.wanted:
        return
    stats = outcome.stats
    answered: Figures = {
        "gen_ai.response.model": turn.order.model,
        "gen_ai.response.finish_reasons": () if failed else (outcome.finish,),
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        "gen_ai.usage.output_tokens": stats.tokens,
        "gen_ai.response.time_to_first_chunk": stats.ttft_ms / 1000,
        "inferencecenter.preempted": stats.preempted,
    }
    turn.trace.end(answered, error=outcome.finish if failed else None)
