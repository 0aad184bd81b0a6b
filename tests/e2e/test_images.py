"""Images have what text has: KV of earlier turns, forks, offload, and survival of kills. The projector is random."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ollama import Client as OllamaClient
from openai import BadRequestError, OpenAI
from PIL import Image

from inferencecenter.client import Client, RequestError, TooLongError
from tests.e2e.harness import connect_client, run_daemon, start_daemon
from tests.engine.llama.tiny_projectors import ROWS, write_projector
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon, Message, SocketClient

DEMO_WIDTH = 192
RED, BLUE = image_file((64, 48)), image_file((64, 48), color="blue")
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A projector for the demo model."""
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_projector(path, n_embd=DEMO_WIDTH)
    return path


@pytest.fixture
def daemon(tmp_path: Path, demo_model_path: Path, projector: Path) -> Iterator[Daemon]:
    """A daemon whose model takes images."""
    with run_daemon(
        tmp_path / "state",
        demo_model_path,
        INFERENCECENTER_MODEL__MMPROJ=str(projector),
        INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S="0.1",
    ) as running:
        yield running


def image(file: bytes) -> dict[str, str]:
    """A part of a message."""
    return {"type": "image", "data": base64.b64encode(file).decode()}


async def ask(client: SocketClient, session: str, *parts: str | dict[str, str]) -> tuple[str, Message]:
    """A turn about texts and images."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages: Any = [{"role": "user", "content": content}]
    await client.send(op="infer", session_id=session, messages=messages, params=GREEDY)
    text = ""
    while True:
        message = await client.receive()
        assert message["op"] != "error", message
        if message.get("session_id") == session and message["op"] == "token":
            text += message["content"]
        if message["op"] == "end":
            return text, message


async def test_image_stays_in_the_session(daemon: Daemon) -> None:
    """Its rows are tokens of the prompt, read once; its file can be fetched."""
    async with connect_client(daemon) as client:
        session, plain = await client.create(), await client.create()
        _, end = await ask(client, session, image(RED), "What is it?")
        _, without = await ask(client, plain, "What is it?")
        assert end["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + ROWS
        _, later = await ask(client, session, "And now?")
        assert later["usage"]["cached_tokens"] >= end["usage"]["prompt_tokens"]
        transcript = (await client.ask(op="get_session", session_id=session))["transcript"]
        (shown,) = transcript[0]["images"]
        fetched = await client.ask(op="get_image", digest=shown["digest"])
    assert daemon.metric("image_encode_seconds_total") > 0
    assert transcript[0]["content"] == "\ufffcWhat is it?"
    assert base64.b64decode(fetched["data"]) == RED


@pytest.mark.slow
async def test_image_survives_kills_of_engine_and_daemon(
    daemon: Daemon, tmp_path: Path, demo_model_path: Path, projector: Path
) -> None:
    """Its KV is computed again from the stored file: answers are those of an undisturbed session."""
    async with connect_client(daemon) as client:
        session, undisturbed = await client.create(), await client.create()
        for each in (session, undisturbed):
            await ask(client, each, "Look: ", image(RED), image(BLUE))
        expected = [(await ask(client, undisturbed, question))[0] for question in ("And now?", "And then?")]
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        answers = [(await ask(client, session, "And now?"))[0]]
        forked = (await client.ask(op="fork_session", session_id=session))["session_id"]
        assert (await ask(client, forked, "And then?"))[0] == expected[1]
    daemon.process.kill()
    daemon.process.wait()
    second = start_daemon(tmp_path / "state", demo_model_path, INFERENCECENTER_MODEL__MMPROJ=str(projector))
    try:
        second.wait_ready()
        async with connect_client(second) as client:
            assert (await client.ask(op="resume_session", session_id=session))["op"] == "session_resumed"
            answers.append((await ask(client, session, "And then?"))[0])
    finally:
        assert second.stop() == 0
    assert answers == expected


async def test_models_that_take_images_are_listed_as_such(daemon: Daemon) -> None:
    """In every API that has a place for it."""
    async with connect_client(daemon) as client:
        (model,) = (await client.ask(op="list_models"))["models"]
    assert model["vision"]
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}", api_key=daemon.admin_token, max_retries=0) as http:
        models = http.get("/v1/models", cast_to=object)
        properties = http.get("/props", cast_to=object)
    assert isinstance(models, dict)
    assert isinstance(properties, dict)
    assert "vision" in models["data"][0]["capabilities"]
    assert properties["modalities"] == {"vision": True, "audio": False}


async def test_unusable_image_is_refused_and_the_session_goes_on(daemon: Daemon) -> None:
    """The error names the part."""
    async with connect_client(daemon) as client:
        session = await client.create()
        parts = [{"type": "text", "text": "What?"}, image(b"no image")]
        refused = await client.ask(op="infer", session_id=session, messages=[{"role": "user", "content": parts}])
        assert (refused["op"], refused["code"]) == ("error", "invalid_request")
        assert refused["field"] == "messages.0.content.1.data"
        assert "PNG, JPEG, WebP and GIF" in refused["hint"]
        _, end = await ask(client, session, "Hello")
        assert end["finish_reason"] in ("stop", "length")


@pytest.mark.slow
def test_openai_client_sends_images(daemon: Daemon) -> None:
    """As data URLs, again with each request: they are decoded once, and their KV is found."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as client:
        messages: list[Any] = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image(RED)['data']}"}},
                ],
            }
        ]
        options: Any = {"model": "demo", "temperature": 0, "max_tokens": 12}
        first = client.chat.completions.create(messages=messages, **options)
        assert first.usage is not None
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Sure?"},
        ]
        second = client.chat.completions.create(messages=messages, **options)
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens
        messages[0]["content"][1]["image_url"]["url"] = "https://127.0.0.1/cat.png"
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(messages=messages, **options)
    assert caught.value.param == "messages.0.content.1.image_url.url"
    assert "fetches no images" in str(caught.value)


@pytest.mark.slow
def test_responses_have_images(daemon: Daemon) -> None:
    """They stay in stored conversations, are named by digest in items, and can be sent again by it."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as client:
        options: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
        shown: Any = {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{image(RED)['data']}"},
            ],
        }
        first = client.responses.create(input=[shown], **options)
        (item,) = client.responses.input_items.list(first.id).data
        content: Any = item.to_dict()["content"]
        text, picture = content
        assert text == {"type": "input_text", "text": "What is it?"}
        assert picture["file_id"] == hashlib.sha256(RED).hexdigest()
        second = client.responses.create(input="And now?", previous_response_id=first.id, **options)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens > ROWS
        named: Any = {"role": "user", "content": [text, {"type": "input_image", "file_id": picture["file_id"]}]}
        again = client.responses.create(input=[named], **options)
        assert again.output_text == first.output_text
        call: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
        output: Any = {"type": "function_call_output", "call_id": "c1", "output": [picture]}
        counted = client.responses.input_tokens.count(model="demo", input=[named, call, output])
        assert counted.input_tokens > first.usage.input_tokens + ROWS
        conversation = client.conversations.create(items=[shown, {"role": "user", "content": "Well?"}])
        latest, earlier = client.conversations.items.list(conversation.id).data
        assert earlier.to_dict()["content"] == [text, picture]
        client.conversations.items.delete(str(latest.id), conversation_id=conversation.id)
        (left,) = client.conversations.items.list(conversation.id).data
        assert left.id == earlier.id
        within = client.responses.create(input="And?", conversation=conversation.id, **options)
        assert within.usage is not None
        assert within.usage.input_tokens > ROWS
        with pytest.raises(BadRequestError, match="is not an image of this client") as unknown:
            client.responses.create(
                input=[{"role": "user", "content": [{"type": "input_image", "detail": "auto", "file_id": "0" * 64}]}],
                **options,
            )
    assert unknown.value.param == "input"


async def test_python_client_sends_images(daemon: Daemon, tmp_path: Path) -> None:
    """As paths, contents, and uploads for what is larger than a frame."""
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    noise = bytes(np.random.default_rng(1).integers(0, 256, 800 * 600 * 3, dtype=np.uint8))
    large = io.BytesIO()
    Image.frombytes("RGB", (800, 600), noise).save(large, "PNG")
    async with Client(f"http://127.0.0.1:{daemon.port}", daemon.admin_token) as client, client.session() as session:
        answer = await session.ask("What is it?", images=[path, BLUE], params=GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 2 * ROWS
        with pytest.raises(TooLongError, match="larger than"):
            await session.ask("And now?", images=[large.getvalue()])
        uploaded = await client.add_image(large.getvalue())
        assert (uploaded.width, uploaded.height) == (800, 600)
        await session.ask("And now?", images=[uploaded], params=GREEDY)
        with pytest.raises(RequestError, match="none of a known format") as refused:
            await client.add_image(b"no image")
        assert refused.value.field == "data"
        transcript = (await client.resume(session.session_id))[1].transcript or ()
    assert [len(message.images or ()) for message in transcript] == [2, 0, 1, 0]


@pytest.mark.slow
def test_anthropic_and_ollama_clients_send_images(daemon: Daemon) -> None:
    """Each in its own form, with the same prompt."""
    from anthropic import Anthropic  # noqa: PLC0415 - it takes seconds to import, which other workers are spared

    base_url = f"http://127.0.0.1:{daemon.port}"
    source: Any = {"type": "base64", "media_type": "image/png", "data": image(RED)["data"]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": blocks}]}
    with Anthropic(base_url=base_url, auth_token=daemon.admin_token, max_retries=0) as anthropic:
        message = anthropic.messages.create(max_tokens=8, **asked)
        counted = anthropic.messages.count_tokens(**asked)
    assert message.usage.input_tokens == counted.input_tokens > ROWS
    with OllamaClient(base_url, headers={"Authorization": f"Bearer {daemon.admin_token}"}) as ollama:
        chat = ollama.chat("demo", [{"role": "user", "content": "What is it?", "images": [RED]}])
        prompt = ollama.generate("demo", "What is it?", images=[RED])
    assert chat.prompt_eval_count == prompt.prompt_eval_count == counted.input_tokens


@pytest.mark.slow
def test_commands_send_images(daemon: Daemon, tmp_path: Path, demo_model_path: Path, projector: Path) -> None:
    """``chat`` with the next question, ``run`` without a daemon."""
    path = tmp_path / "a red.png"
    path.write_bytes(RED)
    command = [sys.executable, "-m", "inferencecenter"]
    environment = {**os.environ, "INFERENCECENTER_STATE_DIR": str(daemon.state_dir)}
    chat = subprocess.run(
        [*command, "chat", "--url", daemon.url, "--token", daemon.admin_token],
        input=f"/image {path}\nWhat is it?\n/image {tmp_path}/none.png\n",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    first, answer = chat.stdout.splitlines()[:2]
    assert first == "a red.png: 64 x 48 pixels, sent with the next question"
    assert answer
    assert "none.png cannot be read" in chat.stderr
    run = [*command, "run", str(demo_model_path), "What is it?", "--image", str(path), "--json", "--max-tokens", "4"]
    done = subprocess.run([*run, "--mmproj", str(projector)], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] > ROWS
    blind = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert blind.returncode == 64
    assert "does not take images" in blind.stderr
