"""Endpoints of llama-server that user interfaces read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.ipc.port import EngineState
from tests.api.http_client import post, request
from tests.server.harness import ready

if TYPE_CHECKING:
    from tests.server.harness import Running

PATH = "/apply-template"
HI = {"role": "user", "content": "Hi"}


async def test_props_describe_the_default_model(server: Running) -> None:
    """They have its context length, slots, template and default parameters, and its file's name without the path."""
    found = (await request(server, "GET", "/props")).json
    assert found["default_generation_settings"]["n_ctx"] == 4096
    assert found["default_generation_settings"]["params"]["top_k"] == 40
    assert (found["total_slots"], found["model_alias"], found["model_path"]) == (4, "stub", "stub.gguf")
    assert found["modalities"] == {"vision": False, "audio": False}


async def test_slots_show_how_many_are_in_use(server: Running) -> None:
    """The first slots are shown as those of the running turns."""
    server.engine.become(ready(running=1))
    found = (await request(server, "GET", "/slots")).json
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in found] == [
        (0, 4096, True),
        (1, 4096, False),
        (2, 4096, False),
        (3, 4096, False),
    ]


@pytest.mark.parametrize("path", ["/props", "/slots"])
async def test_model_that_is_not_loaded_has_no_properties(server: Running, path: str) -> None:
    """The status is 503, as llama-server's."""
    server.engine.become(ready(model=None, state=EngineState.STARTING))
    answer = await request(server, "GET", path)
    assert (answer.status, answer.error["code"]) == (503, "model_loading")


async def test_template_is_applied_without_an_answer(server: Running) -> None:
    """The prompt has the tools and the start of the answer, and no session is created."""
    tools = [{"type": "function", "function": {"name": "add_up"}}]
    answer = await post(server, PATH, {"messages": [HI, {"role": "assistant", "content": "Sure"}], "tools": tools})
    prompt = answer.json["prompt"]
    assert "add_up" in prompt
    assert prompt.endswith("<|im_start|>assistant\nSure")
    assert server.context.sessions.session_ids() == ()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [({}, 400, "messages"), ({"messages": [HI], "model": "gpt-99"}, 404, "model")],
)
async def test_invalid_conversation_is_refused(server: Running, body: dict[str, Any], status: int, param: str) -> None:
    """The error is that of chat completions."""
    answer = await post(server, PATH, body)
    assert (answer.status, answer.error["param"]) == (status, param)


@pytest.mark.parametrize("path", ["/props", "/slots"])
async def test_model_that_a_token_may_not_use_is_not_described(server: Running, path: str) -> None:
    """Limits of a token apply to its description too."""
    server.accounts.limit_token(server.token_id, AccessLimits(models=("other",)))
    server.context.tokens_changed()
    assert (await request(server, "GET", path)).status == 403
