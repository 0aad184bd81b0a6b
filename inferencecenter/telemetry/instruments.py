"""Counters, gauges and histograms for a single thread, without locks: a sixth of the cost of prometheus_client's own.

The daemon counts on its event loop only, in part for each token of each turn. The exposition format is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric


OTHER: Final = "other"
_PREFIX: Final = "inferencecenter_"
_MAX_CHARS: Final = 64
_UNSHOWN: Final = "\N{REPLACEMENT CHARACTER}"


def label_text(text: str) -> str:
    """Return ``text`` without characters that cannot be displayed or encoded, truncated to 64 characters."""
    return "".join(each if each.isprintable() else _UNSHOWN for each in text[:_MAX_CHARS])


class BoundedLabel:
    """Gives the first ``limit`` names their own label values, and all others ``other``.

    A name keeps its value: a series that changed its meaning would jump, and moving a counter out of ``other`` would
    make that fall.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[str, str] = {}

    def of(self, name: str) -> str:
        found = self._values.get(name)
        if found is not None:
            return found
        if len(self._values) >= self._limit:
            return OTHER
        value = self._values[name] = label_text(name)
        return value


class Count:
    """A counter; its value may also be set from a counter read elsewhere."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Distribution:
    """A histogram's counts by bucket, each including its upper bound, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


_InstrumentT = TypeVar("_InstrumentT", Count, Distribution)


class _Family(Collector, Generic[_InstrumentT]):
    """One instrument per set of label values; without labels there is one from the start."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._instruments: dict[tuple[str, ...], _InstrumentT] = {}
        if not self._labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _InstrumentT:
        """Return the instrument of these label values, in the labels' order."""
        found = self._instruments.get(values)
        if found is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            found = self._instruments[values] = self._new()
        return found

    def clear(self) -> None:
        """Drop all sets of label values."""
        self._instruments.clear()

    def describe(self) -> Iterator[Metric]:
        """Return the family without samples; the registry checks for duplicates with it."""
        yield self._family()

    def _new(self) -> _InstrumentT:
        raise NotImplementedError

    def _family(self) -> Metric:
        raise NotImplementedError


class Counts(_Family[Count]):
    """A Prometheus counter."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = self._family()
        for values, count in self._instruments.items():
            family.add_metric(values, count.value)
        yield family

    def _new(self) -> Count:
        return Count()

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._name, self._documentation, labels=self._labels)


class Gauges(Counts):
    """A Prometheus gauge that is changed by amounts."""

    def _family(self) -> GaugeMetricFamily:  # type: ignore[override]
        return GaugeMetricFamily(self._name, self._documentation, labels=self._labels)


class Histograms(_Family[Distribution]):
    """A Prometheus histogram.

    Args:
        name: Without ``_bucket``, ``_sum`` and ``_count``.
        documentation: The help text.
        labels: The names of its labels.
        bounds: Upper bounds of the buckets, ascending, without infinity.
        registry: The registry that exposes it.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(bounds)
        self._spelled = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        super().__init__(name, documentation, labels, registry=registry)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        for values, each in self._instruments.items():
            buckets = list(zip(self._spelled, accumulate(each.counts), strict=True))
            family.add_metric(values, buckets, each.sum)
        yield family

    def _new(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)


class MetricRegistry(CollectorRegistry):
    """A registry whose metrics have the prefix ``inferencecenter_`` and their labels in the order given."""

    def counter(self, name: str, documentation: str, *labels: str) -> Counts:
        return Counts(_PREFIX + name, documentation, labels, registry=self)

    def gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, documentation, labels, registry=self)

    def histogram(self, name: str, documentation: str, *labels: str, bounds: Sequence[float]) -> Histograms:
        return Histograms(_PREFIX + name, documentation, labels, bounds=bounds, registry=self)
