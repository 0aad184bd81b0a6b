"""Tests of what the page costs: bytes before it is seen, and work while a long answer grows."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.web.browser import MARKS, bare, origin_of, said, visiting
from tests.web.frames import CATEGORIES, script_ms
from tests.web.stub import Stub

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS
logger = logging.getLogger(__name__)

FIRST_PAINT_BYTES = 150 * 1024
FRAME_MS = 16
TOKENS = 10_000
PARTS = (
    "Some words with **weight** and `code` that go on for a line or two before they end. ",
    "and on they go.\n\n",
    "- an item\n- another one\n- and a third\n\n",
    "```python\nfor x in range(10):\n    print(x, x * x)\n```\n\n",
    "| a | b |\n| - | - |\n| 1 | 2 |\n| 3 | 4 |\n\n",
)


def long_answer() -> list[str]:
    """Return an answer of thousands of tokens, some at once as a daemon sends them, with some of everything in it."""
    tokens: Iterator[str] = itertools.cycle(word + " " for part in PARTS for word in part.split(" "))
    return ["".join(itertools.islice(tokens, 4)) for _ in range(TOKENS // 4)]


async def test_the_first_paint_is_light(browser: Browser, echo: Daemon) -> None:
    """From an empty cache to a conversation that one can write in; and from a full one next to nothing is fetched."""
    async with visiting(browser, origin_of(echo)) as visit:
        session = await visit.page.context.new_cdp_session(visit.page)
        received: list[float] = []
        session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        await session.send("Network.enable")
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.composer).to_be_visible()
        await visit.page.wait_for_load_state("networkidle")
        cold = sum(received)
        assert 10 * 1024 < cold <= FIRST_PAINT_BYTES, f"{len(received)} files, {cold / 1024:.0f} KiB"
        received.clear()
        await visit.page.reload()
        await expect(visit.composer).to_be_visible()
        await visit.page.wait_for_load_state("networkidle")
        assert sum(received) < FIRST_PAINT_BYTES / 10


async def test_a_long_answer_scrolls(browser: Browser, echo: Daemon) -> None:
    """10,000 tokens: the end stays in view, except for who reads further up; most frames have time to spare."""
    answer = long_answer()
    stub = Stub()
    async with visiting(browser, origin_of(echo)) as visit:
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await visit.ask("Tell me everything.")
        await browser.start_tracing(page=visit.page, categories=CATEGORIES)
        await stub.give(answer, burst=5, pause_s=0.016)
        shown = await visit.answered()
        spent = script_ms(await browser.stop_tracing())
        figures = tuple(round(spent[len(spent) * part // 100], 1) for part in (50, 90, 99))
        logger.info("CPU ms of script in %d frames: p50 %s, p90 %s, p99 %s, most %s", len(spent), *figures, spent[-1])
        assert figures[0] <= FRAME_MS
        left = "(each) => each.scrollHeight - each.scrollTop - each.clientHeight"
        messages = visit.page.get_by_role("region", name="Messages")
        assert await messages.evaluate(left) < 2
        await messages.hover()
        await visit.page.mouse.wheel(0, -2000)
        await expect(visit.button("To the end")).to_be_visible()
        await visit.button("To the end").click()
        await expect(visit.button("To the end")).to_have_count(0)
        assert await messages.evaluate(left) < 2
        words = bare("".join(answer)).replace("python", "")
        assert bare(await said(shown)).replace("python", "").replace("Copy", "") == words
