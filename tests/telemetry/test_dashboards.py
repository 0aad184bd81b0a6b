"""Alerts and the dashboard query only existing metrics, labels and values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml

from inferencecenter.core.errors import ERRORS, ErrorCode
from tests.telemetry.all_series import busy_metrics, samples_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.telemetry.all_series import SeriesByName

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config/prometheus/rules.yml"
SCRAPING = ROOT / "config/prometheus/prometheus.yml"
DASHBOARD = ROOT / "config/grafana/inferencecenter.json"
ALERT_TESTS = Path(__file__).parent / "alerts.yml"
# Replaced by Prometheus and Grafana.
OF_PROMETHEUS = {"up": {"job": {"inferencecenter"}, "instance": {"box:3000"}}}
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}
FREE = {"model", "gpu", "client", "node"}


@dataclass(frozen=True)
class Query:
    """An expression, its location, and the labels that its texts use."""

    place: str
    expr: str
    labels: frozenset[str]

    @property
    def parsed(self) -> Any:
        """The expression with its variables replaced, as PromQL."""
        text = self.expr
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        return promql_parser.parse(text)


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> Any:
    """The dashboard."""
    return json.loads(DASHBOARD.read_text())


def queries() -> Iterator[Query]:
    """All queries of alerts and dashboard."""
    for rule in alerts():
        texts = " ".join(rule["annotations"].values())
        yield Query(rule["alert"], rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", texts)))
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            labels = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Query(f"{panel['title']} {target['refId']}", target["expr"], labels)
    for note in dashboard()["annotations"]["list"]:
        yield Query(note["name"], note["expr"], frozenset(re.findall(r"\{\{(\w+)\}\}", note["titleFormat"])))


QUERIES = list(queries())


@pytest.fixture(scope="module")
def known_series() -> SeriesByName:
    """Every series that a daemon can show."""
    return samples_of(busy_metrics()) | OF_PROMETHEUS


def nodes(expr: Any, kind: type[Any]) -> list[Any]:
    """Return all parts of an expression that are of a type."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, kind):
            found.append(node)
        return True

    promql_parser.walk(expr, pre_visit=visit)
    return found


def selectors(expr: Any) -> list[Any]:
    """Return the selectors of an expression, range selectors included."""
    return nodes(expr, promql_parser.VectorSelector)


def outcome_labels(node: Any, known_series: SeriesByName) -> set[str]:
    """Return the labels of an expression's result, as far as known."""
    match node:
        case promql_parser.VectorSelector():
            found = set(known_series[str(node.name)])
        case promql_parser.AggregateExpr():
            kept = set(node.modifier.labels if node.modifier else ())
            found = outcome_labels(node.expr, known_series)
            found = found if str(node.op) == "topk" else found & kept
        case promql_parser.BinaryExpr():
            found = outcome_labels(node.lhs, known_series) or outcome_labels(node.rhs, known_series)
        case promql_parser.Call():
            found = set().union(*(outcome_labels(each, known_series) for each in node.args))
            found -= {"le"} if node.func.name == "histogram_quantile" else set()
        case promql_parser.MatrixSelector():
            found = outcome_labels(node.vector_selector, known_series)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            found = outcome_labels(node.expr, known_series)
        case _:
            found = set()
    return found


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.place)
def test_queries_use_existing_series(query: Query, known_series: SeriesByName) -> None:
    """Each metric, label and compared value exists, and so does each label that a text shows."""
    for selector in selectors(query.parsed):
        assert selector.name in known_series, f"{selector.name} is no metric"
        labels = known_series[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            if matcher.name not in FREE:
                for value in matcher.value.split("|"):
                    assert value in labels[matcher.name], f"{selector.name} has no {matcher.name}={value}"
    assert query.labels <= outcome_labels(query.parsed, known_series)


def test_query_check_can_fail(known_series: SeriesByName) -> None:
    """It fails for a wrong name, label, value or text."""
    for expr, label in (
        ("inferencecenter_nothing", "model"),
        ('inferencecenter_slots{state="x"}', "model"),
        ('inferencecenter_engine_state{state="x"}', "model"),
        ("sum(inferencecenter_slots)", "model"),
    ):
        with pytest.raises(AssertionError):
            test_queries_use_existing_series(Query("planned", expr, frozenset({label})), known_series)


def test_every_metric_is_queried(known_series: SeriesByName) -> None:
    """Metrics without a panel or an alert are listed by name."""
    names = {selector.name for query in QUERIES for selector in selectors(query.parsed)}
    unseen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known_series} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in names
    }
    assert unseen == {
        "inferencecenter_build_info",
        "inferencecenter_records_set_aside_total",
        "inferencecenter_client_turns_total",
        "inferencecenter_gpu_info",
        "inferencecenter_model_info",
    }


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.place)
def test_counters_are_queried_as_rates(query: Query) -> None:
    """A bare counter only shows how long the daemon has been up."""
    ranges = [matrix.vector_selector.name for matrix in nodes(query.parsed, promql_parser.MatrixSelector)]
    bare = [selector.name for selector in selectors(query.parsed) if selector.name.endswith("_total")]
    assert sorted(bare) == sorted(name for name in ranges if name.endswith("_total"))


def test_counter_check_can_fail() -> None:
    """A bare counter is found."""
    with pytest.raises(AssertionError):
        test_counters_are_queried_as_rates(Query("planned", "sum(inferencecenter_errors_total)", frozenset()))


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alerts_are_documented(alert: dict[str, Any]) -> None:
    """Each has sentences, a severity, and a row in the operator's guide."""
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description"}
    assert all(text.endswith(".") for text in alert["annotations"].values())
    assert f"| `{alert['alert']}` |" in (ROOT / "docs/operations.md").read_text()


def test_failure_codes_are_server_errors() -> None:
    """The alert and the dashboard have the codes of HTTP's 5xx that a turn can end with."""
    (alert,) = (rule for rule in alerts() if rule["alert"] == "InferenceCenterTurnsFail")
    (codes,) = set(re.findall(r'finish=~"([^"]+)"', alert["expr"] + DASHBOARD.read_text().replace('\\"', '"')))
    assert all(ERRORS[ErrorCode(code)].http_status >= 500 for code in codes.split("|"))


def test_prometheus_loads_the_rules() -> None:
    """Its configuration names them, and the job that the rules query."""
    config = yaml.safe_load(SCRAPING.read_text())
    assert config["rule_files"] == [RULES.name]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["inferencecenter"]


def test_panel_layout() -> None:
    """Nothing overlaps or exceeds the page, and ids are unique."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        cells |= taken


def test_panels_use_the_variables() -> None:
    """No panel names a data source, and queries of models are of the selected ones."""
    board = dashboard()
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "model"]
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(RULES)),
        ("check", "config", "--syntax-only", str(SCRAPING)),
        ("test", "rules", str(ALERT_TESTS)),
    ],
    ids=["rules", "scraping", "alerts"],
)
def test_promtool_accepts_the_rules(arguments: tuple[str, ...]) -> None:
    """Promtool finds no error in them, and alerts fire exactly when they should."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
