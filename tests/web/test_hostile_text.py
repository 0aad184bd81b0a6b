"""Hostile text in a browser has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, Visit, origin_of, signed_in, visiting
from tests.web.vectors import VECTORS

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

    from tests.e2e.harness import Daemon

pytestmark = MARKS

LAID_OUT = Path(__file__).parent / "harm.js"
FEW = VECTORS[::8]
"""Enough to be streamed: all prefixes of all of them are rendered without a daemon."""


async def harmless(visit: Visit) -> None:
    """Assert that answers contain only text and formatting, and that no script ran."""
    found: Any = await visit.page.evaluate("() => [...document.querySelectorAll('.prose')].flatMap(harm)")
    assert found == []
    assert await visit.page.evaluate("() => hits") == 0


async def test_markdown_is_sanitized(browser: Browser, echo: Daemon) -> None:
    """Every vector, whole and character by character, leaves only harmless elements, attributes and URLs."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.add_init_script(path=LAID_OUT)
        await visit.go()
        found: Any = await visit.page.evaluate("(texts) => harmOf(texts)", list(VECTORS))
        assert found == []
        await harmless(visit)


async def test_streamed_vectors_are_harmless(browser: Browser, echo: Daemon) -> None:
    """An answer of many vectors, streamed byte by byte and shown again after a reload, does no harm."""
    async with signed_in(browser, echo) as visit:
        await visit.page.add_init_script(path=LAID_OUT)
        await visit.page.reload()
        await visit.ask("\n\n".join(FEW))
        await expect(visit.answers.first.locator(".prose")).not_to_be_empty()
        await harmless(visit)
        answer = await visit.answered()
        await expect(answer).to_contain_text("hit()")
        await harmless(visit)
        await visit.page.reload()
        await visit.answered()
        await harmless(visit)


async def test_other_untrusted_text_is_plain(browser: Browser, echo: Daemon) -> None:
    """Questions, system prompts, reasoning, tool names, arguments, results and titles become no elements."""
    trap = "<img src=x onerror=hit()><script>hit()</script>"
    call = {"call_id": f"call-1{trap}", "name": "look", "arguments": f'{{"a": "{trap}"}}'}
    history = [
        {"role": "user", "content": trap},
        {"role": "assistant", "content": trap, "reasoning": trap, "tool_calls": [call]},
        {"role": "tool", "content": trap, "tool_call_id": call["call_id"]},
        {"role": "assistant", "content": "\n\n".join(VECTORS)},
    ]
    async with connect_client(echo) as client:
        session = await client.create(system=trap, metadata={"title": trap})
        told = await client.ask(op="append", session_id=session, messages=history)
        assert told["op"] == "appended", told
    async with signed_in(browser, echo) as visit:
        await visit.page.add_init_script(path=LAID_OUT)
        await visit.go(f"#/c/{session}")
        await visit.page.reload()
        await expect(visit.conversation(trap)).to_be_visible()
        await expect(visit.questions.first).to_contain_text(trap)
        await visit.button("Conversation settings").click()
        await expect(visit.page.get_by_role("complementary")).to_contain_text(trap)
        await harmless(visit)
        assert (
            await visit.page.locator(
                "img, iframe, object, embed, form:not(.composer, .preset-form), main script"
            ).count()
            == 0
        )


async def test_content_security_policy(browser: Browser, echo: Daemon) -> None:
    """The browser refuses scripts, handlers, eval, HTML from strings, other sites and frames."""
    async with visiting(browser, origin_of(echo)) as visit:
        visit.expected = "violates|requires|blocked|elsewhere: https://evil.test"
        await visit.page.add_init_script(path=LAID_OUT)
        await visit.go()
        told: list[str] = await visit.page.evaluate("() => misbehave()")
        assert [each for each in told if each.startswith("allowed")] == []
        assert set(told) >= {
            "base-uri",
            "connect-src",
            "form-action",
            "frame-src",
            "img-src",
            "require-trusted-types-for",
        }
        await harmless(visit)


async def test_other_origins_are_refused(browser: Browser, echo: Daemon) -> None:
    """They open no socket to the daemon, and cannot frame its page."""

    async def serve_evil(route: Route) -> None:
        await route.fulfill(content_type="text/html", body=f"<iframe src='{origin_of(echo)}/'></iframe>")

    async with visiting(browser, "http://evil.test") as visit:
        visit.expected = "WebSocket connection|frame-ancestors|elsewhere: (http|ws)://127"
        await visit.page.route("http://evil.test/", serve_evil)
        async with visit.page.expect_event("requestfailed") as refused:
            await visit.go()
        assert (await refused.value).failure == "net::ERR_BLOCKED_BY_RESPONSE"
        heard: Any = await visit.page.evaluate(
            """(url) => new Promise((heard) => {
              const socket = new WebSocket(url, "inferencecenter.v1");
              socket.onmessage = ({ data }) => heard(data);
              socket.onclose = () => heard(null);
            })""",
            echo.url,
        )
        assert heard is None
