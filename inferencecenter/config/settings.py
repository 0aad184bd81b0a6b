"""Every setting, described once.

``config.loader.load_settings`` reads them; ``docs/configuration.md`` and ``config/inferencecenter.toml`` are generated
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
    EngineSettings,
    ExpandedPath,
    ExternalAuthSettings,
    KvType,
    LogSettings,
    LoraSettings,
    McpServerSettings,
    ModelKind,
    Section,
    TelemetrySettings,
)
from inferencecenter.core.addresses import parse_address

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


def _reachable(value: str) -> str:
    """Refuse addresses that stand for all of a machine: other machines are told to connect to this one."""
    host = value.rsplit(":", 1)[0] if value.count(":") == 1 else value
    if (parsed := parse_address(host)) is not None and parsed.is_unspecified:
        raise ValueError("must be an address at which other machines reach this one, as 192.168.1.7")
    return value


def _state_dir() -> Path:
    directory = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(directory) if directory else platformdirs.user_state_path(APP_NAME)


def _models_dir() -> Path:
    directory = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(directory) / "models" if directory else platformdirs.user_data_path(APP_NAME) / "models"


def _kv_ram_dir() -> Path:
    directory = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if directory:
        return Path(directory) / "kv"
    return Path(f"/dev/shm/{APP_NAME}-{os.getuid()}")  # noqa: S108 - a directory writable by other users is refused


def bundled_model() -> Path:
    """Return the path of the demo model that comes with the package."""
    return Path(__file__).parents[1] / "demo" / "demo.gguf"


def bundled_projector() -> Path:
    """Return the path of the demo model's projector."""
    return bundled_model().with_name("mmproj-demo.gguf")


Origin = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://[^/]+$")]
ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME)]
NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
McpServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class ServerSettings(Section):
    """The listening port, its limits and access to it."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(3000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    unix_socket: ExpandedPath | None = Field(
        None,
        description="Path of a Unix socket to listen on as well, without TLS; its directory must exist. The user ids"
        " of `auth.unix_users` need no token there.",
    )
    unix_socket_mode: Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3}$")] = Field(
        "0600",
        description="Permissions of the Unix socket, octal: a program that may write to it can connect. 0660 admits the"
        " group of its directory if that has the setgid bit.",
    )
    base_path: Annotated[str, AfterValidator(_base_path)] = Field(
        "", description="Path prefix that a reverse proxy adds to every URL, such as /inference."
    )
    trusted_proxies: tuple[Network, ...] = Field(
        (), description="Addresses or networks whose X-Forwarded-For and X-Forwarded-Proto headers are trusted."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins from which browsers may connect in addition to the daemon's own, such as "
        "https://example.org.",
    )
    web: bool = Field(True, description="Whether the web page is served.")
    share_links: bool = Field(
        False,
        description="Whether clients may share snapshots of their conversations by links, which any account of the "
        "daemon can open.",
    )
    max_share_links: int = Field(50, ge=1, le=1000, description="Maximum number of share links per client.")
    ollama: bool = Field(
        False,
        description="Whether to listen also on 127.0.0.1:11434, the default address of Ollama's clients; without TLS.",
    )
    ollama_account: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        None,
        description="Account for requests to Ollama's API without a token that come from a program on this machine; "
        "they have only the scope `user`. If not set, they are refused. A reverse proxy on this machine that sets no "
        "forwarding headers counts as such a program.",
    )
    max_frame_bytes: int = Field(2**20, ge=1024, le=2**28, description="Maximum size of a frame from a client.")
    max_body_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        le=2**30,
        description="Maximum size of an HTTP request body; a body is held in memory while it is read.",
    )
    image_hosts: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$")], ...] = Field(
        (),
        description="Hosts from which images are fetched where a request names one by an address with https, such as "
        "images.example.org; redirections are not followed. None by default.",
    )
    body_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds within which the body of an HTTP request must arrive."
    )
    strict_dialects: bool = Field(
        False,
        description="Whether requests of foreign dialects (OpenAI's and others) are refused for fields that are unknown"
        " or have no effect here; otherwise such fields are named in `warnings` and in the header `X-Warning`.",
    )
    unknown_models: Literal["refuse", "default"] = Field(
        "refuse",
        description="Answer to a request of a foreign dialect that names an unknown model: `refuse` is 404"
        " `model_not_found`, `default` has the default model answer, with a warning.",
    )
    sse_keepalive_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds without an event after which an HTTP stream sends a keepalive comment.",
    )
    auth_timeout_s: float = Field(5.0, gt=0, le=300, description="Seconds within which a socket must authenticate.")
    ping_interval_s: float = Field(20.0, gt=0, le=3600, description="Seconds between keepalive pings.")
    ping_timeout_s: float = Field(20.0, gt=0, le=3600, description="Seconds within which a pong must arrive.")
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        le=300,
        description="Seconds within which the request line and the headers of an HTTP request must arrive.",
    )
    keep_alive_s: float = Field(
        75.0, gt=0, le=3600, description="Seconds for which an HTTP connection may be idle between requests."
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Maximum number of open sockets of all clients and, counted separately, of HTTP connections; at "
        "the limit, a new HTTP connection replaces an idle one.",
    )
    max_unauthenticated: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Maximum number of open unauthenticated sockets, counted separately from those of clients; at"
        " the limit, a new one replaces the oldest.",
    )
    max_unauthenticated_per_address: int = Field(
        32, ge=1, le=1_000_000, description="Maximum number of unauthenticated sockets per address, or per IPv6 /64."
    )
    unauthenticated_per_s: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Sockets per second that one address, or one IPv6 /64, may open without a credential, with a "
        "burst of fifteen times as many; a socket that authenticates does not count. Others are "
        "refused with 429.",
    )
    max_connections_per_client: int = Field(
        32, ge=1, le=1_000_000, description="Maximum number of open sockets per client."
    )
    operations_per_minute: int = Field(
        6000,
        ge=1,
        le=10**9,
        description="Maximum number of requests other than turns per client and minute, and of a burst. A request that "
        "reads or copies a session counts once more for each 64 KiB of it, and one in a long frame "
        "once more for each 16 KiB. Refused turns count as well.",
    )
    outbox_bytes: int = Field(
        2**20,
        ge=2**14,
        le=2**30,
        description="Bytes that may be queued for a slow reader before its socket is aborted.",
    )
    login_attempts_per_minute: int = Field(10, ge=1, le=100_000, description="Failed logins per address and minute.")
    metrics_access: Literal["loopback", "token", "either"] = Field(
        "token",
        description="Who may read /metrics: callers on this machine, tokens with the scope `operator`, or either."
        " Behind a reverse proxy on this machine all callers appear local unless it sends "
        "X-Forwarded-For or the original Host.",
    )
    shutdown_timeout_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds that running turns have to finish at shutdown; unfinished turns resume after the "
        "next start.",
    )
    stateless_ttl_s: float = Field(
        900.0,
        gt=0,
        le=31_536_000,
        description="Idle seconds after which a stateless session, whose client resends all messages with each "
        "request, expires.",
    )
    certfile: ExpandedPath | None = Field(
        None,
        description="PEM file with the certificate and its chain; enables TLS on the port.",
    )
    keyfile: ExpandedPath | None = Field(
        None, description="PEM file with the private key of the certificate, unencrypted."
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ServerSettings:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile go together: give both or neither")
        return self


class SessionSettings(Section):
    """Sessions: their limits, storage and expiry."""

    max_sessions: int = Field(1000, ge=1, le=1_000_000, description="Maximum number of open sessions of all clients.")
    max_client_mib: int = Field(
        256,
        ge=1,
        le=2**20,
        description="Mi characters that all sessions of one client may hold together, forks counted in full; "
        "beyond it, requests are refused with `quota_exceeded`.",
    )
    archive_mib: int = Field(
        1024,
        ge=1,
        le=2**20,
        description="Mi characters that all stored sessions of one client may hold together, the archived ones "
        "included, each of which counts 4 Ki more; beyond it, further stored sessions are refused with "
        "`quota_exceeded`, and none is deleted.",
    )
    images_mib: int = Field(
        1024,
        ge=1,
        le=2**20,
        description="MiB of image files that one client may have in stored sessions; beyond it, further images are "
        "refused with `quota_exceeded`. Files in sessions that are not stored may have 64 MiB.",
    )
    max_messages: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Maximum number of messages and tool calls in one session; more are refused.",
    )
    default_ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="Idle seconds after which a session without its own `ttl_s` expires."
    )
    store: bool = Field(
        True, description="Whether sessions are stored in the state directory; otherwise they end with the daemon."
    )
    search: bool = Field(
        True,
        description="Whether the texts of stored sessions can be searched: their words are indexed in the session "
        "file. Switching it off deletes the index at the next start.",
    )
    retention_days: float | None = Field(
        None,
        gt=0,
        le=36_500,
        description="Days without use after which a session is deleted, regardless of its `ttl_s`; if not set, "
        "sessions are kept.",
    )
    when_full: Literal["refuse", "evict"] = Field(
        "refuse",
        description="Behavior when the stored sessions of a client approach `archive_mib`: `refuse` refuses further "
        "ones at the limit, `evict` deletes the client's least recently used archived sessions at 90 % of it. Beyond "
        "the number of sessions that a client, or all clients, may have open, stored sessions are archived and others "
        "are evicted, with either value.",
    )
    replay_kib: int = Field(
        256, ge=0, le=2**20, description="KiB of events buffered per session for reconnecting clients."
    )
    detached_turn_s: float = Field(
        900.0,
        ge=0,
        le=86_400,
        description="Seconds for which a running turn buffers its events without a subscriber; after that only "
        "its text is kept.",
    )
    shared_prompts: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (),
        description="System prompts, matched exactly, whose KV is shared between sessions of different clients; "
        "the time to first token then reveals whether another client has used the prompt before.",
    )


class GpuSettings(Section):
    """Placement of a model on GPUs and host; `inferencecenter doctor --plan MODEL` explains it."""

    devices: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (), description="GPUs to use, by index, UUID or PCI bus address; empty uses all."
    )
    rpc_servers: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,253}:[0-9]{1,5}$")], ...] = Field(
        (),
        max_length=16,
        description="Addresses (`host:port`) of llama.cpp's RPC servers, whose devices are used after this machine's "
        "GPUs. The traffic is neither encrypted nor authenticated.",
    )
    split_mode: Literal["auto", "layer", "none"] = Field(
        "auto",
        description="`layer` distributes layers over all GPUs, `none` uses one; `auto` uses as few as hold the model.",
    )
    main_gpu: int | None = Field(
        None,
        ge=0,
        le=63,
        description="Index within `devices` of the single GPU to use; if not set, it is chosen automatically.",
    )
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="Proportion of the layers on each GPU; if empty, it depends on what fits."
    )
    margin_mib: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="MiB to leave free on each GPU; if not set, 5 % of its memory, and at least 300.",
    )
    quantized_kv: bool = Field(
        False, description="Whether KV may be quantized to q8_0 or q4_0 instead of f16 to make a model fit."
    )
    prefer: Literal["many", "long"] = Field(
        "many",
        description="What memory is used for: `many` concurrent sessions, or few with contexts as `long` as fit.",
    )
    expert_offload: Literal["auto", "never", "all"] = Field(
        "auto", description="Which experts stay in host memory: those that do not fit (`auto`), none, or all."
    )
    thermal_guard: bool = Field(True, description="Whether the load is reduced while the GPUs are warm or hot.")
    warm_c: float = Field(
        80.0,
        gt=0,
        le=150,
        description="Temperature in °C from which half of the slots are used and prefill chunks are smaller.",
    )
    hot_c: float = Field(
        87.0,
        gt=0,
        le=150,
        description="Temperature in °C from which only interactive turns run, in a quarter of the slots and with "
        "pauses.",
    )
    hysteresis_c: float = Field(
        5.0, ge=0, le=50, description="°C below a threshold that a GPU must reach to leave that state."
    )
    cooling_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds for which it must stay below; each further step down takes as long."
    )
    hot_pause_ms: int = Field(
        200, ge=0, le=10_000, description="Milliseconds of pause after each step of a hot engine."
    )

    @model_validator(mode="after")
    def _warm_below_hot(self) -> GpuSettings:
        if self.warm_c >= self.hot_c:
            raise ValueError(f"warm_c ({self.warm_c:g}) must be below hot_c ({self.hot_c:g})")
        return self


class KvSettings(Section):
    """Storage of the KV of sessions without a slot."""

    parking: bool = Field(
        True, description="Whether KV is offloaded; otherwise the prompt of a returning session is prefilled again."
    )
    ram_dir: ExpandedPath = Field(
        default_factory=_kv_ram_dir,
        validate_default=True,
        description="Directory in memory (tmpfs); each daemon uses its own subdirectory.",
        json_schema_extra={"default_text": "$RUNTIME_DIRECTORY/kv, else /dev/shm/inferencecenter-<uid>"},
    )
    ram_mib: int = Field(
        1024,
        ge=0,
        le=2**30,
        description="MiB of `ram_dir` that each model may use, or the free space if that is less; 0 disables it.",
    )
    disk_dir: ExpandedPath | None = Field(
        None,
        description="Directory on disk; each daemon uses its own subdirectory.",
        json_schema_extra={"default_text": "kv in the state directory"},
    )
    disk_mib: int = Field(4096, ge=0, le=2**30, description="MiB of `disk_dir` that each model may use; 0 disables it.")
    client_share: float = Field(
        0.5, gt=0, le=1, description="Maximum fraction of `ram_mib` and of `disk_mib` that one client may use."
    )


class MemorySettings(Section):
    """Memory pressure: when memory is short, offloaded KV is evicted; if that is not enough, no turn starts."""

    guard: bool = Field(True, description="Whether memory is monitored while an engine runs.")
    ram_ceiling_mib: int | None = Field(
        None,
        ge=1,
        le=2**30,
        description="MiB that the daemon, its engines and offloaded KV may use, not counting mapped model files; "
        "if not set, 90 % of the limit of the control group, or without one 95 % of the machine's "
        "memory, including that used by other programs.",
    )
    vram_floor_mib: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="MiB that must be free on each GPU in use for a turn to start; if not set, VRAM is not monitored.",
    )
    hysteresis_percent: float = Field(
        5.0,
        ge=0,
        le=50,
        description="Percent below the ceiling down to which KV is evicted, and at which turns start again at "
        "once; anywhere below the ceiling they start again after half a minute.",
    )


LoraAdapters = Annotated[
    tuple[LoraSettings, ...],
    Field(
        max_length=16,
        description="LoRA adapters applied to it.",
        json_schema_extra={"allowed_text": "list of `{path = FILE, scale = NUMBER}` (at most 16 entries)"},
    ),
]


Aliases = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    Field(description="Further names of the model, such as gpt-4o."),
]


Mmproj = Annotated[
    Literal["off"] | ExpandedPath | None,
    Field(
        description="GGUF file of the projector (`mmproj`) that turns images into input of the model; if not set, "
        "`mmproj-NAME.gguf` beside a `NAME.gguf` in `models_dir`. Without one, or if `off`, the model takes only text."
    ),
]


class ModelSettings(Section):
    """The default model, used by sessions that name none."""

    path: ExpandedPath | None = Field(
        None,
        description="GGUF file; if not set, the model registered as `name`, and without that the bundled demo model.",
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name shown to clients; if not set, the name of the file without its ending.",
    )
    aliases: Aliases = ()
    lora: LoraAdapters = ()
    mmproj: Mmproj = None


class ModelEntry(Section):
    """A model that sessions may name: `[models.NAME]`. Unset settings are those of `[engine]`."""

    path: ExpandedPath | None = Field(None, description="GGUF file; if not set, `NAME.gguf` in `models_dir`.")
    aliases: Aliases = ()
    replicas: Annotated[int, Field(ge=1, le=64)] | Literal["all"] = Field(
        1,
        description="Engines of this model, 1 to 64. With at least as many GPUs each has its own, else they divide the "
        "memory. A session stays with the engine that holds its KV. `all` is one on this machine and one on each that "
        "has joined the cluster, also later, or on each of `nodes`.",
    )
    nodes: tuple[NodeName, ...] = Field(
        (),
        max_length=64,
        description="Machines of the cluster that run a replica each, by the names with which they joined; `local` is "
        "this one. Excludes a number of `replicas`.",
    )
    rpc_nodes: tuple[NodeName, ...] = Field(
        (),
        max_length=16,
        description="Machines of the cluster whose devices take what this machine's GPUs cannot hold, for a model that "
        "is larger than one machine: RPC servers of llama.cpp are started there. Needs llama.cpp built with RPC, and "
        "excludes `replicas` and other `nodes`.",
    )
    slots: int | None = Field(None, ge=0, le=256, description="Overrides `engine.slots`, for each replica.")
    n_ctx: int | None = Field(None, ge=0, le=2**24, description="Overrides `engine.n_ctx`.")
    n_gpu_layers: int | None = Field(None, ge=-1, le=10_000, description="Overrides `engine.n_gpu_layers`.")
    kv_type_k: KvType | Literal["auto"] | None = Field(None, description="Overrides `engine.kv_type_k`.")
    kv_type_v: KvType | Literal["auto"] | None = Field(None, description="Overrides `engine.kv_type_v`.")
    speculative: Literal["off", "lookup"] | None = Field(None, description="Overrides `engine.speculative`.")
    draft: str | None = Field(
        None, max_length=4096, description="Overrides `engine.draft`; an empty text is no draft model."
    )
    kind: ModelKind | None = Field(
        None,
        description="What the model does: `chat` generates text, `embedding` turns texts into vectors, `reranking` "
        "scores documents for a query; if not set, the kind is read from the file.",
    )
    matryoshka: bool = Field(
        False,
        description="Whether requests may truncate the vectors of an embedding model (`dimensions`), which must have "
        "been trained for it (Matryoshka representation learning).",
    )
    keep_alive_s: float | None = Field(
        None, ge=-1, le=2_592_000, description="Overrides `engine.sleep_after_s`; -1 is forever."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Parameters that override those recommended by the file and `[params]`."
    )
    lora: LoraAdapters = ()
    mmproj: Mmproj = None

    @model_validator(mode="after")
    def _nodes_or_replicas(self) -> ModelEntry:
        if self.nodes and self.replicas not in (1, "all"):
            raise ValueError("nodes and a number of replicas exclude each other: each of the nodes runs one replica")
        return self


_HeadAddress = Annotated[str, StringConstraints(pattern=r"^[^:/]+:[0-9]{1,5}$"), AfterValidator(_reachable)]


class ClusterSettings(Section):
    """Other machines that run engines; needs the extra `cluster`."""

    address: _HeadAddress | None = Field(
        None,
        description="Address of the cluster's head, as `inferencecenter node head` prints it; this machine must be a "
        "node too. If not set, there are no other machines.",
    )
    token_file: ExpandedPath | None = Field(
        None,
        description="File with the cluster's token; if not set, `~/.ray/auth_token`. The token permits to run code on "
        "all nodes.",
    )
    listen: Annotated[str, StringConstraints(min_length=1), AfterValidator(_reachable)] | None = Field(
        None,
        description="Address of this machine to which hosts of engines connect, by TLS; if not set, that of the head.",
    )
    port: int = Field(
        6381, ge=0, le=65535, description="Port for that; 0 picks a free one, which changes with restarts."
    )
    files_port: int = Field(
        6382, ge=0, le=65535, description="Port from which nodes copy model files that they lack; 0 picks a free one."
    )
    copy_mib_per_s: float = Field(
        256.0,
        ge=0,
        le=100_000,
        description="MiB of model files a second that are sent to all nodes together; 0 is no limit. Set it below what "
        "the network can carry, so that tokens are not delayed.",
    )
    rpc_port: int = Field(
        6383,
        ge=0,
        le=65535,
        description="Port on the same address for hosts of RPC servers, also by TLS; opened for the first engine of a "
        "model with `rpc_nodes`. 0 picks a free one.",
    )
    orphan_s: float = Field(
        60.0,
        ge=5,
        le=86_400,
        description="Seconds for which an engine on another machine waits for a daemon that is gone. A restarted "
        "daemon continues with it without loading the model.",
    )


class Settings(BaseSettings):
    """All settings. ``load_settings`` reads them; the constructor reads no file and no environment variable."""

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
        description="Directory of accounts, sessions and the control socket.",
        json_schema_extra={"default_text": "$STATE_DIRECTORY, else the user's state directory"},
    )
    models_dir: ExpandedPath = Field(
        default_factory=_models_dir,
        validate_default=True,
        description="Directory to which `inferencecenter model pull` downloads models; each GGUF file in it can "
        "be named by its stem.",
        json_schema_extra={"default_text": "$STATE_DIRECTORY/models, else models in the user's data directory"},
    )
    models: dict[ModelName, ModelEntry] = Field(
        default_factory=dict,
        description="Models that sessions may name, as tables `[models.NAME]`.",
        json_schema_extra={"allowed_text": "tables, see below"},
    )
    mcp: dict[McpServerName, McpServerSettings] = Field(
        default_factory=dict,
        max_length=64,
        description="MCP servers whose tools sessions may call, as tables `[mcp.NAME]`.",
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
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Default sampling and stopping parameters, which those of sessions and turns override; names "
        "as in docs/protocol.md.",
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
        """Use only the values of ``load_settings``, which merges the layers itself to know the origin of each value."""
        return (init_settings,)


def sections() -> dict[str, type[BaseModel]]:
    """Return the model of each section by its name."""
    annotations = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def setting_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every setting, in the order of the documentation."""
    models = sections()
    for name, field in Settings.model_fields.items():
        if name in models:
            for inner, inner_field in models[name].model_fields.items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


def environment_name(name: str) -> str:
    return ENV_PREFIX + name.replace(".", "__").upper()
