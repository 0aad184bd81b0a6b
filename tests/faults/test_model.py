"""The engine is lost at every moment of its work on the demo model, and answers are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import connect_client
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import FEW_SLOTS, daemon_harness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.harness import DaemonHarness

pytestmark = pytest.mark.slow

PROMPTS = ["My name is Ada. I have a cat.", "Count from 5 to 19.", "Tell me a short story.", "What is 7 plus 8?"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def faulty_model(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """A daemon on the demo model with two slots, quanta of eight tokens, and fault points."""
    with daemon_harness(tmp_path_factory.mktemp("model"), demo_model_path, **FEW_SLOTS) as found:
        found.start()
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(faulty_model: DaemonHarness) -> list[Answer]:
    """The answers of undisturbed turns."""
    async with connect_client(faulty_model.daemon) as client:
        return [(await ask(client, [await client.create()], [prompt], **GREEDY, n_probs=2))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("point", "passes"),
    [("prefill", 0), ("decode", 0), ("decode", 30), ("save", 0), ("save", 7), ("restore", 0), ("restore", 5)],
)
@pytest.mark.parametrize("action", ["kill", "segfault", "exhaust"])
async def test_engine_kill_leaves_answers_unchanged(
    faulty_model: DaemonHarness, expected: list[Answer], point: str, passes: int, action: str
) -> None:
    """No token is lost or repeated; answers differ only where two tokens were nearly equally likely."""
    async with connect_client(faulty_model.daemon) as client:
        recorders = [await RecordingClient.open(client) for _ in PROMPTS]
        faulty_model.faults.set(point, action, passes=passes)
        for recorder, prompt in zip(recorders, PROMPTS, strict=True):
            await recorder.infer(prompt, n_probs=2, **GREEDY)
        for recorder in recorders:
            await recorder.finish()
        assert faulty_model.faults.left == []
        answers = answers_of(client.seen)
        for recorder, one in zip(recorders, expected, strict=True):
            assert recorder.end["op"] == "end"
            assert recorder.end["usage"]["completion_tokens"] == len(answers[recorder.session_id].tokens) == 48
            assert one.agrees_with(answers[recorder.session_id])
            await recorder.turn("What is 7 plus 8?", **GREEDY)
            await recorder.described()
            await client.ask(op="close_session", session_id=recorder.session_id)
