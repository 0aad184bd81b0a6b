"""The anthropic package: messages, streams, tools, thinking."""

import json
import os

import anthropic
from pydantic import BaseModel

client = anthropic.Anthropic(
    base_url="http://127.0.0.1:3000", api_key=os.environ["INFERENCECENTER_TOKEN"], max_retries=0
)


def ask(text, **options):
    """Return the arguments for a user message."""
    return {"model": "script", "max_tokens": 1000, "messages": [{"role": "user", "content": text}], **options}


schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "get_weather", "input_schema": schema}]
done = {}
done["text"] = client.messages.create(**ask("Hi")).content[0].text
with client.messages.stream(**ask("Hi")) as stream:
    done["streaming"] = "".join(stream.text_stream)
question = ask("How is the weather?", tools=tools)
message = client.messages.create(**question)
call = next(block for block in message.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
history = [
    *question["messages"],
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": [result]},
]
done["tools"] = client.messages.create(**{**question, "messages": history}).content[0].text
thinking = {"type": "enabled", "budget_tokens": 1024}
thought = client.messages.create(**ask("Please think.", thinking=thinking, max_tokens=2000))
done["messages"] = next(block.text for block in thought.content if block.type == "text")
done["reasoning"] = next(block.thinking for block in thought.content if block.type == "thinking")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


done["structured output"] = client.messages.parse(**ask("Who is Ada?"), output_format=Person).parsed_output.model_dump()
try:
    client.messages.create(**ask("Please fail."))
except anthropic.APIStatusError as error:
    done["errors"] = error.status_code
print(json.dumps(done))
