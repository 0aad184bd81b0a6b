"""The ollama package: conversations."""

import json
import os

from ollama import Client, ResponseError
from pydantic import BaseModel

token = os.environ["INFERENCECENTER_TOKEN"]
client = Client(host="http://127.0.0.1:3000", headers={"Authorization": f"Bearer {token}"})
model = client.list().models[0].model


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


def ask(text):
    """Return a user message."""
    return [{"role": "user", "content": text}]


done = {}
done["text"] = client.chat(model=model, messages=ask("Hi")).message.content
done["streaming"] = "".join(part.message.content for part in client.chat(model=model, messages=ask("Hi"), stream=True))
messages = ask("How is the weather?")
message = client.chat(model=model, messages=messages, tools=[get_weather]).message
(call,) = message.tool_calls
result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
answer = client.chat(model=model, messages=[*messages, message, result], tools=[get_weather])
done["tools"] = answer.message.content
parsed = client.chat(model=model, messages=ask("Who is Ada?"), format=Person.model_json_schema())
done["structured output"] = Person.model_validate_json(parsed.message.content).model_dump()
done["reasoning"] = client.chat(model=model, messages=ask("Please think."), think=True).message.thinking
try:
    client.chat(model=model, messages=ask("Please fail."))
except ResponseError as error:
    done["errors"] = error.status_code
print(json.dumps(done))
