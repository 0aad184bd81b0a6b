"""Tests of ``bench.options``: obeyed or refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from benchmarks.options import (
    Options,
    Peer,
    parse_backend,
    parse_numbers,
    parse_peers,
    parse_restart_by,
    resolve,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

DEFAULTS = Options(clients=(1, 4), repeat=5)
TAKES = {"clients", "repeat", "slots", "connections", "assume_same", "url", "token", "model"}


def test_what_is_given_wins() -> None:
    """The rest has the scenario's defaults."""
    options = resolve("throughput", Options(clients=(2,), slots=3), defaults=DEFAULTS, takes=TAKES)

    assert options == Options(clients=(2,), slots=3, repeat=5)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (Options(max_tokens=5), "max_tokens"),
        (Options(clients=(1, 0)), "clients"),
        (Options(repeat=0), "repeat"),
        (Options(slots=257), "slots"),
        (Options(assume_same=("speed",)), "assume_same"),
        (Options(model=Path("/nowhere.gguf")), "model"),
        (Options(url="ws://host/"), "token"),
        (Options(url="ws://host/", token="t", slots=4), "slots"),
        (Options(connections=resource.getrlimit(resource.RLIMIT_NOFILE)[1]), "connections"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(given: Options, field: str) -> None:
    """The error names the option: one the scenario does not take, out of range, unknown, or at odds with another."""
    with pytest.raises(InferenceCenterError) as refused:
        resolve("throughput", given, defaults=DEFAULTS, takes=TAKES)

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.field == field
    assert refused.value.message.startswith(f"--{field.replace('_', '-')}: ")


def test_lists_of_numbers() -> None:
    """Written with commas."""
    assert parse_numbers("clients", "1,4,8") == (1, 4, 8)
    assert parse_numbers("clients", None) is None


@pytest.mark.parametrize("text", ["", "1,,2", "x", "1.5", "4,4"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    """Also a number that is named twice."""
    with pytest.raises(InferenceCenterError, match="--clients"):
        parse_numbers("clients", text)


def test_peers() -> None:
    """Tokens and commands belong to the peer of their name."""
    found = parse_peers(["a=http://h:1", "b=https://h:2"], tokens=["b=secret"], commands=["a=server -m x=y"])

    assert found == (
        Peer(name="a", url="http://h:1", command="server -m x=y"),
        Peer(name="b", url="https://h:2", token="secret"),
    )
    assert parse_peers([]) is None


@pytest.mark.parametrize(
    ("peers", "tokens", "commands"),
    [
        (["http://h:1"], [], []),
        (["=http://h:1"], [], []),
        (["a=h:1"], [], []),
        (["a=http://h:1", "a=http://h:2"], [], []),
        (["a=http://h:1"], ["b=t"], []),
        (["a=http://h:1"], [], ["b=server"]),
    ],
)
def test_what_is_no_peer_is_refused(peers: list[str], tokens: list[str], commands: list[str]) -> None:
    """No pair, no address, named twice, or a token or command for an unknown peer."""
    with pytest.raises(InferenceCenterError, match="--peer"):
        parse_peers(peers, tokens=tokens, commands=commands)


def test_backends() -> None:
    """There are two."""
    assert [parse_backend(name) for name in (None, "llama", "echo")] == [None, "llama", "echo"]
    with pytest.raises(InferenceCenterError, match="--backend"):
        parse_backend("other")


def test_ways_to_restart() -> None:
    """There are two."""
    assert [parse_restart_by(name) for name in (None, "term", "kill")] == [None, "term", "kill"]
    with pytest.raises(InferenceCenterError, match="--restart-by"):
        parse_restart_by("luck")
