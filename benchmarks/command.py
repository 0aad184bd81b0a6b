"""``inferencecenter bench``: measure this daemon, alone or side by side with others."""

from __future__ import annotations

import asyncio
import datetime
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import plot, record, table
from benchmarks.options import (
    Options,
    parse_backend,
    parse_numbers,
    parse_peers,
    parse_restart_by,
    refused,
    resolve,
)
from benchmarks.runner import run_scenario
from benchmarks.scenarios import SCENARIOS, find
from inferencecenter.cli.output import print_json, stderr, stdout
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.nvml import Gpu

if TYPE_CHECKING:
    from benchmarks.results import Report
    from benchmarks.scenario import Scenario

_LIST = "list"


def bench(  # noqa: PLR0913 - one argument an option
    scenario: Annotated[str, typer.Argument(help="What to measure; `list` describes the scenarios.")],
    *,
    model: Annotated[
        Path | None, typer.Option(help="GGUF file.", metavar="FILE", show_default="the bundled one")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="GGUF file of the draft model.", metavar="FILE", show_default=False)
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option(help="GGUF file of the projector.", metavar="FILE", show_default=False)
    ] = None,
    backend: Annotated[str | None, typer.Option(help="llama or echo.", show_default=False)] = None,
    slots: Annotated[int | None, typer.Option(help="Slots of our daemon.", show_default="the scenario's")] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", help="Tokens of context per slot.", show_default="what the turns need")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that decode.", show_default="one per physical core")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(help="Numbers of clients, as 1,4,8.", show_default="the scenario's")
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt; some scenarios take several, as 512,4096.", show_default="the scenario's"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens that each turn generates.", show_default="the scenario's")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", help="Seconds that are measured.", show_default="the scenario's")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(help="Repetitions, the sides alternating.", show_default="the scenario's")
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="Aborts, turns or rounds of each client; kills.", show_default="the scenario's")
    ] = None,
    connections: Annotated[int | None, typer.Option(help="Idle connections.", show_default="5000")] = None,
    sessions: Annotated[int | None, typer.Option(help="Open sessions.", show_default="the scenario's")] = None,
    restart_by: Annotated[
        str | None, typer.Option(help="How `restart` ends the daemon: term or kill.", show_default="term")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another server as NAME=URL; may be repeated.", metavar="NAME=URL", show_default=False),
    ] = None,
    peer_token: Annotated[
        list[str] | None,
        typer.Option(help="Token for a peer.", metavar="NAME=TOKEN", show_default=False),
    ] = None,
    peer_command: Annotated[
        list[str] | None,
        typer.Option(
            help="What starts a peer; {slots}, {n_ctx} and {context} become our daemon's.",
            metavar="NAME=COMMAND",
            show_default=False,
        ),
    ] = None,
    assume_same: Annotated[
        list[str] | None,
        typer.Option(
            help="A fact that a peer does not report, assumed to be equal; may be repeated.",
            metavar="FACT",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write the record there; - is standard output.", metavar="FILE")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw speed against clients there.", metavar="FILE.svg")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running daemon to measure instead of one of our own.", show_default=False)
    ] = None,
    token: Annotated[str | None, typer.Option(help="Token for that daemon.", show_default=False)] = None,
) -> None:
    """Measure speed, alone or side by side with other servers; docs/benchmarks.md explains the scenarios."""
    if scenario == _LIST:
        return _list()
    chosen = find(scenario)
    given = Options(
        model=model,
        draft=draft,
        mmproj=mmproj,
        backend=parse_backend(backend),
        slots=slots,
        n_ctx=n_ctx,
        threads=threads,
        clients=parse_numbers("clients", clients),
        prompt_tokens=parse_numbers("prompt_tokens", prompt_tokens),
        max_tokens=max_tokens,
        duration_s=duration_s,
        repeat=repeat,
        count=count,
        connections=connections,
        sessions=sessions,
        restart_by=parse_restart_by(restart_by),
        peers=parse_peers(peer or (), tokens=peer_token or (), commands=peer_command or ()),
        assume_same=tuple(assume_same) if assume_same else None,
        url=url,
        token=token,
    )
    options = resolve(chosen.name, given, defaults=chosen.defaults, takes=chosen.takes)
    _check_files(chosen, json, plot_file)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        report = asyncio.run(_run(chosen, options))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    printer = stderr if json == "-" else stdout
    printer.print(table.render(report))
    if report.markdown:
        printer.print(report.markdown, markup=False, highlight=False, soft_wrap=True)
    _write(report, options, date=date, json=json, plot_file=plot_file)


class ProgressBar:
    """Shows on standard error how many runs are done and which one is running."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self._expected = 0

    def expect(self, runs: int) -> None:
        """Add runs to the total."""
        self._expected += runs
        self._progress.update(self._task, total=self._expected)

    def begin(self, what: str) -> None:
        """Show the running step."""
        self._progress.update(self._task, description=what)

    def done(self) -> None:
        """Advance by one run."""
        self._progress.advance(self._task)


async def _run(chosen: Scenario, options: Options) -> Report:
    """Run a scenario; SIGTERM cancels it, so that the servers that it started are stopped."""
    task = asyncio.current_task()
    assert task is not None, "must run in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn once a second: the bar shares the cores with the measured servers.
    with Progress(*columns, console=stderr, refresh_per_second=1, transient=True) as progress:
        return await run_scenario(chosen, options, ProgressBar(progress))


def _list() -> None:
    listing = Table("scenario", "what it measures", "defaults")
    for each in SCENARIOS.values():
        defaults = each.defaults
        values = [f"{name}={_shown(getattr(defaults, name))}" for name in sorted(defaults.given())]
        listing.add_row(each.name, each.summary, " ".join(values))
    stdout.print(listing)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_files(chosen: Scenario, json: str | None, plot_file: Path | None) -> None:
    """Check before a long measurement that the results can be written."""
    if plot_file is not None and not chosen.plots:
        raise refused("plot", f"the scenario {chosen.name} does not vary the clients", hint="throughput and burst do.")
    for name, file in (("json", Path(json) if json not in (None, "-") else None), ("plot", plot_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise refused(name, f"{file.absolute().parent} is no directory")


def _write(report: Report, options: Options, *, date: str, json: str | None, plot_file: Path | None) -> None:
    if json is not None:
        found = record.record(report, options, machine=record.this_machine(Gpu().read().name), date=date)
        if json == "-":
            print_json(found)
        else:
            _save(Path(json), record.as_text(found))
    if plot_file is not None:
        _save(plot_file, plot.svg(report))


def _save(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE, f"{file} cannot be written: {error.strerror}"
        ) from error
