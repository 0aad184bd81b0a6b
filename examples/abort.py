"""Three ways to end an answer early. However it ends, the conversation goes on with what was said by then."""

import asyncio
import contextlib
import os

from inferencecenter.client import Client

URL = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
TOKEN = os.environ["INFERENCECENTER_TOKEN"]
LONG = {"max_tokens": 2000, "ignore_eos": True}


async def main() -> None:
    """Leave the loop, run out of time, and be told by somebody else."""
    async with Client(URL, TOKEN) as client, client.session() as session:
        turn = session.infer("Tell me a short story.", params=LONG)
        async for _text in turn:
            if "." in turn.content:
                break  # leaving the loop ends the turn
        answer = await turn.result()
        print(f"after a sentence: {answer.finish_reason}, {answer.content.count('.')} full stop")

        turn = session.infer("Tell me another one.", params=LONG)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await turn.result()
        print(f"after half a second: {(await turn.result()).finish_reason}")

        turn = session.infer("And a last one.", params=LONG)
        async with asyncio.TaskGroup() as tasks:
            async for _text in turn:  # goes on to the end, which abort() brings about
                if turn.content.count(" ") == 5:
                    tasks.create_task(session.abort())
        print(f"from another task: {turn.finish_reason}")


asyncio.run(main())
