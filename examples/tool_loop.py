"""A loop that runs the model's tool calls and returns their results until the model answers."""

import asyncio
import json
import os

from inferencecenter.client import Answer, Client, ClientSession, Tool, ToolCall, result

URL = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
TOKEN = os.environ["INFERENCECENTER_TOKEN"]
MAX_ROUNDS = 5


def get_weather(city: str) -> dict[str, object]:
    """Return the weather, which is always good."""
    return {"city": city, "temperature": 21, "sky": "sunny"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    Tool(
        name="get_weather",
        description="Get the current weather",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
]


def run(call: ToolCall) -> str:
    """Return what a tool says; its arguments always keep to its schema, unless the answer was cut off."""
    try:
        return json.dumps(FUNCTIONS[call.name](**json.loads(call.arguments)))
    except (ValueError, KeyError, TypeError) as error:
        return json.dumps({"error": str(error)})


async def answer(session: ClientSession, question: str) -> Answer:
    """Return the answer to a question, with as many tools as it takes."""
    said = await session.ask(question, tools=TOOLS, params={"temperature": 0})
    for _round in range(MAX_ROUNDS):
        if said.finish_reason != "tool_calls":
            break
        for call in said.tool_calls:
            print(f"{call.name}({call.arguments})")
        returned = [result(call, run(call)) for call in said.tool_calls]
        said = await session.ask(messages=returned, tools=TOOLS, params={"temperature": 0})
    return said


async def main() -> None:
    """Request the weather."""
    async with Client(URL, TOKEN) as client, client.session() as session:
        print(await answer(session, "What is the weather in Oslo?"))


asyncio.run(main())
