"""``inferencecenter share``: read-only links to snapshots of conversations."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, duration_s, given
from inferencecenter.cli.output import print_json, print_rows
from inferencecenter.cli.reach import DaemonAccess, TokenFileOption, TokenOption, UrlOption, own_url, reach_daemon
from inferencecenter.config.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from inferencecenter.client import Client
    from inferencecenter.protocol.values import Share

_Result = TypeVar("_Result")

app = typer.Typer(help="Share conversations by links.", no_args_is_help=True)


@app.command("create")
def create(  # noqa: PLR0913 - one argument an option
    session_id: Annotated[str, typer.Argument(help="A stored session of the account.")],
    *,
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", help="Lifetime of the link, such as 30d, 12h, 45m.", show_default=False),
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Share a conversation as it is now, and write the link, which is shown once.

    Any account of the daemon that has the link can read it, until it expires or is revoked, or the session is deleted.
    """
    daemon = _daemon(url, token, token_file, config, state_dir)
    expires_in_s = None if expires_in is None else duration_s(expires_in)
    created = _run(daemon, lambda client: client.create_share(session_id, expires_in_s=expires_in_s))
    page = daemon.url
    if page.startswith("unix:"):  # the link is for browsers, which use the port
        page = own_url(load_settings(config, given(state_dir=state_dir)))
    link = share_link(page, created.share.share_id, created.share_token)
    if json:
        print_json(created.share.model_dump() | {"link": link})
    else:
        typer.echo(link)


@app.command("list")
def list_shares(  # noqa: PLR0913 - one argument an option
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the share links of an account, without their secrets; tab-separated when piped."""
    shares = _run(_daemon(url, token, token_file, config, state_dir), lambda client: client.shares())
    if json:
        print_json([each.model_dump() for each in shares])
        return
    print_rows(["share_id", "session_id", "title", "messages", "created", "expires"], map(_cells, shares))


@app.command("revoke")
def revoke(  # noqa: PLR0913 - one argument an option
    share_id: Annotated[str, typer.Argument(help="Id of the link, as listed by `share list`.")],
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Revoke a share link."""
    _run(_daemon(url, token, token_file, config, state_dir), lambda client: client.revoke_share(share_id))


def share_link(url: str, share_id: str, share_token: str) -> str:
    """Return the link of the web page of the daemon at ``url``, a WebSocket address or that of the page."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    path = parts.path.removesuffix("/ws").rstrip("/")
    return f"{scheme}://{parts.netloc}{path}/#/s/{share_id}/{share_token}"


def _daemon(
    url: str | None, token: str | None, token_file: Path | None, config: Path | None, state_dir: Path | None
) -> DaemonAccess:
    settings = load_settings(config, given(state_dir=state_dir))
    return reach_daemon(settings, url=url, token=token, token_file=token_file)


def _run(daemon: DaemonAccess, work: Callable[[Client], Awaitable[_Result]]) -> _Result:
    async def run() -> _Result:
        async with daemon.client(reconnect=False) as client:
            return await work(client)

    return asyncio.run(run())


def _cells(share: Share) -> tuple[str, ...]:
    dates = map(_date, (share.created_at, share.expires_at))
    return share.share_id, share.session_id, share.title, str(share.messages), *dates


def _date(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
