"""Python client of the daemon for asyncio; ``inferencecenter.client.blocking`` is the synchronous one.

The client reconnects automatically and resumes its sessions and turns without losing or repeating events.
"""

from inferencecenter.client.answer import Answer, TurnStreamEvent, result
from inferencecenter.client.client import Client, RankedDocuments, TextEmbeddings
from inferencecenter.client.connection import Notice
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
from inferencecenter.client.options import ClientOptions, InferOptions, SessionOptions
from inferencecenter.client.retry import Connected, ConnectionState, Ended, Reconnecting, Timing
from inferencecenter.client.session import ClientSession
from inferencecenter.client.turn import ClientTurn
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage, MessageImage, Preset, Tool, ToolCall

# The former names of InferOptions and ClientTurn.
Asked = InferOptions
Turn = ClientTurn

__all__ = [
    "START",
    "Answer",
    "Asked",
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
    "MessageImage",
    "NotAllowedError",
    "NotFoundError",
    "Notice",
    "Preset",
    "RankedDocuments",
    "Reconnecting",
    "RequestError",
    "SessionOptions",
    "SessionTakenOverError",
    "TextEmbeddings",
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
