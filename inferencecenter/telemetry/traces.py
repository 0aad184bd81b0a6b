"""Opens OpenTelemetry traces; OpenTelemetry is imported only if a collector is configured."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.config.sections import TelemetrySettings
    from inferencecenter.telemetry.otlp import Traces

_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_installed(settings: TelemetrySettings) -> None:
    """Raise if tracing is configured but not installed.

    Raises:
        InferenceCenterError: ``invalid_config`` without OpenTelemetry.
    """
    if settings.otlp_endpoint is not None and not all(_is_installed(package) for package in _PACKAGES):
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "telemetry.otlp_endpoint is set, but OpenTelemetry is not installed",
            hint="pip install 'inferencecenter[otel]', or leave the setting out.",
            field="telemetry.otlp_endpoint",
        )


def open_traces(settings: TelemetrySettings) -> Traces | None:
    """Return the traces; ``None`` without a collector.

    Raises:
        InferenceCenterError: ``invalid_config`` without OpenTelemetry.
    """
    if settings.otlp_endpoint is None:
        return None
    check_installed(settings)
    from inferencecenter.telemetry.otlp import Traces  # noqa: PLC0415 - a quarter of a second, and an extra

    headers = {name: value.get_secret_value() for name, value in settings.otlp_headers.items()}
    return Traces.to_collector(settings.otlp_endpoint, headers=headers, ratio=settings.trace_ratio)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False
