"""A client of `/v1/embeddings`, of our daemon or another server.

A turn is one request: ``max_tokens`` texts of ``prompt_tokens`` each, whose vectors come as base64. Its trace counts
the tokens of all texts as prompt tokens, as the server reports them, and the texts as tokens.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.peers.http import Http
from benchmarks.peers.openai import unmeasured_abort
from benchmarks.target import TurnTrace
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import AbortTrace, TargetSpec, Work

_PATH: Final = "/v1/embeddings"
_SEEDS_OF_A_TURN: Final = 1_000


class _Embedding(msgspec.Struct):
    """The vector of a text, which is read but not decoded."""

    embedding: str


class _TextUsage(msgspec.Struct):
    """Tokens of all texts."""

    prompt_tokens: int


class _EmbeddingAnswer(msgspec.Struct):
    """Answer of `/v1/embeddings`."""

    data: list[_Embedding]
    usage: _TextUsage


class EmbeddingSession:
    """A client's connection."""

    prompts: Prompts

    def __init__(self, http: Http, spec: TargetSpec) -> None:
        self._http = http
        self._model = {"model": spec.model} if spec.model else {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, spec: TargetSpec) -> AsyncIterator[EmbeddingSession]:
        """Open a connection."""
        async with Http(spec) as http:
            yield cls(http, spec)

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Send one request; its failure is the trace's ``error``."""
        seeds = range(work.seed * _SEEDS_OF_A_TURN, work.seed * _SEEDS_OF_A_TURN + work.max_tokens)
        texts = [self.prompts.text(replace(work, seed=seed), first=True) for seed in seeds]
        answer, error = None, None
        started_s = time.monotonic()
        try:
            answer = await self._embed(texts)
        except InferenceCenterError as failure:
            error = str(failure)
        ended_s = time.monotonic()
        if on_text is not None:
            on_text()
        return TurnTrace(
            started_s=started_s,
            token_times_s=(ended_s,),
            ended_s=ended_s,
            prompt_tokens=answer.usage.prompt_tokens if answer else 0,
            tokens=len(answer.data) if answer else 0,
            error=error,
        )

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: the end of the abort is not observable."""
        return unmeasured_abort()

    async def count(self, text: str) -> int:
        """Return the tokens of a text, with those around it."""
        return (await self._embed([text])).usage.prompt_tokens

    async def _embed(self, texts: list[str]) -> _EmbeddingAnswer:
        body: dict[str, Any] = {**self._model, "input": texts, "encoding_format": "base64"}
        return await self._http.post(_PATH, body, _EmbeddingAnswer)
