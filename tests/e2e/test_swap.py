"""Models are loaded and unloaded on a real daemon without interrupting turns or losing history."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import answers_of, ask
from tests.e2e.harness import ENDLESS, Daemon, connect_client, run_daemon, start_daemon, stopped
from tests.e2e.other_model import write_other_model
from tests.e2e.recording_client import RecordingClient
from tests.fuzz.targets import corpus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Message, SocketClient

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 300}
STATEMENT = "My name is Ada. I live in Vienna."
QUESTION = "What is my name?"
CAPITAL = "What is the capital of France?"
PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Name four colors.",
    "Give me a JSON object with a name and an age.",
    "Hello, who are you?",
)
SETTINGS = {
    "INFERENCECENTER_ENGINE__SLOTS": "8",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.1",
    "INFERENCECENTER_MODEL__NAME": "demo",
}


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """A models directory with another model than the demo, a truncated one and one with NaN weights."""
    directory = tmp_path_factory.mktemp("models")
    whole = write_other_model(demo_model_path, directory / "other.gguf").read_bytes()
    (directory / "truncated.gguf").write_bytes(whole[: len(whole) // 2])
    (directory / "nan.gguf").write_bytes(corpus("model_file")["nan-heads.gguf"])
    return directory


@pytest.fixture(scope="module")
def settings(models_dir: Path, demo_model_path: Path) -> dict[str, str]:
    """Settings with these models, one with a short keep-alive, one missing and one too large."""
    entries = {
        "brief": {"path": str(models_dir / "other.gguf"), "keep_alive_s": 0.5},
        "missing": {"path": str(models_dir / "missing.gguf")},
        "huge": {"path": str(demo_model_path), "n_ctx": 2**22, "slots": 256},
    }
    return SETTINGS | {
        "INFERENCECENTER_MODELS_DIR": str(models_dir),
        "INFERENCECENTER_MODELS": json.dumps(entries),
    }


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, settings: dict[str, str]
) -> Iterator[Daemon]:
    """A daemon with several models, shared by the module; each test starts with the demo as the default."""
    with run_daemon(tmp_path_factory.mktemp("fleet") / "state", demo_model_path, **settings) as running:
        yield running


async def load(client: SocketClient, name: str) -> Message:
    """Load a model and return the final frame about it."""
    request_id = f"load-{len(client.seen)}"
    await client.send(op="load_model", id=request_id, name=name)
    return await client.until(
        lambda frame: frame.get("id") == request_id and (frame["op"] == "error" or frame["phase"] in ("done", "failed"))
    )


async def model_states(client: SocketClient) -> dict[str, str]:
    """Return the state of each model."""
    return {model["name"]: model["state"] for model in (await client.ask(op="list_models"))["models"]}


async def open_session(client: SocketClient, model: str) -> RecordingClient:
    """Create a session of a model once that is loaded."""
    while (created := await client.ask(op="create_session", model=model))["op"] == "error":
        assert created["code"] == "model_loading", created
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "ready")
    assert created["model"] == model
    recorder = RecordingClient(client, created["session_id"], created["epoch"])
    client.listeners.append(recorder.see)
    return recorder


async def start_streams(client: SocketClient, *, n_streams: int, **options: Any) -> list[RecordingClient]:
    """Start endless turns, and wait until each has produced text."""
    streams = [await RecordingClient.open(client, **options) for _ in range(n_streams)]
    for stream, prompt in zip(streams, PROMPTS, strict=False):
        await stream.infer(prompt, **ENDLESS)
    for stream in streams:
        while not stream.turns or not stream.text:
            await client.receive()
    return streams


async def assert_streams_continue(streams: list[RecordingClient]) -> None:
    """Wait until each stream has produced more, abort it, and check that all its text was received."""
    for stream in streams:
        assert not stream.is_over
        await stream.until("token")
    for stream in streams:
        await stream.client.send(op="abort", session_id=stream.session_id)
    for stream in streams:
        await stream.finish()
        assert (stream.end["op"], stream.end["finish_reason"]) == ("end", "aborted")
        assert (await stream.described())["turns"][0]["finish_reason"] == "aborted"


@pytest.mark.slow
async def test_swap_does_not_disturb_running_turns(daemon: Daemon, record_property: Any) -> None:
    """Eight streams end with their own model as expected; later turns use the new one."""
    async with connect_client(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        expected = await ask(client, [await client.create() for _ in PROMPTS], PROMPTS, **LONG, n_probs=2)
        sessions = [await client.create() for _ in PROMPTS]
        begin = len(client.seen)
        for session, prompt in zip(sessions, PROMPTS, strict=True):
            await client.send(op="infer", session_id=session, prompt=prompt, params=LONG, n_probs=2)
        await client.until(lambda frame: frame["op"] == "token")
        with stopped(daemon.engine_pid()):  # the model may load more slowly than the turns end
            assert (await load(client, "other"))["phase"] == "done"
        n_running = len(sessions) - sum(frame["op"] == "end" for frame in client.seen[begin:])
        record_property("streams_running_after_swap", n_running)
        assert n_running, "all had ended before the other model was loaded"
        while sum(frame["op"] == "end" for frame in client.seen[begin:]) < len(sessions):
            assert (await client.receive())["op"] != "error"
        seen = client.seen[begin:]
        answers = answers_of(seen)
        for session, alone in zip(sessions, expected, strict=True):
            assert len(answers[session].tokens) == LONG["max_tokens"]
            assert answers[session].agrees_with(alone)
        assert sum(frame["op"] == "queued" for frame in seen) == len(sessions), "no turn was queued again"
        assert [frame["model"] for frame in seen if frame["op"] == "model_changed"] == ["other"]
        for session in sessions[:2]:
            assert (await client.turn(session, CAPITAL, **GREEDY))[1]["usage"]["completion_tokens"] > 0
            described = await client.ask(op="get_session", session_id=session)
            assert (described["model"], len(described["turns"])) == ("other", 2)
        assert daemon.metric("engine_restarts_total") == 0


@pytest.mark.slow
async def test_sessions_keep_history_across_a_swap(daemon: Daemon) -> None:
    """The new model knows the history; a session with a chosen model keeps it, and its KV."""
    async with connect_client(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        loose, pinned = await RecordingClient.open(client), await open_session(client, "demo")
        for recorder in (loose, pinned):
            await recorder.turn(STATEMENT, **GREEDY)
        assert (await load(client, "other"))["phase"] == "done"
        assert "Ada" in await loose.turn(QUESTION, **GREEDY)
        assert loose.end["stats"]["cached_tokens"] == 0
        assert (await loose.described())["model"] == "other"
        assert "Ada" in await pinned.turn(QUESTION, **GREEDY)
        assert pinned.end["stats"]["cached_tokens"] > 0
        assert (await pinned.described())["model"] == "demo"
        for name in ("demo", "other"):
            assert "Paris" in await (await open_session(client, name)).turn(CAPITAL, **GREEDY)
        assert (await load(client, "demo"))["phase"] == "done"
        assert "Vienna" in await loose.turn("Where do I live?", **GREEDY)
        described = await loose.described()
        assert (described["model"], len(described["turns"])) == ("demo", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "does not exist"),
        ("truncated", "truncated.gguf"),
        ("nan", "nan.gguf"),
        ("huge", "Does not fit in memory"),
    ],
)
async def test_failed_load_leaves_turns_running(daemon: Daemon, name: str, why: str) -> None:
    """A missing, truncated, NaN or too large model reports why; turns and the default are unaffected."""
    async with connect_client(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        streams = await start_streams(client, n_streams=4)
        failed = await load(client, name)
        assert (failed["op"], failed["phase"], failed["model"]) == ("swap", "failed", name)
        assert why in failed["detail"]
        models = {model["name"]: model for model in (await client.ask(op="list_models"))["models"]}
        assert (models["demo"]["default"], models["demo"]["state"]) == (True, "loaded")
        assert (models[name]["default"], models[name]["state"]) == (False, "unloaded")
        assert not [frame for frame in client.seen if frame["op"] == "model_changed" and frame["model"] == name]
        await assert_streams_continue(streams)
        assert "Paris" in await (await RecordingClient.open(client)).turn(CAPITAL, **GREEDY)


async def test_session_of_unloadable_model_gets_the_reason(daemon: Daemon) -> None:
    """The first request gets model_loading, later ones the reason; an unknown model is not found."""
    async with connect_client(daemon) as client:
        refused = await client.ask(op="create_session", model="truncated")
        assert (refused["code"], refused["retryable"]) == ("model_loading", True)
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "failed")
        refused = await client.ask(op="create_session", model="truncated")
        assert refused["code"] == "engine_unavailable"
        assert "truncated" in refused["message"]
        for op, field in (("create_session", "model"), ("load_model", "name"), ("unload_model", "name")):
            assert (await client.ask(op=op, **{field: "unknown"}))["code"] == "model_not_found"


@pytest.mark.slow
async def test_unloaded_model_is_loaded_on_demand(daemon: Daemon) -> None:
    """A running turn ends before the unload; the next turn waits for a load and knows the history."""
    async with connect_client(daemon) as client:
        recorder = await open_session(client, "other")
        await recorder.turn(STATEMENT, **GREEDY)
        await recorder.infer("Tell me a short story.", **LONG)
        await recorder.until("token")
        assert (await client.ask(op="unload_model", name="other"))["op"] == "model_unloaded"
        await recorder.finish()
        assert recorder.end["finish_reason"] == "length"
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "asleep")
        assert (await model_states(client))["other"] == "asleep"
        assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
        await recorder.described()
        assert (await model_states(client))["other"] == "loaded"


@pytest.mark.slow
async def test_keep_alive_is_per_model(daemon: Daemon) -> None:
    """A model with a short keep-alive is unloaded while the default stays, and the next turn loads it."""
    async with connect_client(daemon) as client:
        recorder = await open_session(client, "brief")
        await recorder.turn(STATEMENT, **GREEDY)
        await client.until(
            lambda frame: frame["op"] == "engine" and (frame.get("model"), frame["state"]) == ("brief", "asleep")
        )
        found = await model_states(client)
        assert (found["brief"], found["demo"]) == ("asleep", "loaded")
        assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
        await recorder.described()


@pytest.mark.slow
async def test_models_alternate_with_one_resident(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """With one resident model, each evicts the other, even during a long turn, and no text is lost."""
    alone = {"INFERENCECENTER_ENGINE__MAX_RESIDENT": "1", "INFERENCECENTER_ENGINE__SWAP_PATIENCE_S": "0.05"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings | alone) as daemon:
        async with connect_client(daemon) as client:
            recorders = [await open_session(client, name) for name in ("demo", "other")]
            assert list((await model_states(client)).values()).count("loaded") == 1
            for prompt in (STATEMENT, QUESTION):
                for recorder in recorders:
                    await recorder.infer(prompt, **GREEDY)
                for recorder in recorders:
                    assert "Ada" in await recorder.finish()
                assert list((await model_states(client)).values()).count("loaded") == 1
            long, short = recorders[::-1] if (await model_states(client))["other"] == "loaded" else recorders
            await long.infer("Tell me a short story.", **LONG | {"max_tokens": 1000})
            await long.until("token")
            await short.infer(QUESTION, **GREEDY)
            assert "Ada" in await short.finish()
            assert not long.is_over
            await long.finish()
            assert (long.end["finish_reason"], long.end["usage"]["completion_tokens"]) == ("length", 1000)
            for recorder, name in zip(recorders, ("demo", "other"), strict=True):
                assert (await recorder.described())["model"] == name
            assert daemon.metric("engine_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_turn_resumes_with_its_own_model_after_restart(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str], how: signal.Signals
) -> None:
    """The next daemon loads the session's model, and received text is a prefix of the answer."""
    first = start_daemon(
        tmp_path / "state", demo_model_path, **settings, INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S="0"
    )
    try:
        first.wait_ready()
        async with connect_client(first) as client:
            recorder = await open_session(client, "other")
            await recorder.turn(STATEMENT, **GREEDY)
            await recorder.infer("Tell me a short story.", **LONG | {"max_tokens": 800})
            await recorder.until("token")
            first.process.send_signal(how)
            await recorder.drain()
        first.process.wait(60)
    finally:
        first.process.kill()
        first.process.wait()
    assert not recorder.is_over
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as second:
        async with connect_client(second) as client:
            await recorder.resume(client)
            await recorder.finish()
            assert (recorder.end["op"], recorder.end["finish_reason"]) == ("end", "length")
            assert recorder.end["usage"]["completion_tokens"] == 800
            assert (await recorder.described())["model"] == "other"
            assert (await model_states(client))["demo"] == "loaded"


@pytest.mark.slow
async def test_reload_swaps_the_default_model(tmp_path: Path, demo_model_path: Path, models_dir: Path) -> None:
    """SIGHUP swaps the model under a stream; an invalid configuration later changes nothing."""
    config = tmp_path / "inferencecenter.toml"

    def choose(name: str) -> None:
        config.write_text(
            f'models_dir = "{models_dir}"\n[model]\nname = "{name}"\n[models.demo]\npath = "{demo_model_path}"\n'
        )

    choose("demo")
    own = {name: value for name, value in SETTINGS.items() if "MODEL" not in name}
    with run_daemon(tmp_path / "state", None, INFERENCECENTER_CONFIG=str(config), **own) as daemon:
        async with connect_client(daemon) as client:
            recorder = await RecordingClient.open(client)
            await recorder.turn(STATEMENT, **GREEDY)
            streams = await start_streams(client, n_streams=2)
            choose("other")
            daemon.process.send_signal(signal.SIGHUP)
            changed = await client.until(lambda frame: frame["op"] == "model_changed")
            assert changed["model"] == "other"
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert (await recorder.described())["model"] == "other"
            choose("truncated")
            daemon.process.send_signal(signal.SIGHUP)
            await client.until(
                lambda frame: (
                    frame["op"] == "engine" and (frame.get("model"), frame["state"]) == ("truncated", "failed")
                )
            )
            assert "Paris" in await (await RecordingClient.open(client)).turn(CAPITAL, **GREEDY)
            await assert_streams_continue(streams)
            assert (await client.ask(op="hello"))["model"] == "other"
    assert "truncated" in daemon.log.read_text()
