"""OpenAI's Agents SDK, by chat completions and by Responses."""

import asyncio
import json
import os

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import APIStatusError, AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url="http://127.0.0.1:3000/v1", api_key=os.environ["INFERENCECENTER_TOKEN"], max_retries=0)
model = OpenAIResponsesModel("script", client)  # or OpenAIChatCompletionsModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny" if city == "Oslo" else "rain"


async def run(text, model=model, **options):
    """Return the final output of an agent."""
    return (await Runner.run(Agent("helper", model=model, **options), text)).final_output


async def main():
    """Try all of it."""
    done = {"text": await run("Hi")}
    streamed = Runner.run_streamed(Agent("helper", model=model), "Hi")
    async for _ in streamed.stream_events():
        pass
    done["streaming"] = streamed.final_output
    chat = OpenAIChatCompletionsModel("script", client)
    done["tools"] = await run("How is the weather?", tools=[get_weather])
    assert await run("How is the weather?", chat, tools=[get_weather]) == done["tools"]
    done["structured output"] = (await run("Who is Ada?", output_type=Person, tools=[get_weather])).model_dump()
    assert (await run("Who is Ada?", chat, output_type=Person, tools=[get_weather])).model_dump() == done[
        "structured output"
    ]
    thought = await Runner.run(Agent("helper", model=model), "Please think.")
    done["responses"] = thought.final_output
    thoughts = [item.raw_item for item in thought.new_items if item.type == "reasoning_item"]
    done["reasoning"] = thoughts[0].content[0].text
    try:
        await run("Please fail.")
    except APIStatusError as error:
        done["errors"] = error.code
    print(json.dumps(done))


asyncio.run(main())
