"""The Conversations API, through the openai package on a server with a scripted engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, ConflictError, NotFoundError, RateLimitError

from inferencecenter.api.responses.conversations import StoredConversation
from inferencecenter.auth.rate_limits import OperationRateLimiter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.session import SessionSnapshot
from tests.api.http_client import post, request, tick
from tests.api.responses.helpers import PATH, begin_turns, receive, send, socket, text_of
from tests.api.streaming import send_answer
from tests.server.harness import StubJournal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

CONVERSATIONS = "/v1/conversations"
MISSING = "conv_" + "a" * 22
SAID: list[Any] = [
    {"type": "message", "role": "user", "content": "Hi"},
    {"type": "message", "role": "assistant", "content": "Hello"},
    {"type": "message", "role": "user", "content": "Hi"},
]


def n_sessions(server: Running) -> int:
    """The sessions of the client."""
    return server.context.sessions.session_counts("ada")[0]


async def respond(server: Running, ada: AsyncOpenAI, text: str, **fields: Any) -> Any:
    """Create a response that the engine answers with ``text``."""
    response, _ = await asyncio.gather(ada.responses.create(**fields), send_answer(server, text))
    return response


async def texts(ada: AsyncOpenAI, name: str) -> list[tuple[str, str]]:
    """Return the roles and texts of all items of a conversation."""
    items = [item.to_dict() async for item in ada.conversations.items.list(name, order="asc")]
    return [(str(item["role"]), item["content"][0]["text"]) for item in items]  # type: ignore[index]


async def test_conversation_is_created_changed_and_deleted(server: Running, ada: AsyncOpenAI) -> None:
    """The calls are those of the package's documentation; the daemon's own metadata entry is hidden."""
    made = await ada.conversations.create(metadata={"topic": "demo"}, items=SAID[:1])
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert await ada.conversations.retrieve(made.id) == made
    changed = await ada.conversations.update(made.id, metadata={"topic": "other"})
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"topic": "other"})
    assert await texts(ada, made.id) == [("user", "Hi")]
    deleted = await ada.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(NotFoundError):
        await ada.conversations.retrieve(made.id)
    assert n_sessions(server) == 0


async def test_items_are_added_listed_and_retrieved(ada: AsyncOpenAI) -> None:
    """Pages follow each other in both orders."""
    made = await ada.conversations.create()
    added = await ada.conversations.items.create(made.id, items=SAID)
    assert (len(added.data), added.has_more, added.first_id) == (3, False, added.data[0].id)
    more = await ada.conversations.items.create(made.id, items=[{"role": "assistant", "content": "Again?"}])
    names = [item.id for item in (*added.data, *more.data)]
    assert len(set(names)) == 4
    assert [item.id async for item in ada.conversations.items.list(made.id, order="asc", limit=2)] == names
    assert [item.id async for item in ada.conversations.items.list(made.id, limit=3)] == names[::-1]
    found = await ada.conversations.items.retrieve(str(names[1]), conversation_id=made.id)
    assert found.to_dict() == added.data[1].to_dict()
    with pytest.raises(NotFoundError):
        await ada.conversations.items.retrieve("msg_x", conversation_id=made.id)


async def test_deleted_item_leaves_the_ids_of_others(server: Running, ada: AsyncOpenAI) -> None:
    """The metadata stays too, and the model is not given the item."""
    made = await ada.conversations.create(metadata={"topic": "demo"}, items=SAID[:2])
    first, second = [item.id async for item in ada.conversations.items.list(made.id, order="asc")]
    after = await ada.conversations.items.delete(str(first), conversation_id=made.id)
    assert after == made
    assert [item.id async for item in ada.conversations.items.list(made.id)] == [second]
    with pytest.raises(NotFoundError):
        await ada.conversations.items.delete(str(first), conversation_id=made.id)
    pending = asyncio.get_running_loop().create_task(ada.responses.create(input="And?", conversation=made.id))
    (turn,) = await begin_turns(server)
    assert text_of(server.engine.submission(turn)).count("Hi") == 0
    server.engine.finish(turn)
    await pending
    assert n_sessions(server) == 1


async def test_equal_items_are_deleted_by_their_own_ids(ada: AsyncOpenAI) -> None:
    """They can be deleted in any order until none is left."""
    made = await ada.conversations.create(items=SAID)
    names = [str(item.id) async for item in ada.conversations.items.list(made.id, order="asc")]
    for name in names:
        await ada.conversations.items.delete(name, conversation_id=made.id)
    assert await texts(ada, made.id) == []
    with pytest.raises(NotFoundError):
        await ada.conversations.items.retrieve(names[2], conversation_id=made.id)


async def test_items_of_calls_are_deleted_one_by_one(ada: AsyncOpenAI) -> None:
    """An answer's reasoning, text and calls are items of their own."""
    items: list[Any] = [
        {"role": "user", "content": "Look"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "id": "rs_1"},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "A cat"},
    ]
    made = await ada.conversations.create(items=items)
    found = [item async for item in ada.conversations.items.list(made.id, order="asc")]
    assert [item.type for item in found] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    await ada.conversations.items.delete(str(found[1].id), conversation_id=made.id)
    await ada.conversations.items.delete(str(found[2].id), conversation_id=made.id)
    left = [item async for item in ada.conversations.items.list(made.id, order="asc")]
    assert [item.id for item in left] == [found[0].id, found[3].id, found[4].id]


async def test_responses_continue_a_conversation(server: Running, ada: AsyncOpenAI) -> None:
    """Inputs and answers become items, in one session; each response names its conversation."""
    made = await ada.conversations.create()
    first = await respond(server, ada, "Hello", input="Hi", conversation=made.id)
    second = await respond(server, ada, "Fine", input="How are you?", conversation={"id": made.id}, store=False)
    assert first.conversation.id == second.conversation.id == made.id
    assert await texts(ada, made.id) == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "How are you?"),
        ("assistant", "Fine"),
    ]
    assert n_sessions(server) == 1
    assert (await ada.responses.retrieve(first.id)).conversation == first.conversation
    counted = await ada.responses.input_tokens.count(conversation=made.id, input="And?")
    assert counted.input_tokens > (await ada.responses.input_tokens.count(input="And?")).input_tokens


async def test_other_instructions_move_the_conversation(server: Running, ada: AsyncOpenAI) -> None:
    """They are no item and not carried over; earlier responses stay, and metadata too."""
    made = await ada.conversations.create(metadata={"topic": "demo"})
    first = await respond(server, ada, "Hello", input="Hi", conversation=made.id, instructions="Be brief.")
    assert n_sessions(server) == 1  # the empty one is closed
    pending = asyncio.get_running_loop().create_task(
        ada.responses.create(input="And?", conversation=made.id, instructions="Be kind.")
    )
    (turn,) = await begin_turns(server)
    prompt = text_of(server.engine.submission(turn))
    assert ("Be brief." in prompt, "Be kind." in prompt, "Hello" in prompt) == (False, True, True)
    server.engine.say(turn, "Well")
    server.engine.finish(turn)
    second = await pending
    said = [("user", "Hi"), ("assistant", "Hello"), ("user", "And?"), ("assistant", "Well")]
    assert await texts(ada, made.id) == said
    assert (await ada.responses.retrieve(first.id)).output_text == "Hello"
    assert (await ada.responses.retrieve(second.id)).output_text == "Well"
    assert await ada.conversations.retrieve(made.id) == made
    inputs = [item.to_dict() async for item in ada.responses.input_items.list(second.id, order="asc")]
    assert len(inputs) == 3


async def test_turn_that_cannot_start_leaves_the_conversation(
    server: Running, ada: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that was opened for it is closed."""
    made = await ada.conversations.create(items=SAID[:2])

    def refuse(_turn: object) -> int:
        raise InferenceCenterError(ErrorCode.RATE_LIMITED)

    monkeypatch.setattr(server.engine, "submit", refuse)
    with pytest.raises(RateLimitError):
        await ada.responses.create(input="And?", conversation=made.id, instructions="Be kind.")
    assert await texts(ada, made.id) == [("user", "Hi"), ("assistant", "Hello")]
    assert n_sessions(server) == 1


async def test_chain_of_responses_forks_a_conversation(server: Running, ada: AsyncOpenAI) -> None:
    """A response that only names the previous one does not become part of its conversation."""
    made = await ada.conversations.create()
    first = await respond(server, ada, "Hello", input="Hi", conversation=made.id)
    await respond(server, ada, "Fork", input="And?", previous_response_id=first.id)
    await respond(server, ada, "Well", input="Go on", conversation=made.id, instructions="Be kind.")
    said = [("user", "Hi"), ("assistant", "Hello"), ("user", "Go on"), ("assistant", "Well")]
    assert await texts(ada, made.id) == said


async def test_busy_conversation_is_not_changed(server: Running, ada: AsyncOpenAI) -> None:
    """Neither a response nor an item is added while one is in progress, and its response is not deleted."""
    made = await ada.conversations.create(items=SAID[:2])
    (item, *_) = [item.id async for item in ada.conversations.items.list(made.id)]
    pending = asyncio.get_running_loop().create_task(ada.responses.create(input="And?", conversation=made.id))
    (turn,) = await begin_turns(server)
    with pytest.raises(ConflictError):
        await ada.responses.create(input="Now?", conversation=made.id)
    with pytest.raises(ConflictError):
        await ada.conversations.items.create(made.id, items=SAID[:1])
    with pytest.raises(ConflictError):
        await ada.conversations.items.delete(str(item), conversation_id=made.id)
    server.engine.say(turn, "Well")
    server.engine.finish(turn)
    response = await pending
    with pytest.raises(BadRequestError) as refused:
        await ada.responses.delete(response.id)
    assert refused.value.param == "response_id"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"conversation": MISSING}, 404, "conversation"),
        ({"conversation": {"id": MISSING}}, 404, "conversation"),
        ({"conversation": {"id": "conv_1"}}, 400, "conversation.id"),
        ({"conversation": MISSING, "previous_response_id": "resp_" + "a" * 44}, 400, None),
    ],
)
async def test_response_of_no_conversation_is_refused(
    server: Running, body: dict[str, Any], status: int, param: str | None
) -> None:
    """No session is left."""
    answer = await post(server, PATH, {"input": "Hi", **body})
    assert (answer.status, answer.error["param"]) == (status, param)
    assert n_sessions(server) == 0


async def test_conversation_of_another_client_is_not_found(server: Running, ada: AsyncOpenAI) -> None:
    """It is not found even if the other client's metadata contains its id."""
    made = await ada.conversations.create(items=SAID)
    server.accounts.ensure_client("bob", max_sessions=8, priority="normal")
    bob = server.accounts.create_token("bob", name="test").token
    for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
        answer = await request(server, method, f"{CONVERSATIONS}/{made.id}{more}", token=bob)
        assert answer.status == 404
    assert (await post(server, PATH, {"input": "Hi", "conversation": made.id}, token=bob)).status == 404
    assert len(await texts(ada, made.id)) == 3


async def test_prefill_of_a_conversation_is_refused(server: Running, ada: AsyncOpenAI) -> None:
    """The prefilled text would become an item."""
    made = await ada.conversations.create(items=SAID)
    async with socket(server) as connection:
        await send(connection, input="Hi", conversation=made.id, generate=False)
        frame = await receive(connection, "error")
    assert (frame["status"], frame["error"]["param"]) == (400, "generate")


async def test_conversation_over_a_websocket(server: Running, ada: AsyncOpenAI) -> None:
    """Its responses name it, and their items are added."""
    made = await ada.conversations.create()
    async with socket(server) as connection:
        await send(connection, input="Hi", conversation=made.id, instructions="Be kind.")
        await send_answer(server, "Hello")
        done = await receive(connection, "response.completed")
    assert done["response"]["conversation"] == {"id": made.id}
    assert await texts(ada, made.id) == [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [*SAID] * 7}, "items"),
        ("", {"metadata": {str(index): "" for index in range(16)}}, "metadata"),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items.0"),
        ("/items", {"items": []}, "items"),
        ("/items", {"items": [{"type": "reasoning", "summary": []}]}, "items"),
    ],
)
async def test_invalid_items_are_refused(
    server: Running, ada: AsyncOpenAI, path: str, body: dict[str, Any], param: str
) -> None:
    """The conversation is unchanged."""
    where = f"/{(await ada.conversations.create()).id}{path}" if path else ""
    answer = await post(server, CONVERSATIONS + where, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_number_of_conversations_is_bounded(serve: Serve) -> None:
    """They count as sessions, whose number the client's account limits."""
    async with serve(journal=StubJournal()) as server:
        answers = [await post(server, CONVERSATIONS, {}) for _ in range(9)]
    assert [answer.status for answer in answers] == [200] * 8 + [429]


async def test_changes_count_as_operations(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as those of sessions do; adding a whole conversation counts once more."""
    charged: list[str] = []
    monkeypatch.setattr(server.context.operations, "charge", lambda client_id, **_: charged.append(client_id))
    made = (await post(server, CONVERSATIONS, {})).json["id"]
    await post(server, f"{CONVERSATIONS}/{made}", {"metadata": {}})
    assert (await post(server, f"{CONVERSATIONS}/{made}/items", {"items": SAID[:1]})).status == 200
    assert charged == ["ada"] * 4


async def test_reading_a_conversation_counts_by_its_size(
    server: Running, ada: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items are listed, added to and deleted in time that grows with the whole of it."""
    long: Any = {**SAID[0], "content": "x" * 200_000}
    made = await ada.conversations.create(items=[*SAID, long])
    charge, charged = OperationRateLimiter.charge, 0

    def noting(limiter: OperationRateLimiter, client_id: str, *, n_chars: int = 0, n_frame_chars: int = 0) -> None:
        nonlocal charged
        charged += n_chars
        charge(limiter, client_id, n_chars=n_chars, n_frame_chars=n_frame_chars)

    monkeypatch.setattr(OperationRateLimiter, "charge", noting)
    (first, *_) = (await ada.conversations.items.list(made.id, order="asc")).data
    assert first.id is not None
    await ada.conversations.items.retrieve(first.id, conversation_id=made.id)
    await ada.conversations.items.create(made.id, items=SAID[:1])
    await ada.conversations.items.delete(first.id, conversation_id=made.id)
    assert charged >= 4 * 200_000


async def test_conversation_is_changed_without_a_copy_of_it(ada: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retrieval, update and deletion count as one operation, so their cost must not depend on the length."""
    made = await ada.conversations.create(items=SAID)
    copied: list[SessionSnapshot] = []
    monkeypatch.setattr(SessionSnapshot, "describe", lambda snapshot, _: copied.append(snapshot))
    monkeypatch.setattr(StoredConversation, "messages", property(lambda found: copied.append(found.session)))
    assert await ada.conversations.retrieve(made.id) == made
    await ada.conversations.update(made.id, metadata={"topic": "other"})
    await ada.conversations.delete(made.id)
    assert copied == []


async def test_reply_waits_until_the_conversation_is_stored(serve: Serve) -> None:
    """A conversation that a client knows survives the daemon."""
    journal = StubJournal()
    async with serve(journal=journal) as server:
        journal.holding = True
        pending = asyncio.get_running_loop().create_task(post(server, CONVERSATIONS, {}))
        async with asyncio.timeout(60):
            while not n_sessions(server):
                await tick()
        await tick(10)
        assert not pending.done()
        journal.run_callbacks()
        assert (await pending).status == 200
