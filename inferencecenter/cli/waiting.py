"""Waiting until a daemon that has just begun can answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.client import Client

_LOADING_POLL_S: Final = 0.5


async def until_ready(client: Client, told: Callable[[str], None] = lambda _message: None) -> None:
    """Wait until the daemon's model is loaded.

    Args:
        client: The connection.
        told: Hears how far it is.

    Raises:
        InferenceCenterError: The connection is lost.
    """
    hello = client.hello
    while hello.status == "loading":
        told(hello.message)
        await anyio.sleep(_LOADING_POLL_S)
        hello = await client.refresh_hello()
