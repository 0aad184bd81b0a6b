"""Clients with a model that generates text: what they show is theirs, and two ways to ask have one answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

from tests.clients.client_programs import SDKS, ClientProgram, blocks_of, install, printed, run
from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1500)]

_SCHEMA: Final = (
    '{"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}}, '
    '"required": ["kind", "old"], "additionalProperties": false}'
)
_PYTHON: Final = f"""
import json, os
hi = [{{"role": "user", "content": "Hello"}}]
schema = json.loads('{_SCHEMA}')
"""
_OPENAI_FORMAT: Final = '{"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": schema}}'
_JAVASCRIPT: Final = f"const schema = {_SCHEMA};\n"
PROGRAMS: Final = {
    "openai (Python)": (
        _PYTHON,
        f"""
asked = {{"model": "script", "messages": hi, "temperature": 0}}
create = client.chat.completions.create
text = create(**asked, max_tokens=12).choices[0].message.content
streaming = "".join(
    chunk.choices[0].delta.content or "" for chunk in create(**asked, max_tokens=12, stream=True) if chunk.choices
)
structured = json.loads(create(**asked, response_format={_OPENAI_FORMAT}).choices[0].message.content)
print(json.dumps([text, streaming, structured]))
""",
    ),
    "openai (npm)": (
        _JAVASCRIPT,
        """
const asked = { model: "script", messages: [{ role: "user", content: "Hello" }], temperature: 0 };
const text = (await client.chat.completions.create({ ...asked, max_tokens: 12 })).choices[0].message.content;
const streaming = await client.chat.completions.stream({ ...asked, max_tokens: 12 }).finalContent();
const response_format = { type: "json_schema", json_schema: { name: "pet", strict: true, schema } };
const { message } = (await client.chat.completions.create({ ...asked, response_format })).choices[0];
const structured = JSON.parse(message.content);
console.log(JSON.stringify([text, streaming, structured]));
""",
    ),
    "anthropic (Python)": (
        f"{_PYTHON}import anthropic\n",
        """
asked = {"model": "script", "messages": hi, "max_tokens": 12, "extra_body": {"temperature": 0}}
text = client.messages.create(**asked).content[0].text
with client.messages.stream(**asked) as stream:
    streaming = "".join(stream.text_stream)
print(json.dumps([text, streaming, None]))
""",
    ),
    "langchain-openai": (
        _PYTHON,
        """
short = model.bind(max_tokens=12, temperature=0)
text = short.invoke("Hello").content
streaming = "".join(part.content for part in short.stream("Hello"))
structured = model.with_structured_output({"title": "pet", **schema}, method="json_schema").invoke("Hello")
print(json.dumps([text, streaming, structured]))
""",
    ),
    "litellm": (
        f"{_PYTHON}import litellm\n",
        f"""
asked = {{**server, "messages": hi, "temperature": 0}}
text = litellm.completion(**asked, max_tokens=12).choices[0].message.content
parts = litellm.completion(**asked, max_tokens=12, stream=True)
streaming = "".join(part.choices[0].delta.content or "" for part in parts)
structured = json.loads(litellm.completion(**asked, response_format={_OPENAI_FORMAT}).choices[0].message.content)
print(json.dumps([text, streaming, structured]))
""",
    ),
    "ollama (Python)": (
        _PYTHON,
        """
asked = {"model": "script", "messages": hi, "options": {"temperature": 0, "num_predict": 12}}
text = client.chat(**asked).message.content
streaming = "".join(part.message.content for part in client.chat(**asked, stream=True))
structured = json.loads(client.chat(model="script", messages=hi, format=schema).message.content)
print(json.dumps([text, streaming, structured]))
""",
    ),
    "Vercel AI SDK": (
        _JAVASCRIPT,
        """
const asked = { model, prompt: "Hello", maxOutputTokens: 12, temperature: 0 };
const text = (await generateText(asked)).text;
const streaming = await streamText(asked).text;
const pet = z.object({ kind: z.enum(["cat", "dog"]), old: z.boolean() });
const structured = (await generateText({ model, prompt: "Hello", output: Output.object({ schema: pet }) })).output;
console.log(JSON.stringify([text, streaming, structured]));
""",
    ),
}
"""What precedes and follows the lines of configuration of docs/clients.md; prints text, streamed text and an object."""
CLIENTS: Final = [client for client in SDKS if client.name in PROGRAMS]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon with the demo model, under the name that the page has."""
    aliases = {"INFERENCECENTER_MODEL__ALIASES": json.dumps(["script"])}
    with run_daemon(tmp_path_factory.mktemp("demo") / "state", demo_model_path, **aliases) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_package_gets_generated_text_and_objects(
    client: ClientProgram, demo: Daemon, installed_clients: Path, tmp_path: Path
) -> None:
    """The code is that of the page; a stream has the text of the whole answer, an object matches its schema."""
    before, after = PROGRAMS[client.name]
    program = f"{before}{''.join(blocks_of(client))}{after}"
    text, streaming, structured = printed(run(client, install(client, installed_clients), demo, tmp_path, text=program))
    assert text
    assert streaming == text
    if structured is not None:
        assert sorted(structured) == ["kind", "old"]
        assert (structured["kind"] in ("cat", "dog"), type(structured["old"])) == (True, bool)
