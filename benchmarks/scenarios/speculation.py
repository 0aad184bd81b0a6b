"""Gain and cost of speculation, which drafts tokens from earlier text (prompt lookup) or, with `--draft`, by a model.

Two daemons, of which only one drafts tokens, run the same closed loops in turn, as in `throughput`. At temperature 0
small models repeat themselves once their answer should have ended, which is the best case; at 1 their text repeats
itself less. The text of a model with random weights (`--model`) never repeats itself, which is the worst case.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Parameter, Report
from benchmarks.scenario import OWN, Scenario, one_prompt_length, required
from benchmarks.scenarios import throughput

if TYPE_CHECKING:
    from benchmarks.stage import Bench

_WITHOUT_LOOKUP: Final = "without lookup"
_WITHOUT_MODEL: Final = "without draft model"
_TEMPERATURES: Final = (0, 1)


async def run(bench: Bench) -> Report:
    """Measure each number of clients, at each temperature."""
    options = bench.options
    clients = required(options.clients)
    usual = throughput.settings(bench)
    without = _WITHOUT_LOOKUP if options.draft is None else _WITHOUT_MODEL
    settings = replace(usual, lookup=options.draft is None, draft=options.draft)
    points = len(clients) * len(_TEMPERATURES)
    async with bench.stage(settings, points=points, beside={without: usual}) as stage:
        for temperature in _TEMPERATURES:
            for n_clients in clients:
                await stage.measure(
                    Parameter("temperature", temperature),
                    Parameter("clients", n_clients),
                    job=partial(
                        ClosedLoop,
                        clients=n_clients,
                        prompt_tokens=one_prompt_length(options),
                        max_tokens=required(options.max_tokens),
                        duration_s=required(options.duration_s),
                        temperature=temperature,
                    ),
                    answer=Turns,
                    read=throughput.read,
                )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="speculation",
    summary="gain of drafting tokens from earlier text (prompt lookup), or by a model (--draft)",
    run=run,
    defaults=Options(clients=(1, 4), prompt_tokens=(64,), max_tokens=256, duration_s=10.0, repeat=5),
    takes=OWN | {"draft", "clients", "prompt_tokens", "max_tokens", "duration_s"},
)
