"""``inferencecenter chat``: chat with a daemon from a terminal or a script."""

from __future__ import annotations

import readline  # noqa: F401 - importing it gives input() line editing and history
import sys
from typing import Annotated

import typer
from anyio.from_thread import start_blocking_portal

from inferencecenter.cli.chat_loop import ChatLoop, until_ready
from inferencecenter.cli.options import ConfigOption, StateDirOption, given, read_params
from inferencecenter.cli.output import stderr, stdout
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.cli.view import PlainView, TerminalView
from inferencecenter.client import Client
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError


def chat(  # noqa: PLR0913 - one argument an option
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    model: Annotated[
        str | None, typer.Option(help="Model to use.", show_default="the daemon's default model, even if it changes")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Continue a conversation by its id, as listed by /sessions.", show_default=False),
    ] = None,
    latest: Annotated[bool, typer.Option("--continue", help="Continue the most recent conversation.")] = False,
    params: Annotated[
        list[str] | None,
        typer.Option("--params", "-p", help="A parameter as name=value; may be repeated.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Chat with a daemon. Piped input is one turn per line, and only the answers are written."""
    turn_params = read_params(params or [])
    check_resumption(resume=resume, latest=latest, system=system, model=model)
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    interactive = sys.stdin.isatty() and stdout.is_terminal
    view = TerminalView(stdout, model=model) if interactive else PlainView()
    connection = daemon.client(on_notice=view.notice)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(connection) as client:
        portal.call(_wait_until_ready, client)
        conversation = ChatLoop(
            portal, client, view=view, system=system, model=model, params=turn_params, interactive=interactive
        )
        if interactive:
            stdout.print(
                f"{model or client.hello.model} at {daemon.url}; /help lists commands", style="dim", markup=False
            )
        if resume is not None or latest:
            conversation.resume(resume)
        conversation.run(_prompt if interactive else _next_line)


def check_resumption(*, resume: str | None, latest: bool, system: str | None, model: str | None) -> None:
    """Refuse options that contradict each other.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if resume is not None and latest:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "--resume and --continue are mutually exclusive")
    if system is not None and (resume is not None or latest):
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "--system applies to new conversations only")
    if model is not None and (resume is not None or latest):
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "--model applies to new conversations only")


async def _wait_until_ready(client: Client) -> None:
    if client.hello.status != "loading":
        return
    with stderr.status(client.hello.message) as status:
        await until_ready(client, status.update)


def _prompt() -> str:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        stdout.print()
        raise EOFError from None


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
