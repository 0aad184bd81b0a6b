"""Sections of the settings that other packages use on their own, and the base class of sections."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

Priority = Literal["interactive", "normal", "batch"]


def expand(path: Path) -> Path:
    """Return ``path`` absolute, with ``~`` and environment variables replaced."""
    return Path(os.path.expandvars(path)).expanduser().absolute()


ExpandedPath = Annotated[Path, AfterValidator(expand)]


class Section(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _clients_file() -> Path | None:
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(credentials) / "clients.toml"
    return path if credentials and path.exists() else None


class AuthSettings(Section):
    """Accounts and the defaults of new ones."""

    clients_file: ExpandedPath | None = Field(
        default_factory=_clients_file,
        validate_default=True,
        description="A clients.toml with client_id, api_key (or its hash), max_sessions, priority, retention_days, "
        "limits.",
        json_schema_extra={"default_text": "$CREDENTIALS_DIRECTORY/clients.toml if it is there"},
    )
    default_max_sessions: int = Field(
        16, ge=1, le=100_000, description="Maximum number of sessions of a client without its own limit."
    )
    default_priority: Priority = Field("normal", description="Priority class of a client without its own.")
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
        description='HTTP headers with credentials for it, such as `{authorization = "Bearer …"}`; never shown.',
    )
    trace_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the turns that are traced; a turn within a client's trace follows its sampling decision.",
    )
