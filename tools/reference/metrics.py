"""The page of metrics, from their declarations."""

from __future__ import annotations

from typing import Final

from inferencecenter.telemetry.metrics import DaemonMetrics
from tools.reference import markdown

_INTRODUCTION: Final = """\
`GET /metrics` returns Prometheus' text format, or OpenMetrics by content negotiation; `server.metrics_access`
controls access. Counters have samples with the suffix `_total`, histograms `_bucket`, `_sum` and `_count`."""


def page() -> str:
    """Return ``docs/metrics.md``."""
    rows = [
        (markdown.code(family.name), family.type, family.documentation) for family in DaemonMetrics().registry.collect()
    ]
    return markdown.page("Metrics", _INTRODUCTION, markdown.table(("name", "type", "meaning"), rows))
