"""The description of a scenario, and options that scenarios share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from benchmarks.jobs import TurnSize
from benchmarks.options import refused
from benchmarks.results import Report

if TYPE_CHECKING:
    from benchmarks.options import Options
    from benchmarks.results import Point, Side
    from benchmarks.stage import Bench, Stage

T = TypeVar("T")

OWN: Final = frozenset({"model", "backend", "slots", "n_ctx", "threads", "repeat"})
"""Options of every scenario that starts our daemon with a model."""
COMPARABLE: Final = OWN | {"peers", "assume_same", "url", "token"}
"""Options of every scenario that runs the same work on other servers too."""
WARM_UP: Final = TurnSize(prompt_tokens=16, max_tokens=8)
"""A turn of each client before what is measured."""
_CONTEXT_STEP: Final = 256
_SPARE_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Scenario:
    """One benchmark.

    Attributes:
        name: As it is called on the command line.
        summary: What it measures, in a line.
        run: Measures it.
        defaults: Values of the options that were not given.
        takes: Names of the options that it obeys; others are refused.
        plots: Whether it varies the number of clients, so that a plot can be drawn.
    """

    name: str
    summary: str
    run: Callable[[Bench], Awaitable[Report]]
    defaults: Options
    takes: frozenset[str]
    plots: bool = False


def required(value: T | None) -> T:
    assert value is not None, "the scenario's defaults have a value for each option that it reads"
    return value


def one_prompt_length(options: Options) -> int:
    """Return the prompt's length in a scenario that does not vary it.

    Raises:
        InferenceCenterError: ``invalid_request`` for more than one.
    """
    lengths = required(options.prompt_tokens)
    if len(lengths) != 1:
        raise refused(
            "prompt_tokens",
            "this scenario takes one length",
            hint="`context`, `restart`, `shared-prefix` and `sparse` take several.",
        )
    return lengths[0]


def context_tokens(tokens: int) -> int:
    """Return a context size for a turn of this many tokens and the texts with which a target probes the tokenizer."""
    return -(-(tokens + _SPARE_TOKENS) // _CONTEXT_STEP) * _CONTEXT_STEP


async def matched(
    name: str, bench: Bench, *, turn_tokens: int, measure: Callable[[Stage, Options], Awaitable[None]]
) -> Report:
    """Measure each number of clients on servers that have as many slots, and return the report.

    With ``--slots`` or ``--url`` the number of slots is given, and the same servers serve all points.
    """
    options = bench.options
    clients, n_ctx = required(options.clients), context_tokens(turn_tokens)
    if options.slots is not None or options.url is not None:
        async with bench.stage(bench.settings(slots=max(clients), n_ctx=n_ctx), points=len(clients)) as stage:
            await measure(stage, options)
            return Report(name, stage.sides, tuple(stage.points))
    points: list[Point] = []
    sides: tuple[Side, ...] = ()
    for n_clients in clients:
        async with bench.stage(bench.settings(slots=n_clients, n_ctx=n_ctx), points=1) as stage:
            await measure(stage, replace(options, clients=(n_clients,)))
            points += [replace(point, sides=stage.sides) for point in stage.points]
            sides = sides or stage.sides
    return Report(name, sides, tuple(points))
