"""Questions about images: the first one, another about the same image, one image for all, and one beside streams.

Our daemon and the peers get the same requests, to `/v1/chat/completions` with images in data URLs, which each turn
sends again. A round is a client's question with a new image, then a question without one in the same conversation, one
client at a time. Then all clients ask at the same moment about one image that is new to the server. At last all clients
stream, and another one asks about a new image, as the newcomer of `interference` does. A peer is started with the
projector, as `llama-server --mmproj FILE`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks import protocols, timeline
from benchmarks.jobs import Arrival, Round, Rounds, Turns, TurnSize
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, Scenario, context_tokens, one_prompt_length, required
from benchmarks.scenarios import interference

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_MOST_ROWS: Final = 1024
"""Tokens that an image may take, for which there is room."""
_OPENING_TOKENS: Final = 8
_STREAM_TOKENS: Final = 160
_PIECES_BEFORE: Final = 32


@dataclass(frozen=True, slots=True)
class ImageDelays:
    """Waiting times of first and second questions, and until all clients have an answer about a common image."""

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]
    all_started_ms: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            *percentile_metrics("TTFT new image", "ms", self.first_ms),
            *percentile_metrics("TTFT second question", "ms", self.second_ms),
            Metric("second question / new image", "", median(self.second_ms) / median(self.first_ms), "lower"),
            Metric("all have text about one image", "ms", self.all_started_ms, "lower"),
        )


def read(measured: Measured[Turns], *, rounds: tuple[Round, ...]) -> ImageDelays:
    """Return the delays of the rounds."""
    *asked, together = measured.answer.by_round(rounds)
    return ImageDelays(
        first_ms=tuple(timeline.ttft_ms([turn for turns in asked[::2] for turn in turns])),
        second_ms=tuple(timeline.ttft_ms([turn for turns in asked[1::2] for turn in turns])),
        all_started_ms=max(timeline.ttft_ms(together)),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients.

    Raises:
        InferenceCenterError: ``invalid_request`` without a projector.
    """
    options = bench.options
    if options.mmproj is None and options.url is None:
        raise refused("mmproj", "the scenario needs a projector", hint="`python -m benchmarks.projector` writes one.")
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    prompt_tokens = one_prompt_length(options)
    first = Round(prompt_tokens, max_tokens, image=True, at_once=1)
    second = Round(prompt_tokens, max_tokens, at_once=1)
    common = Round(prompt_tokens, max_tokens, image=True, opening_tokens=_OPENING_TOKENS)
    n_ctx = context_tokens(2 * count * (prompt_tokens + max_tokens + 16) + (count + 1) * _MOST_ROWS)
    settings = replace(bench.settings(slots=max(clients) + 1, n_ctx=n_ctx), mmproj=options.mmproj)
    warm_up = TurnSize(prompt_tokens, max_tokens, image=True)
    async with bench.stage(settings, points=2 * len(clients)) as stage:
        stage.servers = tuple(replace(server, spec=protocols.chat_with_images(server.spec)) for server in stage.servers)
        for n_clients in clients:
            rounds = (*[first, second] * count, common)
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(
                    Rounds,
                    clients=n_clients,
                    rounds=rounds,
                    continues=True,
                    warm_up=warm_up,
                ),
                answer=Turns,
                read=partial(read, rounds=rounds),
            )
            await stage.measure(
                Parameter("streams beside a new image", n_clients),
                job=partial(
                    Arrival,
                    streams=n_clients,
                    stream=TurnSize(prompt_tokens, _STREAM_TOKENS),
                    newcomer=warm_up,
                    after_tokens=_PIECES_BEFORE,
                    warm_up=warm_up,
                ),
                answer=Turns,
                read=interference.read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="images",
    summary="questions about images: time to first token of a first, a second and a common one; streams meanwhile",
    run=run,
    defaults=Options(clients=(2,), count=1, prompt_tokens=(20,), max_tokens=8, repeat=3),
    takes=(COMPARABLE - {"backend"}) | {"mmproj", "clients", "count", "prompt_tokens", "max_tokens"},
)
