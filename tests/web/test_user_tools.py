"""Tools that the user defines in the page: checked, offered, answered by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.mcp.daemon import declared, mcp_daemon
from tests.mcp.serving import CallFile, serve
from tests.web.browser import MARKS, PHONE, barriers, signed_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.async_api import Browser, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose answers call the tool get_weather, and that has a server with another tool of this name."""
    calls = CallFile(tmp_path_factory.mktemp("mcp") / "calls")
    with serve(calls) as (_, port), mcp_daemon(tmp_path_factory.mktemp("daemon"), declared(port)) as running:
        yield running


def drawer(visit: Visit) -> Locator:
    """The settings of the conversation."""
    return visit.page.get_by_role("complementary", name="Conversation settings")


async def fill(visit: Visit, name: str, schema: str, description: str = "") -> None:
    """Fill in the form of a tool and save it."""
    await drawer(visit).get_by_label("Name of the tool").fill(name)
    await drawer(visit).get_by_label("Description for the model").fill(description)
    await drawer(visit).get_by_label("Arguments (JSON schema)").fill(schema)
    await visit.button("Save the tool").click()


async def define(visit: Visit, name: str, schema: str, description: str = "") -> None:
    """Define a tool in the open settings."""
    await visit.button("Define a tool").click()
    await fill(visit, name, schema, description)
    await expect(drawer(visit).get_by_role("checkbox", name=name, exact=True)).to_be_checked()


@pytest.mark.parametrize("language", ["en", "de"])
async def test_defined_tool_is_called_and_answered(browser: Browser, scripted: Daemon, language: str) -> None:
    """The model's call is shown, its output entered by hand, and the model continues with it; also after a reload."""
    async with signed_in(browser, scripted, viewport=PHONE) as visit:
        await visit.button("Conversation settings").click()
        await define(visit, "get_weather", json.dumps(SCHEMA), "The weather of a city.")
        await expect(drawer(visit)).to_contain_text("The weather of a city.")
        assert await barriers(visit) == []
        await visit.button("Close the settings").click()
        await expect(visit.button("Tools: get_weather")).to_be_visible()
        await visit.ask("weather in Oslo")
        await visit.answered()
        words = ["Called get_weather", "Output of get_weather", "Tool output (text or JSON)", "Send output"]
        words.append("The model will continue with this.")
        if language == "de":
            session = visit.session_id()
            await visit.page.evaluate("() => localStorage.setItem('inferencecenter.language', '\"de\"')")
            await visit.page.reload()
            assert visit.session_id() == session
            words = ["get_weather aufgerufen", "Ausgabe von get_weather", "Ausgabe des Werkzeugs (Text oder JSON)"]
            words += ["Ausgabe senden", "Das Modell fährt damit fort."]
        called, label, placeholder, send, hint = words
        await expect(visit.page.get_by_text(called)).to_be_visible()
        await expect(visit.page.get_by_text(hint)).to_be_visible()
        output = visit.page.get_by_label(label)
        await expect(output).to_have_attribute("placeholder", placeholder)
        assert await barriers(visit) == []
        await output.fill("-3 °C")
        await visit.button(send).click()
        await expect(visit.page.get_by_text("So it is.", exact=True)).to_be_visible()
        async with connect_client(scripted) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert [each["content"] for each in told["transcript"] if each["role"] == "tool"] == ["-3 °C"]


async def test_wrong_definitions_are_explained(browser: Browser, scripted: Daemon) -> None:
    """The field with the error has the focus; the input stays, and nothing is saved."""
    wrong = {
        ("two words", ""): ("Name of the tool", "letters, digits"),
        ("", ""): ("Name of the tool", "letters, digits"),
        ("look_up", ""): ("Name of the tool", "There is already a tool look_up."),
        ("a", "{"): ("Arguments (JSON schema)", "Not valid JSON"),
        ("a", "[1]"): ("Arguments (JSON schema)", "must be that of an object"),
        ("a", '{"type": "string"}'): ("Arguments (JSON schema)", "must be that of an object"),
        ("a", '{"type": "object", "properties": ["b"]}'): ("Arguments (JSON schema)", "properties must be an object"),
        ("a", '{"type": "object", "required": ["b"]}'): ("Arguments (JSON schema)", 'required: "b" is not in'),
        ("a", '{"type": "object", "properties": {"b": {"items": {"type": "text"}, "type": "array"}}}'): (
            "Arguments (JSON schema)",
            'properties.b.items.type: "text" is not a type.',
        ),
    }
    async with signed_in(browser, scripted) as visit:
        await visit.button("Conversation settings").click()
        await define(visit, "look_up", "")
        await visit.button("Define a tool").click()
        for (name, schema), (label, words) in wrong.items():
            await fill(visit, name, schema)
            await expect(drawer(visit).get_by_role("alert")).to_contain_text(words)
            await expect(drawer(visit).get_by_label(label)).to_be_focused()
            await expect(drawer(visit).get_by_label(label)).to_have_attribute("aria-invalid", "true")
        assert await barriers(visit) == []
        await visit.page.keyboard.press("Escape")
        await expect(visit.button("Define a tool")).to_be_focused()
        await expect(drawer(visit).get_by_role("checkbox", name="look_up")).to_have_count(1)
        await expect(drawer(visit).get_by_role("checkbox", name="a", exact=True)).to_have_count(0)


async def test_tools_belong_to_their_conversation(browser: Browser, scripted: Daemon) -> None:
    """They survive a reload and are changed, disallowed and deleted there; what is disallowed is not offered."""
    async with signed_in(browser, scripted) as visit:
        await visit.ask("Hello.")
        await visit.answered()
        await visit.button("Conversation settings").click()
        await define(visit, "get_weather", json.dumps(SCHEMA))
        await visit.page.reload()
        await visit.button("Clear: Tools: get_weather").click()
        await expect(visit.button("Tools: get_weather")).to_have_count(0)
        await visit.ask("weather in Oslo")
        await expect((await visit.answered(count=2)).get_by_text("Called")).to_have_count(0)
        await visit.button("Conversation settings").click()
        box = drawer(visit).get_by_role("checkbox", name="get_weather", exact=True)
        await expect(box).not_to_be_checked()
        await box.check()
        await visit.button("Edit get_weather").click()
        assert json.loads(await drawer(visit).get_by_label("Arguments (JSON schema)").input_value()) == SCHEMA
        await fill(visit, "get_rain", json.dumps(SCHEMA))
        await expect(drawer(visit).get_by_role("checkbox", name="get_rain", exact=True)).to_be_checked()
        await expect(box).to_have_count(0)
        await visit.button("New chat").click()
        await expect(visit.button("Tools: get_rain")).to_have_count(0)
        await visit.conversation("Hello.").first.click()
        await visit.button("Conversation settings").click()
        await visit.button("Delete get_rain").click()
        await expect(visit.button("Define a tool")).to_be_focused()
        await expect(visit.button("Tools: get_rain")).to_have_count(0)


async def test_tool_of_a_server_does_not_run_for_one_of_the_user(browser: Browser, scripted: Daemon) -> None:
    """Both have the same name; the call is answered by hand."""
    async with signed_in(browser, scripted) as visit:
        await visit.button("Conversation settings").click()
        await define(visit, "get_weather", json.dumps(SCHEMA))
        await drawer(visit).get_by_role("checkbox", name="weather", exact=True).check()
        await visit.button("Close the settings").click()
        await expect(visit.button("Tools: weather, get_weather")).to_be_visible()
        await visit.ask("weather in Oslo")
        await visit.page.get_by_label("Output of get_weather").fill("mine")
        await visit.button("Send output").click()
        await expect(visit.page.get_by_text("So it is.", exact=True)).to_be_visible()


async def test_preset_has_the_allowed_tools(browser: Browser, scripted: Daemon) -> None:
    """It brings them to another conversation, whose own tools are kept, but not allowed."""
    async with signed_in(browser, scripted) as visit:
        await visit.button("Conversation settings").click()
        await define(visit, "get_weather", json.dumps(SCHEMA), "The weather.")
        await define(visit, "other", "")
        await drawer(visit).get_by_role("checkbox", name="other").uncheck()
        await drawer(visit).get_by_label("Name of the preset").fill("Weather")
        await visit.button("Save").click()
        await expect(visit.page.get_by_text("Weather is saved.")).to_be_visible()
        async with connect_client(scripted) as client:
            (kept,) = (await client.ask(op="list_presets"))["presets"]
        tool = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
        assert kept["tools"] == [tool]
        await visit.button("Delete get_weather").click()
        await drawer(visit).get_by_role("checkbox", name="other").check()
        await visit.button("Use Weather").click()
        await expect(drawer(visit).get_by_role("checkbox", name="get_weather", exact=True)).to_be_checked()
        await expect(drawer(visit).get_by_role("checkbox", name="other")).not_to_be_checked()
        await expect(drawer(visit)).to_contain_text("The weather.")
