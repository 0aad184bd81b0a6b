"""The answer to a request for completions: pieces of a stream, or one document. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from inferencecenter.dialects import sse
from inferencecenter.dialects.openai.ending import finish_of, finite, raise_failure, usage_of, warnings_of
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all pieces of an answer say. ``logprobs`` are the likeliest tokens to tell, ``None`` for none at all."""

    completion_id: str
    created: int
    model: str
    prompts: tuple[str, ...]
    n: int = 1
    echo: bool = False
    include_usage: bool = False
    logprobs: int | None = None


class Pieces:
    """Takes events, and writes each at once, or all of them at the end."""

    def __init__(self, head: Head) -> None:
        self._head = head
        n_choices = len(head.prompts) * head.n
        self._texts: list[list[str]] = [[] for _ in range(n_choices)]
        self._n_chars = [0] * n_choices
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(n_choices)]
        self._ends: list[events.End | None] = [None] * n_choices
        self._begun = [False] * n_choices
        common = orjson.dumps(self._common())[:-1]
        self._prefix = b"data: " + common + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def write(self, index: int, event: Event) -> bytes:
        """Return what a stream says of an event, which may be nothing.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                piece = self._piece(index, self._begin(index) + event.content, event.logprobs)
                self._n_chars[index] += len(event.content)
                return piece
            case events.End():
                self._ends[index] = event
                return self._piece(index, self._begin(index), None, finish=finish_of(event), warnings=event.warnings)
            case _:
                raise_failure(event)
                return b""

    def last(self) -> bytes:
        """Return the end of a stream whose turns have all ended."""
        if not self._head.include_usage:
            return sse.DONE
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, orjson.dumps(self._usage()), sse.DONE)

    def take(self, index: int, event: Event) -> None:
        """Keep an event for ``document``.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self._texts[index].append(event.content)
                self._logprobs[index] += event.logprobs or ()
            case events.End():
                finish_of(event)
                self._ends[index] = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole answer."""
        said = {
            **self._common(),
            "choices": [self._choice(index, end) for index, end in enumerate(self._ends) if end is not None],
            "usage": self._usage(),
        }
        warnings = warnings_of(end for end in self._ends if end is not None)
        return {**said, "warnings": warnings} if warnings else said

    def _common(self) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.completion_id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
        }

    def _usage(self) -> dict[str, Any]:
        return usage_of([end for end in self._ends if end is not None], n=self._head.n)

    def _begin(self, index: int) -> str:
        """Return what an answer begins with: the prompt where it is echoed."""
        begun, self._begun[index] = self._begun[index], True
        return self._head.prompts[index // self._head.n] if self._head.echo and not begun else ""

    def _choice(self, index: int, end: events.End) -> dict[str, Any]:
        return {
            "text": self._begin(index) + "".join(self._texts[index]),
            "index": index,
            "logprobs": self._told(self._logprobs[index], offset=0),
            "finish_reason": finish_of(end),
        }

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        *,
        finish: str | None = None,
        warnings: tuple[str, ...] = (),
    ) -> bytes:
        told = None if logprobs is None else self._told(logprobs, offset=self._n_chars[index])
        choice = orjson.dumps({"text": text, "index": index, "logprobs": told, "finish_reason": finish})
        suffix = self._suffix
        if warnings:
            suffix = b'%b,"warnings":%b}\n\n' % (suffix[: -len(b"}\n\n")], orjson.dumps(warnings))
        return self._prefix + choice + suffix

    def _told(self, entries: Sequence[TokenLogprobs], *, offset: int) -> dict[str, Any] | None:
        """Return probabilities of tokens, the first of which begins at ``offset``."""
        n_top = self._head.logprobs
        if n_top is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{each.token: finite(each.logprob) for each in entry.top[:n_top]} for entry in entries],
            "text_offset": offsets,
        }
