"""Models come and go on a real daemon while people talk to it: nobody is cut off, and nothing is forgotten."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import answers_of, ask
from tests.e2e.harness import ENDLESS, Daemon, run_daemon, start_daemon, stopped, talk
from tests.e2e.other_model import write_other_model
from tests.e2e.witness import Witness
from tests.fuzz.targets import corpus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Message, Talk

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 300}
TOLD = "My name is Ada. I live in Vienna."
ASKED = "What is my name?"
CAPITAL = "What is the capital of France?"
PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Name four colours.",
    "Give me a JSON object with a name and an age.",
    "Hello, who are you?",
)
SETTINGS = {
    "INFERENCECENTER_ENGINE__SLOTS": "8",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # what is shorter is not worth parking
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.1",
    "INFERENCECENTER_MODEL__NAME": "demo",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """A directory of models with another one than the demo, one that was cut short, and one whose numbers are none."""
    directory = tmp_path_factory.mktemp("models")
    whole = write_other_model(demo_model_path, directory / "other.gguf").read_bytes()
    (directory / "truncated.gguf").write_bytes(whole[: len(whole) // 2])
    (directory / "nan.gguf").write_bytes(corpus("model_file")["nan-heads.gguf"])
    return directory


@pytest.fixture(scope="module")
def settings(folder: Path, demo_model_path: Path) -> dict[str, str]:
    """Settings of a daemon with these models, one that is soon asleep, one that is not there and one too large."""
    entries = {
        "brief": {"path": str(folder / "other.gguf"), "keep_alive_s": 0.5},
        "missing": {"path": str(folder / "missing.gguf")},
        "huge": {"path": str(demo_model_path), "n_ctx": 2**22, "slots": 256},
    }
    return SETTINGS | {
        "INFERENCECENTER_MODELS_DIR": str(folder),
        "INFERENCECENTER_MODELS": json.dumps(entries),
    }


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, settings: dict[str, str]
) -> Iterator[Daemon]:
    """A daemon with several models, shared by a module's tests; each begins with the demo as the default."""
    with run_daemon(tmp_path_factory.mktemp("fleet") / "state", demo_model_path, **settings) as running:
        yield running


async def load(client: Talk, name: str) -> Message:
    """Have a model loaded, and return the last that is said of it."""
    request_id = f"load-{len(client.seen)}"
    await client.send(op="load_model", id=request_id, name=name)
    return await client.until(
        lambda frame: frame.get("id") == request_id and (frame["op"] == "error" or frame["phase"] in ("done", "failed"))
    )


async def states(client: Talk) -> dict[str, str]:
    """Return where each model is."""
    return {model["name"]: model["state"] for model in (await client.ask(op="list_models"))["models"]}


async def opened(client: Talk, model: str) -> Witness:
    """Open a session of a model, as soon as that is loaded."""
    while (created := await client.ask(op="create_session", model=model))["op"] == "error":
        assert created["code"] == "model_loading", created
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "ready")
    assert created["model"] == model
    witness = Witness(client, created["session_id"], created["epoch"])
    client.listeners.append(witness.see)
    return witness


async def begun(client: Talk, *, n_streams: int, **options: Any) -> list[Witness]:
    """Begin turns that do not end by themselves, and wait until each says something."""
    streams = [await Witness.open(client, **options) for _ in range(n_streams)]
    for stream, prompt in zip(streams, PROMPTS, strict=False):
        await stream.infer(prompt, **ENDLESS)
    for stream in streams:
        while not stream.turns or not stream.text:
            await client.receive()
    return streams


async def going_on(streams: list[Witness]) -> None:
    """Wait until each stream has said more, end it, and see that it was shown all that it said."""
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
async def test_eight_streams_do_not_notice_a_swap(daemon: Daemon, record_property: Any) -> None:
    """Each says what it says undisturbed, to its last token, with the model that began it; then the other answers."""
    async with talk(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        undisturbed = await ask(client, [await client.create() for _ in PROMPTS], PROMPTS, **LONG, n_probs=2)
        sessions = [await client.create() for _ in PROMPTS]
        begin = len(client.seen)
        for session, prompt in zip(sessions, PROMPTS, strict=True):
            await client.send(op="infer", session_id=session, prompt=prompt, params=LONG, n_probs=2)
        await client.until(lambda frame: frame["op"] == "token")
        with stopped(daemon.engine_pid()):  # loading may take longer than what it has to say
            assert (await load(client, "other"))["phase"] == "done"
        n_running = len(sessions) - sum(frame["op"] == "end" for frame in client.seen[begin:])
        record_property("streams_that_ran_on", n_running)
        assert n_running, "all had ended before the other model was loaded"
        while sum(frame["op"] == "end" for frame in client.seen[begin:]) < len(sessions):
            assert (await client.receive())["op"] != "error"
        seen = client.seen[begin:]
        answers = answers_of(seen)
        for session, alone in zip(sessions, undisturbed, strict=True):
            assert len(answers[session].tokens) == LONG["max_tokens"]
            assert answers[session].agrees_with(alone)
        assert sum(frame["op"] == "queued" for frame in seen) == len(sessions), "nobody had to wait again"
        assert [frame["model"] for frame in seen if frame["op"] == "model_changed"] == ["other"]
        for session in sessions[:2]:
            assert (await client.turn(session, CAPITAL, **GREEDY))[1]["usage"]["completion_tokens"] > 0
            described = await client.ask(op="get_session", session_id=session)
            assert (described["model"], len(described["turns"])) == ("other", 2)
        assert daemon.figure("engine_restarts_total") == 0


async def test_sessions_carry_on(daemon: Daemon) -> None:
    """What was said is known to the model that answers now; one that has chosen its model keeps it, with its KV."""
    async with talk(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        loose, pinned = await Witness.open(client), await opened(client, "demo")
        for witness in (loose, pinned):
            await witness.turn(TOLD, **GREEDY)
        assert (await load(client, "other"))["phase"] == "done"
        assert "Ada" in await loose.turn(ASKED, **GREEDY)
        assert loose.end["stats"]["cached_tokens"] == 0
        assert (await loose.described())["model"] == "other"
        assert "Ada" in await pinned.turn(ASKED, **GREEDY)
        assert pinned.end["stats"]["cached_tokens"] > 0
        assert (await pinned.described())["model"] == "demo"
        for name in ("demo", "other"):
            assert "Paris" in await (await opened(client, name)).turn(CAPITAL, **GREEDY)
        assert (await load(client, "demo"))["phase"] == "done"
        assert "Vienna" in await loose.turn("Where do I live?", **GREEDY)
        described = await loose.described()
        assert (described["model"], len(described["turns"])) == ("demo", 3)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "does not exist"),
        ("truncated", "truncated.gguf"),
        ("nan", "nan.gguf"),
        ("huge", "Does not fit in memory"),
    ],
)
async def test_what_cannot_be_loaded_cuts_nobody_off(daemon: Daemon, name: str, why: str) -> None:
    """A file that is missing, cut short, full of NaN or too large: it is said why, streams go on, all is as it was."""
    async with talk(daemon) as client:
        assert (await load(client, "demo"))["phase"] == "done"
        streams = await begun(client, n_streams=4)
        failed = await load(client, name)
        assert (failed["op"], failed["phase"], failed["model"]) == ("swap", "failed", name)
        assert why in failed["detail"]
        models = {model["name"]: model for model in (await client.ask(op="list_models"))["models"]}
        assert (models["demo"]["default"], models["demo"]["state"]) == (True, "loaded")
        assert (models[name]["default"], models[name]["state"]) == (False, "unloaded")
        assert not [frame for frame in client.seen if frame["op"] == "model_changed" and frame["model"] == name]
        await going_on(streams)
        assert "Paris" in await (await Witness.open(client)).turn(CAPITAL, **GREEDY)


async def test_who_names_what_cannot_be_loaded_hears_why(daemon: Daemon) -> None:
    """At first that it is being loaded, then the reason; what is no model at all is not found."""
    async with talk(daemon) as client:
        refused = await client.ask(op="create_session", model="truncated")
        assert (refused["code"], refused["retryable"]) == ("model_loading", True)
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "failed")
        refused = await client.ask(op="create_session", model="truncated")
        assert refused["code"] == "engine_unavailable"
        assert "truncated" in refused["message"]
        for op, field in (("create_session", "model"), ("load_model", "name"), ("unload_model", "name")):
            assert (await client.ask(op=op, **{field: "nobody"}))["code"] == "model_not_found"


async def test_an_unloaded_model_is_loaded_by_the_next_turn(daemon: Daemon) -> None:
    """Its running turn ends before it goes; who talks to it next waits, and is known."""
    async with talk(daemon) as client:
        witness = await opened(client, "other")
        await witness.turn(TOLD, **GREEDY)
        await witness.infer("Tell me a short story.", **LONG)
        await witness.until("token")
        assert (await client.ask(op="unload_model", name="other"))["op"] == "model_unloaded"
        await witness.finish()
        assert witness.end["finish_reason"] == "length"
        await client.until(lambda frame: frame["op"] == "engine" and frame["state"] == "asleep")
        assert (await states(client))["other"] == "asleep"
        assert "Ada" in await witness.turn(ASKED, **GREEDY)
        await witness.described()
        assert (await states(client))["other"] == "loaded"


async def test_each_model_sleeps_when_it_is_to(daemon: Daemon) -> None:
    """One that is kept for half a second is gone while the default stays; it wakes for the next turn."""
    async with talk(daemon) as client:
        witness = await opened(client, "brief")
        await witness.turn(TOLD, **GREEDY)
        await client.until(
            lambda frame: frame["op"] == "engine" and (frame.get("model"), frame["state"]) == ("brief", "asleep")
        )
        found = await states(client)
        assert (found["brief"], found["demo"]) == ("asleep", "loaded")
        assert "Ada" in await witness.turn(ASKED, **GREEDY)
        await witness.described()


@pytest.mark.slow
async def test_models_take_turns_where_only_one_may_be_loaded(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str]
) -> None:
    """Each makes way for the other, a long turn after a while in its midst; all are answered and nothing is lost."""
    alone = {"INFERENCECENTER_ENGINE__MAX_RESIDENT": "1", "INFERENCECENTER_ENGINE__SWAP_PATIENCE_S": "0.05"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings | alone) as daemon:
        async with talk(daemon) as client:
            witnesses = [await opened(client, name) for name in ("demo", "other")]
            assert list((await states(client)).values()).count("loaded") == 1
            for prompt in (TOLD, ASKED):
                for witness in witnesses:
                    await witness.infer(prompt, **GREEDY)
                for witness in witnesses:
                    assert "Ada" in await witness.finish()
                assert list((await states(client)).values()).count("loaded") == 1
            long, short = witnesses[::-1] if (await states(client))["other"] == "loaded" else witnesses
            await long.infer("Tell me a short story.", **LONG | {"max_tokens": 1000})
            await long.until("token")
            await short.infer(ASKED, **GREEDY)
            assert "Ada" in await short.finish()
            assert not long.is_over
            await long.finish()
            assert (long.end["finish_reason"], long.end["usage"]["completion_tokens"]) == ("length", 1000)
            for witness, name in zip(witnesses, ("demo", "other"), strict=True):
                assert (await witness.described())["model"] == name
            assert daemon.figure("engine_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_turn_goes_on_with_its_own_model_after_a_restart(
    tmp_path: Path, demo_model_path: Path, settings: dict[str, str], how: signal.Signals
) -> None:
    """Whatever the default is by then: the session's model is loaded for it, and what was shown is its beginning."""
    first = start_daemon(
        tmp_path / "state", demo_model_path, **settings, INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S="0"
    )
    try:
        first.wait_ready()
        async with talk(first) as client:
            witness = await opened(client, "other")
            await witness.turn(TOLD, **GREEDY)
            await witness.infer("Tell me a short story.", **LONG | {"max_tokens": 800})
            await witness.until("token")
            first.process.send_signal(how)
            await witness.drain()
        first.process.wait(60)
    finally:
        first.process.kill()
        first.process.wait()
    assert not witness.is_over
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as second:
        async with talk(second) as client:
            await witness.resume(client)
            await witness.finish()
            assert (witness.end["op"], witness.end["finish_reason"]) == ("end", "length")
            assert witness.end["usage"]["completion_tokens"] == 800
            assert (await witness.described())["model"] == "other"
            assert (await states(client))["demo"] == "loaded"


@pytest.mark.slow
async def test_another_configuration_swaps(tmp_path: Path, demo_model_path: Path, folder: Path) -> None:
    """At SIGHUP, under a stream; what is wrong with it later changes nothing."""
    config = tmp_path / "inferencecenter.toml"

    def choose(name: str) -> None:
        config.write_text(
            f'models_dir = "{folder}"\n[model]\nname = "{name}"\n[models.demo]\npath = "{demo_model_path}"\n'
        )

    choose("demo")
    own = {name: value for name, value in SETTINGS.items() if "MODEL" not in name}
    with run_daemon(tmp_path / "state", None, INFERENCECENTER_CONFIG=str(config), **own) as daemon:
        async with talk(daemon) as client:
            witness = await Witness.open(client)
            await witness.turn(TOLD, **GREEDY)
            streams = await begun(client, n_streams=2)
            choose("other")
            daemon.process.send_signal(signal.SIGHUP)
            changed = await client.until(lambda frame: frame["op"] == "model_changed")
            assert changed["model"] == "other"
            assert "Ada" in await witness.turn(ASKED, **GREEDY)
            assert (await witness.described())["model"] == "other"
            choose("truncated")
            daemon.process.send_signal(signal.SIGHUP)
            await client.until(
                lambda frame: (
                    frame["op"] == "engine" and (frame.get("model"), frame["state"]) == ("truncated", "failed")
                )
            )
            assert "Paris" in await (await Witness.open(client)).turn(CAPITAL, **GREEDY)
            await going_on(streams)
            assert (await client.ask(op="hello"))["model"] == "other"
    assert "truncated" in daemon.log.read_text()
