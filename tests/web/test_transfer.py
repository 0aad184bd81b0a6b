"""Export and import of conversations."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, barriers, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS

CALL = {"call_id": "c1", "name": "look_up", "arguments": '{"key": "hash"}'}
MESSAGES = [
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "I do.", "tool_calls": [CALL]},
    {"role": "tool", "content": "```\n42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 42."},
]


async def exported(visit: Visit, name: str) -> tuple[str, str]:
    """Press a button; return the name and the text of the file that the browser saves."""
    async with visit.page.expect_download() as saved:
        await visit.button(name).click()
    download = await saved.value
    saved_at = await download.path()
    return download.suggested_filename, await asyncio.to_thread(saved_at.read_text, encoding="utf-8")


async def test_export_and_import(browser: Browser, echo: Daemon) -> None:
    """An exported conversation is imported with all its messages."""
    async with connect_client(echo) as client:
        session = await client.create(system="Be brief.", metadata={"title": "A table / of hashes"})
        assert (await client.ask(op="append", session_id=session, messages=MESSAGES))["op"] == "appended"
        before = await client.ask(op="get_session", session_id=session)
    async with signed_in(browser, echo) as visit:
        await visit.go(f"#/c/{session}")
        await expect(visit.answers.last).to_contain_text("It is 42.")
        await visit.button("Conversation settings").click()
        name, markdown = await exported(visit, "Export as Markdown")
        assert name == "A-table-of-hashes.md"
        assert markdown.startswith(
            "# A table / of hashes\n\n## System\n\nBe brief.\n\n## You\n\nLook it up.\n\n## Answer\n\n"
        )
        assert "## Tool output\n\n````\n```\n42\n````\n" in markdown
        name, text = await exported(visit, "Export as JSON")
        assert name == "A-table-of-hashes.json"
        (one,) = json.loads(text)["conversations"]
        assert one["messages"] == before["transcript"]
        _, everything = await exported(visit, "Export all as JSON")
        assert one in json.loads(everything)["conversations"]
        assert await barriers(visit) == []
        renamed: dict[str, Any] = {**json.loads(text), "conversations": [{**one, "title": "Imported"}]}
        chosen = visit.page.get_by_label("File to import")
        await chosen.set_input_files(
            {"name": "a.json", "mimeType": "application/json", "buffer": b'{"conversations": 1}'}
        )
        status = visit.page.get_by_role("complementary").get_by_role("status").last
        await expect(status).to_contain_text("no list named")
        content = json.dumps(renamed).encode()
        await chosen.set_input_files({"name": "b.json", "mimeType": "application/json", "buffer": content})
        await expect(status).to_have_text("1 conversation imported.")
        await visit.button("Close the settings").click()
        await visit.conversation("Imported").click()
        await expect(visit.answers.last).to_contain_text("It is 42.")
        async with connect_client(echo) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert told["transcript"] == before["transcript"]
