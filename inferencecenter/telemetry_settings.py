"""Settings of what the daemon tells of itself: its log, and traces of its turns."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, StringConstraints

from inferencecenter.setting_types import ExpandedPath, Section


def _collector(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a machine")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("must not hold a user, a query or a fragment; otlp_headers are for credentials")
    return value


def _header(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().isprintable() or not value.get_secret_value().isascii():
        raise ValueError("must be printable ASCII")
    return value


HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=256)]


class LogSettings(Section):
    """What is logged, and where to."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level written.")
    format: Literal["auto", "pretty", "json"] = Field("auto", description="`auto` is pretty on a terminal, else JSON.")
    output: Literal["stderr", "stdout"] = Field("stderr", description="Where it is written when `file` is not set.")
    file: ExpandedPath | None = Field(
        None, description="File that it is written to, readable by its owner only; opened again at SIGHUP."
    )
    max_mib: int = Field(
        100, ge=0, le=2**20, description="MiB at which the file is renamed and a new one begun; 0 lets it grow."
    )
    backups: int = Field(5, ge=1, le=1000, description="Renamed files that are kept, `.1` the newest.")


class TelemetrySettings(Section):
    """Traces: where the time of each turn went, in both processes."""

    otlp_endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        None,
        description="Address of an OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318; without it "
        "nothing is traced. Needs the extra: `pip install 'inferencecenter[otel]'`.",
    )
    otlp_headers: dict[HeaderName, Annotated[SecretStr, AfterValidator(_header)]] = Field(
        default_factory=dict,
        description='HTTP headers with credentials for it, as `{authorization = "Bearer …"}`; never shown.',
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of the turns that are traced; a turn in a client's trace is as that says."
    )
