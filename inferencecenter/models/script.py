"""Scripted answers: the rules by which the ``script`` backend answers, and the file that holds them.

The first rule whose conditions all hold gives the reply. Rules are stateless: each matches one conversation, so equal
conversations get equal answers, in any order and after a restart.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import regex
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError, foreign_input

if TYPE_CHECKING:
    from pathlib import Path

MAX_SCRIPT_BYTES: Final = 4 * 1024 * 1024
MAX_RULES: Final = 1000
_MAX_TEXT_CHARS: Final = 1_000_000
_MAX_PATTERN_CHARS: Final = 1000
_PATTERN_TIMEOUT_S: Final = 1.0
_SHOWN_CHARS: Final = 100
_HINT: Final = "docs/scripted.md describes the format."


@dataclass(frozen=True, slots=True)
class Conversation:
    """The view of a conversation that rules match.

    ``user`` is the last user message and ``turn`` the number of the answer, counted from 1. ``results`` are the results
    since the last answer, ``called`` the names of the tools that they are of, ``offers`` the names of all tools.
    """

    system: str = ""
    user: str = ""
    turn: int = 1
    results: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    offers: frozenset[str] = field(default_factory=frozenset)


def _pattern(source: str) -> str:
    try:
        regex.compile(source)
    except regex.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return source


_Text = Annotated[str, Field(max_length=_MAX_TEXT_CHARS)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Pattern = Annotated[str, Field(max_length=_MAX_PATTERN_CHARS), AfterValidator(_pattern)]


def _on_wire(code: ErrorCode) -> ErrorCode:
    if not ERRORS[code].on_wire:
        raise ValueError(f"{code} never ends a turn")
    return code


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True, defer_build=True)


class ScriptedCall(_Table):
    """A call of a tool."""

    name: _Name
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class ScriptedError(_Table):
    """The error that ends an answer, after its text."""

    code: Annotated[ErrorCode, Field(strict=False), AfterValidator(_on_wire)]
    message: _Text = ""


class Reply(_Table):
    """An answer: reasoning, then text, then calls. ``raw`` replaces them by text that is parsed as a model's.

    The first token comes after ``delay_s``, the next ones at ``tokens_per_s``; if not set, as fast as possible.
    """

    text: _Text = ""
    reasoning: _Text = ""
    tool_calls: tuple[ScriptedCall, ...] = Field((), max_length=100, strict=False)
    raw: _Text | None = None
    error: ScriptedError | None = None
    tokens_per_s: float | None = Field(None, gt=0, le=1_000_000)
    delay_s: float = Field(0.0, ge=0, le=3600)

    @model_validator(mode="after")
    def _raw_alone(self) -> Reply:
        if self.raw is not None and (self.text or self.reasoning or self.tool_calls):
            raise ValueError("raw replaces text, reasoning and tool_calls: give it without them")
        return self


class Conditions(_Table):
    """When a rule applies: all that is given must hold.

    ``user`` and ``tool_result`` are parts of the text; their ``_regex`` forms are searched for.
    """

    user: _Text | None = None
    user_regex: _Pattern | None = None
    tool_result: _Text | None = None
    tool_result_regex: _Pattern | None = None
    tool: _Name | None = None
    system: _Text | None = None
    offers: _Name | None = None
    turn: int | None = Field(None, ge=1, le=1_000_000)

    def hold(self, conversation: Conversation) -> bool:
        """Return whether all conditions hold; a regular expression that takes too long does not."""
        return (
            (self.turn is None or self.turn == conversation.turn)
            and (self.tool is None or self.tool in conversation.called)
            and (self.offers is None or self.offers in conversation.offers)
            and (self.system is None or self.system in conversation.system)
            and _matches(self.user, self.user_regex, (conversation.user,))
            and _matches(self.tool_result, self.tool_result_regex, conversation.results)
        )


def _matches(part: str | None, pattern: str | None, texts: tuple[str, ...]) -> bool:
    if part is not None and not any(part in text for text in texts):
        return False
    if pattern is None:
        return True
    try:
        return any(regex.search(pattern, text, timeout=_PATTERN_TIMEOUT_S) is not None for text in texts)
    except TimeoutError:
        return False


class Rule(_Table):
    """Conditions and the reply; without conditions it always applies."""

    when: Conditions = Conditions()
    reply: Reply


class Script(_Table):
    """A file of rules."""

    tokens_per_s: float | None = Field(None, gt=0, le=1_000_000)
    rules: tuple[Rule, ...] = Field(min_length=1, max_length=MAX_RULES, strict=False)

    @model_validator(mode="after")
    def _all_reachable(self) -> Script:
        for number, rule in enumerate(self.rules[:-1], 1):
            if rule.when == Conditions():
                raise ValueError(f"rule {number} has no conditions, so the rules after it never apply: put it last")
        return self

    def find(self, conversation: Conversation) -> tuple[int, Reply]:
        """Return the number of the first rule that applies, counted from 1, and its reply.

        Raises:
            InferenceCenterError: ``invalid_request``: none does.
        """
        for number, rule in enumerate(self.rules, 1):
            if rule.when.hold(conversation):
                speed = rule.reply.tokens_per_s or self.tokens_per_s
                return number, rule.reply.model_copy(update={"tokens_per_s": speed})
        seen = [f"answer {conversation.turn}", f"the user message {_shown(conversation.user)}"]
        seen += [f"the tool result {_shown(result)}" for result in conversation.results[-1:]]
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"no rule of the script applies to {', '.join(seen)}",
            hint="A last rule without `when` answers everything else.",
        )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def read_script(path: Path) -> Script:
    """Read a file of rules: JSON if its name ends so, else TOML.

    Raises:
        InferenceCenterError: ``invalid_config``, naming file, field, value and what is allowed.
    """
    with foreign_input(lambda reason: _invalid(f"{path}: cannot be parsed: {reason}")):
        try:
            return Script.model_validate(_parsed(path, _content(path)))
        except ValidationError as error:
            raise _invalid(f"{path}: {_reason(error)}") from None


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
        if len(content) > MAX_SCRIPT_BYTES:
            raise _invalid(f"{path}: is larger than {MAX_SCRIPT_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise _invalid(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _invalid(f"{path}: is not UTF-8 at byte {error.start}") from None


def _parsed(path: Path, content: str) -> Any:
    try:
        return json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except json.JSONDecodeError as error:
        raise _invalid(f"{path}: is not JSON: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise _invalid(f"{path}: is not TOML: {error}") from None


def _reason(error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    where = ".".join(str(part + 1) if isinstance(part, int) else part for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown field {where}"
    if detail["type"] == "missing":
        return f"{where} is missing"
    reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    if not where or isinstance(detail["input"], dict):
        return f"{where}: {reason}".removeprefix(": ")
    return f"{where} is {_shown(detail['input'])}: {reason[0].lower()}{reason[1:]}"


def _invalid(message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field="engine.script", hint=_HINT)
