"""Options are applied or refused."""

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


def test_given_options_override_defaults() -> None:
    """The others have the scenario's defaults."""
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
def test_invalid_options_are_refused(given: Options, field: str) -> None:
    """The error names the option: unsupported, out of range, unknown, or conflicting."""
    with pytest.raises(InferenceCenterError) as refused:
        resolve("throughput", given, defaults=DEFAULTS, takes=TAKES)

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.field == field
    assert refused.value.message.startswith(f"--{field.replace('_', '-')}: ")


def test_number_lists() -> None:
    """The numbers are separated by commas."""
    assert parse_numbers("clients", "1,4,8") == (1, 4, 8)
    assert parse_numbers("clients", None) is None


@pytest.mark.parametrize("text", ["", "1,,2", "x", "1.5", "4,4"])
def test_invalid_number_lists_are_refused(text: str) -> None:
    """Repeated numbers are refused, too."""
    with pytest.raises(InferenceCenterError, match="--clients"):
        parse_numbers("clients", text)


def test_peers_are_parsed() -> None:
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
def test_invalid_peers_are_refused(peers: list[str], tokens: list[str], commands: list[str]) -> None:
    """A peer without name or address, a repeated one, and a token or command of an unknown peer are refused."""
    with pytest.raises(InferenceCenterError, match="--peer"):
        parse_peers(peers, tokens=tokens, commands=commands)


def test_backends() -> None:
    """A backend is ``llama`` or ``echo``; others are refused."""
    assert [parse_backend(name) for name in (None, "llama", "echo")] == [None, "llama", "echo"]
    with pytest.raises(InferenceCenterError, match="--backend"):
        parse_backend("other")


def test_restart_methods() -> None:
    """A restart is by ``term`` or ``kill``; others are refused."""
    assert [parse_restart_by(name) for name in (None, "term", "kill")] == [None, "term", "kill"]
    with pytest.raises(InferenceCenterError, match="--restart-by"):
        parse_restart_by("luck")
