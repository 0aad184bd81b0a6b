"""Values that several messages carry."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from inferencecenter.protocol.base import DAGGER

Mode = Literal["chat", "raw"]
Priority = Literal["interactive", "normal", "batch"]
StatusType = Literal["queue", "memory", "sessions", "performance", "model"]
Role = Literal["system", "user", "assistant", "tool"]
SessionStateName = Literal["idle", "busy", "closed", "expired"]
FinishReason = Literal[
    "stop", "length", "aborted", "context_full", "time", "tool_calls", "repetition", "quota_exceeded"
]

MetadataText = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], MetadataText], Field(max_length=16)
]


class Value(BaseModel):
    """Part of a message: immutable, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ChatMessage(Value):
    """One message of a conversation."""

    role: Role = Field(description="Who speaks.")
    content: str = Field(description="What is said, as plain text.")


class Usage(Value):
    """Tokens counted for one turn or a whole session."""

    prompt_tokens: int = Field(ge=0, description="Tokens the model was given.")
    cached_tokens: int = Field(ge=0, description="Of those, tokens whose KV was reused.")
    completion_tokens: int = Field(ge=0, description="Tokens the model made.")


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

    token: str
    token_id: int
    logprob: float


class TokenLogprobs(Value):
    """The sampled token and the likeliest ones at its position."""

    token: str
    token_id: int
    logprob: float
    top: tuple[TokenProbability, ...]


class ClientLimits(Value):
    """What a client may have at once."""

    max_sessions: int
    max_connections: int


class ServerLimits(Value):
    """What the daemon accepts from anyone."""

    max_frame_bytes: int
    auth_timeout_s: float


class TranscriptTurn(Value):
    """What is known of one finished turn."""

    turn_id: str
    finish_reason: str
    usage: Usage


class SessionSummary(Value):
    """A session in a list."""

    session_id: str
    state: SessionStateName
    mode: Mode
    model: str
    messages: int
    tokens: int
    created_at: float = Field(description="Unix seconds.")
    last_used_at: float = Field(description="Unix seconds.")
    metadata: dict[str, str]


class GpuReadings(Value):
    """The first GPU's readings; null where there is no GPU or no such reading."""

    temp: Annotated[float | None, DAGGER] = Field(description="Degrees Celsius.")
    vram_total_mb: Annotated[float | None, DAGGER]
    vram_used_mb: Annotated[float | None, DAGGER]
    vram_free_mb: Annotated[float | None, DAGGER]
    power_watts: Annotated[float | None, DAGGER]
    fan_percent: Annotated[float | None, DAGGER]
    throttling: Annotated[bool | None, DAGGER]
    name: str | None
    utilization: float | None = Field(description="Percent.")
    throttle_reasons: tuple[str, ...] | None


class InferenceReadings(Value):
    """What the engine is doing."""

    active_generations: Annotated[int, DAGGER]
    total_sessions: Annotated[int, DAGGER]
    last_tps: Annotated[float, DAGGER]
    last_ttft_ms: Annotated[float, DAGGER]
    total_tokens_generated: Annotated[int, DAGGER]
    queue_depth: int
    tokens_per_s: float = Field(description="Over the last ten seconds.")
    slots_used: int
    slots: int
    parked_sessions: int
    parked_mb: float


class EngineReadings(Value):
    """The engine process."""

    state: str
    model: str | None
    gpu_layers: int | None
    restarts: int
    rss_mb: float | None
