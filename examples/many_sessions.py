"""Many concurrent conversations over one connection; their system prompt is prefilled once."""

import asyncio
import os

from inferencecenter.client import Client

URL = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
TOKEN = os.environ["INFERENCECENTER_TOKEN"]
CITIES = ("France", "Italy", "Spain", "Norway", "Japan", "Egypt", "Peru", "Canada")


async def ask(client: Client, country: str) -> str:
    """Return the answer of a new session about a country."""
    async with client.session(system="Answer in one sentence.", store=False) as session:
        return str(await session.ask(f"What is the capital of {country}?", params={"temperature": 0, "max_tokens": 40}))


async def main() -> None:
    """Send all prompts at once; turns without a free slot wait in the daemon's queue."""
    async with Client(URL, TOKEN, retries=5) as client:
        answers = await asyncio.gather(*(ask(client, country) for country in CITIES))
    for country, answer in zip(CITIES, answers, strict=True):
        print(f"{country}: {answer}")


asyncio.run(main())
