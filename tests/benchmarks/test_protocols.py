"""The protocols of one daemon as sides of a comparison, and the scenarios that use them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks import protocols
from benchmarks.compare import Comparison
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options, resolve
from benchmarks.results import Metric, Side
from benchmarks.runner import run_scenario
from benchmarks.scenarios import agents, dialects, find, resend, structured
from benchmarks.stage import Bench, Server, Stage, protocol_sides
from benchmarks.target import TargetFacts, TargetSpec
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import RecordingProgress
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


def test_each_protocol_is_a_side_of_the_same_server() -> None:
    """A side is named after its protocol, and facts of one process need no comparison."""
    first, second = protocol_sides(
        Server(SPEC, Side(FACTS, None)), {"HTTP": protocols.chat_completions, "WebSocket": protocols.websocket}
    )

    assert first.spec == TargetSpec("HTTP", "chat-completions", "http://127.0.0.1:3000", "t")
    assert second.spec == replace(SPEC, name="WebSocket", chat=True)
    assert (first.side.facts.name, first.side.facts.kind, first.side.comparison) == ("HTTP", "chat-completions", None)
    assert second.side.comparison == Comparison((), ())
    assert second.side.comparison.fair


@dataclass
class RecordingGenerator:
    """Answers like a load generator, and records the seeds."""

    used: list[int] = field(default_factory=list)

    async def do(self, job: ClosedLoop, _answer: type[Turns]) -> Turns:
        """Answer at once."""
        self.used.append(job.first_seed)
        return Turns((), 0.0)


@dataclass(frozen=True)
class EmptyResult:
    """A result without numbers."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return none."""
        return ()


@pytest.mark.parametrize(("is_one_server", "n_seeds"), [(True, 4), (False, 2)])
async def test_one_server_never_receives_a_prompt_twice(*, is_one_server: bool, n_seeds: int) -> None:
    """A prompt cached for one side would speed up the other; different servers get the same prompts."""
    generator = RecordingGenerator()
    bench = Bench(Options(repeat=2), cast("LoadGenerator", generator), RecordingProgress())
    sides = protocol_sides(Server(SPEC, Side(FACTS, None)), {"one": protocols.as_usual, "other": protocols.websocket})
    job = partial(ClosedLoop, clients=1, prompt_tokens=1, max_tokens=1, duration_s=1)
    stage = Stage(bench, tuple(sides), is_one_server=is_one_server)
    await stage.measure(job=job, answer=Turns, read=lambda _: EmptyResult())

    assert len(generator.used) == 4
    assert len(set(generator.used)) == n_seeds


def test_responses_use_the_http_address() -> None:
    """The target adds the path."""
    assert protocols.responses(SPEC).url == protocols.chat_completions(SPEC).url == "http://127.0.0.1:3000"


def test_dialects_divides_front_cpu_by_tokens() -> None:
    """Half a second of CPU for ten tokens, warm-up included, is 50 ms a token."""
    found = dialects.read(measured([turn(0, 1), turn(1, 3, 6, 8, tokens=4)], [turn(0, 4), turn(4, 6, 7, 8, tokens=4)]))

    assert values(found)["front CPU a token"] == pytest.approx(50_000)
    assert values(found)["generation"] == pytest.approx(found.loop.tok_s)


def test_resend_excludes_the_turns_of_the_history() -> None:
    """Eight turns build the history; the two measured ones wait half a second each."""
    history = [turn(number, number + 0.9, cached=0) for number in range(8)]
    later = [turn(10, 10.5, cached=80), turn(11, 11.5, cached=90)]
    found = resend.read(measured([*history, *later]))

    assert found.ttft_ms == (500, 500)
    assert found.prompt_tokens == 100
    assert found.read_tokens == 15


async def test_resend_requires_a_history() -> None:
    """Too few prompt tokens for its eight turns are refused."""
    scenario = find("resend")
    options = resolve("resend", Options(prompt_tokens=(200,)), defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match="--prompt-tokens: a history of 200 tokens"):
        await run_scenario(scenario, options, RecordingProgress())


def test_agents_compare_prefilled_with_new_tokens() -> None:
    """The first request is no measure; what follows is new beyond the prompt before and its answer of two tokens."""
    requests = [
        replace(turn(number, number + 0.5, number + 0.6, tokens=2), prompt_tokens=prompt, cached_tokens=cached)
        for number, prompt, cached in ((0, 100, 0), (1, 152, 100), (2, 204, 150))
    ]
    found = agents.read(measured(requests))

    assert (found.new_tokens, found.read_tokens) == (50, 53)
    assert values(found)["tokens read for each new one"] == pytest.approx(1.06)


def test_structured_reports_answer_lengths() -> None:
    """Warm-up turns have their own lengths."""
    found = structured.read(measured([turn(0, 1), turn(1, 3, 6, 8)], [turn(0, 4), turn(4, 6, 7, 8)]))

    assert values(found)["tokens a turn"] == 3


def test_schema_requires_more_than_an_answer() -> None:
    """A record for each token, where a record's fixed text alone is many."""
    wanted = json.loads(structured.schema(64))

    assert wanted["minItems"] == 64
    assert len(json.dumps(dict.fromkeys(wanted["items"]["required"]))) > 32
