"""The dashboard's history of readings and their texts."""

from __future__ import annotations

from typing import Any, Final

from tests.web import node

HISTORY: Final = """
  const history = new History();
  const gpu = { vram_used_mb: null, temp: null };
  const of = (value) => ({ tokens_per_s: value, last_ttft_ms: null, slots_used: 1, queue_depth: 0, total_sessions: 1,
    parked_sessions: 0 });
  for (const [timestamp, value] of input) history.add({ timestamp, gpu, inference: of(value) });
  return { times: history.times, values: history.columns.tokensPerS, summary: history.summary("tokensPerS", 60) };
"""


def history(*readings: tuple[float, float]) -> dict[str, Any]:
    """Return the stored readings at these times."""
    kept: dict[str, Any] = node.run('import { History } from "JS/board/history.js";', HISTORY, given=readings)
    return kept


def test_history_covers_a_quarter_of_an_hour() -> None:
    """Older values are dropped, and the summary covers the window."""
    kept = history(*((1000 + s, s) for s in range(2000)))
    assert (kept["times"][0], kept["times"][-1], len(kept["times"])) == (2099, 2999, 901)
    assert kept["values"] == list(range(1099, 2000))
    assert kept["summary"] == {"now": 1999, "lowest": 1939, "mean": 1969, "highest": 1999}


def test_gap_breaks_the_line() -> None:
    """An empty reading is inserted, which counts in no summary."""
    kept = history((1000, 4), (1001, 6), (1030, 8))
    assert kept["times"] == [1000, 1001, 1003.5, 1030]
    assert kept["values"] == [4, 6, None, 8]
    assert kept["summary"] == {"now": 8, "lowest": 4, "mean": 6, "highest": 8}


def test_clock_set_back_restarts_the_history() -> None:
    """A repeated reading is ignored."""
    assert history((5000, 1), (5000, 2), (4999, 3))["values"] == [1]
    kept = history((5000, 1), (5001, 2), (1000, 3), (1001, 4))
    assert (kept["times"], kept["values"]) == ([1000, 1001], [3, 4])


def test_number_formats() -> None:
    """Significant digits and a unit; an unknown value is a dash."""
    words = {
        "short(0)": "0",
        "short(0.4231)": "0.42",
        "short(42.31)": "42.3",
        "short(null)": "\N{EN DASH}",
        "count(1234567)": "1,234,567",
        "magnitude(7615616512)": "7.62 B",
        "duration(85.4)": "85 ms",
        "duration(1449)": "1.4 s",
        "duration(7_800_000)": "2 h 10 min",
        "duration(90_000_000)": "1 d 1 h",
        "memory(0.5)": "512 KiB",
        "memory(15872)": "15.5 GiB",
        "bytes(2_831_155)": "2.70 MiB",
    }
    names = 'import { bytes, count, duration, magnitude, memory, short } from "JS/board/format.js";'
    assert node.run(names, f"return [{', '.join(words)}];") == list(words.values())


def test_status_lines() -> None:
    """Every reading of `status` has a line unless it is null or part of another's."""
    values = {"state": "ready", "layers": 32, "gpu_layers": 20, "lora": None, "n_new_things": 3}
    loaded = 'import { loadTexts } from "JS/i18n.js"; await loadTexts("board");'
    facts = node.run(f'import {{ factsOf }} from "JS/board/facts.js"; {loaded}', "return factsOf(input);", given=values)
    assert [(each["label"], each["text"]) for each in facts] == [
        ("Layers on the GPU", "20 of 32"),
        ("N new things", "3"),
    ]


PAST = """
  const past = new Past(input);
  return { times: past.times, groups: past.groups, ...past.columns };
"""


def test_past_is_read_from_the_daemon() -> None:
    """Work is tokens per minute without the step that has not ended; the time to the first token counts by turns."""

    def work(group: str | None, tokens: int, *, turns: int, ttft_ms: float | None) -> dict[str, Any]:
        columns = {"turns": [turns, turns], "completion_tokens": [tokens, 1], "ttft_ms": [ttft_ms, None]}
        return {"group": group, "columns": columns}

    named = {"running": [1.5, None]}
    columns = {
        name: [None, 2]
        for name in ("tokens_per_s", "waiting", "sessions", "parked_sessions", "vram_used_mb", "gpu_temp")
    }
    series = [
        work("a", 500, turns=3, ttft_ms=10),
        work("b", 50, turns=1, ttft_ms=50),
        *[work(str(n), 5, turns=0, ttft_ms=None) for n in range(3)],
    ]
    event = {"starts_at": 600, "resolution_s": 120, "columns": columns | named, "series": series}
    past = node.run('import { Past } from "JS/board/history.js";', PAST, given=event)
    assert past["times"] == [660, 780]
    assert past["groups"] == ["a", "b", "0", None]
    assert [past[f"work{index}"] for index in range(4)] == [[250, None], [25, None], [2.5, None], [5, None]]
    assert (past["running"], past["vramMb"], past["ttftMs"]) == ([1.5, None], [None, 2], [20, None])
