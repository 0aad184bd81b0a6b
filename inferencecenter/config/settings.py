"""Every setting, described once.

``configuration.load_settings`` reads them; ``docs/configuration.md`` and ``config/inferencecenter.toml`` are generated
from the descriptions here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import platformdirs
from pydantic import AfterValidator, BaseModel, Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from inferencecenter.config.limits import AccessLimits, Network
from inferencecenter.config.sections import (
    AuthSettings,
    ExpandedPath,
    ExternalAuthSettings,
    LogSettings,
    Section,
    TelemetrySettings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

APP_NAME: Final = "inferencecenter"
ENV_PREFIX: Final = "INFERENCECENTER_"
MODEL_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}$"


def _base_path(value: str) -> str:
    if value and (not value.startswith("/") or value.endswith("/")):
        raise ValueError("must be empty or start with / and not end with it, as in /inference")
    return value


def _state_dir() -> Path:
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(given) if given else platformdirs.user_state_path(APP_NAME)


def _models_dir() -> Path:
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(given) / "models" if given else platformdirs.user_data_path(APP_NAME) / "models"


def _kv_ram_dir() -> Path:
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given) / "kv"
    return Path(f"/dev/shm/{APP_NAME}-{os.getuid()}")  # noqa: S108 - what others may write to is refused


def bundled_model() -> Path:
    """Return the path of the demo model that comes with the package."""
    return Path(__file__).parents[1] / "demo" / "demo.gguf"


Origin = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://[^/]+$")]
ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME)]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class ServerSettings(Section):
    """The port, its limits and who may reach it."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(3000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    base_path: Annotated[str, AfterValidator(_base_path)] = Field(
        "", description="Path that a reverse proxy puts before every address, as /inference."
    )
    trusted_proxies: tuple[Network, ...] = Field(
        (), description="Addresses or networks whose X-Forwarded-For and X-Forwarded-Proto are believed."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (), description="Origins that browsers may connect from besides the daemon's own, as https://example.org."
    )
    web: bool = Field(True, description="Whether browsers are shown the web page.")
    max_frame_bytes: int = Field(2**20, ge=1024, le=2**28, description="Largest frame a client may send.")
    max_body_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        le=2**30,
        description="Largest body of an HTTP request; one that is being read is in memory.",
    )
    body_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds that the body of an HTTP request may take to arrive."
    )
    sse_keepalive_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds without an event after which a stream over HTTP says that it is alive.",
    )
    auth_timeout_s: float = Field(5.0, gt=0, le=300, description="Seconds a socket has to authenticate.")
    ping_interval_s: float = Field(20.0, gt=0, le=3600, description="Seconds between keepalive pings.")
    ping_timeout_s: float = Field(20.0, gt=0, le=3600, description="Seconds a pong may take.")
    head_timeout_s: float = Field(
        10.0, gt=0, le=300, description="Seconds that the line and the headers of an HTTP request may take to arrive."
    )
    keep_alive_s: float = Field(
        75.0, gt=0, le=3600, description="Seconds that an HTTP connection may wait for its next request."
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Open sockets, all clients together, and beside them as many HTTP connections; one that waits for "
        "a request makes way for one that comes.",
    )
    max_unauthenticated: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Open sockets that have not authenticated yet, beside those of clients; the oldest makes way for "
        "one that comes.",
    )
    max_unauthenticated_per_address: int = Field(
        32, ge=1, le=1_000_000, description="Such sockets of one address, or of one /64 of IPv6."
    )
    unauthenticated_per_s: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Sockets that one address, or one /64 of IPv6, may open in a second without a credential, and "
        "fifteen times as many at once; one that authenticates does not count. Others are refused with 429.",
    )
    max_connections_per_client: int = Field(32, ge=1, le=1_000_000, description="Open sockets of one client.")
    operations_per_minute: int = Field(
        6000,
        ge=1,
        le=10**9,
        description="Requests of one client for anything but turns in a minute, and at once; one that reads or "
        "copies a session counts once more for each 64 KiB of it, and one in a long frame for each 16 KiB. Turns that "
        "are refused count, too.",
    )
    outbox_bytes: int = Field(
        2**20, ge=2**14, le=2**30, description="Bytes that may wait for a slow reader before its socket is aborted."
    )
    login_attempts_per_minute: int = Field(
        10, ge=1, le=100_000, description="Failed logins allowed to one address per minute."
    )
    metrics_access: Literal["loopback", "token", "either"] = Field(
        "token",
        description="Who may read /metrics: callers on this machine, holders of a token with `operator`, or either. A "
        "reverse proxy on this machine makes visitors local unless it sends X-Forwarded-For or their Host.",
    )
    shutdown_timeout_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds that running turns get to finish when the daemon stops; the rest goes on after its start.",
    )
    stateless_ttl_s: float = Field(
        900.0,
        gt=0,
        le=31_536_000,
        description="Idle seconds for which a conversation is kept whose client sends all of it each time.",
    )
    certfile: ExpandedPath | None = Field(
        None,
        description="PEM file with the certificate and those that lead to its authority; with it the port speaks TLS.",
    )
    keyfile: ExpandedPath | None = Field(None, description="PEM file with the certificate's key, not encrypted.")

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ServerSettings:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile go together: give both or neither")
        return self


class SessionSettings(Section):
    """Conversations."""

    max_sessions: int = Field(1000, ge=1, le=1_000_000, description="Open sessions, all clients together.")
    max_client_mib: int = Field(
        256,
        ge=1,
        le=2**20,
        description="Mi characters that all sessions of a client may hold together, forks counted in full; more is "
        "refused with `quota_exceeded`.",
    )
    max_messages: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Messages and tool calls that one session may hold; what would be more is refused.",
    )
    default_ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="Idle seconds after which a session expires that sets no own `ttl_s`."
    )
    store: bool = Field(
        True, description="Whether sessions are kept in the state directory; if not, they end with the daemon."
    )
    retention_days: float | None = Field(
        None,
        gt=0,
        le=36_500,
        description="Days after its last use at which a session is deleted, whatever its `ttl_s`; without it none is.",
    )
    when_full: Literal["refuse", "evict"] = Field(
        "refuse",
        description="What happens where a client opens a session and there may be no more of its own, or of all: "
        "`refuse` says so, `evict` closes and deletes its oldest that no socket is attached to. Sessions that are not "
        "stored are evicted in either case.",
    )
    replay_kib: int = Field(
        256, ge=0, le=2**20, description="KiB of events that a session keeps for clients that come back."
    )
    detached_turn_s: float = Field(
        900.0,
        ge=0,
        le=86_400,
        description="Seconds that a running turn keeps its events while nobody listens; then only its text is kept.",
    )
    shared_prompts: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (),
        description="System prompts, word for word, whose computed state sessions of different clients share; how fast "
        "an answer begins then tells whether somebody used the prompt before.",
    )


class EngineSettings(Section):
    """The processes that decode, one for each model that is loaded; what is set holds for each of them."""

    backend: Literal["llama", "echo"] = Field(
        "llama", description="`llama` decodes with llama.cpp; `echo` repeats the prompt and needs no model."
    )
    slots: int = Field(
        0,
        ge=0,
        le=256,
        description="Sequences decoded at once, each with its own context; 0 is 8, or as many as memory holds.",
    )
    n_ctx: int = Field(
        0, ge=0, le=2**24, description="Tokens of context per slot; 0 is 4096, or what the model and memory allow."
    )
    n_gpu_layers: int = Field(
        -1,
        ge=-1,
        le=10_000,
        description="Layers on GPUs, counted from the last, the output matrix as one; -1 is as many as fit.",
    )
    n_threads: int = Field(
        0, ge=0, le=1024, description="Threads for generation; 0 is one per physical core, and few with all on a GPU."
    )
    n_threads_batch: int = Field(0, ge=0, le=1024, description="Threads for prompts; 0 is as for generation.")
    n_batch: int = Field(0, ge=0, le=2**20, description="Most tokens in one decode call; 0 is 2048, or what fits.")
    n_ubatch: int = Field(
        0, ge=0, le=2**20, description="Most tokens computed at once inside a decode call; 0 is 512, or what fits."
    )
    kv_type_k: KvType | Literal["auto"] = Field(
        "auto", description="Storage type of the K half of the KV; `auto` is f16, or less with `gpu.quantized_kv`."
    )
    kv_type_v: KvType | Literal["auto"] = Field(
        "auto", description="Storage type of the V half, likewise; quantized needs flash attention."
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        "auto", description="Flash attention; `auto` is off where no layer is on a GPU and KV is not quantized."
    )
    use_mmap: bool = Field(True, description="Whether the model file is mapped rather than read.")
    use_mlock: bool = Field(False, description="Whether the model's memory is locked against swapping.")
    prefill_grid_tokens: int = Field(
        64, ge=1, le=8192, description="Prompts are cut at multiples of this many tokens, whatever the load."
    )
    target_step_ms: int = Field(
        150, ge=1, le=60_000, description="Milliseconds a step with prompt reading should take."
    )
    worker_threads: int = Field(
        0, ge=0, le=256, description="Threads that tokenize and sample; 0 chooses by the cores."
    )
    quantum_tokens: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Tokens a turn may generate before one that waits gets its slot; 0 chooses by what parking costs.",
    )
    ageing_s: float = Field(
        30.0, gt=0, le=86_400, description="Seconds of waiting after which a turn counts as one of the next class up."
    )
    speculative: Literal["off", "lookup"] = Field(
        "off",
        description="`lookup` guesses tokens from where the text said the like before: the same answer in fewer steps.",
    )
    draft_tokens: int = Field(8, ge=1, le=64, description="Most tokens that a turn guesses in a step.")
    max_queue: int = Field(1000, ge=1, le=1_000_000, description="Turns that may wait for a slot.")
    queue_timeout_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Seconds after which a turn fails that has not had a slot yet; without it none does.",
    )
    queue_warning: int = Field(
        100, ge=0, le=1_000_000, description="Turns that wait when a warning is logged; 0 logs none."
    )
    load_timeout_s: float = Field(1800.0, gt=0, le=86_400, description="Seconds that loading a model may take.")
    restart_backoff_min_s: float = Field(
        0.5, gt=0, le=3600, description="Wait before the first restart of a dead engine."
    )
    restart_backoff_max_s: float = Field(30.0, gt=0, le=3600, description="Longest wait between restarts.")
    hang_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds without progress after which a working engine counts as hung."
    )
    sleep_after_s: float = Field(
        1800.0,
        ge=-1,
        le=2_592_000,
        description="Seconds without a turn after which the engine ends, and its memory and the GPU are free, until a "
        "turn comes; -1 is never.",
    )
    max_resident: int = Field(
        0, ge=0, le=64, description="Models that may be loaded at once; 0 is as many as fit into memory."
    )
    min_residency_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds for which a model that was loaded keeps its memory from clients that do not use it; a "
        "load by an operator does not wait for that.",
    )
    swap_patience_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds that the turns of a model get to end when another needs its memory; those that have not "
        "ended go on when it is loaded again.",
    )
    max_restarts: int = Field(
        5, ge=0, le=1000, description="Restarts within the window after which the engine is given up as failed."
    )
    restart_window_s: float = Field(600.0, gt=0, le=86_400, description="The window, in seconds.")
    max_client_crashes: int = Field(
        6,
        ge=0,
        le=1000,
        description="Deaths of engines within `engine.client_crash_window_s` that a client's turns may cause before "
        "its new turns are refused with `rate_limited`; 0 refuses none.",
    )
    client_crash_window_s: float = Field(
        3600.0, gt=0, le=2_592_000, description="Seconds for which such a death counts."
    )
    exit_when_failed: bool = Field(False, description="Whether the daemon ends, with status 1, when that happens.")
    echo_delay_ms: int = Field(0, ge=0, le=60_000, description="Milliseconds the echo backend takes for each decode.")

    @model_validator(mode="after")
    def _ordered(self) -> EngineSettings:
        if 0 < self.n_batch < self.n_ubatch:
            raise ValueError(f"n_ubatch ({self.n_ubatch}) must not exceed n_batch ({self.n_batch})")
        if self.restart_backoff_min_s > self.restart_backoff_max_s:
            raise ValueError("restart_backoff_min_s must not exceed restart_backoff_max_s")
        if -1 < self.sleep_after_s <= 0:
            raise ValueError("sleep_after_s must be above 0, or -1 for never")
        return self


class GpuSettings(Section):
    """How a model is divided between GPUs and host; what is open, `inferencecenter doctor --plan MODEL` shows why."""

    devices: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (), description="GPUs to use, by index, UUID or address on the PCI bus; none named is all."
    )
    split_mode: Literal["auto", "layer", "none"] = Field(
        "auto",
        description="`layer` spreads layers over all GPUs, `none` uses one; `auto` uses as few as hold the model.",
    )
    main_gpu: int | None = Field(
        None, ge=0, le=63, description="The one GPU to use, counted within `devices`; without it the plan chooses."
    )
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="Share of the layers on each GPU; none given is what fits."
    )
    margin_mib: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="MiB to leave free on each GPU; without it 5 % of its memory, and at least 300.",
    )
    quantized_kv: bool = Field(
        False, description="Whether KV may be kept in q8_0 or q4_0 instead of f16 to make a model fit."
    )
    prefer: Literal["many", "long"] = Field(
        "many", description="`many` sessions at once, or `long` contexts, as long as fit, for few."
    )
    expert_offload: Literal["auto", "never", "all"] = Field(
        "auto", description="Whether experts stay in the host's memory: what does not fit, none, or all of them."
    )
    thermal_guard: bool = Field(True, description="Whether less is done while the GPUs are warm or hot.")
    warm_c: float = Field(
        80.0,
        gt=0,
        le=150,
        description="°C from which half of the slots are used and less is read at once.",
    )
    hot_c: float = Field(
        87.0,
        gt=0,
        le=150,
        description="°C from which only interactive turns run, in a quarter of the slots and with pauses.",
    )
    hysteresis_c: float = Field(
        5.0, ge=0, le=50, description="How many °C below these a GPU must be to count as cooler again."
    )
    cooling_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds that it must have been so; each step down takes as long."
    )
    hot_pause_ms: int = Field(
        200, ge=0, le=10_000, description="Milliseconds without work after each step of a hot engine."
    )

    @model_validator(mode="after")
    def _warm_below_hot(self) -> GpuSettings:
        if self.warm_c >= self.hot_c:
            raise ValueError(f"warm_c ({self.warm_c:g}) must be below hot_c ({self.hot_c:g})")
        return self


class KvSettings(Section):
    """Where the KV of sessions without a slot is kept."""

    parking: bool = Field(True, description="Whether it is kept at all; if not, a returning session is read again.")
    ram_dir: ExpandedPath = Field(
        default_factory=_kv_ram_dir,
        validate_default=True,
        description="Directory in memory (tmpfs); each daemon uses one of its own in it.",
        json_schema_extra={"default_text": "$RUNTIME_DIRECTORY/kv, else /dev/shm/inferencecenter-<uid>"},
    )
    ram_mib: int = Field(
        1024,
        ge=0,
        le=2**30,
        description="MiB of it to use for each model, or what is free there if that is less; 0 uses none.",
    )
    disk_dir: ExpandedPath | None = Field(
        None,
        description="Directory on disk; each daemon uses one of its own in it.",
        json_schema_extra={"default_text": "kv in the state directory"},
    )
    disk_mib: int = Field(4096, ge=0, le=2**30, description="MiB of it to use for each model; 0 uses none.")
    client_share: float = Field(0.5, gt=0, le=1, description="Most that one client may have of either.")


class MemorySettings(Section):
    """When memory counts as short; then parked KV is given up, and if that does not help no turn begins."""

    guard: bool = Field(True, description="Whether memory is watched while an engine runs.")
    ram_ceiling_mib: int | None = Field(
        None,
        ge=1,
        le=2**30,
        description="MiB that the daemon, its engines and what they park may take, mapped model files not counted; "
        "without it 90 % of what the control group may, or if that is not limited 95 % of the machine's memory, "
        "whoever uses it.",
    )
    vram_floor_mib: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="MiB that must be free on each GPU in use for a turn to begin; without it VRAM is not watched.",
    )
    hysteresis_percent: float = Field(
        5.0,
        ge=0,
        le=50,
        description="Percent below the ceiling down to which KV is given up, and from which on turns begin again at "
        "once; anywhere below the ceiling they do after half a minute.",
    )


class LoraSettings(Section):
    """A LoRA adapter on top of a model."""

    path: ExpandedPath = Field(description="GGUF file of the adapter.")
    scale: float = Field(1.0, ge=-100, le=100, description="How strongly it counts; 0 is not at all.")


class ModelSettings(Section):
    """The model of sessions that name none."""

    path: ExpandedPath | None = Field(
        None,
        description="GGUF file; without it the model registered as `name`, and without that the bundled demo model.",
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name shown to clients; if not set, the file's stem if it lies in `models_dir`, else its own name.",
    )
    lora: tuple[LoraSettings, ...] = Field(
        (),
        max_length=16,
        description="LoRA adapters on top of it.",
        json_schema_extra={"allowed_text": "list of `{path = FILE, scale = NUMBER}` (at most 16 entries)"},
    )


class ModelEntry(Section):
    """A model that sessions may name: `[models.NAME]`. What is not set is as for every engine."""

    path: ExpandedPath | None = Field(None, description="GGUF file; without it `NAME.gguf` in `models_dir`.")
    slots: int | None = Field(None, ge=0, le=256, description="In place of `engine.slots`.")
    n_ctx: int | None = Field(None, ge=0, le=2**24, description="In place of `engine.n_ctx`.")
    n_gpu_layers: int | None = Field(None, ge=-1, le=10_000, description="In place of `engine.n_gpu_layers`.")
    kv_type_k: KvType | Literal["auto"] | None = Field(None, description="In place of `engine.kv_type_k`.")
    kv_type_v: KvType | Literal["auto"] | None = Field(None, description="In place of `engine.kv_type_v`.")
    speculative: Literal["off", "lookup"] | None = Field(None, description="In place of `engine.speculative`.")
    keep_alive_s: float | None = Field(
        None, ge=-1, le=2_592_000, description="In place of `engine.sleep_after_s`; -1 is for ever."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Parameters between those that the file recommends and `[params]`."
    )
    lora: tuple[LoraSettings, ...] = Field(
        (),
        max_length=16,
        description="LoRA adapters on top of it.",
        json_schema_extra={"allowed_text": "list of `{path = FILE, scale = NUMBER}` (at most 16 entries)"},
    )


class Settings(BaseSettings):
    """All settings. ``load_settings`` reads them; constructing one directly reads nothing from outside."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    state_dir: ExpandedPath = Field(
        default_factory=_state_dir,
        validate_default=True,
        description="Where accounts, sessions and the control socket are kept.",
        json_schema_extra={"default_text": "$STATE_DIRECTORY, else the user's state directory"},
    )
    models_dir: ExpandedPath = Field(
        default_factory=_models_dir,
        validate_default=True,
        description="Where `inferencecenter model pull` puts models; each GGUF file there may be named by its stem.",
        json_schema_extra={"default_text": "$STATE_DIRECTORY/models, else models in the user's data directory"},
    )
    models: dict[ModelName, ModelEntry] = Field(
        default_factory=dict,
        description="Models that sessions may name, as tables `[models.NAME]`.",
        json_schema_extra={"allowed_text": "tables, see below"},
    )
    server: ServerSettings = Field(default_factory=ServerSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    limits: AccessLimits = Field(default_factory=AccessLimits)
    external_auth: ExternalAuthSettings = Field(default_factory=ExternalAuthSettings)
    sessions: SessionSettings = Field(default_factory=SessionSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    gpu: GpuSettings = Field(default_factory=GpuSettings)
    kv: KvSettings = Field(default_factory=KvSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Sampling and stopping parameters under those of sessions and turns; names as in docs/protocol.md.",
    )
    log: LogSettings = Field(default_factory=LogSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what ``load_settings`` hands over: it merges the layers to know which one a value came from."""
        return (init_settings,)


def setting_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every setting, in the order of the documentation."""
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for inner, inner_field in field.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


def environment_name(name: str) -> str:
    """Return the environment variable of a dotted setting name."""
    return ENV_PREFIX + name.replace(".", "__").upper()
