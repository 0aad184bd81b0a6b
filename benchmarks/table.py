"""A report as text for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.results import rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from benchmarks.results import Report, Row, Side
    from benchmarks.stats import Ratio, Spread

_GOOD: Final = "green"
_BAD: Final = "red"


def render(report: Report) -> RenderableType:
    """Return the sides' facts, the table, and the reasons of missing ratios."""
    return Group(_facts(report), _table(report), *_remarks(report))


def _facts(report: Report) -> Table:
    table = Table("", *(side.facts.name for side in report.sides), title="what runs", title_justify="left")
    for name, label in (
        ("kind", "kind"),
        ("model", "model"),
        ("model_bytes", "bytes of weights"),
        ("n_params", "parameters"),
        ("library", "llama.cpp"),
        ("threads", "threads"),
        ("slots", "slots"),
        ("n_ctx", "context of a slot"),
    ):
        table.add_row(label, *(_facts_of(report, index, name) for index in range(len(report.sides))))
    return table


def _facts_of(report: Report, index: int, name: str) -> str:
    """Return a fact of a side, in the order of the points where it varies among them."""
    found = [_fact(getattr(report.sides_of(point)[index].facts, name)) for point in report.points]
    return ", ".join(dict.fromkeys(found))


def _table(report: Report) -> Table:
    table = Table(title=f"{report.scenario}: median (least to greatest)", title_justify="left")
    table.add_column("")
    table.add_column("metric")
    table.add_column("unit")
    for side in report.sides:
        table.add_column(side.facts.name, justify="right")
    for index in _compared(report):
        table.add_column(f"ours / {report.sides[index].facts.name}", justify="right")
    for _, group in groupby(rows(report), key=lambda row: row.parameters):
        for index, row in enumerate(group):
            table.add_row(_point(row) if index == 0 else "", row.name, row.unit, *_cells(row, _compared(report)))
        table.add_section()
    return table


def _compared(report: Report) -> list[int]:
    """Return the indices of the sides that have a ratio at some point."""
    return [
        index
        for index in range(1, len(report.sides))
        if any(_is_fair(report.sides_of(point)[index]) for point in report.points)
    ]


def _is_fair(side: Side) -> bool:
    return side.comparison is not None and side.comparison.fair


def _cells(row: Row, compared: list[int]) -> list[Text]:
    return [_spread(found) for found in row.spreads] + [_ratio(row.ratios[index - 1], row) for index in compared]


def _point(row: Row) -> str:
    return "\n".join(f"{parameter.value} {parameter.name}" for parameter in row.parameters)


def _spread(found: Spread | None) -> Text:
    if found is None:
        return Text("")
    if found.least == found.greatest:
        return Text(_number(found.median))
    return Text.assemble(_number(found.median), (f" ({_number(found.least)} to {_number(found.greatest)})", "dim"))


def _ratio(ratio: Ratio | None, row: Row) -> Text:
    if ratio is None:
        return Text("")
    # Colored only where the whole interval lies on one side: anything else is noise.
    better = ratio.low > 1 if row.better == "higher" else ratio.high < 1
    worse = ratio.high < 1 if row.better == "higher" else ratio.low > 1
    style = _GOOD if better else _BAD if worse else ""
    return Text.assemble((f"{ratio.median:.3f}", style), (f" [{ratio.low:.3f}, {ratio.high:.3f}]", "dim"))


def _remarks(report: Report) -> list[Text]:
    remarks = []
    for index in range(1, len(report.sides)):
        comparisons = [report.sides_of(point)[index].comparison for point in report.points]
        name = report.sides[index].facts.name
        if refusals := dict.fromkeys(text for each in comparisons if each is not None for text in each.refusals):
            remarks.append(Text(f"No ratio to {name}, because", style="bold"))
            remarks += [Text(f"  {refusal}") for refusal in refusals]
        if assumed := dict.fromkeys(fact for each in comparisons if each is not None for fact in each.assumed):
            remarks.append(Text(f"Assumed, not known, to be the same at {name}: {', '.join(assumed)}"))
    ratios = [ratio for row in rows(report) for ratio in row.ratios if ratio is not None]
    if ratios:
        remarks.append(
            Text(f"A ratio's interval holds the true median with a probability of {ratios[0].coverage:.1%}.")
        )
    return remarks


def _fact(value: int | str | None) -> str:
    return "unknown" if value in (None, "") else str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
