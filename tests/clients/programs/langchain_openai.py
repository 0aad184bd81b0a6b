"""LangChain's package for OpenAI."""

import json
import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(
    model="script",
    base_url="http://127.0.0.1:3000/v1",
    api_key=os.environ["INFERENCECENTER_TOKEN"],
    max_retries=0,
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny" if city == "Oslo" else "rain"


done = {}
done["text"] = model.invoke("Hi").text
done["streaming"] = "".join(chunk.text for chunk in model.stream("Hi"))
messages = [HumanMessage("How is the weather?")]
messages.append(model.bind_tools([get_weather]).invoke(messages))
for call in messages[-1].tool_calls:
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
done["tools"] = model.bind_tools([get_weather]).invoke(messages).text
structured = [model.with_structured_output(Person, method=method) for method in ("json_schema", "function_calling")]
people = [each.invoke("Who is Ada?").model_dump() for each in structured]
assert people[0] == people[1]
done["structured output"] = people[0]
try:
    model.invoke("Please fail.")
except Exception as error:
    done["errors"] = error.code
done["responses"] = model.model_copy(update={"use_responses_api": True}).invoke("Please think.").text
print(json.dumps(done))
