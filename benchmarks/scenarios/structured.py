"""The cost of answers that a JSON schema constrains.

The same closed loops as in `throughput` run on one daemon, with a JSON schema and without. Random weights (`--model`)
hardly ever follow a schema by themselves, so the mask decides, and with a vocabulary of real size it has its full size.
The schema requires more records than an answer has tokens, so answers of both sides end at the same length. Its strings
are bounded, else random weights would hardly ever leave the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from benchmarks import protocols
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report
from benchmarks.scenario import OWN, Scenario, one_prompt_length, required
from benchmarks.scenarios import throughput

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured
    from benchmarks.target import TargetSpec

_RECORD: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_known": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
    },
    "required": ["name", "kind", "age", "is_known", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Constrained:
    """The figures of a closed loop, and the length of its answers, which must be the same on both sides."""

    loop: throughput.Throughput
    tokens_per_turn: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (*self.loop.metrics(), Metric("tokens a turn", "", self.tokens_per_turn))


def read(measured: Measured[Turns]) -> Constrained:
    """Return the figures of a closed loop; the warm-up turns, which are shorter, do not count towards the length."""
    turns = [turn for turns in measured.answer.clients for turn in turns[throughput.WARM_UP_TURNS :]]
    return Constrained(throughput.read(measured), sum(turn.tokens for turn in turns) / len(turns))


def schema(max_tokens: int) -> str:
    """Return a JSON schema whose answers have more tokens than that: each record takes at least one."""
    return orjson.dumps({"type": "array", "items": _RECORD, "minItems": max_tokens}).decode()


async def run(bench: Bench) -> Report:
    """Measure each number of clients."""
    options = bench.options
    wanted = schema(required(options.max_tokens))

    def constrained(spec: TargetSpec) -> TargetSpec:
        return replace(spec, json_schema=wanted)

    sides = {"with a schema": constrained, "without": protocols.as_usual}
    points = len(required(options.clients))
    async with bench.stage(throughput.settings(bench), points=points, protocols=sides) as stage:
        for n_clients in required(options.clients):
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(
                    ClosedLoop,
                    clients=n_clients,
                    prompt_tokens=one_prompt_length(options),
                    max_tokens=required(options.max_tokens),
                    duration_s=required(options.duration_s),
                ),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="structured",
    summary="answers constrained by a JSON schema, against free ones: tokens a second",
    run=run,
    defaults=Options(clients=(8,), prompt_tokens=(32,), max_tokens=128, duration_s=10.0, repeat=5),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
