"""Where a daemon is reached, and the token to show it: options and what holds without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.settings import Settings

UrlOption: TypeAlias = Annotated[
    str | None, typer.Option("--url", envvar="INFERENCECENTER_URL", help="The daemon's address.", show_default=False)
]
TokenOption: TypeAlias = Annotated[
    str | None, typer.Option("--token", envvar="INFERENCECENTER_TOKEN", help="Token to show.", show_default=False)
]
TokenFileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token.", show_default="admin.token in the state directory"),
]


def daemon_url(settings: Settings) -> str:
    """Return where the daemon of these settings is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)  # noqa: S104
    bracketed = f"[{host}]" if ":" in host else host
    return f"ws://{bracketed}:{settings.server.port}{settings.server.base_path}/ws"


def admin_token_file(settings: Settings) -> Path:
    """Return the file that the first run of the daemon of these settings writes."""
    return settings.state_dir / "admin.token"


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        InferenceCenterError: ``not_authenticated``, naming the file.
    """
    try:
        return path.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise InferenceCenterError(
            ErrorCode.NOT_AUTHENTICATED,
            f"no token: {path}: {reason}",
            hint="The first `inferencecenter serve` writes it; or give --token, --token-file, INFERENCECENTER_TOKEN.",
        ) from None
