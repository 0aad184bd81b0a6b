"""Coding agents on our own daemon, with the requests of Codex and Claude Code, which contain the whole conversation.

The first turn of a conversation is a task, each later one the results of the tools that the last answer called. The
requests have the shape and the size that these clients send, instructions and tools included. Texts are words of three
letters, drawn by the turn's seed, so that ``prompt_tokens`` of a turn are its words.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from benchmarks.peers.http import Http
from benchmarks.peers.openai import CompletionsSession, OpenAITarget, Problem, unmeasured_abort
from benchmarks.peers.response_trace import Counted, ResponseTrace
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.target import AbortTrace, TargetFacts, TargetSpec, TurnTrace, Work

SHELL: Final = "exec_command"
READ: Final = "Read"
"""The tools that answers have to call, of Codex and of Claude Code."""
_CODEX_WORDS: Final = 3000
_CODEX_TOOLS: Final = (SHELL, "write_stdin", "apply_patch", "update_plan", "view_image", "list_mcp_resources")
_CLAUDE_WORDS: Final = 4000
_CLAUDE_TOOLS: Final = (READ, *(f"{verb}{what}" for verb in ("Edit", "Task", "Find") for what in ("", *"ABCDEFG")))
_DESCRIPTION_WORDS: Final = 400
_PROPERTIES: Final = ("file_path", "command", "offset", "limit", "description")
_REMINDER_WORDS: Final = 300


def words(n_words: int, *, seed: int) -> str:
    """Return words of three letters, drawn by a seed."""
    draw = random.Random(seed)  # noqa: S311 - the same words for the same seed
    return "".join(" " + "".join(draw.choices(ascii_lowercase, k=3)) for _ in range(n_words))


def _schema(seed: int) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": words(12, seed=seed + place)} for place, name in enumerate(_PROPERTIES)
    }
    return {"type": "object", "properties": properties, "required": [], "additionalProperties": False}


class _Model(msgspec.Struct):
    """A listed model."""

    id: str


class _Models(msgspec.Struct):
    """The models of a server."""

    data: list[_Model]


class AgentTarget:
    """Our daemon as an agent's server.

    Args:
        spec: ``url`` is its HTTP address.
        agent: The agent.
    """

    def __init__(self, spec: TargetSpec, agent: type[AgentSession]) -> None:
        self._spec = spec
        self._agent = agent

    async def facts(self) -> TargetFacts:
        """Return the facts that every server with OpenAI's API reports.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        return await OpenAITarget(self._spec, CompletionsSession.connect).facts()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AgentSession]:
        """Open a connection for one agent."""
        async with Http(self._spec) as http:
            listed = await http.get("/v1/models", _Models)
            yield self._agent(http, model=listed.data[0].id)


class AgentSession(ABC):
    """One agent and its conversations."""

    def __init__(self, http: Http, *, model: str) -> None:
        self._http = http
        self._model = model
        self._conversations: dict[str, list[dict[str, Any]]] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        response = ResponseTrace(on_text)
        conversation = self._conversations.setdefault(work.history_id or "", [])
        try:
            conversation += self._new_input(conversation, work)
            response.begin()
            conversation += await self._answer(conversation, work, response)
        except InferenceCenterError as failure:
            response.error = str(failure)
        return response.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: the end of the abort is not observable."""
        return unmeasured_abort()

    @abstractmethod
    def _new_input(self, conversation: list[dict[str, Any]], work: Work) -> list[dict[str, Any]]:
        """Return the new input: a task, or the results of the last answer's calls."""

    @abstractmethod
    async def _answer(
        self, conversation: list[dict[str, Any]], work: Work, response: ResponseTrace
    ) -> list[dict[str, Any]]:
        """Send the conversation, and return its answer as it is sent with the next request."""


class _Details(msgspec.Struct):
    """More about the input."""

    cached_tokens: int | None = None


class _CodexUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    input_tokens_details: _Details | None = None


class _CodexResponse(msgspec.Struct):
    """The parts of a response that are read."""

    usage: _CodexUsage | None = None
    error: Problem | None = None


class _CodexEvent(msgspec.Struct):
    """The parts of a response event that are read."""

    type: str
    delta: str = ""
    item: dict[str, Any] | None = None
    response: _CodexResponse | None = None


_CODEX_EVENTS: Final = msgspec.json.Decoder(_CodexEvent)
_CODEX_SENT: Final = {
    "message": ("type", "role", "content"),
    "function_call": ("type", "name", "arguments", "call_id"),
}
"""The fields of an item that are sent again."""


class CodexSession(AgentSession):
    """Codex: `/v1/responses` with nothing stored."""

    _instructions: ClassVar = words(_CODEX_WORDS, seed=1)
    _tools: ClassVar = [
        {
            "type": "function",
            "name": name,
            "description": words(_DESCRIPTION_WORDS, seed=10 + place),
            "strict": False,
            "parameters": _schema(100 * place),
        }
        for place, name in enumerate(_CODEX_TOOLS)
    ]

    def _new_input(self, conversation: list[dict[str, Any]], work: Work) -> list[dict[str, Any]]:
        text = words(work.prompt_tokens, seed=work.seed)
        if conversation:
            calls = [
                item["call_id"]
                for item in conversation[_last(conversation, "function_call_output") :]
                if "arguments" in item
            ]
            return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id in calls]
        around = {"developer": "<permissions>", "user": "<environment_context>"}
        reminders = [(role, head + words(_REMINDER_WORDS, seed=2)) for role, head in around.items()]
        return [
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in (*reminders, ("user", text))
        ]

    async def _answer(
        self, conversation: list[dict[str, Any]], work: Work, response: ResponseTrace
    ) -> list[dict[str, Any]]:
        body = {
            "model": self._model,
            "instructions": self._instructions,
            "input": conversation,
            "tools": self._tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": work.history_id,
            "text": {"verbosity": "medium"},
            "client_metadata": {"turn": str(work.seed)},
        }
        answer: list[dict[str, Any]] = []
        async for now_s, event in self._http.stream("/v1/responses", body, _CODEX_EVENTS):
            if event.type == "response.output_text.delta":
                response.piece(event.delta, now_s=now_s)
            elif event.type == "response.output_item.done" and event.item is not None:
                fields = _CODEX_SENT.get(event.item["type"], ())
                answer.append({name: event.item[name] for name in fields})
            if event.response is not None and (usage := event.response.usage) is not None:
                details = usage.input_tokens_details
                response.counted = Counted(
                    usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None
                )
            if event.response is not None and event.response.error is not None:
                response.error = event.response.error.message
        return [item for item in answer if item]


class _ClaudeUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _ClaudeDelta(msgspec.Struct):
    """A delta of a block."""

    text: str = ""
    partial_json: str = ""


class _ClaudeEvent(msgspec.Struct):
    """The parts of a message event that are read."""

    type: str
    index: int = 0
    content_block: dict[str, Any] | None = None
    delta: _ClaudeDelta | None = None
    usage: _ClaudeUsage | None = None
    error: Problem | None = None


_CLAUDE_EVENTS: Final = msgspec.json.Decoder(_ClaudeEvent)
_CACHED: Final = {"cache_control": {"type": "ephemeral"}}


class ClaudeCodeSession(AgentSession):
    """Claude Code: `/v1/messages`, with a line in the system prompt that changes with each request."""

    _system: ClassVar = words(_CLAUDE_WORDS, seed=3)
    _tools: ClassVar = [
        {
            "name": name,
            "description": words(_DESCRIPTION_WORDS, seed=50 + place),
            "input_schema": _schema(100 * place),
        }
        for place, name in enumerate(_CLAUDE_TOOLS)
    ]

    def _new_input(self, conversation: list[dict[str, Any]], work: Work) -> list[dict[str, Any]]:
        text = words(work.prompt_tokens, seed=work.seed)
        if not conversation:
            reminder = "<system-reminder>" + words(_REMINDER_WORDS, seed=4)
            return [{"role": "user", "content": [{"type": "text", "text": each} for each in (reminder, text)]}]
        calls = [block["id"] for block in conversation[-1]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id in calls]
        return [{"role": "user", "content": results}]

    async def _answer(
        self, conversation: list[dict[str, Any]], work: Work, response: ResponseTrace
    ) -> list[dict[str, Any]]:
        *before, last = conversation
        *blocks, end = last["content"]
        body = {
            "model": self._model,
            "max_tokens": work.max_tokens,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={work.seed:08x};"},
                {"type": "text", "text": "You are an agent.", **_CACHED},
                {"type": "text", "text": self._system, **_CACHED},
            ],
            "messages": [*before, {**last, "content": [*blocks, {**end, **_CACHED}]}],
            "tools": self._tools,
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "user"},
            "stream": True,
        }
        found: dict[int, dict[str, Any]] = {}
        async for now_s, event in self._http.stream("/v1/messages?beta=true", body, _CLAUDE_EVENTS):
            if event.content_block is not None:
                found[event.index] = {**event.content_block, "arguments": ""}
            elif event.type == "content_block_delta" and event.delta is not None:
                response.piece(event.delta.text, now_s=now_s)
                found[event.index]["text"] = found[event.index].get("text", "") + event.delta.text
                found[event.index]["arguments"] += event.delta.partial_json
            elif event.usage is not None:
                read, cached = event.usage.input_tokens, event.usage.cache_read_input_tokens
                response.counted = Counted(read + cached, event.usage.output_tokens, cached)
            response.error = event.error.message if event.error else response.error
        return [{"role": "assistant", "content": [_block(block) for block in found.values()]}]


def _block(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "tool_use":
        arguments = msgspec.json.decode(block["arguments"] or "{}")
        return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": arguments}
    return {"type": "text", "text": block["text"]}


def _last(items: list[dict[str, Any]], kind: str) -> int:
    """Return the place after the last item of a kind, 0 without one."""
    return max((place for place, item in enumerate(items, start=1) if item["type"] == kind), default=0)
