"""The figures of a machine and a model in one row of the table in docs/gpu.md.

It measures the speed that one client gets, and whether the plan was right. A prompt is prefilled in a turn that
generates one token, then the conversation continues with a short turn, as in ``context``. Placement and memory are
those of the plan by which the daemon started its engine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options, refused
from benchmarks.peers.line import open_line, succeeded
from benchmarks.record import this_machine
from benchmarks.results import Report, rows
from benchmarks.scenario import OWN, WARM_UP, Scenario, context_tokens, one_prompt_length, required
from benchmarks.scenarios import context
from inferencecenter.hardware.placement import MIB
from inferencecenter.protocol.values import EnginePlan

if TYPE_CHECKING:
    from benchmarks.daemon_process import RunningDaemon
    from benchmarks.record import Machine
    from benchmarks.stage import Bench

COLUMNS: Final = (
    "machine",
    "device",
    "VRAM MiB",
    "model",
    "layers on it",
    "planned MiB",
    "used MiB",
    "prefill tok/s",
    "decode tok/s",
    "TTFT ms",
)
_FIGURES: Final = ("prefill", "decode only", "TTFT reading p50")
_QUESTION_TOKENS: Final = 16
_UNKNOWN: Final = "?"
_WHOLE_FROM: Final = 100


async def run(bench: Bench) -> Report:
    """Measure one client on one slot, and add the row to the report."""
    options = bench.options
    prompt_tokens, max_tokens = one_prompt_length(options), required(options.max_tokens)
    n_ctx = context_tokens(prompt_tokens + _QUESTION_TOKENS + max_tokens)
    async with bench.stage(bench.settings(slots=1, n_ctx=n_ctx), points=1) as stage:
        await stage.measure(
            job=partial(
                Rounds,
                clients=1,
                rounds=(Round(prompt_tokens, 1), Round(_QUESTION_TOKENS, max_tokens)),
                continues=True,
                warm_up=WARM_UP,
            ),
            answer=Turns,
            read=context.read,
        )
        found = Report(SCENARIO.name, stage.sides, tuple(stage.points))
        plan = await _plan(stage.daemon)
    return replace(found, markdown=row(this_machine(None), plan, found))


def row(machine: Machine, plan: EnginePlan, found: Report) -> str:
    """Return the table's row of Markdown."""
    devices = plan.devices
    planned = [each.weight_bytes + each.kv_bytes + each.compute_bytes + each.context_bytes for each in devices]
    medians = {each.name: each.spreads[0].median for each in rows(found) if each.spreads[0] is not None}
    cells = (
        f"{machine.cpu}, {machine.usable_cores} cores",
        " + ".join(each.name for each in devices) or "none",
        _sum([each.total_bytes // MIB for each in devices]),
        found.sides[0].facts.model,
        f"{plan.n_gpu_layers} of {plan.layers}",
        _sum([n_bytes // MIB for n_bytes in planned]),
        _sum([None if each.used_bytes is None else each.used_bytes // MIB for each in devices]),
        *(_figure(medians[name]) if name in medians else _UNKNOWN for name in _FIGURES),
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:.3g}"


def _sum(numbers: list[int | None]) -> str:
    return " + ".join(_UNKNOWN if number is None else f"{number:,}" for number in numbers) or "0"


async def _plan(daemon: RunningDaemon) -> EnginePlan:
    async with open_line(daemon.spec) as line:
        status = succeeded(await line.request(op="status", type="model"), "status")
    if not (plan := bytes(status.plan)):
        raise refused("model", "the daemon made no plan for it", hint="The echo backend has none.")
    return EnginePlan.model_validate_json(plan)


SCENARIO = Scenario(
    name="report",
    summary="a machine's figures as a row of the table in docs/gpu.md",
    run=run,
    defaults=Options(prompt_tokens=(512,), max_tokens=64, repeat=3),
    takes=OWN | {"prompt_tokens", "max_tokens"},
)
