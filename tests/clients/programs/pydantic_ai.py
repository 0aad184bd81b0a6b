"""Pydantic AI."""

import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url="http://127.0.0.1:3000/v1", api_key=os.environ["INFERENCECENTER_TOKEN"])
model = OpenAIChatModel("script", provider=provider)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny" if city == "Oslo" else "rain"


done = {}
done["text"] = Agent(model).run_sync("Hi").output
done["streaming"] = [*Agent(model).run_stream_sync("Hi").stream_text()][-1]
done["tools"] = Agent(model, tools=[get_weather]).run_sync("How is the weather?").output
structured = [Agent(model, output_type=each, tools=[get_weather]) for each in (Person, NativeOutput(Person))]
people = [agent.run_sync("Who is Ada?").output for agent in structured]
assert people[0] == people[1]
done["structured output"] = people[0].model_dump()
parts = Agent(model).run_sync("Please think.").new_messages()[-1].parts
done["reasoning"] = next(part.content for part in parts if part.part_kind == "thinking")
try:
    Agent(model).run_sync("Please fail.")
except ModelHTTPError as error:
    done["errors"] = error.status_code
done["responses"] = Agent(OpenAIResponsesModel("script", provider=provider)).run_sync("Please think.").output
print(json.dumps(done))
