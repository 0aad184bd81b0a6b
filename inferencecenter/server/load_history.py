"""Load and work of the last 24 hours, by the minute: the history that a newly opened dashboard shows.

Each column is a ring buffer of minutes, so the size is bounded: about 6 KB for a reading and 35 KB for the work of one
client on one model, of which ``MAX_SERIES`` are recorded separately. Readings are means of samples; a turn counts in
the minute in which it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import orjson
import structlog

from inferencecenter.core.errors import ErrorCode
from inferencecenter.core.private_file import write_private
from inferencecenter.core.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from pathlib import Path

    from inferencecenter.protocol.events import Metrics
    from inferencecenter.server.metrics_stream import MetricsSampler
    from inferencecenter.sessions.observability import TurnRecord

HISTORY_FILE: Final = "load_history.json"
STEP_S: Final = 60
STEPS: Final = 24 * 60
SAMPLE_EVERY_S: Final = 10.0
"""The window of tokens per second, so that the samples of a minute cover it."""
MAX_SERIES: Final = 64
MOST_SHOWN: Final = 8
_MAX_SET_BACK: Final = 5
"""Minutes by which the clock may be set back; beyond that the history is cleared."""
_VERSION: Final = 1

Owner: TypeAlias = tuple[str | None, str | None]
"""Model and client; both ``None`` for the work beyond ``MAX_SERIES``."""
Column: TypeAlias = "tuple[float | None, ...]"
GroupBy: TypeAlias = Literal["model", "client"]

READINGS: Final[Mapping[str, Callable[[Metrics], float | None]]] = {
    "running": lambda metrics: metrics.inference.slots_used,
    "waiting": lambda metrics: metrics.inference.queue_depth,
    "sessions": lambda metrics: metrics.inference.total_sessions,
    "parked_sessions": lambda metrics: metrics.inference.parked_sessions,
    "tokens_per_s": lambda metrics: metrics.inference.tokens_per_s,
    "vram_used_mb": lambda metrics: metrics.gpu.vram_used_mb,
    "gpu_temp": lambda metrics: metrics.gpu.temp,
    "rss_mb": lambda metrics: metrics.engine.rss_mb,
}
_COUNTS: Final = ("turns", "failed_turns", "prompt_tokens", "completion_tokens", "first_tokens", "ttft_ms")
"""Of ended turns; ``ttft_ms`` is the sum over those with a first token."""
_ERRORS: Final = frozenset(code.value for code in ErrorCode)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Part of the history in steps of equal length; ``None`` where there is no reading.

    Attributes:
        start_s: Start in Unix seconds.
        columns: Readings of the daemon.
        series: Work by name of model or client, most tokens first; ``None`` is the rest.
    """

    start_s: float
    columns: Mapping[str, Column]
    series: tuple[tuple[str | None, Mapping[str, Column]], ...]


class LoadHistory:
    """The ring buffer. It is written on the event loop; ``window`` may run concurrently in a thread.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest = self._step()
        self._readings = {name: _unread() for name in READINGS}
        self._samples: dict[str, tuple[float, int]] = {}
        self._series: dict[Owner, dict[str, array[float]]] = {}
        self._last_work: dict[Owner, int] = {}

    def sample(self, metrics: Metrics) -> None:
        """Record the current readings."""
        slot = self._advance()
        for name, read in READINGS.items():
            value = read(metrics)
            if value is not None:
                total, n_samples = self._samples.get(name, (0.0, 0))
                self._samples[name] = (total + value, n_samples + 1)
                self._readings[name][slot] = (total + value) / (n_samples + 1)

    def turn_ended(self, record: TurnRecord) -> None:
        """Count a turn; implements ``TurnObserver``."""
        slot = self._advance()
        counts, stats = self._counts_of((record.model, record.client_id)), record.stats
        counts["turns"][slot] += 1
        counts["failed_turns"][slot] += record.finish in _ERRORS
        counts["prompt_tokens"][slot] += stats.prompt_tokens
        counts["completion_tokens"][slot] += stats.tokens
        if stats.ttft_ms > 0:
            counts["first_tokens"][slot] += 1
            counts["ttft_ms"][slot] += stats.ttft_ms

    def forget(self, client_id: str) -> None:
        """Count the work of a deleted client to the rest."""
        for owner in [each for each in self._series if each[1] == client_id]:
            counts = self._series.pop(owner)
            del self._last_work[owner]
            rest = self._series.setdefault((None, None), _counts())
            for name, values in counts.items():
                rest[name] = array("f", map(add, rest[name], values))
            self._last_work[None, None] = self._latest

    def window(self, *, range_s: int, resolution_s: int, client_id: str | None, by: GroupBy) -> LoadWindow:
        """Return the last ``range_s`` seconds.

        Args:
            range_s: At least ``resolution_s``.
            resolution_s: Seconds of a step, a multiple of a minute; steps begin at multiples of it.
            client_id: The client whose work is returned; all clients if ``None``.
            by: Whether a series is a model's or a client's work.
        """
        latest, width = self._latest, resolution_s // STEP_S
        last = self._step() // width
        first = last - math.ceil(range_s / resolution_s) + 1
        steps = [
            [step % STEPS for step in range(at * width, (at + 1) * width) if latest - STEPS < step <= latest]
            for at in range(first, last + 1)
        ]
        groups: dict[str | None, list[dict[str, array[float]]]] = defaultdict(list)
        for (model, client), counts in tuple(self._series.items()):
            if client_id is None or client == client_id:
                groups[model if by == "model" else client].append(counts)
        summed = {name: _summed(group, steps) for name, group in groups.items()}
        ranked = sorted(
            (name for name in summed if name is not None),
            key=lambda name: sum(summed[name]["completion_tokens"]),
            reverse=True,
        )
        rest = [summed[name] for name in (*ranked[MOST_SHOWN:], *({None} & summed.keys()))]
        shown: list[tuple[str | None, dict[str, list[float]]]] = [(name, summed[name]) for name in ranked[:MOST_SHOWN]]
        if rest:
            shown.append(
                (
                    None,
                    {name: [sum(each) for each in zip(*(one[name] for one in rest), strict=True)] for name in _COUNTS},
                )
            )
        return LoadWindow(
            start_s=float(first * resolution_s),
            columns={name: tuple(_mean(values, slots) for slots in steps) for name, values in self._readings.items()},
            series=tuple((name, _columns(counts)) for name, counts in shown if any(counts["turns"])),
        )

    def dump(self) -> bytes:
        """Return the complete history, for ``load``."""
        series = [
            {"model": model, "client": client, "counts": {name: values.tolist() for name, values in counts.items()}}
            for (model, client), counts in self._series.items()
        ]
        readings = {name: values.tolist() for name, values in self._readings.items()}
        return orjson.dumps({"version": _VERSION, "latest": self._latest, "readings": readings, "series": series})

    def load(self, dumped: bytes) -> None:
        """Continue from the ``dump`` of an earlier daemon.

        Raises:
            ValueError: The data is not a valid dump.
        """
        try:
            history: dict[str, Any] = orjson.loads(dumped)
            if history["version"] != _VERSION or not isinstance(history["latest"], int):
                raise ValueError("another version")
            readings = {name: _column(history["readings"][name], otherwise=math.nan) for name in READINGS}
            series = {
                _owner(each): {name: _column(each["counts"][name]) for name in _COUNTS}
                for each in history["series"][: MAX_SERIES + 1]
            }
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        self._readings, self._series, self._latest = readings, series, history["latest"]
        self._last_work = dict.fromkeys(series, self._latest)
        self._advance()

    def _step(self) -> int:
        return int(self._clock()) // STEP_S

    def _advance(self) -> int:
        """Clear the minutes since the last write, and return the slot of the current one."""
        step = self._step()
        if step < self._latest - _MAX_SET_BACK:
            self._clear(range(STEPS))
            self._latest = step
        elif step > self._latest:
            self._clear(each % STEPS for each in range(max(self._latest + 1, step - STEPS + 1), step + 1))
            self._latest = step
        return self._latest % STEPS

    def _clear(self, slots: Iterable[int]) -> None:
        self._samples.clear()
        for slot in slots:
            for values in self._readings.values():
                values[slot] = math.nan
            for counts in self._series.values():
                for values in counts.values():
                    values[slot] = 0

    def _counts_of(self, owner: Owner) -> dict[str, array[float]]:
        found = self._series.get(owner)
        if found is None and len(self._series) >= MAX_SERIES:
            for unused in [each for each, step in self._last_work.items() if step <= self._latest - STEPS]:
                del self._series[unused], self._last_work[unused]
        if found is None and len(self._series) >= MAX_SERIES:
            owner = (None, None)
            found = self._series.get(owner)
        if found is None:
            found = self._series[owner] = _counts()
        self._last_work[owner] = self._latest
        return found


def _counts() -> dict[str, array[float]]:
    return {name: array("f", bytes(4 * STEPS)) for name in _COUNTS}


def _unread() -> array[float]:
    return array("f", [math.nan] * STEPS)


def _owner(entry: dict[str, Any]) -> Owner:
    model, client = entry["model"], entry["client"]
    if not (isinstance(model, str | None) and isinstance(client, str | None)):
        raise TypeError("an owner is not a string")
    return model, client


def _column(values: object, *, otherwise: float = 0.0) -> array[float]:
    if not isinstance(values, list) or len(values) != STEPS:
        raise ValueError("a column has another length")
    return array("f", [otherwise if each is None else each for each in values])


def _summed(group: list[dict[str, array[float]]], steps: list[list[int]]) -> dict[str, list[float]]:
    return {
        name: [sum(counts[name][slot] for counts in group for slot in slots) for slots in steps] for name in _COUNTS
    }


def _columns(counts: dict[str, list[float]]) -> dict[str, Column]:
    """Return counts as sent: with the mean time to the first token instead of its sum."""
    columns: dict[str, Column] = {name: tuple(values) for name, values in counts.items()}
    n_first = counts["first_tokens"]
    columns["ttft_ms"] = tuple(
        round(ms / n, 1) if n else None for ms, n in zip(counts["ttft_ms"], n_first, strict=True)
    )
    del columns["first_tokens"]
    return columns


def _mean(values: array[float], slots: list[int]) -> float | None:
    known = [values[slot] for slot in slots if not math.isnan(values[slot])]
    return round(sum(known) / len(known), 2) if known else None


@contextlib.asynccontextmanager
async def recording(history: LoadHistory, path: Path, sampler: MetricsSampler) -> AsyncIterator[None]:
    """Sample readings into ``history``, which is loaded from and saved to ``path``.

    The file is written at shutdown: a killed daemon loses what it recorded.
    """
    _read(history, path)
    tasks = TaskGroup("load_history")
    tasks.keep_running(partial(_record, history, sampler), name="sample")
    try:
        yield
    finally:
        await tasks.cancel()
        await asyncio.to_thread(_write, path, history.dump())


async def _record(history: LoadHistory, sampler: MetricsSampler) -> None:
    while True:
        history.sample(await sampler.sample())
        await asyncio.sleep(SAMPLE_EVERY_S)


def _read(history: LoadHistory, path: Path) -> None:
    try:
        history.load(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("load_history_unreadable", path=str(path), reason=str(error))


def _write(path: Path, dumped: bytes) -> None:
    try:
        write_private(path, dumped, durable=False)
    except OSError as error:
        _log.warning("load_history_not_written", path=str(path), reason=str(error))
