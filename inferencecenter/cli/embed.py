"""``inferencecenter embed``: embedding vectors of texts, as lines of JSON."""

from __future__ import annotations

import asyncio
import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import orjson
import typer

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.config.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.cli.reach import DaemonAccess

_TEXTS_AT_ONCE: Final = 64
_DIGITS: Final = 8
"""Decimal places, enough to compare normalized vectors of 32-bit floats."""


def embed(  # noqa: PLR0913 - one argument an option
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to embed.", show_default="lines of the input")
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Model to use.", show_default="the only embedding model")] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Length of the vectors.", min=1, show_default="that of the model")
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Write each text and its embedding as a line of JSON; empty lines of the input are skipped."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    lines = texts or (line for line in map(str.strip, sys.stdin) if line)
    asyncio.run(_embed(daemon, lines, model=model, dimensions=dimensions))


async def _embed(daemon: DaemonAccess, texts: Iterable[str], *, model: str | None, dimensions: int | None) -> None:
    rest = iter(texts)
    async with daemon.client() as client:
        while part := list(islice(rest, _TEXTS_AT_ONCE)):
            result = await client.embed(part, model=model, dimensions=dimensions)
            for text, vector in zip(part, result.vectors, strict=True):
                rounded = [round(number, _DIGITS) for number in vector]
                typer.echo(orjson.dumps({"text": text, "embedding": rounded}))
