"""An answer that outlives the program that requested it.

Without an argument, request a long answer and print the session's id. Stop the program during the answer, by Ctrl-C or
`kill -9`, and pass the id to another one, here or on another machine: it receives the whole answer.
"""

import asyncio
import os
import sys

from inferencecenter.client import Client, Connected, Notice, Reconnecting

URL = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
TOKEN = os.environ["INFERENCECENTER_TOKEN"]
QUESTION = "Tell me a short story."


def tell(notice: Notice) -> None:
    """Report when the connection is lost and restored; the answer then continues automatically."""
    if isinstance(notice, Reconnecting | Connected):
        print(notice, file=sys.stderr)


async def main(session_id: str | None) -> None:
    """Start an answer, or continue one."""
    async with Client(URL, TOKEN, give_up_after_s=None, on_notice=tell) as client:
        if session_id is None:
            session = await client.create_session(ttl_s=3600)
            print(session.session_id, flush=True)
            turn = session.infer(QUESTION, params={"max_tokens": 400, "ignore_eos": True, "temperature": 0})
            turn.detach()
        else:
            session, resumed = await client.resume(session_id)
            turn = session.follow()
            if resumed.turn_id is None and resumed.transcript:  # it has ended meanwhile
                print(resumed.transcript[-1].content, end="")
        async for text in turn:
            print(text, end="", flush=True)
        print()


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
