"""The base class of sections, and the sections of settings that other packages import separately."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

Priority = Literal["interactive", "normal", "batch"]
ModelKind = Literal["chat", "embedding", "reranking"]
"""What a model does: generate text, compute vectors of texts, or score documents for a query."""

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


UNIX_USER = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(=[A-Za-z0-9][A-Za-z0-9._@+-]{0,63})?$"
"""A user of this machine, by name or id, and the client id of its account."""


def expand(path: Path) -> Path:
    """Return an absolute path with ``~`` and environment variables expanded."""
    return Path(os.path.expandvars(path)).expanduser().absolute()


ExpandedPath = Annotated[Path, AfterValidator(expand)]


class Section(BaseModel):
    """A table of the configuration file.

    Most are only validated as a part of ``Settings``, so the validator of one alone is built when it is first used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _clients_file() -> Path | None:
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(credentials) / "clients.toml"
    return path if credentials and path.exists() else None


class AuthSettings(Section):
    """Accounts and the defaults of new ones."""

    clients_file: ExpandedPath | None = Field(
        default_factory=_clients_file,
        validate_default=True,
        description="TOML file of accounts, each with client_id, api_key (or its hash), max_sessions, priority, "
        "retention_days, archive_mib and limits.",
        json_schema_extra={"default_text": "$CREDENTIALS_DIRECTORY/clients.toml if it exists"},
    )
    default_max_sessions: int = Field(
        16, ge=1, le=100_000, description="Maximum number of sessions of a client without its own limit."
    )
    default_priority: Priority = Field("normal", description="Priority class of a client without its own.")
    unix_users: tuple[Annotated[str, StringConstraints(pattern=UNIX_USER)], ...] = Field(
        (),
        max_length=1000,
        description='Users of this machine who need no token on the Unix socket, with their accounts: "alice" for the'
        ' account of the same name, or "1001=build". Root and the user of the daemon have the account `admin` if not'
        " listed.",
    )
    audit_days: int = Field(90, ge=1, le=36_500, description="Days for which the audit log is kept.")


class ExternalAuthSettings(Section):
    """An external HTTP service that authenticates client ids without a local account."""

    url: str | None = Field(
        None,
        max_length=2048,
        description="URL of the service, https; if not set, such clients are refused.",
    )
    form: Literal["headers", "query"] = Field(
        "headers",
        description="How the credential is sent: in the headers X-Client-ID and X-API-Key, or in the query as "
        "client_id and api_key, where logs of intermediaries may keep it.",
    )
    token_file: ExpandedPath | None = Field(
        None, description="File with a token of the daemon, sent as `Authorization: Bearer`."
    )
    ca_file: ExpandedPath | None = Field(
        None, description="PEM file with the certificate authorities trusted for it, instead of the system's."
    )
    allow_http: bool = Field(
        False, description="Whether `url` may be http to another machine, which sends keys in plain text."
    )
    connect_timeout_s: float = Field(2.0, gt=0, le=60, description="Timeout in seconds for the connection.")
    read_timeout_s: float = Field(3.0, gt=0, le=60, description="Timeout in seconds for the response.")
    cache_s: float = Field(900.0, ge=0, le=86_400, description="Seconds for which an accepted credential is cached.")
    refused_cache_s: float = Field(
        10.0, ge=0, le=86_400, description="Seconds for which a refused credential is cached."
    )
    max_requests: int = Field(8, ge=1, le=256, description="Maximum number of concurrent requests.")

    @model_validator(mode="after")
    def _safe_url(self) -> ExternalAuthSettings:
        if self.url is None:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("url must begin with https:// or http:// and name a host")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("url must not hold a user, a query or a fragment; token_file is for the daemon's token")
        if parts.scheme == "http" and not (self.allow_http or _is_loopback(parts.hostname)):
            raise ValueError("url is http to another machine; use https, or set allow_http")
        return self


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _collector(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("must not hold a user, a query or a fragment; otlp_headers are for credentials")
    return value


def _header(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().isprintable() or not value.get_secret_value().isascii():
        raise ValueError("must be printable ASCII")
    return value


HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=256)]


class LogSettings(Section):
    """Log level, format and destination."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level that is logged.")
    format: Literal["auto", "pretty", "json"] = Field("auto", description="`auto` is pretty on a terminal, else JSON.")
    output: Literal["stderr", "stdout"] = Field("stderr", description="Destination when `file` is not set.")
    file: ExpandedPath | None = Field(None, description="Log file, readable by its owner only; reopened at SIGHUP.")
    max_mib: int = Field(100, ge=0, le=2**20, description="MiB at which the file is rotated; 0 never rotates it.")
    backups: int = Field(5, ge=1, le=1000, description="Number of rotated files that are kept, `.1` the newest.")


class TelemetrySettings(Section):
    """Traces of turns through both processes."""

    otlp_endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318; if not "
        "set, nothing is traced. Needs the extra: `pip install 'inferencecenter[otel]'`.",
    )
    otlp_headers: dict[HeaderName, Annotated[SecretStr, AfterValidator(_header)]] = Field(
        default_factory=dict,
        description='HTTP headers with credentials for the collector, such as `{authorization = "Bearer …"}`; never '
        "shown.",
    )
    trace_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of the turns that are traced; a turn within a client's trace follows the sampling "
        "decision of that trace.",
    )


class EngineSettings(Section):
    """Engine processes, one for each loaded model; these settings apply to each of them."""

    backend: Literal["llama", "echo", "script"] = Field(
        "llama",
        description="`llama` decodes with llama.cpp. `echo` repeats the prompt, and `script` answers according to "
        "`engine.script`; both need no model.",
    )
    script: ExpandedPath | None = Field(
        None,
        description="File of rules, TOML or JSON, for the backend `script`; read when the engine starts.",
    )
    slots: int = Field(
        0,
        ge=0,
        le=256,
        description="Sequences decoded in parallel, each with its own context; 0 is 8, or as many as fit into memory.",
    )
    n_ctx: int = Field(
        0, ge=0, le=2**24, description="Tokens of context per slot; 0 is 4096, or what the model and memory allow."
    )
    n_gpu_layers: int = Field(
        -1,
        ge=-1,
        le=10_000,
        description="Layers on GPUs, counted from the last, the output matrix counting as one; -1 is as many as fit.",
    )
    n_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads for decode; 0 is one per physical core, or fewer for a tiny model or one on a GPU.",
    )
    n_threads_batch: int = Field(0, ge=0, le=1024, description="Threads for prefill; 0 is the same as for decode.")
    n_batch: int = Field(
        0, ge=0, le=2**20, description="Maximum number of tokens per decode call; 0 is 2048, or what fits."
    )
    n_ubatch: int = Field(
        0,
        ge=0,
        le=2**20,
        description="Maximum number of tokens computed at once within a decode call; 0 is 512, or what fits.",
    )
    kv_type_k: KvType | Literal["auto"] = Field(
        "auto", description="Data type of the K cache; `auto` is f16, or a smaller type with `gpu.quantized_kv`."
    )
    kv_type_v: KvType | Literal["auto"] = Field(
        "auto", description="Data type of the V cache, as for K; a quantized type requires flash attention."
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        "auto", description="Flash attention; `auto` is off if no layer is on a GPU and KV is not quantized."
    )
    use_mmap: bool = Field(True, description="Whether the model file is memory-mapped instead of read.")
    use_mlock: bool = Field(False, description="Whether the model's memory is locked to prevent swapping.")
    prefill_grid_tokens: int = Field(
        64,
        ge=1,
        le=8192,
        description="Prompts are split into chunks at multiples of this many tokens, regardless of the load.",
    )
    target_step_ms: int = Field(
        150, ge=1, le=60_000, description="Target duration in milliseconds of a step that includes prefill."
    )
    worker_threads: int = Field(
        0, ge=0, le=256, description="Threads for tokenization and sampling; 0 is a number that depends on the cores."
    )
    quantum_tokens: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Tokens that a turn may generate before it is preempted for a waiting turn; 0 is a number that "
        "depends on the cost of swapping.",
    )
    ageing_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds of waiting after which a turn is treated as one of the next higher priority class.",
    )
    speculative: Literal["off", "lookup"] = Field(
        "off",
        description="`lookup` drafts tokens by prompt lookup, from earlier occurrences in the text; the output is the "
        "same, in fewer steps.",
    )
    draft: str = Field(
        "",
        max_length=4096,
        description="Draft model: the name or the GGUF file of a small model with the same vocabulary. It drafts "
        "tokens where `engine.speculative` finds none in the text; the output is the same, in fewer steps. Empty is "
        "none.",
    )
    draft_tokens: int = Field(8, ge=1, le=64, description="Maximum number of tokens drafted per turn and step.")
    max_queue: int = Field(1000, ge=1, le=1_000_000, description="Maximum number of turns waiting for a slot.")
    queue_timeout_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Seconds of waiting for a slot after which a turn fails; if not set, turns wait without limit.",
    )
    queue_warning: int = Field(
        100, ge=0, le=1_000_000, description="Number of waiting turns at which a warning is logged; 0 logs none."
    )
    load_timeout_s: float = Field(1800.0, gt=0, le=86_400, description="Seconds within which a model must be loaded.")
    restart_backoff_min_s: float = Field(
        0.5, gt=0, le=3600, description="Seconds before the first restart of a crashed engine."
    )
    restart_backoff_max_s: float = Field(30.0, gt=0, le=3600, description="Maximum number of seconds between restarts.")
    hang_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds without progress after which a busy engine counts as hung."
    )
    sleep_after_s: float = Field(
        1800.0,
        ge=-1,
        le=2_592_000,
        description="Idle seconds after which the engine process ends, which frees its memory and the GPU, until "
        "the next turn; -1 is never.",
    )
    max_resident: int = Field(
        0, ge=0, le=64, description="Maximum number of models loaded at the same time; 0 is as many as fit into memory."
    )
    min_residency_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds for which a loaded model cannot be evicted for other clients' models; a load by an "
        "operator does not wait.",
    )
    swap_patience_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds that the turns of a model have to finish when another model needs its memory; "
        "unfinished turns resume when it is loaded again.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        le=1000,
        description="Restarts within `engine.restart_window_s` after which the engine is marked as failed.",
    )
    restart_window_s: float = Field(
        600.0, gt=0, le=86_400, description="Window in seconds in which restarts are counted."
    )
    max_client_crashes: int = Field(
        6,
        ge=0,
        le=1000,
        description="Engine crashes that the turns of one client may cause within `engine.client_crash_window_s` "
        "before its new turns are refused with `rate_limited`; 0 refuses none.",
    )
    client_crash_window_s: float = Field(
        3600.0, gt=0, le=2_592_000, description="Window in seconds in which a client's crashes are counted."
    )
    exit_when_failed: bool = Field(
        False, description="Whether the daemon exits with status 1 when the engine is marked as failed."
    )
    echo_delay_ms: int = Field(
        0, ge=0, le=60_000, description="Milliseconds that each decode of the echo backend takes."
    )

    @model_validator(mode="after")
    def _ordered(self) -> EngineSettings:
        if 0 < self.n_batch < self.n_ubatch:
            raise ValueError(f"n_ubatch ({self.n_ubatch}) must not exceed n_batch ({self.n_batch})")
        if self.restart_backoff_min_s > self.restart_backoff_max_s:
            raise ValueError("restart_backoff_min_s must not exceed restart_backoff_max_s")
        if self.backend == "script" and self.script is None:
            raise ValueError("backend `script` needs script, a file of rules")
        if -1 < self.sleep_after_s <= 0:
            raise ValueError("sleep_after_s must be above 0, or -1 for never")
        return self


class LoraSettings(Section):
    """A LoRA adapter on top of a model."""

    path: ExpandedPath = Field(description="GGUF file of the adapter.")
    scale: float = Field(1.0, ge=-100, le=100, description="Weight of the adapter; 0 disables it.")


_ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
McpToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]
McpApproval = Literal["always", "never"]
"""Whether the user must approve each call of a tool."""


class McpServerSettings(Section):
    """An MCP server whose tools sessions may call: `[mcp.NAME]`. Needs the extra `mcp`.

    Its tools run on request of a client (`call_mcp_tool`); their results become messages of the session.
    """

    url: str | None = Field(
        None, max_length=2048, description="URL of its Streamable HTTP endpoint: https, or http on this machine."
    )
    headers_file: ExpandedPath | None = Field(
        None,
        description="File with HTTP headers for the server, one `Name: value` per line, such as `Authorization`; read "
        "for each connection.",
    )
    headers_env: dict[HeaderName, Annotated[str, StringConstraints(pattern=_ENVIRONMENT_NAME)]] = Field(
        default_factory=dict,
        max_length=16,
        description="HTTP headers for the server; the value of each is read from the environment variable named here.",
    )
    allow_http: bool = Field(
        False, description="Whether `url` may be http to another machine, which sends everything in plain text."
    )
    command: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="Instead of `url`: a program that speaks MCP over standard input and output. One process per "
        "account that uses it runs as the daemon's user, and ends with the daemon.",
    )
    args: tuple[Annotated[str, StringConstraints(max_length=4096)], ...] = Field(
        (), max_length=256, description="Arguments of `command`."
    )
    env: dict[Annotated[str, StringConstraints(pattern=_ENVIRONMENT_NAME)], SecretStr] = Field(
        default_factory=dict,
        max_length=64,
        description="Environment variables of `command`. It inherits only `PATH`, `HOME`, `LANG`, `TZ`, `TMPDIR` and "
        "those of `env_passed`. Never shown.",
    )
    env_passed: tuple[Annotated[str, StringConstraints(pattern=_ENVIRONMENT_NAME)], ...] = Field(
        (), max_length=64, description="Further environment variables that `command` inherits from the daemon."
    )
    directory: ExpandedPath = Field(Path("/"), description="Working directory of `command`.")
    memory_mib: int | None = Field(
        None, ge=16, le=2**20, description="MiB of address space of each process of `command`; if not set, no limit."
    )
    accounts: tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...] = Field(
        (), max_length=1000, description="Accounts that may use the server, in addition to those with `scope`."
    )
    scope: Literal["user", "operator", "admin"] = Field(
        "operator", description="Scope of the accounts that may use the server; every account has `user`."
    )
    allowed_tools: tuple[McpToolName, ...] | None = Field(
        None, max_length=128, description="Tools that may be called; if not set, all tools of the server."
    )
    require_approval: McpApproval = Field(
        "always",
        description="Whether the user must approve each call: `always`, or `never` for tools that are harmless with "
        "any arguments.",
    )
    approvals: dict[McpToolName, McpApproval] = Field(
        default_factory=dict, max_length=128, description="Overrides `require_approval` for tools by name."
    )
    connect_timeout_s: float = Field(
        10.0, gt=0, le=300, description="Timeout in seconds for a connection and its handshake."
    )
    timeout_s: float = Field(
        60.0, gt=0, le=3600, description="Timeout in seconds for a call, whose outcome is then unknown."
    )
    max_result_bytes: int = Field(
        65_536, ge=256, le=2**22, description="Maximum bytes of a result for the model; a longer one is truncated."
    )
    max_calls: int = Field(4, ge=1, le=64, description="Maximum number of concurrent calls of one account.")
    max_queued_calls: int = Field(
        16, ge=0, le=1024, description="Maximum number of waiting calls of one account; each waits `timeout_s` at most."
    )
    max_connections: int = Field(
        16,
        ge=1,
        le=1024,
        description="Maximum number of connections to the server. Each account has a connection of its own, so that a "
        "stateful server does not mix accounts; it is closed after five idle minutes.",
    )

    @model_validator(mode="after")
    def _reachable(self) -> McpServerSettings:
        if (self.url is None) == (self.command is None):
            raise ValueError("give either url or command")
        if self.url is None:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("url must begin with https:// or http:// and name a host")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise ValueError("url must not hold a user or a fragment; headers_file is for credentials")
        if parts.scheme == "http" and not (self.allow_http or _is_loopback(parts.hostname)):
            raise ValueError("url is http to another machine; use https, or set allow_http")
        return self

    def approval_of(self, tool: str) -> McpApproval:
        """Return whether calls of a tool must be approved."""
        return self.approvals.get(tool, self.require_approval)

    def allows_tool(self, tool: str) -> bool:
        """Return whether a tool may be called."""
        return self.allowed_tools is None or tool in self.allowed_tools
