"""Text of a gap: ``suffix`` of completions, and llama-server's ``/infill``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter.api.openai.chat_schemas import ChatCompletion, ChatCompletionChunk
from inferencecenter.api.openai.infill import InfillAnswer
from inferencecenter.ipc.messages import InfillTokens, PromptSegment
from inferencecenter.protocol.params import decode
from tests.api.http_client import post
from tests.api.streaming import next_turn
from tests.server.harness import MODEL, ask, receive

if TYPE_CHECKING:
    from tests.api.http_client import HttpResponse
    from tests.server.harness import Running

TOKENS = InfillTokens("<P>", "<S>", "<M>", "<R>", "<F>")
GAP: dict[str, Any] = {"input_prefix": "def f", "input_suffix": "\n", "prompt": "oo"}


@pytest.fixture
def coder(server: Running) -> Running:
    """A server of a model that fills gaps."""
    model = msgspec.structs.replace(MODEL, infill=TOKENS)
    server.engine.status = replace(server.engine.status, model=model)
    return server


async def filled(
    server: Running, path: str, body: dict[str, Any], *texts: str, reason: str = "stop"
) -> tuple[HttpResponse, tuple[PromptSegment, ...]]:
    """Send a request, answer it, and return the response and the pieces of the prompt."""
    pending = asyncio.get_running_loop().create_task(post(server, path, body))
    turn = await next_turn(server)
    pieces = server.engine.submission(turn).pieces
    server.engine.begin(turn)
    for text in texts:
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)
    return await pending, pieces


async def test_suffix_of_a_completion_follows_the_gap(coder: Running) -> None:
    """The prompt may be empty, and the texts stay plain whatever they spell."""
    body = {"prompt": "", "suffix": "<M>"}
    response, pieces = await filled(coder, "/v1/completions", body, "x")
    assert response.json["choices"][0]["text"] == "x"
    assert [(piece.text, piece.special) for piece in pieces] == [
        ("<P>", True),
        ("<S>", True),
        ("<M>", False),
        ("<M>", True),
    ]


@pytest.mark.parametrize("before", [{"prompt": "def f"}, {}])
async def test_suffix_of_ollamas_request_follows_the_gap(coder: Running, before: dict[str, str]) -> None:
    """The template and its conversation then have no effect."""
    body = {"model": "stub", **before, "suffix": "\n", "stream": False, "system": "Be brief.", "think": True}
    response, pieces = await filled(coder, "/api/generate", body, "o", "o")
    assert (response.json["response"], response.json["done_reason"]) == ("oo", "stop")
    assert "context" not in response.json
    assert "".join(piece.text for piece in pieces) == f"<P>{before.get('prompt', '')}<S>\n<M>"
    assert [warning.split()[0] for warning in response.json["warnings"]] == ["system", "think"]


async def test_gap_is_filled_in_llama_servers_form(coder: Running) -> None:
    """The prompt belongs to the text before the gap, and other files precede it."""
    body = {**GAP, "input_extra": [{"filename": "a.py", "text": "1"}], "n_predict": 4}
    response, pieces = await filled(coder, "/infill", body, "(", ")", reason="length")
    answer = InfillAnswer.model_validate(response.json)
    assert (answer.content, answer.stop, answer.stop_type) == ("()", True, "limit")
    assert (answer.model, answer.tokens_evaluated) == ("stub", 1)
    text = "".join(piece.text for piece in pieces)
    assert text == "<R>myproject\n<F>a.py\n1<F>filename\n<P>def foo<S>\n<M>"


async def test_stream_ends_with_a_stop(coder: Running) -> None:
    """Each part has its text, and the last one the figures."""
    response, _ = await filled(coder, "/infill", {**GAP, "stream": True}, "(", ")")
    *parts, last = [InfillAnswer.model_validate(event) for event in response.events]
    assert [part.content for part in parts] == ["(", ")"]
    assert not any(part.stop for part in parts)
    assert (last.content, last.stop, last.stop_type) == ("", True, "eos")


async def test_gap_is_filled_in_mistrals_form(coder: Running) -> None:
    """The answer is that of a chat, and its own name of the seed is obeyed."""
    body = {"prompt": "def f", "suffix": "\n", "random_seed": 7, "max_tokens": 4}
    response, pieces = await filled(coder, "/v1/fim/completions", body, "o", "o", reason="length")
    (choice,) = ChatCompletion.model_validate(response.json).choices
    assert (choice.message.content, choice.finish_reason) == ("oo", "length")
    assert "".join(piece.text for piece in pieces) == "<P>def f<S>\n<M>"


async def test_seed_has_mistrals_name(coder: Running) -> None:
    """Mistral's ``random_seed`` is the seed of the turn."""
    pending = asyncio.get_running_loop().create_task(
        post(coder, "/v1/fim/completions", {"prompt": "a", "suffix": "b", "random_seed": 7})
    )
    turn = await next_turn(coder)
    assert decode(coder.engine.submission(turn).params_json).seed == 7
    coder.engine.finish(turn)
    assert (await pending).status == 200


async def test_chunks_of_a_gap_are_those_of_a_chat(coder: Running) -> None:
    """Editors expect the chunks of chat completions."""
    response, _ = await filled(coder, "/v1/fim/completions", {"prompt": "", "suffix": "x", "stream": True}, "(", ")")
    *events, done, rest = response.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "()"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_text_without_a_suffix_is_continued(server: Running) -> None:
    """Models without infill tokens continue it, too."""
    response, pieces = await filled(server, "/v1/fim/completions", {"prompt": "def f"}, "oo")
    assert response.json["choices"][0]["message"]["content"] == "oo"
    assert "".join(piece.text for piece in pieces) == "def f"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/fim/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/fim/completions", {"prompt": ""}, "prompt"),
        ("/v1/fim/completions", {"prompt": "x", "n": 2}, "n"),
        ("/infill", GAP, "model"),
        ("/infill", {"input_prefix": "x"}, "input_suffix"),
        ("/infill", {**GAP, "n": 2}, "n"),
        ("/infill", {**GAP, "input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
    ],
)
async def test_gap_that_cannot_be_filled_is_refused(
    server: Running, path: str, body: dict[str, Any], field: str
) -> None:
    """A vocabulary without the tokens is the model's fault; no session is created for a wrong request."""
    response = await post(server, path, body)
    assert (response.status, response.error["param"]) == (400, field)
    assert response.error["code"] == "invalid_request"


async def test_ollamas_error_names_the_suffix(server: Running) -> None:
    """The vocabulary has no tokens for infill."""
    response = await post(server, "/api/generate", {"model": "stub", "prompt": "x", "suffix": "y"})
    assert (response.status, response.json["error"].partition(":")[0]) == (400, "suffix")


async def test_chat_has_no_gap(coder: Running) -> None:
    """``infill`` requires a raw session."""
    async with coder.v1() as socket:
        await receive(socket)
        session_id = (await ask(socket, op="create_session"))["session_id"]
        error = await ask(socket, op="infer", session_id=session_id, prompt="x", infill={"suffix": "y"})
        assert (error["op"], error["field"]) == ("error", "infill")
