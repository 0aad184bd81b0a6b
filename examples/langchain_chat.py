"""LangChain with the daemon's OpenAI-compatible API: `pip install langchain-openai`."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import SecretStr

url = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
token = os.environ["INFERENCECENTER_TOKEN"]

name = OpenAI(base_url=f"{url}/v1", api_key=token).models.list().data[0].id

model = ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr(token), model=name, temperature=0, max_completion_tokens=40)
prompt = ChatPromptTemplate([("system", "Answer in one sentence."), ("user", "What is the capital of {country}?")])
chain = prompt | model | StrOutputParser()

for piece in chain.stream({"country": "France"}):
    print(piece, end="", flush=True)
print()
for answer in chain.batch([{"country": country} for country in ("Italy", "Spain", "Norway")]):
    print(answer)
