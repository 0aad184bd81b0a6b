"""Closed loop of requests for embeddings: N clients, each sending its next texts when it has the last vectors.

It measures the tokens a second that a busy server embeds, and the duration of a request. Our daemon and the peers get
the same requests, to `/v1/embeddings` with base64, as OpenAI's clients send them. `--model` is an embedding model;
`--max-tokens` is the number of texts of a request, each of `--prompt-tokens`. Peers have to be started for embeddings,
as `llama-server --embeddings`. Tokens count in the time in which all clients have a request running that is not their
first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import protocols, timeline
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stage import compared

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured, Server
    from benchmarks.target import TargetFacts

_WARM_UP_TURNS = 1


@dataclass(frozen=True, slots=True)
class EmbeddingRate:
    """Tokens and texts a second of all clients together, and how long requests took."""

    tok_s: float
    texts_s: float
    request_ms: tuple[float, ...]
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("embedding", "tok/s", self.tok_s, "higher"),
            Metric("texts", "1/s", self.texts_s, "higher"),
            *percentile_metrics("request", "ms", self.request_ms),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> EmbeddingRate:
    """Return the figures of a closed loop without its warm-up."""
    clients = measured.answer.clients
    every_request = [request for requests in clients for request in requests]
    window = timeline.busy_window(clients, warm_up_turns=_WARM_UP_TURNS)
    ended = [request for request in every_request if window.start_s < request.ended_s <= window.end_s]
    return EmbeddingRate(
        tok_s=sum(request.prompt_tokens for request in ended) / window.length_s,
        texts_s=sum(request.tokens for request in ended) / window.length_s,
        request_ms=tuple((request.ended_s - request.started_s) * 1000 for request in ended),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients.

    Raises:
        InferenceCenterError: ``invalid_request`` without a model: the bundled one makes no embeddings.
    """
    options = bench.options
    if options.model is None and options.url is None:
        raise refused("model", "the bundled model makes no embeddings", hint="Name the file of an embedding model.")
    clients, prompt_tokens = required(options.clients), one_prompt_length(options)
    # Slots are for the peers' command: ours has none with an embedding model.
    settings = bench.settings(slots=required(options.max_tokens), n_ctx=context_tokens(prompt_tokens))
    async with bench.stage(settings, points=len(clients)) as stage:
        own = stage.servers[0].side.facts
        stage.servers = tuple(_for_embeddings(server, own, options) for server in stage.servers)
        for n_clients in clients:
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(
                    ClosedLoop,
                    clients=n_clients,
                    prompt_tokens=prompt_tokens,
                    max_tokens=required(options.max_tokens),
                    duration_s=required(options.duration_s),
                ),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


def _for_embeddings(server: Server, own: TargetFacts, options: Options) -> Server:
    """Return a server for requests of embeddings, which use no slots; so slots are not compared."""
    side = server.side
    if side.comparison is not None:
        side = compared(own, replace(side.facts, slots=own.slots), options)
    return replace(server, spec=protocols.embeddings(server.spec), side=side)


SCENARIO = Scenario(
    name="embeddings",
    summary="texts embedded without a pause: tokens a second, time of a request",
    run=run,
    defaults=Options(clients=(1, 4), prompt_tokens=(64,), max_tokens=16, duration_s=10.0, repeat=5),
    takes=(COMPARABLE - {"backend"}) | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
