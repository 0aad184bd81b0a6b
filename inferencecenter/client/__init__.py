"""A client of the daemon for Python, for asyncio; ``inferencecenter.client.blocking`` is the same without.

It connects again by itself and goes on where it was.
"""

from inferencecenter.client.answer import Answer, result
from inferencecenter.client.connection import Client
from inferencecenter.client.exchange import Notice
from inferencecenter.client.failures import (
    DaemonError,
    NotAllowedError,
    NotFoundError,
    RequestError,
    SessionTakenOverError,
    TooLongError,
    TryLaterError,
    UnreachableError,
)
from inferencecenter.client.lifeline import Timing
from inferencecenter.client.options import Asked, ClientOptions, SessionOptions
from inferencecenter.client.reconnecting import Connected, ConnectionState, Ended, Reconnecting
from inferencecenter.client.session import ClientSession
from inferencecenter.client.stream import TurnStreamEvent
from inferencecenter.client.turn import Turn
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage, Tool, ToolCall

__all__ = [
    "START",
    "Answer",
    "Asked",
    "ChatMessage",
    "Client",
    "ClientOptions",
    "ClientSession",
    "Connected",
    "ConnectionState",
    "DaemonError",
    "Ended",
    "ErrorCode",
    "InferenceCenterError",
    "NotAllowedError",
    "NotFoundError",
    "Notice",
    "Reconnecting",
    "RequestError",
    "SessionOptions",
    "SessionTakenOverError",
    "Timing",
    "TooLongError",
    "Tool",
    "ToolCall",
    "TryLaterError",
    "Turn",
    "TurnStreamEvent",
    "UnreachableError",
    "result",
]
