"""``inferencecenter rerank``: documents ranked by relevance to a query, as lines of JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.config.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.cli.reach import DaemonAccess


def rerank(  # noqa: PLR0913 - one argument an option
    query: Annotated[str, typer.Argument(help="Query for which the documents are scored.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOCUMENT]...", help="Documents to rank.", show_default="lines of the input"),
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Model to use.", show_default="the only reranking model")] = None,
    top: Annotated[int | None, typer.Option(help="Number of documents to write.", min=1, show_default="all")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Write a line of JSON for each document, the best first; empty lines of the input are skipped."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    texts = documents or [line for line in map(str.strip, sys.stdin) if line]
    asyncio.run(_rerank(daemon, query, texts, model=model, top_n=top))


async def _rerank(
    daemon: DaemonAccess, query: str, documents: Sequence[str], *, model: str | None, top_n: int | None
) -> None:
    async with daemon.client() as client:
        result = await client.rerank(query, documents, model=model, top_n=top_n)
    for each in result.results:
        line = {"index": each.index, "relevance_score": each.relevance_score, "document": documents[each.index]}
        typer.echo(orjson.dumps(line))
