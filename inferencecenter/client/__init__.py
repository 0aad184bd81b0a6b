"""A client of the daemon's WebSocket protocol, for asyncio."""

from inferencecenter.client.connection import Client, connect
from inferencecenter.client.session import ClientSession, TurnStreamEvent

__all__ = ["Client", "ClientSession", "TurnStreamEvent", "connect"]
