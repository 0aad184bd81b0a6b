"""``/api/pull``, ``/api/copy`` and ``/api/delete``: operators add models to the daemon's directory and remove them.

What Ollama does to models beyond that has no counterpart here, and is refused with what to do instead.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import orjson
from pydantic import Field, StringConstraints

from inferencecenter.api.body import invalid_field
from inferencecenter.api.endpoint import LATEST, Call, Operation, Stream, document, known_name
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.ollama.errors import NDJSON, OLLAMA_ERRORS, line
from inferencecenter.api.ollama.models import NamedModel
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.sampling import Name
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.config.settings import ModelName
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.models.library import ModelDownload

_REPORT_EVERY_S: Final = 0.25
_REFUSED: Final = (
    (
        "/api/create",
        "Refused: models are not made of others.",
        "this server makes no models of others",
        "An operator adds [models.NAME] with path and params to the configuration; requests have the system prompt.",
    ),
    (
        "/api/push",
        "Refused: models are not published.",
        "this server publishes no models",
        "Their files are in models_dir.",
    ),
    (
        "/api/blobs/{digest}",
        "Refused: files are not uploaded.",
        "this server takes no uploads of files",
        "An operator pulls the model, or puts its file into models_dir.",
    ),
)
"""Paths of Ollama that are refused: summary, message and hint."""
_HUBS: Final = ("https://", "hf.co/", "huggingface.co/")
"""Starts of Ollama's names of models on the hub."""

Reference: TypeAlias = Annotated[str, StringConstraints(max_length=1024)]


class PullRequest(DialectModel):
    """The model to be downloaded."""

    reference: Reference | None = Field(
        default=None,
        alias="model",
        description="A reference as of `inferencecenter model pull`, which may start with `hf.co/`.",
    )
    name: Reference | None = Field(default=None, description="The same, as the field was called first.")
    stream: bool = Field(default=True, description="Whether progress is sent in lines of JSON.")


class DeleteRequest(NamedModel):
    """The model to be deleted."""


class CopyRequest(DialectModel):
    """The model to be copied."""

    source: Name = Field(description="A name listed by `/api/tags`, with or without `:latest`.")
    destination: ModelName = Field(description="The name of the copy.")


PULL_FIELDS: Final = FieldTable(
    "ollama-pull", PullRequest, rules=(FieldRule(field="insecure", why="`HF_ENDPOINT` of the daemon names the hub"),)
)
"""The fields of ``/api/pull``."""

DELETE_FIELDS: Final = FieldTable("ollama-delete", DeleteRequest)
"""The fields of ``/api/delete``."""

COPY_FIELDS: Final = FieldTable("ollama-copy", CopyRequest)
"""The fields of ``/api/copy``."""


class PullStatus(AnswerModel):
    """Progress of a download; the last one is `success`."""

    status: str = Field(description="The current phase, or the file being downloaded.")
    digest: str | None = Field(default=None, description="The file that is downloaded.")
    total: int | None = Field(default=None, description="Bytes of all files.")
    completed: int | None = Field(default=None, description="Of those, bytes that have arrived.")


class LibraryChanged(AnswerModel):
    """An empty object."""


async def pull(call: Call) -> Reply:
    """Handle a request: download a model."""
    request: PullRequest = call.body
    call.context.operations.charge(call.caller.client.client_id)
    reference = _reference(request.reference or request.name or "")
    download = call.context.downloads.start(reference, call.caller.client.client_id)
    call.audit(AuditEvent.MODEL_PULLED, reference)
    if request.stream:
        return Stream(_lines(call, download), media_type=NDJSON)
    async for _ in _lines(call, download):
        pass
    return document({"status": "success"})


async def delete(call: Call) -> Reply:
    """Handle a request: delete the files of a model, whose running turns end first."""
    context = call.context
    context.models.rescan()
    name = await context.remove_model(call.body.given(context.models), client_id=call.caller.client.client_id)
    call.audit(AuditEvent.MODEL_REMOVED, name)
    return document({})


async def copy(call: Call) -> Reply:
    """Handle a request: give the files of a model a second name."""
    context, request = call.context, call.body
    context.models.rescan()
    spec = context.models.spec_of(known_name(context.models, request.source))
    name = request.destination.removesuffix(LATEST)
    if known_name(context.models, name) in context.models.names:
        raise invalid_field("destination", f"there is a model {name!r} already")
    link = partial(context.library.copy, spec.name, spec.path, name)
    await context.disk_worker.run(call.caller.client.client_id, link)
    context.models.rescan()
    return document({})


def _refusal(message: str, hint: str) -> Callable[[Call], Awaitable[Reply]]:
    """Return a handler that refuses every request."""

    async def refuse(_call: Call) -> Reply:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, message, hint=hint)

    return refuse


def _reference(name: str) -> str:
    for start in _HUBS:
        name = name.removeprefix(start)
    return name.removesuffix(LATEST)


async def _lines(call: Call, download: ModelDownload) -> AsyncGenerator[bytes, None]:
    """Yield the progress of a download, which is aborted when the client disconnects.

    Raises:
        InferenceCenterError: It has failed.
    """
    ended: list[Exception] = []
    call.request_context.listen(ended.append)
    try:
        yield _line("pulling manifest")
        shown = None
        while not download.over:
            await asyncio.sleep(_REPORT_EVERY_S)
            if ended:
                raise ended[0]
            if (progress := download.progress) is not None and progress != shown:
                shown = progress
                yield _line(
                    f"pulling {progress.file}",
                    digest=progress.file,
                    total=progress.total_bytes,
                    completed=progress.done_bytes,
                )
    finally:
        call.request_context.forget(ended.append)
        download.abort()
    if download.error is not None:
        raise download.error
    call.context.models.rescan()
    yield _line("verifying sha256 digest") + _line("success")


def _line(status: str, **more: Any) -> bytes:
    return line(orjson.dumps({"status": status, **more}))


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/api/pull",
        summary="Download a model, as Ollama does.",
        handler=pull,
        body=PullRequest,
        answer=PullStatus,
        event=PullStatus,
        errors=(ErrorCode.MODEL_NOT_FOUND, ErrorCode.HUB_UNREACHABLE, ErrorCode.INVALID_MODEL_FILE),
        scope=Scope.OPERATOR,
        fields=PULL_FIELDS,
        error_format=OLLAMA_ERRORS,
        media_type=NDJSON,
    ),
    Operation(
        method="DELETE",
        path="/api/delete",
        summary="Delete a model, as Ollama does.",
        handler=delete,
        body=DeleteRequest,
        answer=LibraryChanged,
        errors=(ErrorCode.MODEL_NOT_FOUND,),
        scope=Scope.OPERATOR,
        fields=DELETE_FIELDS,
        error_format=OLLAMA_ERRORS,
    ),
    Operation(
        method="POST",
        path="/api/copy",
        summary="Give a model a second name, as Ollama does.",
        handler=copy,
        body=CopyRequest,
        answer=LibraryChanged,
        errors=(ErrorCode.MODEL_NOT_FOUND,),
        charged=True,
        scope=Scope.OPERATOR,
        fields=COPY_FIELDS,
        error_format=OLLAMA_ERRORS,
    ),
    *(
        Operation(
            method="POST",
            path=path,
            summary=summary,
            handler=_refusal(message, hint),
            charged=True,
            error_format=OLLAMA_ERRORS,
            local_account=True,
        )
        for path, summary, message, hint in _REFUSED
    ),
)
