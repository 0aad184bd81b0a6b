"""Tests of ``bench.ways`` and of the scenarios whose sides are ways to speak to one daemon."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks import ways
from benchmarks.compare import Comparison
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options, resolve
from benchmarks.results import Metric, Side
from benchmarks.runner import run_scenario
from benchmarks.scenarios import dialects, find, resend, structured
from benchmarks.stage import Bench, Server, Stage, spoken_to
from benchmarks.target import TargetFacts, TargetSpec
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import Heard
from tests.benchmarks.test_scenarios import measured, values
from tests.benchmarks.test_timeline import turn

if TYPE_CHECKING:
    from benchmarks.generator import LoadGenerator

SPEC = TargetSpec("inferencecenter", "inferencecenter", "ws://127.0.0.1:3000/", "t")
FACTS = TargetFacts(
    name="inferencecenter",
    kind="inferencecenter",
    url=SPEC.url,
    model="m",
    model_bytes=None,
    n_params=None,
    library="",
    threads=None,
    slots=None,
    n_ctx=None,
)


def test_each_way_is_a_side_of_the_same_server() -> None:
    """Named after the way; what is the same process need not be compared, whatever it does not tell."""
    first, second = spoken_to(
        Server(SPEC, Side(FACTS, None)), {"HTTP": ways.chat_completions, "WebSocket": ways.websocket}
    )

    assert first.spec == TargetSpec("HTTP", "chat-completions", "http://127.0.0.1:3000", "t")
    assert second.spec == replace(SPEC, name="WebSocket", chat=True)
    assert (first.side.facts.name, first.side.facts.kind, first.side.comparison) == ("HTTP", "chat-completions", None)
    assert second.side.comparison == Comparison((), ())
    assert second.side.comparison.fair


@dataclass
class Seeds:
    """Answers what a load generator answers, and keeps the seeds that it was given."""

    used: list[int] = field(default_factory=list)

    async def do(self, job: ClosedLoop, _answer: type[Turns]) -> Turns:
        """Answer at once."""
        self.used.append(job.first_seed)
        return Turns((), 0.0)


@dataclass(frozen=True)
class Nothing:
    """A result without numbers."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return none."""
        return ()


@pytest.mark.parametrize(("is_one_server", "n_seeds"), [(True, 4), (False, 2)])
async def test_one_server_is_never_sent_the_same_twice(*, is_one_server: bool, n_seeds: int) -> None:
    """What it has read for one side would be found for the other; different servers are sent the same."""
    generator = Seeds()
    bench = Bench(Options(repeat=2), cast("LoadGenerator", generator), Heard())
    sides = spoken_to(Server(SPEC, Side(FACTS, None)), {"one": ways.as_usual, "other": ways.websocket})
    job = partial(ClosedLoop, clients=1, prompt_tokens=1, max_tokens=1, duration_s=1)
    stage = Stage(bench, tuple(sides), is_one_server=is_one_server)
    await stage.measure(job=job, answer=Turns, read=lambda _: Nothing())

    assert len(generator.used) == 4
    assert len(set(generator.used)) == n_seeds


def test_responses_are_reached_at_the_http_address() -> None:
    """Their path is the target's affair."""
    assert ways.responses(SPEC).url == ways.chat_completions(SPEC).url == "http://127.0.0.1:3000"


def test_dialects_divides_the_fronts_cpu_by_all_tokens() -> None:
    """Half a second for ten tokens, warm-up included."""
    found = dialects.read(measured([turn(0, 1), turn(1, 3, 6, 8, tokens=4)], [turn(0, 4), turn(4, 6, 7, 8, tokens=4)]))

    assert values(found)["front CPU a token"] == pytest.approx(50_000)
    assert values(found)["generation"] == pytest.approx(found.loop.tok_s)


def test_resend_leaves_out_the_turns_of_the_history() -> None:
    """Eight turns are told, however long; of two that follow, both wait half a second."""
    history = [turn(number, number + 0.9, cached=0) for number in range(8)]
    later = [turn(10, 10.5, cached=80), turn(11, 11.5, cached=90)]
    found = resend.read(measured([*history, *later]))

    assert found.ttft_ms == (500, 500)
    assert found.prompt_tokens == 100
    assert found.read_tokens == 15


async def test_resend_wants_a_history() -> None:
    """One of eight turns has to hold them."""
    scenario = find("resend")
    options = resolve("resend", Options(prompt_tokens=(200,)), defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match="--prompt-tokens: a history of 200 tokens"):
        await run_scenario(scenario, options, Heard())


def test_structured_says_how_long_answers_were() -> None:
    """Warm-up turns have lengths of their own."""
    found = structured.read(measured([turn(0, 1), turn(1, 3, 6, 8)], [turn(0, 4), turn(4, 6, 7, 8)]))

    assert values(found)["tokens a turn"] == 3


def test_the_schema_wants_more_than_an_answer_holds() -> None:
    """A record for each token, where a record's fixed text alone is many."""
    wanted = json.loads(structured.schema(64))

    assert wanted["minItems"] == 64
    assert len(json.dumps(dict.fromkeys(wanted["items"]["required"]))) > 32
