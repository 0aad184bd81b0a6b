"""The OpenAPI document is valid, complete, and matches the endpoints."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from inferencecenter.api import openapi
from inferencecenter.api.body import RequestModel
from inferencecenter.api.endpoint import Call, Operation
from inferencecenter.api.errors import CODES
from inferencecenter.api.openapi import document
from inferencecenter.api.operations import OPERATIONS
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from tests.api.http_client import request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


@cache
def published() -> dict[str, Any]:
    """Return the document of all operations."""
    return document(OPERATIONS)


def operation_of(row: Operation) -> dict[str, Any]:
    """Return the document's description of an operation."""
    operation: dict[str, Any] = published()["paths"][row.path][row.method.lower()]
    return operation


def references(value: object) -> Iterator[str]:
    """Yield every reference in the document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.slow
def test_document_is_valid_openapi() -> None:
    """It is validated with the schema of OpenAPI 3.1."""
    assert list(OpenAPIV31SpecValidator(published()).iter_errors()) == []


def test_references_resolve() -> None:
    """Each points to an existing schema."""
    found = {reference.removeprefix("#/components/schemas/") for reference in references(published())}
    assert found <= set(published()["components"]["schemas"])
    assert "Generate" in found


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: f"{row.method} {row.path}")
def test_each_operation_is_described(row: Operation) -> None:
    """The description has its parameters, body, response, security and every possible error."""
    description = operation_of(row)
    assert description["summary"].endswith(".")
    assert ("requestBody" in description) == (row.body is not None)
    assert ("security" in description) == (row.scope is not None)
    assert {name for name in row.path.split("/") if name.startswith("{")} == {
        f"{{{parameter['name']}}}" for parameter in description.get("parameters", ()) if parameter["in"] == "path"
    }
    content = description["responses"]["200"].get("content", {})
    assert (row.media_type in content) == (row.event is not None)
    for code in row.errors:
        failure = description["responses"][str(row.error_format.status(InferenceCenterError(code)))]
        assert f"`{CODES.get(code, code.value)}`" in failure["description"]


def test_operation_ids_are_unique() -> None:
    """Generated clients make a function of each."""
    names = [operation_of(row)["operationId"] for row in OPERATIONS]
    assert len(set(names)) == len(names)


def test_every_http_error_code_is_in_the_document() -> None:
    """Generated clients can parse each of them."""
    codes = set(published()["components"]["schemas"]["ErrorDetail"]["properties"]["code"]["enum"])
    assert {CODES.get(code, code.value) for code in ErrorCode if ERRORS[code].on_http} == codes


def test_optional_fields_are_nullable() -> None:
    """The document accepts exactly what request bodies accept."""

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


async def test_document_is_public(serve: Serve) -> None:
    """No token is needed, and the server address is that of the settings."""
    async with serve(base_path="/inference") as server:
        response = await request(server, "GET", "/inference/openapi.json", token=None)
        assert response.status == 200
        assert response.json == {**published(), "servers": [{"url": "/inference"}]}


async def test_document_is_rendered_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent and later requests receive the same bytes, rendered off the event loop."""
    renderings: list[int] = []

    def counting(table: Iterable[Operation], *, base_path: str) -> dict[str, Any]:
        renderings.append(threading.get_ident())
        return document(table, base_path=base_path)

    fresh = openapi.operation(lambda: OPERATIONS)
    monkeypatch.setattr(openapi, "document", counting)
    call = Call(context=server.context)
    replies = await asyncio.gather(*(fresh.handler(call) for _ in range(5)))
    assert await fresh.handler(call) is replies[0]
    assert len({id(reply) for reply in replies}) == 1
    assert len(renderings) == 1
    assert renderings[0] != threading.get_ident()


async def test_matching_etag_returns_no_body(server: Running) -> None:
    """A request with the last entity tag receives 304."""
    first = await request(server, "GET", "/openapi.json", token=None)
    etag = first.headers["etag"]
    again = await request(server, "GET", "/openapi.json", token=None, headers={"If-None-Match": f'"x", {etag}'})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    other = await request(server, "GET", "/openapi.json", token=None, headers={"If-None-Match": '"x"'})
    assert (other.status, other.body) == (200, first.body)
