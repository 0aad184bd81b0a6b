"""A service in front of the daemon that keeps the token and decides which requests are allowed.

`pip install fastapi`, then `uvicorn --app-dir examples fastapi_proxy:app`, and

curl -N http://127.0.0.1:8000/ask -H "Content-Type: application/json" -d '{"question": "Hello"}'
"""

import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from inferencecenter.client import Client, ClientSession, InferenceCenterError

URL = os.environ.get("INFERENCECENTER_URL", "http://127.0.0.1:3000")
TOKEN = os.environ["INFERENCECENTER_TOKEN"]


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one connection for all requests."""
    async with Client(URL, TOKEN, retries=3, give_up_after_s=None) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    """A request's body."""

    question: str = Field(min_length=1, max_length=4000)


@app.exception_handler(InferenceCenterError)
async def refused(_request: Request, error: InferenceCenterError) -> JSONResponse:
    """Answer with the status that the daemon's error table has for it."""
    return JSONResponse({"error": error.code, "message": error.message}, status_code=error.spec.http_status)


@app.post("/ask")
async def ask(asked: Question, request: Request) -> StreamingResponse:
    """Answer piece by piece; a caller who leaves ends the turn."""
    client: Client = request.app.state.client
    session = await client.create_session(system="Be brief.", store=False, ttl_s=300, params={"max_tokens": 200})
    return StreamingResponse(_answer(session, asked.question), media_type="text/plain; charset=utf-8")


async def _answer(session: ClientSession, question: str) -> AsyncIterator[str]:
    try:
        async for text in session.infer(question):
            yield text
    finally:
        await session.leave(failed=True)
