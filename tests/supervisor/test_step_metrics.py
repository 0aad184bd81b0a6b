"""Metrics of an engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.messages import (
    ContextFull,
    Failed,
    Finished,
    MoveTime,
    PrefillProgress,
    StepOutput,
    StepStats,
    TokenDelta,
    TokenSources,
    pack_tokens,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor.step_metrics import StepMeter
from inferencecenter.telemetry.metrics import DaemonMetrics

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import TurnEvent

FINISHED = Finished(
    turn_id="a",
    reason="stop",
    stop=None,
    kept_tokens=0,
    kept_chars=0,
    end_text="",
    prompt_tokens=1,
    cached_tokens=0,
    generated_tokens=1,
    queue_ms=0,
    ttft_ms=0,
    total_ms=0,
    tokens_per_s=0,
)


class Bench:
    """A meter with a clock that the test advances."""

    def __init__(self, model: str = "demo") -> None:
        self.metrics = DaemonMetrics()
        self.now = 100.0
        self.meter = StepMeter(self.metrics.engines, self.metrics.nodes, model=model, monotonic=lambda: self.now)

    def step(self, *events: TurnEvent, at_s: float = 0.0, work: StepStats | None = None) -> None:
        """Report a step at this time."""
        self.now = 100.0 + at_s
        self.meter.step(StepOutput(events=events, running=0, waiting=0, rss_bytes=0, work=work))

    def shown(self, name: str, **labels: str) -> float | None:
        """Return a sample of the model's."""
        return self.metrics.registry.get_sample_value(f"inferencecenter_{name}", {"model": "demo", **labels})


@pytest.fixture
def bench() -> Bench:
    """A fresh one."""
    return Bench()


def delta(turn_id: str, n_tokens: int = 1, text: str = "x") -> TokenDelta:
    """Return a frame of tokens."""
    return TokenDelta(turn_id, pack_tokens([7] * n_tokens), text)


def test_tokens_are_counted_on_arrival(bench: Bench) -> None:
    """Tokens of all turns count when they arrive, also those whose text is held back."""
    bench.step(
        delta("a"), delta("b", 3), PrefillProgress("c", 1, 2), delta("a", 1, text=""), TokenDelta("b", b"", "rest")
    )
    assert bench.shown("generated_tokens_total") == 5


def test_time_between_tokens_is_measured_per_turn(bench: Bench) -> None:
    """The first frame has none, and several tokens in one frame arrive together."""
    bench.step(delta("a"), at_s=1.0)
    bench.step(delta("b"), at_s=1.5)
    bench.step(delta("a", 4), delta("b"), at_s=2.0)
    assert bench.shown("inter_token_seconds_count") == 2
    assert bench.shown("inter_token_seconds_sum") == 1.5


def test_frame_without_tokens_is_not_counted(bench: Bench) -> None:
    """Held-back text that is released at the end changes no time."""
    bench.step(delta("a"), at_s=1.0)
    bench.step(TokenDelta("a", b"", "rest"), at_s=1.25)
    bench.step(delta("a"), at_s=2.0)
    assert bench.shown("inter_token_seconds_sum") == 1.0


@pytest.mark.parametrize(
    "last", [FINISHED, Failed(turn_id="a", code="internal", message=""), ContextFull(turn_id="a", n_tokens=9)]
)
def test_ended_turn_is_dropped(bench: Bench, last: TurnEvent) -> None:
    """The way it ends does not matter; if it resumes, its wait is not counted between tokens."""
    bench.step(delta("a"), last, at_s=1.0)
    assert repr(bench.meter) == "StepMeter('demo', turns=0)"
    bench.step(delta("a"), at_s=9.0)
    assert bench.shown("inter_token_seconds_count") == 0


def test_lost_engine_leaves_no_turn_behind(bench: Bench) -> None:
    """Its turns may end without another event, and the time until the next engine is not counted between tokens."""
    bench.step(delta("a"), at_s=1.0)
    bench.meter.engine_changed(EngineStatus(EngineState.BACKOFF))
    bench.meter.engine_changed(EngineStatus(EngineState.READY))
    bench.step(delta("a"), at_s=60.0)
    assert bench.shown("inter_token_seconds_count") == 0
    assert bench.shown("generated_tokens_total") == 2


def test_decode_and_prefill_steps_are_counted_apart(bench: Bench) -> None:
    """Their times are counted apart, too, so that both rates are right."""
    bench.step(work=StepStats(0.5, rows=3, decode_s=0.4))
    bench.step(work=StepStats(0.25, prefill_tokens=64, prefill_s=0.2))
    assert (bench.shown("step_seconds_count"), bench.shown("step_seconds_sum")) == (2, 0.75)
    assert (bench.shown("batch_turns_count"), bench.shown("batch_turns_sum")) == (1, 3)
    assert bench.shown("decode_seconds_total") == 0.4
    assert (bench.shown("prefill_seconds_total"), bench.shown("prefill_tokens_total")) == (0.2, 64)


def test_moves_are_not_counted_as_steps(bench: Bench) -> None:
    """Offloads are counted by kind and time, fetches by number; neither affects decode times."""
    moves = (MoveTime("park", 0.25), MoveTime("restore", 0.5), MoveTime("park", 0.25))
    bench.step(work=StepStats(1.0, fetches=2, moves=moves))
    assert bench.shown("step_seconds_count") == 0
    assert (bench.shown("kv_move_seconds_count", kind="park"), bench.shown("kv_move_seconds_sum", kind="park")) == (
        2,
        0.5,
    )
    assert bench.shown("kv_move_seconds_sum", kind="restore") == 0.5
    assert bench.shown("kv_fetches_total") == 2


def test_drafts_are_counted(bench: Bench) -> None:
    """Proposed and accepted tokens of drafts have a counter each."""
    bench.step(work=StepStats(1.0, rows=2, drafted=7, accepted=5))
    bench.step(work=StepStats(1.0, rows=2))
    assert (bench.shown("drafted_tokens_total"), bench.shown("accepted_tokens_total")) == (7, 5)


def test_all_label_values_exist_from_the_start(bench: Bench) -> None:
    """The first event of each is visible as an increase."""
    assert [bench.shown("prompt_tokens_total", source=source) for source in TokenSources.__struct_fields__] == [0] * 5
    assert [bench.shown("kv_move_seconds_count", kind=kind) for kind in ("park", "restore", "copy")] == [0] * 3


def test_prompt_tokens_are_counted_by_source(bench: Bench) -> None:
    """The tokens of each source are summed over the turns."""
    bench.step(work=StepStats(1.0, sources=TokenSources(slot=5, computed=2)))
    bench.step(work=StepStats(1.0, sources=TokenSources(prefix=4, computed=1)))
    found = {name: bench.shown("prompt_tokens_total", source=name) for name in TokenSources.__struct_fields__}
    assert found == {"slot": 5, "neighbour": 0, "parked": 0, "prefix": 4, "computed": 3}  # codespell:ignore neighbour


def test_step_without_work_is_not_counted(bench: Bench) -> None:
    """It may report only a queue position."""
    bench.step(delta("a"))
    assert bench.shown("step_seconds_count") == 0


def test_model_name_is_escaped_in_the_page() -> None:
    """It is text of another author."""
    bench = Bench('demo"\n')
    bench.step(delta("a"), work=StepStats(1.0, moves=(MoveTime("copy", 0.1),)))
    labels = {"model": 'demo"\N{REPLACEMENT CHARACTER}'}
    assert bench.metrics.registry.get_sample_value("inferencecenter_generated_tokens_total", labels) == 1
    assert (
        bench.metrics.registry.get_sample_value("inferencecenter_kv_move_seconds_count", labels | {"kind": "copy"}) == 1
    )


def test_steps_are_counted_by_machine() -> None:
    """Each machine has its own counters; a step without prefill and decode is none."""
    metrics = DaemonMetrics()
    for node in ("local", "box2"):
        meter = StepMeter(metrics.engines, metrics.nodes, model="demo", node=node)
        for work in (StepStats(0.1, rows=1, decode_s=0.25), StepStats(0.1, prefill_tokens=5, prefill_s=0.5), None):
            meter.step(StepOutput((delta("a"),), running=1, waiting=0, rss_bytes=1, work=work))
    for node in ("local", "box2"):
        labels = {"node": node, "model": "demo"}
        shown = {
            name: metrics.registry.get_sample_value(f"inferencecenter_node_{name}_total", labels)
            for name in ("steps", "generated_tokens", "prefill_tokens", "decode_seconds", "prefill_seconds")
        }
        assert shown == {
            "steps": 2,
            "generated_tokens": 3,
            "prefill_tokens": 5,
            "decode_seconds": 0.25,
            "prefill_seconds": 0.5,
        }
