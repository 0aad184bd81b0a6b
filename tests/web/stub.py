"""A stub daemon within a browser: it sends prepared answers, faster than any model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from playwright.async_api import Page, WebSocketRoute

_LIMITS: Final = {"max_frame_bytes": 2**20, "auth_timeout_s": 10}
_HELLO: Final = {
    "op": "hello", "status": "ready", "message": "ready", "uptime_seconds": 1, "requires_auth": True, "protocol": 1,
    "server": "inferencecenter", "version": "0", "model": "stub", "limits": _LIMITS,
}  # fmt: skip
_SUCCESS: Final = {
    "op": "auth_success", "client_id": "admin", "max_sessions": 16, "scopes": [], "priority": "normal", "limits": {},
}  # fmt: skip
_CREATED: Final = {
    "op": "session_created", "session_id": "s1", "epoch": "e1", "model": "stub", "n_ctx": 65_536, "params": {},
    "warnings": [],
}  # fmt: skip


_ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "auth": _SUCCESS,
    "create_session": _CREATED,
    "list_sessions": {"op": "sessions", "sessions": []},
    "ping": {"op": "pong"},
}
_STATS: Final = {"tps": 1000.0, "ttft_ms": 1.0, "queue_ms": 0.0}


@dataclass
class Stub:
    """Simulates a daemon with one session and one turn.

    Attributes: answers are further replies by op, each given the request; asked is the page's question and its
    socket, once received; seq is the number of the session's last event.
    """

    answers: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    asked: asyncio.Future[tuple[WebSocketRoute, str]] = field(default_factory=asyncio.Future)
    seq: int = 0

    async def take_over(self, page: Page) -> None:
        """Route the page's sockets here."""
        await page.route_web_socket("**/ws", self._greet)

    async def give(self, answer: Sequence[str], *, burst: int, pause_s: float) -> None:
        """Answer the question with these pieces; pause after every few."""
        socket, request_id = await self.asked
        self._publish(socket, {"op": "queued", "position": 0, "id": request_id})
        for number, content in enumerate(answer, start=2):
            self._publish(socket, {"op": "token", "content": content})
            if number % burst == 0:
                await asyncio.sleep(pause_s)
        usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": len(answer)}
        self._publish(socket, {"op": "end", "finish_reason": "stop", "usage": usage, "stats": _STATS, "warnings": []})

    def _publish(self, socket: WebSocketRoute, event: dict[str, Any]) -> None:
        self.seq += 1
        _send(socket, {**event, "seq": self.seq, "session_id": "s1", "turn_id": "live"})

    def _greet(self, socket: WebSocketRoute) -> None:
        socket.on_message(lambda text: self._answer(socket, json.loads(text)))
        _send(socket, _HELLO)

    def _answer(self, socket: WebSocketRoute, asked: dict[str, Any]) -> None:
        if asked["op"] == "infer":
            self.asked.set_result((socket, asked["id"]))
        elif asked["op"] in self.answers:
            _send(socket, {**self.answers[asked["op"]](asked), "id": asked.get("id")})
        elif asked["op"] in _ANSWERS:
            _send(socket, {**_ANSWERS[asked["op"]], "id": asked["id"]})


def _send(socket: WebSocketRoute, event: dict[str, Any]) -> None:
    socket.send(json.dumps(event))
