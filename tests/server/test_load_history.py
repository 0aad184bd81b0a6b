"""The load and work of the last day: steps, groups, bounds, and what survives a restart."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.protocol.events import Metrics
from inferencecenter.protocol.values import EngineReadings, GpuReadings, InferenceReadings, TurnStats
from inferencecenter.server.load_history import MAX_SERIES, MOST_SHOWN, STEP_S, STEPS, LoadHistory, recording
from inferencecenter.sessions.observability import TurnRecord
from tests.server.harness import Running, ask, receive, stub_context

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.server.load_history import LoadWindow

NOON_S = 1_700_000_000 // 3600 * 3600.0
GIB = 2**30


class Clock:
    """Unix seconds, set by the test."""

    def __init__(self) -> None:
        self.now_s = NOON_S

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def metrics(*, running: int, temp: float | None = None) -> Metrics:
    """Return readings."""
    empty = dict.fromkeys(GpuReadings.model_fields)
    return Metrics(
        timestamp=0.0,
        gpu=GpuReadings(**{**empty, "temp": temp}),  # type: ignore[arg-type]
        inference=InferenceReadings(
            active_generations=0, total_sessions=3, last_tps=0.0, last_ttft_ms=0.0, total_tokens_generated=0,
            queue_depth=0, tokens_per_s=10.0, slots_used=running, slots=4, parked_sessions=0, parked_mb=0.0,
        ),
        engine=EngineReadings(state="ready", model="m", gpu_layers=0, restarts=0, rss_mb=100.0),
    )  # fmt: skip


def turn(
    model: str = "m", client: str = "ada", *, tokens: int = 10, ttft_ms: float = 20.0, finish: str = "stop"
) -> TurnRecord:
    """Return an ended turn."""
    stats = TurnStats(
        ttft_ms=ttft_ms,
        total_ms=100.0,
        tokens=tokens,
        tps=1.0,
        prompt_tokens=5,
        cached_tokens=0,
        queue_ms=0.0,
        preempted=0,
    )
    return TurnRecord(client_id=client, session_id="s", turn_id="t", model=model, finish=finish, stats=stats)


def last(
    history: LoadHistory, *, steps: int = 3, width: int = 1, client: str | None = None, by: Any = "model"
) -> LoadWindow:
    """Return the last steps."""
    return history.window(range_s=steps * width * STEP_S, resolution_s=width * STEP_S, client_id=client, by=by)


def test_work_of_a_deleted_client_is_part_of_the_rest() -> None:
    """Its name is gone, also from what is written to disk, and the sums are as before."""
    history = LoadHistory(clock=Clock())
    for client in ("ada", "ada", "eve"):
        history.turn_ended(turn(client=client))
    history.turn_ended(turn("n", "ada"))
    history.forget("ada")
    assert b"ada" not in history.dump()
    series = {name: columns["turns"][-1] for name, columns in last(history, by="client").series}
    assert series == {"eve": 1, None: 3}
    history.turn_ended(turn(client="ada"))
    assert dict(last(history, client="ada").series)["m"]["turns"][-1] == 1


def test_readings_are_means_of_a_minute() -> None:
    """Minutes without a sample have none; a reading that is missing has none either."""
    clock = Clock()
    history = LoadHistory(clock=clock)
    for running in (1, 2):
        history.sample(metrics(running=running))
    clock.now_s += 2 * STEP_S
    history.sample(metrics(running=4, temp=60.0))
    window = last(history)
    assert window.start_s == NOON_S
    assert window.columns["running"] == (1.5, None, 4.0)
    assert window.columns["gpu_temp"] == (None, None, 60.0)
    assert last(history, steps=1, width=60).columns["running"] == (2.75,)


def test_work_is_grouped() -> None:
    """Groups are models or clients; a client's own work includes no work of others."""
    history = LoadHistory(clock=Clock())
    history.turn_ended(turn("a", "ada", tokens=5))
    history.turn_ended(turn("b", "ada", tokens=7, ttft_ms=40.0))
    history.turn_ended(turn("b", "bob", tokens=100, ttft_ms=0.0, finish="internal"))
    by_model = dict(last(history, steps=1).series)
    assert list(by_model) == ["b", "a"]
    assert by_model["b"] == {
        "turns": (2,), "failed_turns": (1,), "prompt_tokens": (10,), "completion_tokens": (107,), "ttft_ms": (40.0,),
    }  # fmt: skip
    assert {name: columns["completion_tokens"] for name, columns in last(history, steps=1, by="client").series} == {
        "bob": (100,),
        "ada": (12,),
    }
    own = dict(last(history, steps=1, client="ada").series)
    assert {name: columns["completion_tokens"] for name, columns in own.items()} == {"a": (5,), "b": (7,)}
    assert last(history, steps=1, client="eve").series == ()


def test_history_forgets_what_is_older_than_a_day() -> None:
    """Its slots are used again, however long nothing happened."""
    clock = Clock()
    history = LoadHistory(clock=clock)
    history.sample(metrics(running=1))
    history.turn_ended(turn())
    clock.now_s += STEPS * STEP_S
    assert set(last(history, steps=360, width=4).columns["running"]) == {None}
    history.sample(metrics(running=2))
    window = last(history, steps=360, width=4)
    assert [value for value in window.columns["running"] if value is not None] == [2.0]
    assert window.series == ()


def test_clock_that_is_set_back_begins_anew() -> None:
    """If it is set back by seconds, the last minute continues."""
    clock = Clock()
    history = LoadHistory(clock=clock)
    history.turn_ended(turn(tokens=1))
    clock.now_s -= 1
    history.turn_ended(turn(tokens=2))
    clock.now_s += 1
    assert dict(last(history, steps=1).series)["m"]["completion_tokens"] == (3,)
    clock.now_s -= 3600
    history.turn_ended(turn(tokens=4))
    assert dict(last(history, steps=1).series)["m"]["completion_tokens"] == (4,)
    clock.now_s += 3600
    assert dict(last(history, steps=1).series) == {}


def test_number_of_series_is_bounded() -> None:
    """Further work counts as the rest; series without work in the last day are replaced."""
    clock = Clock()
    history = LoadHistory(clock=clock)
    for number in range(MAX_SERIES + 50):
        history.turn_ended(turn(client=f"c{number}", tokens=1))
    series = last(history, steps=1, by="client").series
    assert [name for name, _ in series][-1] is None
    assert len(series) == MOST_SHOWN + 1
    assert sum(columns["turns"][0] or 0 for _, columns in series) == MAX_SERIES + 50
    clock.now_s += 2 * STEPS * STEP_S
    history.turn_ended(turn(client="late"))
    assert [name for name, _ in last(history, steps=1, by="client").series] == ["late"]


def test_memory_is_bounded() -> None:
    """It is hardly more than all columns need."""
    tracemalloc.start()
    try:
        clock = Clock()
        history = LoadHistory(clock=clock)
        for minute in range(2 * STEPS):
            history.sample(metrics(running=1))
            for number in range(3):
                history.turn_ended(turn(client=f"{minute % 1000}-{number}"))
            clock.now_s += STEP_S
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 4 * STEPS * (8 + 6 * (MAX_SERIES + 1)) * 1.1


def test_history_survives_a_restart() -> None:
    """The recorded history is continued."""
    clock = Clock()
    history = LoadHistory(clock=clock)
    history.sample(metrics(running=3))
    history.turn_ended(turn())
    clock.now_s += STEP_S
    after = LoadHistory(clock=clock)
    after.load(history.dump())
    assert last(after, steps=2) == last(history, steps=2)
    after.turn_ended(turn(tokens=1))
    assert dict(last(after, steps=2).series)["m"]["completion_tokens"] == (10, 1)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2, "latest": 0}',
        b'{"version": 1, "latest": 0, "readings": {"running": [1]}, "series": []}',
    ],
)
def test_damaged_history_is_refused(damaged: bytes) -> None:
    """The existing history stays."""
    history = LoadHistory(clock=Clock())
    history.turn_ended(turn())
    with pytest.raises(ValueError):  # noqa: PT011 - with the reason of the parser
        history.load(damaged)
    assert dict(last(history, steps=1).series)["m"]["turns"] == (1,)


async def test_history_is_kept_in_a_file(tmp_path: Path) -> None:
    """The next daemon reads it; a damaged file is replaced at the end."""
    clock, path = Clock(), tmp_path / "load_history.json"
    sampler = stub_context().sampler
    first = LoadHistory(clock=clock)
    async with recording(first, path, sampler):
        first.turn_ended(turn())
        while last(first, steps=1).columns["sessions"] == (None,):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    assert path.stat().st_mode & 0o777 == 0o600
    second = LoadHistory(clock=clock)
    async with recording(second, path, sampler):
        assert dict(last(second, steps=1).series)["m"]["turns"] == (1,)
    path.write_bytes(b"{")
    third = LoadHistory(clock=clock)
    async with recording(third, path, sampler):
        assert last(third, steps=1).series == ()
    LoadHistory(clock=clock).load(path.read_bytes())


async def test_history_over_the_protocol(server: Running) -> None:
    """A client reads its own work, an administrator all; steps are bounded."""
    context = server.context
    context.history.turn_ended(turn(client="kitchen"))
    context.history.turn_ended(turn(client="other", tokens=50))
    headers = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    async with server.connect(additional_headers=headers, subprotocols=["inferencecenter.v1"]) as socket:
        await receive(socket, "auth_success")
        own = await ask(socket, op="metrics_history", id="h", range_s=600, group_by="client")
        assert (own["op"], own["id"], own["resolution_s"]) == ("metrics_history", "h", 60)
        assert [each["group"] for each in own["series"]] == ["kitchen"]
        assert {len(column) for column in own["columns"].values()} == {10}
        day = await ask(socket, op="metrics_history", range_s=86_400)
        assert day["resolution_s"] == 240
        refused = await ask(socket, op="metrics_history", range_s=86_400, resolution_s=60)
        assert (refused["code"], refused["field"]) == ("invalid_request", "resolution_s")
        assert "240" in refused["hint"]
