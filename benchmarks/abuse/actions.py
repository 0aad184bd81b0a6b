"""The actions of the abusive client: each action is cheap to request, and was or may be expensive to answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.abuse.attacker import Attacker

_PROMPT_CHARS: Final = 900_000
_FILL_CHARS: Final = 800_000
_FILLS: Final = 4
_EMPTY_MESSAGES: Final = 1000
_UNAUTHENTICATED: Final = 200
_AT_ONCE: Final = 10
_LATE_PATTERNS: Final = tuple(rf"(?<=(?:\w+\s*){{1,{n}}}q)[^\w\s]{{3}}$" for n in (40, 41, 42, 43))
"""Look-behinds that match nowhere: each position of the answer is tried with every length."""
_DEEP_JSON: Final = '{"op":' * 5_000


@dataclass(frozen=True, slots=True)
class Action:
    """One operation: ``prepare`` runs once, and ``once`` gets what it returned, ``rate_per_s`` times a second."""

    name: str
    rate_per_s: float
    once: Callable[[Attacker, str], Awaitable[object]]
    prepare: Callable[[Attacker], Awaitable[str]]


async def _nothing(_: Attacker) -> str:
    return ""


async def _session(attacker: Attacker, mode: str) -> str:
    if (session_id := await attacker.open_session(mode=mode)) is None:
        raise InferenceCenterError(ErrorCode.INTERNAL, f"the action has no session: {dict(attacker.outcomes)}")
    return session_id


async def _empty_session(attacker: Attacker) -> str:
    return await _session(attacker, "raw")


async def _chat_session(attacker: Attacker) -> str:
    return await _session(attacker, "chat")


async def _large_session(attacker: Attacker) -> str:
    session_id = await _session(attacker, "raw")
    message = {"role": "user", "content": "word " * (_FILL_CHARS // 5)}
    for _ in range(_FILLS):
        await attacker.request(op="append", session_id=session_id, messages=[message])
    return session_id


async def _openapi(attacker: Attacker, _: str) -> None:
    await asyncio.gather(*(attacker.get("/openapi.json") for _ in range(_AT_ONCE)))


async def _unauthenticated(attacker: Attacker, _: str) -> None:
    await asyncio.gather(*(attacker.connect_without_token(keep=_UNAUTHENTICATED) for _ in range(_AT_ONCE)))


async def _malformed(attacker: Attacker, _: str) -> None:
    await attacker.send_raw(_DEEP_JSON)
    await attacker.send_raw('{"op": "infer", "session_id": 1e999, "params": {"temperature": NaN}}')


async def _long_prompts(attacker: Attacker, session_id: str) -> None:
    prompt = f"{next(attacker.numbers)} " + "<|im_start|> word " * (_PROMPT_CHARS // 18)
    await attacker.send(op="infer", session_id=session_id, prompt=prompt)
    await attacker.request(op="abort", session_id=session_id, discard=True)


async def _schemas(attacker: Attacker, session_id: str) -> None:
    number = next(attacker.numbers)
    schema = {
        "type": "array",
        "minItems": 90,
        "maxItems": 9_000 + number,
        "items": {"type": "string", "maxLength": number},
    }
    await attacker.send(op="infer", session_id=session_id, prompt="list", json_schema=schema)
    await attacker.request(op="abort", session_id=session_id, discard=True)


async def _shared_definitions(attacker: Attacker, session_id: str) -> None:
    definitions = {f"d{n}": {"type": "object", "description": "x" * 200} for n in range(1000)}
    parameters = {"type": "object", "properties": {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(1000)}}
    tool = {"name": f"tool{next(attacker.numbers)}", "parameters": {**parameters, "$defs": definitions}}
    await attacker.send(op="infer", session_id=session_id, prompt="call", tools=[tool], tool_choice="required")
    await attacker.request(op="abort", session_id=session_id, discard=True)


async def _slow_patterns(attacker: Attacker, session_id: str) -> None:
    params = {"stop_regex": _LATE_PATTERNS, "max_tokens": 64, "ignore_eos": True}
    await attacker.send(op="infer", session_id=session_id, prompt="word " * 20, params=params)
    await attacker.request(op="ping")
    await attacker.request(op="abort", session_id=session_id, discard=True)


async def _empty_messages(attacker: Attacker, session_id: str) -> None:
    messages = [{"role": "user", "content": ""}] * _EMPTY_MESSAGES
    await attacker.request(op="append", session_id=session_id, messages=messages)


async def _forks(attacker: Attacker, session_id: str) -> None:
    sent = [await attacker.send(op="fork_session", session_id=session_id) for _ in range(_AT_ONCE)]
    for forked in await attacker.answers(sent):
        if forked.op == "session_created":
            await attacker.request(op="close_session", session_id=forked.session_id)


async def _resumes(attacker: Attacker, session_id: str) -> None:
    sent = [await attacker.send(op="resume_session", session_id=session_id) for _ in range(4)]
    await attacker.answers(sent)


async def _short_lives(attacker: Attacker, _: str) -> None:
    sent = [await attacker.send(op="create_session", ttl_s=1e-9, store=False) for _ in range(_AT_ONCE)]
    await attacker.answers(sent)


async def _sessions(attacker: Attacker, _: str) -> None:
    if (session_id := await attacker.open_session(mode="raw")) is not None:
        await attacker.request(op="close_session", session_id=session_id)


async def _lookups(attacker: Attacker, _: str) -> None:
    text = f"{next(attacker.numbers)} " + "word " * 180_000
    await attacker.post("/tokenize", msgspec.json.encode({"text": text}), hang_up=True)


async def _listings(attacker: Attacker, session_id: str) -> None:
    await attacker.request(op="get_session", session_id=session_id)
    await attacker.request(op="list_sessions", limit=1000)
    await attacker.request(op="usage", days=3660)


def _action(
    once: Callable[[Attacker, str], Awaitable[Any]],
    name: str,
    *,
    rate_per_s: float,
    prepare: Callable[[Attacker], Awaitable[str]] = _nothing,
) -> Action:
    return Action(name, rate_per_s, once, prepare)


ACTIONS: Final = (
    _action(_openapi, "openapi document", rate_per_s=5),
    _action(_unauthenticated, "sockets without a token", rate_per_s=10),
    _action(_malformed, "malformed frames", rate_per_s=50),
    _action(_long_prompts, "long prompts, aborted", rate_per_s=2, prepare=_empty_session),
    _action(_schemas, "new schemas, aborted", rate_per_s=10, prepare=_empty_session),
    _action(_shared_definitions, "tools with shared definitions", rate_per_s=2, prepare=_chat_session),
    _action(_slow_patterns, "slow stop patterns", rate_per_s=2, prepare=_empty_session),
    _action(_empty_messages, "empty messages", rate_per_s=50, prepare=_empty_session),
    _action(_forks, "forks of a large session", rate_per_s=2, prepare=_large_session),
    _action(_resumes, "resumes of a large session", rate_per_s=1, prepare=_large_session),
    _action(_short_lives, "sessions of short life", rate_per_s=20),
    _action(_sessions, "sessions opened and closed", rate_per_s=50),
    _action(_lookups, "look-ups, hung up", rate_per_s=2),
    _action(_listings, "listings of a large session", rate_per_s=5, prepare=_large_session),
)
"""Rates that a client program reaches easily; turns are also sent to a daemon that refuses them."""
