"""``inferencecenter usage``: turns and tokens by client and day; works alongside a running daemon."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, print_rows
from inferencecenter.config.loader import load_settings
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.rows import utc_day
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from inferencecenter.sessions.store.archive import UsageLine

_DAY_S: Final = 86_400


def usage(  # noqa: PLR0913 - one argument an option
    *,
    client: Annotated[str | None, typer.Option(help="Only this account.", show_default=False)] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token", help="List each token separately; API keys, and usage from older versions, have no id."
        ),
    ] = False,
    days: Annotated[int, typer.Option(help="Number of days, including today; days begin at midnight UTC.", min=1)] = 30,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show turns and tokens by client and day, as recorded with stored sessions; tab-separated when piped."""
    settings = load_settings(config, given(state_dir=state_dir))
    since = utc_day(max(0.0, time.time() - (days - 1) * _DAY_S))
    with Archive.open(settings.state_dir / DATABASE_NAME) as archive:
        lines = archive.usage_by_token(client, since=since) if token else archive.usage(client, since=since)
    if json:
        print_json([asdict(line) for line in lines])
        return
    counted = [Column(name, justify="right") for name in ("turns", "prompt tokens", "of these cached", "generated")]
    print_rows(
        ["day", "client", *(["token_id"] if token else []), *counted], [cells(line, by_token=token) for line in lines]
    )


def cells(line: UsageLine, *, by_token: bool) -> tuple[str, ...]:
    """Return day, client, token id if ``by_token``, turns, and prompt, cached and generated tokens."""
    counts = (line.turns, line.prompt_tokens, line.cached_tokens, line.completion_tokens)
    whose = (line.client_id, line.token_id or "") if by_token else (line.client_id,)
    return (line.day, *whose, *map(str, counts))
