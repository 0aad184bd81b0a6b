"""Coding agents, which send the whole conversation with each request: prefilled tokens against new ones.

An agent of each kind sends its instructions, its tools and a task, and then with each request the result of the tool
that the last answer called. Answers come from a script, so that no model has to be large enough to call tools. The
daemon has to find the conversation although clients shorten, reorder and sign what they send again.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from benchmarks import protocols, timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import Scenario, one_prompt_length, required

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_PROTOCOLS: Final = {"Codex": protocols.codex, "Claude Code": protocols.claude_code}
_CALLS: Final = {
    "exec_command": {"command": "sed -n 1,120p src/module.py"},
    "Read": {"file_path": "/work/src/module.py", "limit": "120"},
}
_RULES: Final = [
    {
        "when": {"offers": tool},
        "reply": {"text": "I look at the next part.", "tool_calls": [{"name": tool, "arguments": arguments}]},
    }
    for tool, arguments in _CALLS.items()
]
"""The answer to every request: another call of a tool."""


@dataclass(frozen=True, slots=True)
class AgentRequests:
    """TTFT of the requests after the first one, and their mean numbers of tokens, new tokens and prefilled tokens."""

    ttft_ms: tuple[float, ...]
    prompt_tokens: float
    new_tokens: float
    read_tokens: float
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            Metric("tokens of a request", "tokens", self.prompt_tokens),
            Metric("new tokens of a request", "tokens", self.new_tokens),
            Metric("tokens read of a request", "tokens", self.read_tokens),
            Metric("tokens read for each new one", "", self.read_tokens / self.new_tokens, "lower"),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> AgentRequests:
    """Return the figures of the requests after the first; new tokens follow the previous request and its answer."""
    pairs = [pair for turns in measured.answer.clients for pair in pairwise(turns)]
    later = [turn for _, turn in pairs]
    new_tokens = sum(turn.prompt_tokens - before.prompt_tokens - before.tokens for before, turn in pairs)
    return AgentRequests(
        ttft_ms=tuple(timeline.ttft_ms(later)),
        prompt_tokens=sum(turn.prompt_tokens for turn in later) / len(later),
        new_tokens=new_tokens / len(later),
        read_tokens=(timeline.tokens_read(later) or 0) / len(later),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of agents of a kind at once."""
    options = bench.options
    clients = required(options.clients)
    request = Round(one_prompt_length(options), required(options.max_tokens))
    with tempfile.TemporaryDirectory(prefix="inferencecenter-bench-") as directory:
        script = Path(directory) / "rules.json"
        script.write_bytes(orjson.dumps({"rules": _RULES}))
        usual = bench.settings(slots=len(_PROTOCOLS) * max(clients), n_ctx=0)
        settings = replace(usual, backend="script", model=None, script=script)
        async with bench.stage(settings, points=len(clients), protocols=_PROTOCOLS) as stage:
            for n_clients in clients:
                await stage.measure(
                    Parameter("clients", n_clients),
                    job=partial(Rounds, clients=n_clients, rounds=(request,) * required(options.count), continues=True),
                    answer=Turns,
                    read=read,
                )
            return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="agents",
    summary="coding agents that resend the whole conversation: prefilled tokens against new ones",
    run=run,
    defaults=Options(clients=(1,), count=40, prompt_tokens=(600,), max_tokens=200, repeat=2),
    takes=frozenset({"clients", "count", "prompt_tokens", "max_tokens", "repeat", "slots"}),
)
