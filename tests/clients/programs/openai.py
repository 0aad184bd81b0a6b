"""The openai package: chat completions, responses, completions."""

import json
import os

import openai
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url="http://127.0.0.1:3000/v1", api_key=os.environ["INFERENCECENTER_TOKEN"], max_retries=0)
model = client.models.list().data[0].id


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def ask(text):
    """Return a user message."""
    return [{"role": "user", "content": text}]


def code(text):
    """Return the code of the error that a user message gets."""
    try:
        client.chat.completions.create(model=model, messages=ask(text))
    except openai.APIStatusError as error:
        return error.code


parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
done = {}

done["text"] = client.chat.completions.create(model=model, messages=ask("Hi")).choices[0].message.content
with client.chat.completions.stream(model=model, messages=ask("Hi")) as stream:
    done["streaming"] = "".join(event.delta for event in stream if event.type == "content.delta")
messages = ask("How is the weather?")
message = client.chat.completions.create(model=model, messages=messages, tools=[tool]).choices[0].message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
answer = client.chat.completions.create(model=model, messages=[*messages, message, result], tools=[tool])
done["tools"] = answer.choices[0].message.content
parsed = client.chat.completions.parse(model=model, messages=ask("Who is Ada?"), response_format=Person)
done["structured output"] = parsed.choices[0].message.parsed.model_dump()
thought = client.chat.completions.create(model=model, messages=ask("Please think.")).choices[0].message
done["reasoning"] = thought.reasoning_content
done["errors"] = [code("Please fail."), code("0" * 300_000)]

response = client.responses.create(model=model, input="Please think.")
done["responses"] = response.output_text
print(json.dumps(done))
