"""What Home Assistant's integration does with the ollama package: a conversation with tools, and a task."""

import asyncio
import json
import os

import ollama

url, api_key = "http://127.0.0.1:3000", os.environ["INFERENCECENTER_TOKEN"]


def turn(client, messages, **more):
    """Ask as the integration does."""
    options = {"num_ctx": 8192}
    return client.chat(
        model="script:latest", messages=messages, stream=True, keep_alive=-1, options=options, think=False, **more
    )


async def collected(stream):
    """Return the message that the parts of a stream make, as the integration collects it."""
    content, calls = "", []
    async for part in await stream:
        content += part["message"].get("content") or ""
        calls += part["message"].get("tool_calls") or []
    return ollama.Message(role="assistant", content=content, tool_calls=calls or None)


def user(text):
    """Return a conversation."""
    system = ollama.Message(role="system", content="You are a voice assistant.")
    return [system, ollama.Message(role="user", content=text)]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


async def main():
    """Set up an entry, and use it."""
    done = {}
    try:
        await ollama.AsyncClient(host=url, headers={"Authorization": "Bearer ic_wrong"}).list()
    except ollama.ResponseError as error:
        done["errors"] = error.status_code
    client = ollama.AsyncClient(host=url, headers={"Authorization": f"Bearer {api_key}"})
    assert "script:latest" in {model["model"] for model in (await client.list()).get("models", [])}
    done["text"] = done["streaming"] = (await collected(turn(client, user("Hi")))).content
    messages = user("How is the weather?")
    tools = [{"type": "function", "function": WEATHER}]
    said = await collected(turn(client, messages, tools=tools))
    (call,) = said.tool_calls
    result = ollama.Message(role="tool", content=json.dumps({"data": f"sunny in {call.function.arguments['city']}"}))
    done["tools"] = (await collected(turn(client, [*messages, said, result], tools=tools))).content
    done["structured output"] = json.loads((await collected(turn(client, user("Who is Ada?"), format=PERSON))).content)
    print(json.dumps(done))


asyncio.run(main())
