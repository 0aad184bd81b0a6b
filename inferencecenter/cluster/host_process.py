"""What the processes on other machines have in common that a ticket starts: hosts of engines and of RPC servers."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop

from inferencecenter.cluster.certificates import FRONT_NAME, client_context
from inferencecenter.ipc.engine_child import die_with_parent
from inferencecenter.ipc.link import LinkTicket

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from inferencecenter.ipc.channel import Channel

CONNECT_TIMEOUT_S: Final = 10.0


async def connect(ticket: LinkTicket, channel: Channel[Any, Any], *, within_s: float = CONNECT_TIMEOUT_S) -> None:
    """Connect a channel to the daemon that issued a ticket.

    Raises:
        OSError: The daemon cannot be reached, or is not the one that issued the ticket.
    """
    host, port = ticket.address
    async with asyncio.timeout(within_s):
        await asyncio.get_running_loop().create_connection(
            lambda: channel, host, port, ssl=client_context(ticket), server_hostname=FRONT_NAME
        )


def run_host(run: Callable[[LinkTicket], Coroutine[Any, Any, None]]) -> int:
    """Read the ticket, a line of JSON, from standard input, and run the process, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    ticket = msgspec.json.decode(sys.stdin.buffer.readline(), type=LinkTicket)
    uvloop.run(run(ticket))
    return 0
