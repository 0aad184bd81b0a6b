"""Tests of the OpenAPI document: that it is one, that it is complete, and that it is what the addresses do."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from inferencecenter.api import openapi
from inferencecenter.api.app import OPERATIONS
from inferencecenter.api.body import RequestModel
from inferencecenter.api.endpoint import Call, Operation
from inferencecenter.api.errors import CODES
from inferencecenter.api.openapi import document
from inferencecenter.core.errors import ERRORS, ErrorCode
from tests.api.asking import request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

DOCUMENT = document(OPERATIONS)


def described(row: Operation) -> dict[str, Any]:
    """Return what the document says of an operation."""
    operation: dict[str, Any] = DOCUMENT["paths"][row.path][row.method.lower()]
    return operation


def references(value: object) -> Iterator[str]:
    """Yield everything that the document refers to."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_it_is_an_openapi_document() -> None:
    """It is valid by the specification's own schema, version 3.1."""
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_references_lead_somewhere() -> None:
    """Each points to a schema that there is."""
    found = {reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)}
    assert found <= set(DOCUMENT["components"]["schemas"])
    assert "Generate" in found


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: f"{row.method} {row.path}")
def test_each_operation_is_described(row: Operation) -> None:
    """Its body, its answers, every error that it may fail with, and what it takes to be let in."""
    said = described(row)
    assert said["summary"].endswith(".")
    assert ("requestBody" in said) == (row.body is not None)
    assert ("security" in said) == (row.scope is not None)
    assert {name for name in row.path.split("/") if name.startswith("{")} == {
        f"{{{parameter['name']}}}" for parameter in said.get("parameters", ()) if parameter["in"] == "path"
    }
    content = said["responses"]["200"].get("content", {})
    assert ("text/event-stream" in content) == (row.event is not None)
    for code in row.errors:
        failure = said["responses"][str(ERRORS[code].http_status)]
        assert f"`{CODES.get(code, code.value)}`" in failure["description"]


def test_operations_have_names_of_their_own() -> None:
    """Generated clients make a function of each."""
    names = [described(row)["operationId"] for row in OPERATIONS]
    assert len(set(names)) == len(names)


def test_every_error_that_http_may_tell_is_a_code_of_the_document() -> None:
    """So generated clients can read each of them."""
    codes = set(DOCUMENT["components"]["schemas"]["ErrorDetail"]["properties"]["code"]["enum"])
    assert {CODES.get(code, code.value) for code in ErrorCode if ERRORS[code].on_http} == codes


def test_fields_that_may_be_absent_may_be_null() -> None:
    """The document says what bodies accept, and only that."""

    class Inner(RequestModel):
        """Part of a body."""

        a: int
        b: bool = False

    class Outer(RequestModel):
        """A body."""

        inner: Inner | None = None
        many: list[Inner] | None = None

    class Shown(BaseModel):
        """An answer."""

        inner: Inner

    async def nothing(_call: object) -> Any:
        """Do nothing."""

    row = Operation(method="POST", path="/x", summary="X.", handler=nothing, body=Outer, answer=Shown)
    schemas = document((row,))["components"]["schemas"]
    inner = next(schema for name, schema in schemas.items() if name.endswith(("Inner", "Inner-Input")))
    assert inner["properties"]["a"]["type"] == "integer"
    assert inner["properties"]["b"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]
    assert {"type": "null"} in schemas["Outer"]["properties"]["many"]["anyOf"]
    assert Outer.model_validate({"inner": {"a": 1, "b": None}, "many": None}).inner == Inner(a=1)


async def test_it_is_shown_to_everybody(serve: Serve) -> None:
    """Nobody needs a token to learn how to ask; the address is that of the settings."""
    async with serve(base_path="/inference") as server:
        heard = await request(server, "GET", "/inference/openapi.json", token=None)
        assert heard.status == 200
        assert heard.json == {**DOCUMENT, "servers": [{"url": "/inference"}]}


async def test_it_is_written_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many who ask at once get the same bytes, made off the event loop, and later ones too."""
    made: list[int] = []

    def counting(table: Iterable[Operation], *, base_path: str) -> dict[str, Any]:
        made.append(threading.get_ident())
        return document(table, base_path=base_path)

    fresh = openapi.operation(lambda: OPERATIONS)
    monkeypatch.setattr(openapi, "document", counting)
    call = Call(context=server.context)
    replies = await asyncio.gather(*(fresh.handler(call) for _ in range(5)))
    assert await fresh.handler(call) is replies[0]
    assert len({id(reply) for reply in replies}) == 1
    assert len(made) == 1
    assert made[0] != threading.get_ident()


async def test_who_has_it_gets_no_body(server: Running) -> None:
    """The entity tag of the last answer is enough."""
    first = await request(server, "GET", "/openapi.json", token=None)
    etag = first.headers["etag"]
    again = await request(server, "GET", "/openapi.json", token=None, headers={"If-None-Match": f'"x", {etag}'})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    other = await request(server, "GET", "/openapi.json", token=None, headers={"If-None-Match": '"x"'})
    assert (other.status, other.body) == (200, first.body)
