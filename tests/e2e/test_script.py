"""The scripted backend as documented: the rules of docs/scripted.md, by OpenAI's client and sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.documentation import read_page
from tests.e2e.harness import Daemon, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that answers by the documented rules."""
    (block,) = (each for each in read_page("docs/scripted.md").blocks if each.language == "toml")
    folder = tmp_path_factory.mktemp("script")
    rules = folder / "rules.toml"
    rules.write_text(block.text)
    settings = {"ENGINE__BACKEND": "script", "ENGINE__SCRIPT": str(rules), "ENGINE__N_CTX": "0"}
    variables = {f"INFERENCECENTER_{name}": value for name, value in settings.items()}
    with run_daemon(folder / "state", None, **variables) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    """OpenAI's client."""
    url = f"http://127.0.0.1:{daemon.port}/v1"
    with OpenAI(base_url=url, api_key=daemon.admin_token, max_retries=0) as connected:
        yield connected


def test_agent_calls_a_tool_and_answers_by_its_result(client: OpenAI) -> None:
    """The call is parsed with its reasoning, and the rule on its result answers; the history is found again."""
    first = client.chat.completions.create(model="script", messages=[QUESTION], tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "I need the weather of Oslo."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "-3 °C"}
    history: Any = [QUESTION, message.to_dict(), result]
    second = client.chat.completions.create(model="script", messages=history, tools=[TOOL])
    assert second.choices[0].message.content == "Take a coat."
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens


def test_error_comes_after_the_text_of_a_stream(client: OpenAI) -> None:
    """The rule's code and message reach the client, and without a stream its status."""
    question: Any = {"role": "user", "content": "Please FAIL"}
    stream = client.chat.completions.create(model="script", messages=[question], stream=True)
    texts = (chunk.choices[0].delta.content or "" for chunk in stream)
    assert next(filter(None, texts)) == "T"
    with pytest.raises(openai.APIError, match="as the script says"):
        list(texts)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="script", messages=[question])
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")


async def test_sockets_get_the_same_answers(daemon: Daemon) -> None:
    """A session of the daemon's own protocol is answered by the rules too."""
    async with connect_client(daemon) as socket:
        session_id = await socket.create()
        text, end = await socket.turn(session_id, "Hi")
    assert (text, end["finish_reason"]) == ("Hello.", "stop")
