"""The simulation of replicas on virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from benchmarks.placement import (
    RECORDED,
    RULES,
    Engine,
    Outcome,
    Simulation,
    TracedTurn,
    app,
    by_kv,
    read_trace,
    turns_of_log,
)

if TYPE_CHECKING:
    from pathlib import Path


def simulated(rule: str, *, replicas: int, kv_tokens: int = 100_000) -> Outcome:
    """Run the first turns of the recorded trace, with slots that are busy for 60 % of the time."""
    engine = Engine(kv_tokens=kv_tokens)
    return Simulation(read_trace(RECORDED)[:200], replicas=replicas, rule=RULES[rule](), engine=engine, load=0.6).run()


def test_more_turns_find_their_kv_by_the_rule_than_by_others() -> None:
    """Round robin and the least load find it on one of four replicas by chance."""
    found = {rule: simulated(rule, replicas=4) for rule in RULES}
    assert {outcome.turns for outcome in found.values()} == {4 * 200}
    assert found["KV"].found_kv > 0.85
    assert found["KV"].found_kv > found["round robin"].found_kv + 0.2
    assert found["KV"].found_kv > found["least loaded"].found_kv + 0.2


def test_one_replica_is_alike_by_every_rule() -> None:
    """Nothing is random but the beginning of each copy."""
    one = [simulated(rule, replicas=1) for rule in RULES]
    assert one[0] == one[1] == one[2]
    assert one[0] == simulated("KV", replicas=1)
    assert one[0].busy == pytest.approx(0.6, abs=0.15)


def test_evicted_kv_is_not_found() -> None:
    """A replica keeps only what has room."""
    assert simulated("KV", replicas=2, kv_tokens=1).found_kv == 0


def test_ttft_has_wait_prefill_and_a_step() -> None:
    """On one slot the second turn waits for the first; the third, of the first's conversation, finds its KV."""
    engine = Engine(slots=1, step_s=1.0, prefill_token_s=0.1)
    trace = [TracedTurn(0, 0, 10, 10, 9), TracedTurn(1, 1, 20, 10, 9), TracedTurn(0, 40, 50, 24, 9)]
    work_s = 10.0 + 10.0 + 9.5
    load = work_s / 50  # so that times are not scaled
    found = Simulation(trace, replicas=1, rule=by_kv, engine=engine, load=load, seed=1).run()
    assert sorted(found.ttft_s) == pytest.approx([0.5 + 1, 1 + 1, 9 + 1 + 1])
    assert found.found_kv == 1


def test_log_becomes_a_trace(tmp_path: Path) -> None:
    """Other lines, and turns without an answer, are left out."""
    of_turn = b'{"event":"turn","timestamp":"2026-11-28T12:00:%02dZ","session":"%s",'
    line = of_turn + b'"total_ms":2000.0,"prompt":%d,"tokens":%d}'
    log = [
        b"Address http://127.0.0.1:3000/",
        b'{"event":"engine_ready","timestamp":"2026-11-28T12:00:00Z","slots":4}',
        line % (10, b"b", 20, 5),
        line % (9, b"a", 10, 3),
        line % (11, b"a", 10, 0),
        line % (15, b"a", 30, 4),
    ]
    turns = turns_of_log(log)
    assert turns == (
        TracedTurn(1, 0.0, 2.0, 10, 3),
        TracedTurn(0, 1.0, 3.0, 20, 5),
        TracedTurn(1, 6.0, 8.0, 30, 4),
    )
    (tmp_path / "log").write_bytes(b"\n".join(log))
    done = CliRunner().invoke(app, ["record", str(tmp_path / "log"), str(tmp_path / "trace")])
    assert done.output == "3 turns of 2 conversations\n"
    assert read_trace(tmp_path / "trace") == turns
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "trace"), "--replicas", "1,2", "--loads", "0.5"])
    assert "| 2, 50% |" in done.output
    (tmp_path / "log").write_text("no trace")
    with pytest.raises(ValueError, match="is no trace"):
        read_trace(tmp_path / "log")
