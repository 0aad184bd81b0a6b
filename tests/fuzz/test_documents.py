"""Fuzzed answers and files from outside: each is accepted or refused as documented."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.budget import examples
from tests.fuzz.json_document import changed
from tests.fuzz.targets import (
    TARGETS,
    WEIGHTS,
    clients_file,
    corpus,
    external_answer,
    hub_listing,
    manifest_file,
    plan_file,
    settings_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
FILE: dict[str, Any] = {
    "rfilename": "tiny-Q4_K_M.gguf",
    "size": len(WEIGHTS),
    "blobId": "0" * 40,
    "lfs": {"size": len(WEIGHTS), "sha256": DIGEST, "pointerSize": 134},
}
LISTING: dict[str, Any] = {
    "id": "ada/tiny",
    "sha": "0123456789abcdef0123456789abcdef01234567",
    "lastModified": "2026-01-01T00:00:00.000Z",
    "tags": ["gguf"],
    "gguf": {"total": 5, "architecture": "llama"},
    "siblings": [{"rfilename": "README.md", "size": 5, "blobId": "1" * 40}, FILE],
}
PARTS: dict[str, Any] = LISTING | {
    "siblings": [FILE | {"rfilename": f"Q8_0/tiny-Q8_0-0000{number}-of-00002.gguf"} for number in (1, 2)]
}
MANIFEST: dict[str, Any] = {
    "source": "ada/tiny/tiny.gguf",
    "commit": LISTING["sha"],
    "pulled_at": 1.5e9,
    "sha256": {"model.gguf": DIGEST},
}
PLAN: dict[str, Any] = {
    "model gpu": {"extra_bytes": 200, "estimated_bytes": 1000, "used_bytes": 1200},
    "other gpu": {"extra_bytes": -5, "estimated_bytes": 1000, "used_bytes": 995},
}
ANSWER: dict[str, Any] = {
    "authorized": True,
    "client_id": "ada",
    "max_sessions": 3,
    "priority": "normal",
    "error": None,
    "limits": {"max_tokens": 5, "models": ["demo"], "addresses": ["10.0.0.0/8"]},
    "config": {"max_sessions": 3, "limits": {"tokens_per_day": 9}},
}
DOCUMENTS: dict[Callable[[bytes], None], list[dict[str, Any]]] = {
    hub_listing: [LISTING, PARTS],
    manifest_file: [MANIFEST],
    plan_file: [PLAN],
    external_answer: [ANSWER, {"valid": True}],
}
SETTINGS = """\
[server]
port = 3000
host = '127.0.0.1'
[models.tiny]
path = '/tmp/tiny.gguf'
params = {temperature = 0.5, stop = ['a']}
[gpu]
devices = ['0']
tensor_split = [1.0, 2]
[params]
temperature = 0.5"""
CLIENTS = """\
[[client]]
client_id = 'kitchen'
api_key = 'key'
max_sessions = 4
scopes = ['user']
limits = {tokens_per_day = 5, addresses = ['10.0.0.0/8']}"""
LINES = [*SETTINGS.splitlines(), *CLIENTS.splitlines()]
TOML = [
    *("nan", "inf", "-1", "1e400", "9" * 5000, "0x" + "f" * 400, "true", "''", "'x'", "[]", "{}", "[[], {}]"),
    *("[" * 5000, "{a = " * 400, "1979-05-27T07:32:00Z", "0000-00-00", "25:00:00", "'''", r'"\ud800"', r'"\u0000"'),
    *(r'"\e"', "-0.0", f"'{'x' * 70_000}'", "9223372036854775808", "['\u202e']", "{'' = 1}"),
]


@pytest.mark.parametrize("target", DOCUMENTS, ids=lambda target: target.__name__)
def test_unchanged_document_is_accepted(target: Callable[[bytes], None]) -> None:
    """The fuzzer starts from a valid document."""
    for document in DOCUMENTS[target]:
        target(orjson.dumps(document))


@pytest.mark.slow
@pytest.mark.parametrize("target", DOCUMENTS, ids=lambda target: target.__name__)
@examples(400)
@given(data=st.data())
def test_any_document_is_accepted_or_refused(target: Callable[[bytes], None], data: st.DataObject) -> None:
    """The documents may have any content, JSON or not."""
    target(data.draw(changed(st.sampled_from(DOCUMENTS[target]))))


@st.composite
def toml_files(draw: st.DrawFn) -> bytes:
    """Draw a TOML file of settings and clients with some odd values and mutated bytes."""
    lines = draw(st.sampled_from([SETTINGS, CLIENTS])).splitlines()
    lines += draw(st.lists(st.sampled_from(LINES), max_size=3))
    for place in draw(st.lists(st.integers(0, len(lines) - 1), max_size=3)):
        lines[place] = f"{lines[place].split(' =')[0]} = {draw(st.sampled_from(TOML) | st.text(max_size=20))}"
    text = bytearray("\n".join(lines).encode(errors="surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text)


@pytest.mark.slow
@examples(600)
@given(toml_files())
def test_any_configuration_is_accepted_or_refused(data: bytes) -> None:
    """Covers the daemon's configuration and its clients file."""
    settings_file(data)
    clients_file(data)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@examples(200)
@given(data=st.data())
def test_any_bytes_are_accepted_or_refused(target: str, data: st.DataObject) -> None:
    """Mutates typical inputs and those that once failed, or draws random bytes."""
    text = bytearray(data.draw(st.sampled_from(sorted(corpus(target).values())) | st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    TARGETS[target](bytes(text))
