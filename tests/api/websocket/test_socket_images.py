"""Images in frames."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any

from tests.server.harness import ask, receive
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    import pytest

    from tests.server.harness import Running

RED = image_file()
DATA = base64.b64encode(RED).decode()


def question(*parts: dict[str, str]) -> list[Any]:
    """A message of parts."""
    return [{"role": "user", "content": list(parts)}]


async def test_faults_are_named_by_their_place_in_the_frame(server: Running) -> None:
    """Without the names of the forms that a message may have."""
    async with server.v1() as socket:
        await receive(socket)
        session = (await ask(socket, op="create_session"))["session_id"]
        for part, field in (
            ({"type": "image"}, "messages.0.content.0"),
            ({"type": "image", "data": "!"}, "messages.0.content.0.data"),
            ({"type": "image", "digest": "x"}, "messages.0.content.0.digest"),
            ({"type": "sound"}, "messages.0.content.0"),
            ({"type": "text"}, "messages.0.content.0.text"),
        ):
            error = await ask(socket, op="infer", session_id=session, messages=question(part))
            assert (error["op"], error["code"], error["field"]) == ("error", "invalid_request", field)


async def test_session_that_is_closed_while_an_image_is_decoded_keeps_none(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of a session that is not stored would stay in memory."""
    sessions = server.context.sessions
    resolve = sessions.images.resolve

    async def closing(owner: Any, messages: Any) -> Any:
        sessions.purge("session", owner.session_id)
        return await resolve(owner, messages)

    monkeypatch.setattr(sessions.images, "resolve", closing)
    async with server.v1() as socket:
        await receive(socket)
        session = (await ask(socket, op="create_session", store=False))["session_id"]
        messages = question({"type": "image", "data": DATA})
        error = await ask(socket, op="infer", session_id=session, messages=messages)
        while error["op"] != "error":  # the session's own end comes first
            error = await receive(socket)
        assert error["code"] == "session_not_found"
        image = await ask(socket, op="get_image", digest=hashlib.sha256(RED).hexdigest())
    assert (image["op"], image["field"]) == ("error", "digest")
