"""Runs a scenario from beginning to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.generator import start_generator
from benchmarks.stage import Bench

if TYPE_CHECKING:
    from benchmarks.options import Options
    from benchmarks.results import Report
    from benchmarks.scenario import Scenario
    from benchmarks.stage import Progress


async def run_scenario(scenario: Scenario, options: Options, progress: Progress) -> Report:
    """Start what a scenario needs, measure, stop it again, and return what was found.

    Args:
        scenario: What to measure.
        options: As ``options.resolve`` returned them.
        progress: Called with the progress of the run.

    Raises:
        InferenceCenterError: What kept it from being measured.
    """
    async with start_generator() as generator:
        return await scenario.run(Bench(options, generator, progress))
