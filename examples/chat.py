"""A conversation in a terminal; an empty line ends it.

INFERENCECENTER_TOKEN=$(cat ~/.local/state/inferencecenter/admin.token) python examples/chat.py
"""

import os
import sys

from inferencecenter.client import InferenceCenterError
from inferencecenter.client.blocking import Client

url = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
token = os.environ["INFERENCECENTER_TOKEN"]

with Client(url, token) as client, client.session(system="You are a helpful assistant.") as session:
    print(f"{client.hello.model} is ready; type a message.", file=sys.stderr)
    while question := sys.stdin.readline().strip():
        turn = session.infer(question)
        try:
            for text in turn:
                print(text, end="", flush=True)
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print(" …", end="")
        except InferenceCenterError as error:
            print(error, file=sys.stderr)
        print()
        if turn.stats is not None:
            print(f"{turn.stats.tokens} tokens, {turn.stats.tps:.0f} a second", file=sys.stderr)
