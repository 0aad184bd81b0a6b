"""A server in the test process that answers like llama-server and OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOS = 1


@dataclass
class FakeServer:
    """A server with one slot; its tokenizer has a token for each byte but spaces, after a BOS."""

    url: str = ""
    token: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    polls: list[bool] = field(default_factory=list)
    """What `/slots` said each time about the slot being busy."""
    busy_polls: int = 0
    """How often `/slots` still calls an abandoned slot busy."""
    connections: set[Any] = field(default_factory=set)
    busy: bool = False
    endless: bool = False
    """Generates until the client leaves."""
    slow_prompt: bool = False
    """Reads half of the prompt, and the rest never."""
    failure: str = ""
    """Said in the middle of the stream instead of the last event."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has left before the end."""

    def tokens(self, text: str, *, add_special: bool) -> list[int]:
        """Return the token ids of a text."""
        return [BOS] * add_special + [byte for byte in text.encode() if byte != 0x20]

    @contextlib.asynccontextmanager
    async def streaming(self, request: web.Request) -> AsyncIterator[web.StreamResponse]:
        """Run an event stream and record the client's disconnect."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.busy = True
        try:
            yield response
        except (ConnectionResetError, asyncio.CancelledError):
            self.left.set()
            raise
        finally:
            self.busy = False

    async def props(self, _request: web.Request) -> web.Response:
        """Answer `/props`."""
        return web.json_response(
            {
                "default_generation_settings": {"params": {"n_predict": -1, "temperature": 0.8}, "n_ctx": 4096},
                "total_slots": 1,
                "model_alias": "tiny.gguf",
                "model_path": "/models/tiny.gguf",
                "modalities": {"vision": False},
                "chat_template": "...",
                "build_info": "b9001-0c1e57098",
                "is_sleeping": False,
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        """Answer `/v1/models`."""
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            return web.json_response({"error": error}, status=401)
        meta = {"vocab_type": 2, "n_vocab": 512, "n_ctx_train": 2048, "n_params": 494, "size": 530}
        entry = {"id": "tiny.gguf", "object": "model", "owned_by": "llamacpp", "meta": meta}
        return web.json_response({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer `/tokenize`."""
        body = await request.json()
        assert body["parse_special"] is False
        self.connections.add(request.transport)
        return web.json_response({"tokens": self.tokens(body["content"], add_special=body["add_special"])})

    async def slots(self, _request: web.Request) -> web.Response:
        """Answer `/slots`."""
        lingers = len(self.polls) < self.busy_polls
        self.polls.append(self.busy or lingers)
        slot: dict[str, Any] = {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": self.polls[-1]}
        if self.bodies:
            slot |= {"id_task": 7, "params": {"seed": self.bodies[-1]["seed"], "temperature": 0.8}}
        unused = {"id": 1, "n_ctx": 4096, "speculative": False, "is_processing": False}
        return web.json_response([slot, unused])

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Answer `/completion`."""
        body = await request.json()
        self.bodies.append(body)
        self.connections.add(request.transport)
        n_prompt = len(body["prompt"])
        base = {"index": 0, "id_slot": -1, "tokens_evaluated": n_prompt}
        async with self.streaming(request) as response:

            async def say(**event: Any) -> None:
                await response.write(b"data: " + json.dumps(base | event).encode() + b"\n\n")

            if body.get("return_progress"):
                for processed in (0, n_prompt // 2):
                    reading = {"total": n_prompt, "cache": 0, "processed": processed, "time_ms": 3}
                    await say(content="", tokens=[0], stop=False, tokens_predicted=0, prompt_progress=reading)
            while self.slow_prompt:
                await response.write(b":\n\n")
                await asyncio.sleep(0)
            made = 0
            while made < body["n_predict"] or self.endless:
                made += 1
                # The second token is the first byte of a multi-byte character, so it has no text yet.
                text = "" if made == 2 else f" filler{made}"
                await say(content=text, tokens=[1000 + made], stop=False, tokens_predicted=made)
                await asyncio.sleep(0)
            if self.failure:
                await response.write(b'data: {"error":{"code":500,"message":"%b"}}\n\n' % self.failure.encode())
            else:
                timings = {"cache_n": 3, "prompt_n": n_prompt - 3, "prompt_ms": 1.0, "predicted_n": made}
                ending = {"stop_type": "limit", "truncated": False, "prompt": "x" * 100_000, "timings": timings}
                await say(content="", tokens=[], stop=True, tokens_predicted=made, **ending)
        return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer `/v1/completions`; the stream has both kinds of line ends."""
        body = await request.json()
        self.bodies.append(body)
        n_prompt = len(self.tokens(body["prompt"], add_special=True))
        details = {"cached_tokens": 2}
        usage = {"prompt_tokens": n_prompt, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        if not body.get("stream"):
            return web.json_response({"object": "text_completion", "choices": [{"text": "x"}], "usage": usage})
        async with self.streaming(request) as response:
            for made in range(body["max_tokens"]):
                choice = {"text": f" w{made}", "index": 0, "logprobs": None, "finish_reason": None}
                event = json.dumps({"object": "text_completion", "choices": [choice]}).encode()
                await response.write(b"data: " + event[:20])
                await response.write(event[20:] + b"\r\n\r\n")
            if self.failure:
                await response.write(b'data: {"error":{"message":"%b"}}\n\n' % self.failure.encode())
            else:
                await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def serving(server: FakeServer, *, speaks_llama: bool) -> AsyncIterator[FakeServer]:
    """Run the server."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    if speaks_llama:
        app.router.add_get("/props", server.props)
        app.router.add_get("/slots", server.slots)
        app.router.add_post("/tokenize", server.tokenize)
        app.router.add_post("/completion", server.completion)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
