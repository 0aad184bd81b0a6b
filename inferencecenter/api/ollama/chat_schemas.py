"""Request and response models of ``/api/chat`` and ``/api/generate``, and the tables of their fields. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.ollama.keep_alive import KEEP_ALIVE_RULE, KeepAlive
from inferencecenter.api.openai.chat_schemas import MOST_MESSAGES, AnswerModel
from inferencecenter.api.openai.sampling import MOST_PROBS, Name, SamplerFields, Stop
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.values import MAX_IMAGES, CallId, ToolName

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_CONTEXT: Final = 2**20


class OllamaOptions(SamplerFields):
    """Options of a request; absent ones use the defaults of the daemon and the model."""

    temperature: float | None = Field(default=None, ge=0, le=5, description="As `params.temperature`.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="As `params.top_p`.")
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="As `params.seed`; a negative one is random."
    )
    stop: Stop | None = Field(default=None, description="Texts that end the generation where they begin.")
    num_predict: int | None = Field(
        default=None,
        ge=-2,
        le=MAX_TOKENS,
        description="Maximum number of generated tokens; 0 and below for as many as the context holds.",
    )


class CalledTool(DialectModel):
    """Name and arguments of a tool call."""

    name: ToolName = Field(description="Name of the tool.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")


class SentCall(DialectModel):
    """A tool call of an earlier answer."""

    id: CallId | None = Field(default=None, description="Id of the call; calls without one are known by their order.")
    function: CalledTool = Field(description="Name and arguments.")


Images: TypeAlias = Annotated[list[str], Field(max_length=MAX_IMAGES, fail_fast=True)]
"""Image files in Base64."""


class OllamaMessage(DialectModel):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Role of the author.")
    content: str = Field(default="", description="The text.")
    images: Images | None = Field(default=None, description="Image files in Base64, which stand before the text.")
    thinking: str | None = Field(default=None, description="Reasoning of an assistant before its content.")
    tool_calls: Annotated[list[SentCall], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tool calls of an assistant."
    )
    tool_name: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        default=None,
        description="The tool whose result a tool message has: that of its first call without a result; if absent, of "
        "the first call of any tool.",
    )
    tool_call_id: CallId | None = Field(
        default=None, description="The call whose result a tool message has; takes precedence over `tool_name`."
    )


class OfferedFunction(DialectModel):
    """A function that the client can execute."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = Field(
        default=None, description="Description for the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")


class OfferedTool(DialectModel):
    """A tool that the model may call."""

    type: Literal["function"] = Field(default="function", description="Type of the object.")
    function: OfferedFunction = Field(description="The function.")


class AnswerRequest(DialectModel):
    """Fields of both requests."""

    model: Name = Field(description="A name listed by `/api/tags`, with or without `:latest`.")
    stream: bool = Field(default=True, description="Whether the response is sent in lines of JSON.")
    format: Literal["", "json"] | dict[str, Any] = Field(
        default="", description="Format of the answer: `json` for any JSON object, or a JSON Schema."
    )
    options: OllamaOptions | None = Field(default=None, description="Parameters.")
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        default=None, description="Whether the model reasons first; if absent, the model's default."
    )
    keep_alive: KeepAlive = None
    truncate: bool = Field(
        default=True,
        description="Whether the oldest messages are dropped of a conversation that is too long, which is refused "
        "otherwise.",
    )
    logprobs: bool = Field(default=False, description="Whether token probabilities are returned.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_PROBS,
        description="Number of most likely tokens to return at each position; only with `logprobs`.",
    )


class OllamaChatRequest(AnswerRequest):
    """A conversation to be answered."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MOST_MESSAGES, fail_fast=True)] = Field(
        default_factory=list,
        description="The whole conversation, the last message from `user` or `tool`, or the start of the answer; "
        "without messages the model is loaded.",
    )
    tools: Annotated[list[OfferedTool], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools that the model may call, with distinct names."
    )


class OllamaGenerateRequest(AnswerRequest):
    """A prompt to be answered or continued."""

    prompt: str = Field(
        default="",
        description="Message of the user, or the text before the gap; without it and `suffix` the model is loaded.",
    )
    suffix: str = Field(
        default="",
        description="Text after a gap, which the answer fills; only with models that have tokens for this, and without "
        "their template.",
    )
    images: Images | None = Field(
        default=None, description="Image files in Base64, which stand before the prompt; not with `raw` or `suffix`."
    )
    system: str | None = Field(default=None, description="System prompt.")
    raw: bool = Field(
        default=False, description="Whether the prompt is continued as it is, without the model's template."
    )
    context: Annotated[list[Annotated[int, Field(ge=0, lt=2**16)]], Field(max_length=MOST_CONTEXT)] | None = Field(
        default=None, description="The `context` of an earlier answer, which continues its conversation."
    )


def _is_given(value: Any, _siblings: Mapping[str, Any]) -> bool:
    return bool(value)


def _fills_gap(_value: Any, siblings: Mapping[str, Any]) -> bool:
    return bool(siblings.get("suffix"))


def _cuts_text(value: Any, siblings: Mapping[str, Any]) -> bool:
    return value is True and bool(siblings.get("raw") or siblings.get("suffix"))


def _is_no_function(item: Any, _siblings: Mapping[str, Any]) -> bool:
    return isinstance(item, dict) and isinstance(kind := item.get("type"), str) and kind != "function"


_PLACED: Final = "the settings of the daemon decide how models are loaded"
_SIZE: Final = "the size of the context is a setting of the daemon"

_OPTION_RULES: Final = (
    *(
        FieldRule(field=f"options.{name}", why=_PLACED)
        for name in (
            "numa",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "num_thread",
        )
    ),
    FieldRule(field="options.num_ctx", why=_SIZE),
    FieldRule(field="options.num_keep", why="the daemon drops whole messages of a full context"),
    FieldRule(field="options.tfs_z", why="llama.cpp has removed tail-free sampling"),
    FieldRule(field="options.penalize_newline", why="llama.cpp treats line breaks like other tokens"),
)
_ANSWER_RULES: Final = (
    *_OPTION_RULES,
    KEEP_ALIVE_RULE,
    FieldRule(field="shift", why="`truncate` decides what happens when the context is full"),
)

OLLAMA_CHAT_FIELDS: Final = FieldTable(
    "ollama-chat",
    OllamaChatRequest,
    rules=(
        *_ANSWER_RULES,
        FieldRule(
            field="tools[]",
            values="of a type other than `function`",
            why="the daemon cannot run tools of this type, so the model is not offered it",
            applies=_is_no_function,
        ),
    ),
)
"""The fields of ``/api/chat``."""

OLLAMA_GENERATE_FIELDS: Final = FieldTable(
    "ollama-generate",
    OllamaGenerateRequest,
    rules=(
        *_ANSWER_RULES,
        *(
            FieldRule(field=name, values="with `suffix`", why="a gap has no conversation", applies=_fills_gap)
            for name in ("system", "context", "think")
        ),
        FieldRule(
            field="truncate",
            values="`true` with `raw` or `suffix`",
            why="a text without messages that is too long is refused",
            applies=_cuts_text,
        ),
        FieldRule(field="template", values="a text", why="the template is that of the model file", applies=_is_given),
        FieldRule(field="width", why="the model makes no images"),
        FieldRule(field="height", why="the model makes no images"),
        FieldRule(field="steps", why="the model makes no images"),
    ),
)
"""The fields of ``/api/generate``."""


class OllamaError(AnswerModel):
    """An error response, and the last line of a failed stream."""

    error: str = Field(description="What is wrong, and what to do about it.")


class OllamaProbability(AnswerModel):
    """A token and its probability before any sampler."""

    token: str = Field(description="Its text; bytes that are no whole character are shown as U+FFFD.")
    logprob: float = Field(description="Natural logarithm of its probability; -9999 for none.")
    bytes: list[int] | None = Field(description="Its text in UTF-8; null for what is no whole character.")


class OllamaProbabilities(OllamaProbability):
    """The sampled token, and the most likely ones at its position."""

    top_logprobs: list[OllamaProbability] = Field(description="The most likely tokens, in descending order.")


class AnsweredFunction(AnswerModel):
    """Name and arguments of a tool call."""

    index: int = Field(description="Index of the call in the answer.")
    name: str = Field(description="Name of the tool.")
    arguments: dict[str, Any] = Field(description="Its arguments.")


class AnsweredCall(AnswerModel):
    """A tool call of the model."""

    id: str = Field(description="Id of the call, which a result may name in `tool_call_id`.")
    function: AnsweredFunction = Field(description="Name and arguments.")


class AnsweredMessage(AnswerModel):
    """A message of the model, or a part of it."""

    role: Literal["assistant"] = Field(description="Role of the author.")
    content: str = Field(description="The text.")
    thinking: str | None = Field(default=None, description="Reasoning before the text; absent if there is none.")
    tool_calls: list[AnsweredCall] | None = Field(default=None, description="Tool calls; absent if there are none.")


class OllamaAnswer(AnswerModel):
    """Fields of both answers; in a stream those after `done` are in the last line. Durations are in nanoseconds."""

    model: str = Field(description="The model.")
    created_at: str = Field(description="When the request was accepted.")
    logprobs: list[OllamaProbabilities] | None = Field(
        default=None, description="Token probabilities, if requested; one for each token."
    )
    done: bool = Field(description="Whether this is the end of the answer.")
    done_reason: Literal["stop", "length", "load", "unload"] | None = Field(
        default=None, description="Reason of the end."
    )
    total_duration: int | None = Field(default=None, description="Duration of the request.")
    load_duration: int | None = Field(
        default=None, description="Of that, the time until the model was loaded and had a slot for the request."
    )
    prompt_eval_count: int | None = Field(default=None, description="Tokens of the prompt, including the history.")
    prompt_eval_duration: int | None = Field(default=None, description="Duration of reading the prompt.")
    eval_count: int | None = Field(default=None, description="Tokens generated.")
    eval_duration: int | None = Field(default=None, description="Duration of generating them.")
    warnings: list[str] | None = Field(
        default=None, description="Valid parameters that had no effect; absent if there are none."
    )


class OllamaChatAnswer(OllamaAnswer):
    """An answer to a conversation, or a line of it."""

    message: AnsweredMessage = Field(description="The message, or the new part of it.")


class OllamaGenerateAnswer(OllamaAnswer):
    """An answer to a prompt, or a line of it."""

    response: str = Field(description="The text, or the new part of it.")
    thinking: str | None = Field(default=None, description="Reasoning before the text; absent if there is none.")
    context: list[int] | None = Field(
        default=None,
        description="The conversation as numbers, to be sent with the next prompt; not with `raw` or `suffix`, and not "
        "beyond 2 MiB.",
    )
