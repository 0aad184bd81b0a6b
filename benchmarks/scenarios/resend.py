"""A chat app that sends the whole conversation with each turn, against a session that is sent only new messages.

It measures the waiting time with an app that keeps the conversation itself. A history of several turns is sent first;
then turns of 20 tokens are measured, one at a time. The daemon has to find, among the client's sessions, the one whose
history matches the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks import protocols, timeline
from benchmarks.jobs import Round, Rounds, Turns, TurnSize
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_PROTOCOLS: Final = {"HTTP, all again": protocols.chat_completions, "WebSocket": protocols.websocket}
_HISTORY_TURNS: Final = 8
_QUESTION_TOKENS: Final = 20
_LEAST_TOKENS: Final = 64
"""Tokens of a turn of the history, which include the template's."""
_WARM_UP: Final = TurnSize(_LEAST_TOKENS, 8)
_TEMPLATE_TOKENS: Final = 16
"""More than templates put around a question and its answer."""


@dataclass(frozen=True, slots=True)
class Resent:
    """Waiting times of turns that continue a long conversation, and the tokens that had to be prefilled for each."""

    ttft_ms: tuple[float, ...]
    prompt_tokens: float
    read_tokens: float | None
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            Metric("tokens of a prompt", "tokens", self.prompt_tokens),
            *metrics_if_known("tokens read a turn", "tokens", self.read_tokens),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> Resent:
    """Return the waiting times of the turns that follow the history."""
    later = [turn for turns in measured.answer.clients for turn in turns[_HISTORY_TURNS:]]
    tokens_read = timeline.tokens_read(later)
    return Resent(
        ttft_ms=tuple(timeline.ttft_ms(later)),
        prompt_tokens=sum(turn.prompt_tokens for turn in later) / len(later),
        read_tokens=None if tokens_read is None else tokens_read / len(later),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients, whose turns are run one at a time."""
    options = bench.options
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    history_tokens = one_prompt_length(options)
    each_tokens = history_tokens // _HISTORY_TURNS - max_tokens
    if each_tokens < _LEAST_TOKENS:
        raise refused(
            "prompt_tokens",
            f"a history of {history_tokens} tokens has no room for {_HISTORY_TURNS} turns and their answers",
        )
    n_tokens = history_tokens + count * (_QUESTION_TOKENS + max_tokens) + (_HISTORY_TURNS + count) * _TEMPLATE_TOKENS
    history_turn, measured_turn = (Round(tokens, max_tokens, at_once=1) for tokens in (each_tokens, _QUESTION_TOKENS))
    settings = bench.settings(slots=max(clients), n_ctx=context_tokens(n_tokens))
    async with bench.stage(settings, points=len(clients), protocols=_PROTOCOLS) as stage:
        for n_clients in clients:
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(
                    Rounds,
                    clients=n_clients,
                    rounds=(*[history_turn] * _HISTORY_TURNS, *[measured_turn] * count),
                    continues=True,
                    warm_up=_WARM_UP,
                ),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="resend",
    summary="a chat app that resends the conversation, against a session: time to first token",
    run=run,
    defaults=Options(clients=(2,), count=10, prompt_tokens=(2000,), max_tokens=8, repeat=5),
    takes=OWN | {"clients", "count", "prompt_tokens", "max_tokens"},
)
