"""instructor: structured output by a call and by a response format."""

import json
import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

server = OpenAI(base_url="http://127.0.0.1:3000/v1", api_key=os.environ["INFERENCECENTER_TOKEN"], max_retries=0)
client = instructor.from_openai(server)  # mode=instructor.Mode.JSON_SCHEMA uses a response format


class Person(BaseModel):
    """A person."""

    name: str
    age: int


question = [{"role": "user", "content": "Who is Ada?"}]
modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON)
clients = [client, *(instructor.from_openai(server, mode=mode) for mode in modes)]
people = [
    each.chat.completions.create(model="script", messages=question, response_model=Person, max_retries=0).model_dump()
    for each in clients
]
assert all(person == people[0] for person in people)
partial = [*client.chat.completions.create_partial(model="script", messages=question, response_model=Person)]
print(json.dumps({"structured output": people[0], "streaming": partial[-1].model_dump()}))
