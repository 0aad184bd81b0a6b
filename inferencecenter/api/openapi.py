"""The OpenAPI document of all HTTP operations, derived from their table, and the operation that returns it."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import BaseModel, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

import inferencecenter
from inferencecenter.api import sse
from inferencecenter.api.endpoint import BODY_ERRORS, COMMON_ERRORS, Document, Operation
from inferencecenter.api.errors import CODES, ErrorAnswer
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.server.web import has_etag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inferencecenter.api.endpoint import Call, Reply

    Schemas = Mapping[tuple[Any, JsonSchemaMode], dict[str, Any]]

PATH: Final = "/openapi.json"
_ETAG_DIGITS: Final = 32
_REFERENCE: Final = "#/components/schemas/{model}"
_SECURITY: Final[tuple[dict[str, list[str]], ...]] = ({"token": []}, {"key": []}, {"client": [], "key": []})
_SCHEMES: Final = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token, `ic_<id>_<secret>`."},
    "client": {"type": "apiKey", "in": "header", "name": "X-Client-ID", "description": "A client's id."},
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "A token, or with `X-Client-ID` the client's key.",
    },
}
_RETRY_AFTER: Final = {
    "description": "Seconds after which to retry, if known.",
    "schema": {"type": "integer", "minimum": 0},
}
_STREAM: Final = (
    "Server-sent events, this is one of them. An error ends the stream. OpenAI's streams end with `[DONE]` in place of "
    "JSON. Comments keep the connection alive."
)


def operation(table: Callable[[], Iterable[Operation]]) -> Operation:
    """Return the operation that serves the document of ``table``, of which it is itself a row.

    It needs no token, so it must be cheap: the document is serialized once per base path, in the worker's thread, and a
    client with a current copy gets no body.
    """
    written: dict[str, Document] = {}

    def write(base_path: str) -> Document:
        if base_path not in written:
            body = orjson.dumps(document(table(), base_path=base_path))
            etag = f'"{hashlib.sha256(body).hexdigest()[:_ETAG_DIGITS]}"'
            written[base_path] = Document(body, headers={"etag": etag, "cache-control": "no-cache"})
        return written[base_path]

    async def openapi(call: Call) -> Reply:
        base_path = call.context.settings.base_path
        shown = written.get(base_path)
        if shown is None:
            shown = await call.context.worker.run("", partial(write, base_path))
        if has_etag(shown.headers["etag"], call.headers.get("if-none-match", "")):
            return replace(shown, body=b"", status=HTTPStatus.NOT_MODIFIED)
        return shown

    return Operation(
        method="GET", path=PATH, summary="Return this document.", handler=openapi, answer=OpenApiDocument, scope=None
    )


class OpenApiDocument(BaseModel, extra="allow"):
    """An OpenAPI document."""

    openapi: str = Field(description="Version of the specification.")


def document(operations: Iterable[Operation], *, base_path: str = "") -> dict[str, Any]:
    table = tuple(operations)
    schemas, definitions = models_json_schema(list(_models(table)), ref_template=_REFERENCE)
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in table:
        paths[row.path][row.method.lower()] = _operation(row, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "InferenceCenter",
            "version": inferencecenter.__version__,
            "summary": "GGUF models over HTTP: an OpenAI-compatible API, and a minimal API for plain text.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": base_path or "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": definitions.get("$defs", {}), "securitySchemes": _SCHEMES},
    }


def _models(table: Sequence[Operation]) -> dict[tuple[type[BaseModel], JsonSchemaMode], None]:
    """Return all models of the table, once for each mode (validation, serialization) in which they are used."""
    found: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(ErrorAnswer, "serialization"): None}
    for row in table:
        found[row.error_format.answer, "serialization"] = None
        if row.body is not None:
            found[row.body, "validation"] = None
        for kind in (row.answer, row.event):
            if kind is not None:
                found[kind, "serialization"] = None
    return found


def _operation(row: Operation, schemas: Schemas) -> dict[str, Any]:
    parameters = [*_path_parameters(row.path), *_query_parameters(row.query)]
    body = None if row.body is None else schemas[row.body, "validation"]
    return {
        "operationId": _name(row),
        "summary": row.summary,
        **({"parameters": parameters} if parameters else {}),
        **(
            {}
            if body is None
            else {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
        ),
        "responses": {"200": _answer(row, schemas), **_errors(row, schemas)},
        **({} if row.scope is None else {"security": list(_SECURITY)}),
    }


def _name(row: Operation) -> str:
    return "_".join([row.method.lower(), *re.findall(r"[a-z0-9_]+", row.path.removesuffix(".json"))])


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _query_parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    schema = query.model_json_schema(ref_template=_REFERENCE)
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]


def _answer(row: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if row.answer is not None:
        content["application/json"] = {"schema": schemas[row.answer, "serialization"]}
    if row.event is not None:
        content[row.media_type] = {"schema": _event(row, schemas)}
    return {"description": "The answer.", **({"content": content} if content else {})}


def _event(row: Operation, schemas: Schemas) -> dict[str, Any]:
    """Return the schema of an event of a stream, or of one of its lines."""
    assert row.event is not None, "it has a stream"
    data, failure = schemas[row.event, "serialization"], schemas[row.error_format.answer, "serialization"]
    if row.media_type != sse.CONTENT_TYPE:
        return {"anyOf": [data, failure]}
    return {
        "type": "object",
        "description": _STREAM,
        "required": ["data"],
        "properties": {
            "event": {"type": "string", "description": "Its name, where it has one."},
            "data": {
                "anyOf": [
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": {"anyOf": [data, failure]},
                    },
                    {"const": "[DONE]"},
                ]
            },
        },
    }


def _errors(row: Operation, schemas: Schemas) -> dict[str, Any]:
    """Return the possible errors of an operation, by HTTP status."""
    common = (ErrorCode.INVALID_REQUEST, ErrorCode.INTERNAL) if row.scope is None else COMMON_ERRORS
    by_status: defaultdict[int, list[ErrorCode]] = defaultdict(list)
    of_body = () if row.body is None else BODY_ERRORS
    for code in dict.fromkeys((*common, *of_body, *row.errors)):
        by_status[row.error_format.status(InferenceCenterError(code))].append(code)
    return {str(status): _failure(row, codes, schemas) for status, codes in sorted(by_status.items())}


def _failure(row: Operation, codes: Sequence[ErrorCode], schemas: Schemas) -> dict[str, Any]:
    rows = [f"`{CODES.get(code, code.value)}`: {ERRORS[code].message}" for code in codes]
    retryable = any(ERRORS[code].retryable for code in codes)
    return {
        "description": " ".join(rows),
        **({"headers": {"Retry-After": _RETRY_AFTER}} if retryable else {}),
        "content": {"application/json": {"schema": schemas[row.error_format.answer, "serialization"]}},
    }
