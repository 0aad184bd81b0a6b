"""litellm."""

import json
import os

import litellm
from pydantic import BaseModel

server = {
    "model": "openai/script",
    "api_base": "http://127.0.0.1:3000/v1",
    "api_key": os.environ["INFERENCECENTER_TOKEN"],
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def ask(text, **options):
    """Return the answer to a user message."""
    return litellm.completion(messages=[{"role": "user", "content": text}], **server, **options)


def error(text):
    """Return the name of the error that a user message gets."""
    try:
        ask(text, num_retries=0)
    except Exception as error:
        return type(error).__name__


parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
done = {}
done["text"] = ask("Hi").choices[0].message.content
done["streaming"] = "".join(chunk.choices[0].delta.content or "" for chunk in ask("Hi", stream=True))
message = ask("How is the weather?", tools=[tool]).choices[0].message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
history = [{"role": "user", "content": "How is the weather?"}, message.model_dump(), result]
done["tools"] = litellm.completion(messages=history, tools=[tool], **server).choices[0].message.content
done["structured output"] = json.loads(ask("Who is Ada?", response_format=Person).choices[0].message.content)
done["reasoning"] = ask("Please think.").choices[0].message.reasoning_content
done["errors"] = [error("Please fail."), error("0" * 300_000)]
done["responses"] = litellm.responses(input="Please think.", **server).output[-1].content[0].text
print(json.dumps(done))
