"""A client of the daemon's WebSocket protocol, for asyncio. It connects again by itself and goes on where it was."""

from inferencecenter.client.answer import Answer, collect, result
from inferencecenter.client.connection import Client, connect
from inferencecenter.client.exchange import Notice
from inferencecenter.client.failures import SessionTakenOverError
from inferencecenter.client.lifeline import Timing
from inferencecenter.client.loading import while_loading
from inferencecenter.client.reconnecting import Connected, ConnectionState, Ended, Reconnecting
from inferencecenter.client.session import ClientSession
from inferencecenter.client.stream import TurnStreamEvent

__all__ = [
    "Answer",
    "Client",
    "ClientSession",
    "Connected",
    "ConnectionState",
    "Ended",
    "Notice",
    "Reconnecting",
    "SessionTakenOverError",
    "Timing",
    "TurnStreamEvent",
    "collect",
    "connect",
    "result",
    "while_loading",
]
