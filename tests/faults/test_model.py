"""The engine is lost at every moment of its work on the demo model: answers are what they would have been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import talk
from tests.e2e.witness import Witness
from tests.faults.harness import CROWDED, site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.harness import Site

pytestmark = pytest.mark.slow

PROMPTS = ["My name is Ada. I have a cat.", "Count from 5 to 19.", "Tell me a short story.", "What is 7 plus 8?"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Site]:
    """A daemon on the demo model with two slots, turns of eight tokens in each, and traps."""
    with site(tmp_path_factory.mktemp("model"), demo_model_path, **CROWDED) as found:
        found.start()
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(model: Site) -> list[Answer]:
    """What is answered when nobody is in the way."""
    async with talk(model.daemon) as client:
        return [(await ask(client, [await client.create()], [prompt], **GREEDY, n_probs=2))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("place", "passes"),
    [("prefill", 0), ("decode", 0), ("decode", 30), ("save", 0), ("save", 7), ("restore", 0), ("restore", 5)],
)
@pytest.mark.parametrize("action", ["kill", "segfault", "exhaust"])
async def test_it_dies_at_work(model: Site, expected: list[Answer], place: str, passes: int, action: str) -> None:
    """No token is lost or said twice, and where one differs from an undisturbed run the choice was close."""
    async with talk(model.daemon) as client:
        witnesses = [await Witness.open(client) for _ in PROMPTS]
        model.traps.set(place, action, passes=passes)
        for witness, prompt in zip(witnesses, PROMPTS, strict=True):
            await witness.infer(prompt, n_probs=2, **GREEDY)
        for witness in witnesses:
            await witness.finish()
        assert model.traps.left == []
        answers = answers_of(client.seen)
        for witness, one in zip(witnesses, expected, strict=True):
            assert witness.end["op"] == "end"
            assert witness.end["usage"]["completion_tokens"] == len(answers[witness.session_id].tokens) == 48
            assert one.agrees_with(answers[witness.session_id])
            await witness.turn("What is 7 plus 8?", **GREEDY)
            await witness.described()
            await client.ask(op="close_session", session_id=witness.session_id)
