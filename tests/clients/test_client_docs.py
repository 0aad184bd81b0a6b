"""docs/clients.md against the programs that are run: lines of configuration, and the table of features."""

from __future__ import annotations

import re

import pytest

from tests.clients.client_programs import CLIENTS, ClientProgram, blocks_of
from tests.documentation import read_page

PAGE = read_page("docs/clients.md")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def table() -> dict[str, frozenset[str]]:
    """Return the features that the table says each client has."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.source.splitlines() if line[:1] == "|"
    ]
    (_, *names), _, *clients = rows
    return {
        _LINK.sub(r"\1", name): frozenset(
            feature.lower() for feature, cell in zip(names, cells, strict=True) if cell.startswith("yes")
        )
        for name, *cells in clients
    }


def test_table_has_the_features_that_are_tried() -> None:
    """Each feature in the table is a result of the client's program, and vice versa."""
    assert table() == {client.name: frozenset(client.expected) for client in CLIENTS}


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_lines_of_configuration_are_those_that_run(client: ClientProgram) -> None:
    """Each block of a client's section stands in its program as it is."""
    blocks = blocks_of(client)
    assert blocks
    assert [block for block in blocks if block not in client.text] == []
