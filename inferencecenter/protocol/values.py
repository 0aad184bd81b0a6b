"""Values that several messages carry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from inferencecenter.protocol.base import DAGGER

Mode = Literal["chat", "raw"]
OnFull = Literal["shift", "stop"]
OnDisconnect = Literal["detach", "close"]
Priority = Literal["interactive", "normal", "batch"]
StatusType = Literal["queue", "memory", "sessions", "performance", "model"]
Role = Literal["system", "user", "assistant", "tool"]
SessionStateName = Literal["idle", "busy", "closed", "expired"]
FinishReason = Literal[
    "stop", "length", "aborted", "context_full", "time", "tool_calls", "repetition", "quota_exceeded"
]

MetadataText = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], MetadataText],
    Field(max_length=16, fail_fast=True),
]


class Value(BaseModel):
    """Part of a message: immutable, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Tool(Value):
    """A function that the client can run, and that the model may ask for."""

    name: ToolName = Field(description="Its name.")
    description: str | None = Field(default=None, max_length=16_384, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of its arguments, an object; without it there are none."
    )


class NamedTool(Value):
    """The tool that the model has to call."""

    name: ToolName = Field(description="Its name.")


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class ToolCall(Value):
    """A tool that the model asked for."""

    call_id: CallId = Field(description="Names this call; the message with its result has it as `tool_call_id`.")
    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class ChatMessage(Value):
    """One message of a conversation."""

    role: Role = Field(description="Who speaks.")
    content: str = Field(description="What is said, as plain text; may be empty.")
    reasoning: str | None = Field(
        default=None, description="What an assistant thought before; the model's template says who reads it again."
    )
    tool_calls: (
        Annotated[tuple[ToolCall, ...], Field(min_length=1, max_length=128, strict=False, fail_fast=True)] | None
    ) = Field(default=None, description="Tools that an assistant asked for.")
    tool_call_id: CallId | None = Field(default=None, description="The call that a message of a tool is the result of.")

    @model_validator(mode="after")
    def _fits_role(self) -> ChatMessage:
        if self.role != "assistant" and (self.tool_calls is not None or self.reasoning is not None):
            raise ValueError("tool_calls and reasoning belong to messages of role assistant")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages of role tool")
        return self


class Usage(Value):
    """Tokens counted for one turn or a whole session."""

    prompt_tokens: int = Field(ge=0, description="Tokens the model was given.")
    cached_tokens: int = Field(ge=0, description="Of those, tokens whose KV was reused.")
    completion_tokens: int = Field(ge=0, description="Tokens the model made.")
    reasoning_tokens: int = Field(
        default=0, ge=0, description="Of those, tokens up to the end of what it thought, with the marks around that."
    )


class TurnStats(Value):
    """How one turn went."""

    ttft_ms: Annotated[float, DAGGER] = Field(description="Milliseconds from `infer` to the first token.")
    total_ms: Annotated[float, DAGGER] = Field(description="Milliseconds from `infer` to the end.")
    tokens: Annotated[int, DAGGER] = Field(description="Tokens generated.")
    tps: Annotated[float, DAGGER] = Field(description="Tokens a second after the first.")
    prompt_tokens: int = Field(description="Tokens of the prompt, history included.")
    cached_tokens: int = Field(description="Of those, tokens whose KV was reused.")
    queue_ms: float = Field(description="Milliseconds waited for a slot.")
    preempted: int = Field(description="Times the turn gave its slot to another.")


class TokenProbability(Value):
    """A token and its natural-log probability before any sampler."""

    token: str = Field(description="The token's text; bytes that are no whole character are shown as U+FFFD.")
    token_id: int = Field(description="Its number in the vocabulary.")
    logprob: float = Field(description="Natural logarithm of its probability.")


class TokenLogprobs(Value):
    """The sampled token and the likeliest ones at its position."""

    token: str = Field(description="The sampled token's text.")
    token_id: int = Field(description="Its number in the vocabulary.")
    logprob: float = Field(description="Natural logarithm of its probability.")
    top: tuple[TokenProbability, ...] = Field(description="The `n_probs` likeliest tokens, the likeliest first.")


class ClientLimits(Value):
    """What a client may have at once, and what the token that it showed may use; what is absent has no limit."""

    max_sessions: int = Field(description="Open sessions.")
    max_connections: int = Field(description="Open sockets.")
    requests_per_minute: int | None = Field(default=None, description="Turns that may be asked for in any minute.")
    tokens_per_minute: int | None = Field(
        default=None, description="Tokens of prompts that have to be read, and of answers, in a minute."
    )
    tokens_per_day: int | None = Field(default=None, description="The same in a day, which begins at midnight UTC.")
    concurrent_turns: int | None = Field(default=None, description="Turns that run or wait at once.")
    max_tokens: int | None = Field(default=None, description="Tokens of one answer.")
    models: tuple[str, ...] | None = Field(default=None, description="Models that may be used.")


class UsageDay(Value):
    """What turns that ended on one day took."""

    day: str = Field(description="In UTC, as 2026-11-22.")
    turns: int = Field(description="Turns.")
    prompt_tokens: int = Field(description="Tokens the model was given.")
    cached_tokens: int = Field(description="Of those, tokens whose KV was reused; limits do not count them.")
    completion_tokens: int = Field(description="Tokens the model made.")


class UsageLeft(Value):
    """What the token that asks may still use now; what is absent has no limit."""

    tokens_today: int = Field(description="Tokens that limits count, used since midnight UTC.")
    day_ends_in_ms: int = Field(description="Milliseconds until the next.")
    turns: int = Field(description="Turns that run or wait.")
    requests_left: int | None = Field(default=None, description="Turns that may be asked for.")
    minute_tokens_left: int | None = Field(
        default=None, description="Tokens that are left of a minute's; below 0 so many have to be regained first."
    )
    day_tokens_left: int | None = Field(default=None, description="Tokens that are left of today's.")


class ConnectedClient(Value):
    """A client with open sockets."""

    client_id: str = Field(description="The account.")
    connections: int = Field(description="Its sockets.")
    addresses: int = Field(description="Different addresses that they come from.")
    sessions: int = Field(description="Its open sessions.")
    busy: int = Field(description="Of those, sessions that answer.")
    tokens_today: int = Field(description="Tokens that limits count, used since midnight UTC.")


class ServerLimits(Value):
    """What the daemon accepts from anyone."""

    max_frame_bytes: int = Field(description="Bytes of one frame.")
    auth_timeout_s: float = Field(description="Seconds a socket has to authenticate.")


class TranscriptTurn(Value):
    """What is known of one finished turn."""

    turn_id: str = Field(description="The turn.")
    finish_reason: str = Field(description="How it ended.")
    messages: int = Field(ge=0, description="Messages of the transcript at its end, the last of them its answer.")
    usage: Usage = Field(description="Its tokens.")


class SessionSummary(Value):
    """A session in a list."""

    session_id: str = Field(description="The session.")
    state: SessionStateName = Field(description="Whether it is answering.")
    mode: Mode = Field(description="As it was created.")
    model: str = Field(description="The model that answers.")
    messages: int = Field(description="Messages of history.")
    tokens: int = Field(description="Tokens of history.")
    created_at: float = Field(description="Unix seconds.")
    last_used_at: float = Field(description="Unix seconds.")
    metadata: dict[str, str] = Field(description="What was given when it was created, or by `set_metadata` since.")


class ModelSummary(Value):
    """A model in a list; what is not known before it was loaded is absent."""

    name: str = Field(description="Its name for `create_session` and `load_model`.")
    default: bool = Field(description="Whether sessions that name no model have it.")
    state: Literal["unloaded", "loading", "loaded", "asleep", "failed"] = Field(
        description="Where it is; a turn loads one that is `unloaded` or `asleep`."
    )
    detail: str = Field(default="", description="Why it could not be loaded, in words.")
    n_ctx: int | None = Field(default=None, description="Tokens a session's context holds.")
    slots: int | None = Field(default=None, description="Turns that it answers at once.")
    parameters: int | None = Field(default=None, description="Parameters.")
    size_mb: float | None = Field(default=None, description="Its weights, in MiB.")


PlanText = Annotated[str, StringConstraints(max_length=512)]


class PlannedDevice(Value):
    """What a plan puts on one GPU, and what that GPU had when the plan was made."""

    id: PlanText = Field(description="Its address on the PCI bus, or llama.cpp's name for it.")
    name: PlanText = Field(description="Its name.")
    total_bytes: int = Field(description="Its memory.")
    free_bytes: int = Field(description="What was free of it; the rest was others'.")
    margin_bytes: int = Field(description="What is left free.")
    layers: int = Field(description="Layers that are put there, the output matrix counted as one.")
    weight_bytes: int = Field(description="Their weights.")
    kv_bytes: int = Field(description="Their KV, of all slots.")
    compute_bytes: int = Field(description="Buffers for computing.")
    context_bytes: int = Field(description="What the driver and its libraries take for themselves.")
    used_bytes: int | None = Field(default=None, description="What it took in fact, where that was measured.")


class PlannedHost(Value):
    """What a plan leaves to the processor and its memory."""

    available_bytes: int | None = Field(default=None, description="What was free, where the kernel tells.")
    weight_bytes: int = Field(description="Weights, the embeddings among them.")
    kv_bytes: int = Field(description="KV of the layers that are on no GPU.")
    compute_bytes: int = Field(description="Buffers for computing.")
    expert_layers: int = Field(description="Layers on GPUs of which the experts stay with the host.")


class PlanReason(Value):
    """A number of a plan, and why it is that."""

    name: PlanText = Field(description="The setting, or several.")
    value: PlanText = Field(description="What it is.")
    why: PlanText = Field(description="Why, in words.")
    explicit: bool = Field(description="Whether it was set.")


class EnginePlan(Value):
    """How a model is divided between GPUs and host, as it was planned when its engine was started last."""

    fits: bool = Field(description="Whether all of it fits; if not, what is set was kept all the same.")
    layers: int = Field(description="Layers of the model, the output matrix counted as one.")
    n_gpu_layers: int = Field(description="Of those, layers on GPUs.")
    split_mode: Literal["layer", "none"] = Field(description="`layer` where several GPUs share them.")
    slots: int = Field(description="Turns that are answered at once.")
    n_ctx: int = Field(description="Tokens that the context of each holds.")
    n_batch: int = Field(description="Tokens in a decode call at most.")
    n_ubatch: int = Field(description="Of those, tokens that are computed at once.")
    kv_type_k: PlanText = Field(description="Type of the keys in KV.")
    kv_type_v: PlanText = Field(description="Type of the values in KV.")
    flash_attention: bool = Field(description="Whether it is used, where a GPU has kernels for the model.")
    n_threads: int = Field(description="Threads that compute.")
    devices: tuple[PlannedDevice, ...] = Field(max_length=64, description="The GPUs that take part.")
    host: PlannedHost = Field(description="The rest.")
    reasons: tuple[PlanReason, ...] = Field(max_length=32, description="The numbers, each with its reason.")
    advice: tuple[PlanText, ...] = Field(
        max_length=128, description="What does not fit, what else could be chosen, and what should be known."
    )


class GpuReadings(Value):
    """The first GPU's readings; null where there is no GPU or no such reading."""

    temp: Annotated[float | None, DAGGER] = Field(description="Degrees Celsius.")
    vram_total_mb: Annotated[float | None, DAGGER] = Field(description="Memory, in MiB.")
    vram_used_mb: Annotated[float | None, DAGGER] = Field(description="Memory in use by anybody, in MiB.")
    vram_free_mb: Annotated[float | None, DAGGER] = Field(description="Memory left, in MiB.")
    power_watts: Annotated[float | None, DAGGER] = Field(description="Power drawn.")
    fan_percent: Annotated[float | None, DAGGER] = Field(description="Fan speed.")
    throttling: Annotated[bool | None, DAGGER] = Field(description="Whether the GPU slows itself down.")
    name: str | None = Field(description="The device.")
    utilization: float | None = Field(description="Percent.")
    throttle_reasons: tuple[str, ...] | None = Field(description="Why, as NVML names it.")


class InferenceReadings(Value):
    """What the engine is doing."""

    active_generations: Annotated[int, DAGGER] = Field(description="Turns that run or wait.")
    total_sessions: Annotated[int, DAGGER] = Field(description="Open sessions.")
    last_tps: Annotated[float, DAGGER] = Field(description="Tokens a second of the turn that ended last.")
    last_ttft_ms: Annotated[float, DAGGER] = Field(description="Its time to the first token.")
    total_tokens_generated: Annotated[int, DAGGER] = Field(description="Tokens since the daemon started.")
    queue_depth: int = Field(description="Turns that wait for a slot.")
    tokens_per_s: float = Field(description="Over the last ten seconds.")
    slots_used: int = Field(description="Slots in which a turn runs.")
    slots: int = Field(description="Sequences decoded at once at most.")
    parked_sessions: int = Field(description="Sessions whose KV is kept outside the slots.")
    parked_mb: float = Field(description="What that KV takes, in MiB.")


class EngineReadings(Value):
    """The engine process."""

    state: str = Field(description="Where the process is in its life.")
    model: str | None = Field(description="The loaded model.")
    gpu_layers: int | None = Field(description="Layers on the GPU.")
    restarts: int = Field(description="Times it was started again.")
    rss_mb: float | None = Field(description="Resident memory, in MiB.")
