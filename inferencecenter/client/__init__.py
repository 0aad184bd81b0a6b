"""A client of the daemon for Python, for asyncio; ``inferencecenter.client.blocking`` is the same without.

It connects again by itself and goes on where it was.
"""

from inferencecenter.client.answer import Answer, result
from inferencecenter.client.client import Client
from inferencecenter.client.errors import (
    DaemonError,
    NotAllowedError,
    NotFoundError,
    RequestError,
    SessionTakenOverError,
    TooLongError,
    TryLaterError,
    UnreachableError,
)
from inferencecenter.client.multiplexer import Notice
from inferencecenter.client.options import ClientOptions, InferOptions, SessionOptions
from inferencecenter.client.reconnect import Connected, ConnectionState, Ended, Reconnecting
from inferencecenter.client.session import ClientSession
from inferencecenter.client.stream import TurnStreamEvent
from inferencecenter.client.transport import Timing
from inferencecenter.client.turn import ClientTurn
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage, Tool, ToolCall

__all__ = [
    "START",
    "Answer",
    "ChatMessage",
    "Client",
    "ClientOptions",
    "ClientSession",
    "ClientTurn",
    "Connected",
    "ConnectionState",
    "DaemonError",
    "Ended",
    "ErrorCode",
    "InferOptions",
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
    "TurnStreamEvent",
    "UnreachableError",
    "result",
]
