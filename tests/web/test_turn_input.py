"""Parameters and tool results that a user enters in a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, barriers, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

GREEDY: Final = {"temperature": 0.0, "max_tokens": 64}
WEATHER: Final[dict[str, Any]] = {
    "name": "get_weather",
    "description": "Get the current weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


async def test_tool_result_form(browser: Browser, daemon: Daemon) -> None:
    """The form is under the call, also after a reload, and closes when the result is sent to the model."""
    question = "What is the weather in Oslo?"
    async with connect_client(daemon) as client:
        session = await client.create(params=GREEDY)
        await client.send(op="infer", session_id=session, prompt=question, tools=[WEATHER])
        await client.until(lambda message: message["op"] == "end")
    async with signed_in(browser, daemon) as visit:
        await visit.go(f"#/c/{session}")
        field = visit.page.get_by_label("Output of get_weather")
        await expect(field).to_be_visible()
        await expect(visit.button("Send output")).to_be_disabled()
        await visit.page.reload()
        await field.fill('{"temperature": 21, "sky": "sunny"}')
        assert await barriers(visit) == []
        await visit.button("Send output").click()
        answer = await visit.answered(count=2)
        await expect(answer).to_contain_text("21")
        await expect(field).to_have_count(0)
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=session)
        said = told["transcript"]
        assert [each["role"] for each in said] == ["user", "assistant", "tool", "assistant"]
        assert said[2]["tool_call_id"] == said[1]["tool_calls"][0]["call_id"]
        assert said[2]["content"] == '{"temperature": 21, "sky": "sunny"}'


async def test_effective_parameters_are_shown(browser: Browser, daemon: Daemon) -> None:
    """An open conversation shows its session's own parameters, a new chat the defaults of the last one."""
    async with connect_client(daemon) as client:
        session = await client.create(params={"temperature": 0.3, "max_tokens": 77})
        plain = await client.ask(op="get_session", session_id=await client.create())
    async with signed_in(browser, daemon) as visit:
        settings = visit.page.get_by_role("complementary", name="Conversation settings")
        await visit.go(f"#/c/{session}")
        await visit.button("Conversation settings").click()
        await expect(settings.get_by_label("Max tokens", exact=True)).to_have_attribute("placeholder", "77")
        await expect(settings.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", "0.3")
        await visit.page.get_by_role("navigation").get_by_role("button", name="New chat").click()
        await visit.ask("Count from 1 to 3.")
        await visit.answered()
        await visit.page.get_by_role("navigation").get_by_role("button", name="New chat").click()
        await visit.button("Conversation settings").click()
        expected = str(plain["params"]["temperature"])
        await expect(settings.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", expected)
