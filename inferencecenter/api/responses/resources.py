"""Responses over HTTP: created, retrieved, streamed, cancelled, deleted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import orjson
import structlog
from pydantic import Field

from inferencecenter.api import sse
from inferencecenter.api.endpoint import TURN_ERRORS, Document, Operation, Reply, Stream, document
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.prompt_counts import COUNT_ERRORS, count_prompt_tokens
from inferencecenter.api.request_turns import NullSink, RequestTurns, TurnSink
from inferencecenter.api.responses.compaction import compacted_input
from inferencecenter.api.responses.conversations import is_conversation
from inferencecenter.api.responses.mcp_tools import with_mcp_tools
from inferencecenter.api.responses.request_mapping import (
    EMPTY_QUESTION,
    conversation_of,
    load_context,
    prepare_turn,
    query_of,
    start_turn,
)
from inferencecenter.api.responses.request_schemas import RESPONSE_FIELDS, CreateResponse, ListItems
from inferencecenter.api.responses.response_events import ResponseEventBuilder
from inferencecenter.api.responses.response_schemas import Deleted, InputTokens, ItemList, Response, StreamEvent
from inferencecenter.api.responses.serializers import (
    ResponseRef,
    error_of,
    input_items,
    output_of,
    page_of,
    read_note,
    read_response_id,
    response_id,
    response_of,
    status_of,
)
from inferencecenter.api.session_match import close_session
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort, RewindSession
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inferencecenter.api.endpoint import Call
    from inferencecenter.api.responses.request_mapping import PreparedTurn
    from inferencecenter.api.responses.response_schemas import ItemState, OutputItem
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.stream_recording import StreamRecording
    from inferencecenter.sessions.session import TurnSnapshot

PATH: Final = "/v1/responses"
_ONE: Final = PATH + "/{response_id}"


class Retrieve(DialectModel):
    """Query of a response."""

    stream: Literal["true", "false"] = Field(
        default="false", description="Stream the events of a response created with `background` and `stream`."
    )
    starting_after: int | None = Field(
        default=None, ge=0, strict=False, description="`sequence_number` of the last event that is not streamed again."
    )


_log = structlog.get_logger(__name__)

_RETRIEVE_FIELDS: Final = FieldTable(
    "responses",
    Retrieve,
    rules=(
        FieldRule(
            field="starting_after",
            values="without `stream`",
            why="the whole response is returned, and not its events",
            applies=lambda _, siblings: siblings.get("stream") != "true",
        ),
        FieldRule(field="include_obfuscation", why="events are not padded"),
    ),
)


async def create(call: Call) -> Reply:
    """Handle a request: create a response."""
    request: CreateResponse = call.body
    if request.stream and request.background:
        return Stream(_streamed_in_background(call, request))
    if request.stream:
        return Stream(_streamed(call, request))
    if request.background:
        return await _start_in_background(call, request)
    return _document(await _complete(call, request))


async def count_input_tokens(call: Call) -> Reply:
    """Handle a request: count the tokens of a response's prompt."""
    request: CreateResponse = call.body
    await load_context(call.context, call.caller.client, request)
    request, _ = await with_mcp_tools(call.context, call.request_context, request, run=False)
    await load_context(call.context, call.caller.client, request)
    messages = conversation_of(call.context, call.caller.client, request)
    if not messages:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "input is missing", field="input")
    n_tokens = await count_prompt_tokens(call.context, call.request_context, query_of(request, messages))
    return document(InputTokens(input_tokens=n_tokens).model_dump())


async def retrieve(call: Call) -> Reply:
    """Return the current state of a response, or its events."""
    place, facts = await _find_stored(call)
    query: Retrieve = call.query
    if query.stream == "false":
        return _document(_current(place, facts))
    recording = call.context.stream_recordings.find(call.caller.client.client_id, response_id(place))
    if recording is None:
        return Stream(_rebuilt(call, place, facts))
    return Stream(_followed(call, recording, 0 if query.starting_after is None else query.starting_after + 1))


async def _rebuilt(call: Call, place: ResponseRef, facts: TurnSnapshot) -> AsyncGenerator[bytes, None]:
    """Stream the events of a background response that are not recorded, built anew from what is stored.

    Raises:
        InferenceCenterError: ``invalid_request`` for one that is no background response or has not ended, and for a
            part of the events, since the numbers of the first ones are unknown.
    """
    final, note = _current(place, facts), read_note(facts.note)
    assert note is not None, "a response has a note"
    if not note.background:
        raise _not_streamed("the events of this response are not kept", "Those of a response with background are.")
    if facts.running:
        raise _not_streamed(
            "the events of this response up to the restart of the daemon are not kept, and it is in progress",
            "Retrieve it without stream until it has ended; then its events can be streamed from the beginning.",
        )
    if call.query.starting_after is not None:
        raise _not_streamed(
            "the events of this response are not kept, and those that are built anew have other numbers",
            "Stream it without starting_after, or retrieve it without stream.",
            field="starting_after",
        )
    builder = ResponseEventBuilder(
        note,
        top_logprobs=0,
        clock=call.context.clock,
        generate=note.generate,
        first_items=note.first_items,
        mcp_tools=note.mcp_by_name,
    )
    build = partial(builder.rebuild, place, facts.answer, final)
    for frame in await call.context.worker.run(call.caller.client.client_id, build):
        yield sse.event(frame.data, name=frame.type)
    yield sse.DONE


def _not_streamed(reason: str, hint: str, *, field: str = "stream") -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, reason, hint=hint, field=field)


async def cancel(call: Call) -> Reply:
    """Cancel a response in progress; a complete one stays as it is."""
    place, facts = await _find(call)
    if facts.running:
        abort = Abort(op="abort", session_id=place.session_id, turn_id=place.turn_id)
        with suppress(InferenceCenterError):  # it has just ended
            call.context.sessions.abort(call.caller.client, abort)
        facts = call.context.sessions.get_turn(call.caller.client, *place)
    return _document(_current(place, facts))


async def delete(call: Call) -> Reply:
    """Delete a response that no other response continues."""
    place, facts = await _find(call)
    _forget(call, place, facts)
    recordings = call.context.stream_recordings
    if (recording := recordings.find(call.caller.client.client_id, response_id(place))) is not None:
        recordings.discard(recording)
    return document(Deleted(id=call.path["response_id"]).model_dump())


async def list_input_items(call: Call) -> Reply:
    """List the input items of a response; the whole history is traversed, which is too slow for the event loop."""
    place, facts = await _find_stored(call)
    return await call.context.worker.run(call.caller.client.client_id, partial(_page, place, facts, call.query))


def _page(place: ResponseRef, facts: TurnSnapshot, query: ListItems) -> Document:
    note = read_note(facts.note)
    history = facts.before if note is None or note.instructions is None else facts.before[1:]
    question = () if facts.input_messages == EMPTY_QUESTION else facts.input_messages
    tools = {} if note is None else note.tools_by_name
    mcp_tools = {} if note is None else note.mcp_by_name
    items = input_items((*history, *question), place.turn_id, tools=tools, mcp_tools=mcp_tools)
    return document(page_of(items, query).model_dump())


async def _complete(call: Call, request: CreateResponse) -> Response:
    """Wait for the complete response.

    Raises:
        InferenceCenterError: The response failed.
    """
    context = call.context
    prepared = await _prepare(call, request)
    builder = _event_builder(call, request, prepared)
    with RequestTurns(context, call.request_context, discard=not request.store) as turns:
        _begin(call, prepared, turns)
        async for batch in turns.batches():
            for _, event in batch:
                _check_failed(event)
                builder.feed(event)
    if builder.final is None:
        raise InferenceCenterError(
            ErrorCode.SESSION_NOT_FOUND, "The session was closed before the end of the response."
        )
    return builder.final


async def _streamed(call: Call, request: CreateResponse) -> AsyncGenerator[bytes, None]:
    context = call.context
    prepared = await _prepare(call, request)
    builder = _event_builder(call, request, prepared)

    def encoded(_turn: int, event: Event) -> bytes:
        return b"".join([sse.event(frame.data, name=frame.type) for frame in builder.feed(event)])

    with RequestTurns(context, call.request_context, discard=not request.store) as turns:
        _begin(call, prepared, turns)
        turns.write_through(encoded)
        try:
            async for batch in turns.batches():
                chunk = b"".join([encoded(turn, event) for turn, event in batch])
                if chunk or not batch:
                    yield chunk or _keepalive(call, store=request.store)
        except InferenceCenterError as error:
            if builder.place is None:
                raise
            context.metrics.errors.labels(error.code.value).inc()
            frame = builder.broken(error)
            yield sse.event(frame.data, name=frame.type)
    yield sse.DONE


async def _streamed_in_background(call: Call, request: CreateResponse) -> AsyncGenerator[bytes, None]:
    """Stream a response that continues, and whose events are recorded, when the client disconnects."""
    context, client = call.context, call.caller.client
    prepared = await _prepare(call, request)
    builder = _event_builder(call, request, prepared)
    recordings = context.stream_recordings
    recording = recordings.begin(client.client_id)

    def record(sink: TurnSink[ResponseEventBuilder], event: Event) -> None:
        if recording.finished:
            return
        try:
            for frame in builder.feed(event):
                recording.add(sse.event(frame.data, name=frame.type))
        except Exception:  # noqa: BLE001 - boundary: a defect in the events must not end the turn
            _log.exception("response_untold")
            recording.finish()
        if builder.place is not None and not recording.name:
            recordings.publish(recording, response_id(builder.place))
        if sink.over or recording.finished:
            recordings.finish(recording)
            # Not at once: a session may be in the middle of publishing the end of a turn.
            asyncio.get_running_loop().call_soon(context.sessions.detach, sink)

    sink = TurnSink(builder, prepared.infer.session_id, on_event=record, outlived=True)
    infer = prepared.infer.model_copy(update={"traceparent": call.caller.traceparent})
    try:
        start_turn(context, client, prepared, lambda _, note: context.sessions.infer(client, infer, sink, note=note))
    except InferenceCenterError:
        recordings.discard(recording)
        raise
    async for chunk in _followed(call, recording, 0):
        yield chunk


async def _followed(call: Call, recording: StreamRecording, start: int) -> AsyncGenerator[bytes, None]:
    """Stream the recorded events of a response from a number on, and those that come."""
    loop, keepalive_s = asyncio.get_running_loop(), call.context.settings.sse_keepalive_s
    while True:
        if found := recording.read(start):
            start += len(found)
            yield b"".join(found)
            continue
        if recording.finished:
            break
        changed = recording.changed()
        timer = loop.call_later(keepalive_s, _resolve, changed)
        try:
            await call.request_context.wait_for(changed)
        finally:
            timer.cancel()
        if not recording.finished and not recording.read(start):
            yield _keepalive(call, store=True)
    yield sse.DONE


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _keepalive(call: Call, *, store: bool) -> bytes:
    """Return a keepalive comment, with the storage failure if there is one."""
    fault = call.context.sessions.fault if store else None
    return sse.KEEPALIVE if fault is None else sse.comment(f"storage unavailable: {fault.message}")


async def _start_in_background(call: Call, request: CreateResponse) -> Document:
    """Start a response in the background, and return its initial state."""
    context = call.context
    prepared = await _prepare(call, request)
    builder = _event_builder(call, request, prepared)
    with RequestTurns(context, call.request_context, outlived=True) as turns:
        _begin(call, prepared, turns)
        async for batch in turns.batches():
            for _, event in batch:
                _check_failed(event)
                builder.feed(event)
            if builder.place is not None:
                break
    if builder.final is not None:
        return _document(builder.final)
    assert builder.place is not None, "the first event of a turn sets its place"
    return _document(response_of(prepared.echo, builder.place, status="queued"))


async def _prepare(call: Call, request: CreateResponse) -> PreparedTurn:
    """Return the turn of a request: approved calls of MCP servers run before, and it is compacted if it has to be.

    Raises:
        InferenceCenterError: See ``with_mcp_tools``, ``compacted_input`` and ``prepare_turn``.
    """
    await load_context(call.context, call.caller.client, request)
    request, added = await with_mcp_tools(call.context, call.request_context, request)
    compacted, warnings = await compacted_input(call.context, call.request_context, request)
    await load_context(call.context, call.caller.client, request)  # it may have been archived meanwhile
    return prepare_turn(
        call.context,
        call.caller.client,
        request,
        warnings=(*call.warnings, *added.warnings, *warnings),
        mcp_items=added.items,
        compacted=compacted,
    )


def _event_builder(call: Call, request: CreateResponse, prepared: PreparedTurn) -> ResponseEventBuilder:
    return ResponseEventBuilder(
        prepared.echo,
        top_logprobs=request.top_logprobs or 0,
        clock=call.context.clock,
        first_items=prepared.first_items,
        mcp_tools=prepared.mcp_tools,
    )


def _begin(call: Call, prepared: PreparedTurn, turns: RequestTurns) -> None:
    start_turn(call.context, call.caller.client, prepared, lambda infer, note: turns.begin(infer, note=note))


def _check_failed(event: Event) -> None:
    """Raise the error of a failed turn."""
    if isinstance(event, events.Error):
        raise InferenceCenterError(
            ErrorCode(event.code),
            event.message,
            hint=event.hint,
            field=event.field,
            retry_after_ms=event.retry_after_ms,
        )


async def _find(call: Call) -> tuple[ResponseRef, TurnSnapshot]:
    """Return the turn of the response in the path.

    Raises:
        InferenceCenterError: ``turn_not_found``, also for another client's.
    """
    try:
        place = read_response_id(call.path["response_id"])
        await call.context.load_session(call.caller.client, place.session_id)
        return place, call.context.sessions.get_turn(call.caller.client, *place)
    except InferenceCenterError as error:
        if error.code is not ErrorCode.SESSION_NOT_FOUND and error.code is not ErrorCode.TURN_NOT_FOUND:
            raise
        raise _not_found() from None


async def _find_stored(call: Call) -> tuple[ResponseRef, TurnSnapshot]:
    """Return the turn of the response in the path. One with ``store: false`` can be continued, but not retrieved.

    Raises:
        InferenceCenterError: ``turn_not_found``, also for another client's.
    """
    place, facts = await _find(call)
    note = read_note(facts.note)
    if note is not None and not note.store:
        raise _not_found()
    return place, facts


def _not_found() -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.TURN_NOT_FOUND, "No such response.")


def _current(place: ResponseRef, facts: TurnSnapshot) -> Response:
    """Return the current state of a response.

    Raises:
        InferenceCenterError: ``turn_not_found`` for a turn of another API.
    """
    note = read_note(facts.note)
    if note is None:
        raise _not_found()
    if facts.failure is not None:
        return response_of(note, place, status="failed", error=error_of(facts.failure))
    finish = facts.finish_reason
    if finish is None or facts.running:
        return response_of(note, place, status="in_progress" if finish is None else status_of(finish))
    status = status_of(finish) if note.generate else "completed"
    output: tuple[OutputItem, ...] = ()
    if facts.answer is not None and note.generate:
        state: ItemState = "completed" if status == "completed" else "incomplete"
        items = output_of(
            facts.answer, place.turn_id, state=state, tools=note.tools_by_name, mcp_tools=note.mcp_by_name
        )
        output = (*note.first_items, *items)
    completed_at = facts.ended_at if status == "completed" else None
    return response_of(
        note, place, status=status, output=output, finish_reason=finish, usage=facts.usage, completed_at=completed_at
    )


def _forget(call: Call, place: ResponseRef, facts: TurnSnapshot) -> None:
    """Remove the last turn of a session, and delete a session that has no other.

    Raises:
        InferenceCenterError: ``invalid_request`` when something came after it.
    """
    sessions, client = call.context.sessions, call.caller.client
    session = sessions.snapshot(client, place.session_id)
    if is_conversation(session):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "the response is part of a conversation",
            hint="Delete the conversation, or its items.",
            field="response_id",
        )
    turns = [turn.turn_id for turn in session.turn_log.turns]
    if facts.running and turns:
        sessions.abort(client, Abort(op="abort", session_id=place.session_id, turn_id=place.turn_id, discard=True))
        return
    has_failed = facts.failure is not None
    if not facts.running and (session.state is SessionState.BUSY or not (has_failed or turns[-1] == place.turn_id)):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "other responses continue this one",
            hint="Delete the latest one first.",
            field="response_id",
        )
    earlier = turns if has_failed else turns[:-1]
    if earlier:
        sessions.rewind(
            client, RewindSession(op="rewind_session", session_id=place.session_id, turn=earlier[-1]), NullSink()
        )
    else:
        close_session(sessions, client, place.session_id)


def _document(response: Response) -> Document:
    return Document(orjson.dumps(response.model_dump(mode="json", by_alias=True)))


OPERATIONS: Final = (
    Operation(
        method="POST",
        path=PATH,
        summary="Create a response.",
        handler=create,
        body=CreateResponse,
        answer=Response,
        event=StreamEvent,
        errors=(*TURN_ERRORS, ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, ErrorCode.SESSION_NOT_FOUND),
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="POST",
        path=PATH + "/input_tokens",
        summary="Count the tokens of a response's prompt.",
        handler=count_input_tokens,
        body=CreateResponse,
        answer=InputTokens,
        errors=(
            *COUNT_ERRORS,
            ErrorCode.SESSION_BUSY,
            ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND,
            ErrorCode.SESSION_NOT_FOUND,
        ),
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="GET",
        path=_ONE,
        summary="Retrieve the current state of a response, or stream its events.",
        handler=retrieve,
        query=Retrieve,
        answer=Response,
        event=StreamEvent,
        errors=(ErrorCode.TURN_NOT_FOUND,),
        fields=_RETRIEVE_FIELDS,
    ),
    Operation(
        method="DELETE",
        path=_ONE,
        summary="Delete a response that no other response continues.",
        handler=delete,
        answer=Deleted,
        errors=(ErrorCode.TURN_NOT_FOUND,),
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="POST",
        path=_ONE + "/cancel",
        summary="Cancel a response in progress.",
        handler=cancel,
        answer=Response,
        errors=(ErrorCode.TURN_NOT_FOUND,),
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="GET",
        path=_ONE + "/input_items",
        summary="List the input items of a response, including the history before it.",
        handler=list_input_items,
        query=ListItems,
        answer=ItemList,
        errors=(ErrorCode.TURN_NOT_FOUND,),
        fields=RESPONSE_FIELDS,
    ),
)
"""HTTP operations of responses."""
