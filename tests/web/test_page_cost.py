"""The cost of the page: bytes before the first paint, and work per update."""

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
MOST_REQUESTS = 60
TOKENS = 10_000
STORED = {
    "op": "session_resumed", "session_id": "s1", "resumed": False, "reason": "no_position", "state": "idle",
    "epoch": "e1", "seq": 9, "turns": [{"turn_id": "t1", "finish_reason": "stop", "messages": 2}],
}  # fmt: skip
PARTS = (
    "Some words with **weight** and `code` that go on for a line or two before they end. ",
    "and on they go.\n\n",
    "- an item\n- another one\n- and a third\n\n",
    "```python\nfor x in range(10):\n    print(x, x * x)\n```\n\n",
    "| a | b |\n| - | - |\n| 1 | 2 |\n| 3 | 4 |\n\n",
)


def long_answer() -> list[str]:
    """Return an answer of thousands of tokens with every kind of content, some tokens merged."""
    tokens: Iterator[str] = itertools.cycle(word + " " for part in PARTS for word in part.split(" "))
    return ["".join(itertools.islice(tokens, 4)) for _ in range(TOKENS // 4)]


def log_frames(when: str, spent: list[float]) -> None:
    """Log the duration of frames; it depends on the machine, so it is not asserted."""
    figures = [round(spent[len(spent) * part // 100], 1) for part in (50, 90, 99)]
    logger.info("%s: CPU ms of script in %d frames: p50 %s, p90 %s, p99 %s", when, len(spent), *figures)
    logger.info("%s: most %s", when, spent[-1])


async def test_first_paint_is_small(browser: Browser, echo: Daemon) -> None:
    """The cache is empty; with a full one hardly any bytes are loaded."""
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
        logger.info("%d files, %.1f KiB", len(received), cold / 1024)
        assert len(received) <= MOST_REQUESTS
        received.clear()
        await visit.page.reload()
        await expect(visit.composer).to_be_visible()
        await visit.page.wait_for_load_state("networkidle")
        assert sum(received) < FIRST_PAINT_BYTES / 10


SENTENCE = "Some words with **weight** and `code` that go on, see [here](https://example.org), for a line or two. "
BLOCKS = {
    "paragraph": (SENTENCE,),
    "list": ("- an item with **weight** and `code`\n", "- another\n"),
    "table": ("| a | b |\n| - | - |\n", *["| one **row** | and `more` of it |\n"] * 1000),
    "quote": ("> Some words with **weight**\n> and more.\n>\n",),
    "code": ("```python\n", *["for x in range(10):\n    print(x, x * x)  # a comment\n"] * 1000),
}
"""Each of one block that never ends."""
CHARS = 20_000
WORK = """async (texts) => {
  const main = document.querySelector("script[type=module]").src;
  const { Lexer } = await import(new URL("../vendor/marked.js", main));
  const { MarkdownView } = await import(new URL("text/markdown.js", main));
  let read = 0;
  for (const name of ["blockTokens", "inlineTokens"]) {
    const own = Lexer.prototype[name];
    Lexer.prototype[name] = function (text, ...rest) {
      read += text.length;
      return own.call(this, text, ...rest);
    };
  }
  const measured = (work, root, noted) => {
    const seen = new MutationObserver(() => {});
    seen.observe(root, { childList: true, subtree: true });
    read = 0;
    for (const _ of work) noted();
    const added = seen.takeRecords().flatMap(({ addedNodes }) => [...addedNodes]);
    return added.reduce((n, node) => n + 1 + (node.querySelectorAll?.("*").length ?? 0), 0);
  };
  return texts.map((text) => {
    const root = document.createElement("div");
    const view = new MarkdownView(root);
    const updates = [];
    for (let end = 100; end <= text.length; end += 100) {
      const made = measured(view.showing(text.slice(0, end), false), root, () => {});
      updates.push([read, made]);
    }
    const steps = [];
    const once = document.createElement("div");
    measured(new MarkdownView(once).showing(text, true), once, () => {
      steps.push(read);
      read = 0;
    });
    return { updates, steps };
  });
}"""
MOST_READ = 16_000
MOST_MADE = 400


async def test_update_cost_is_bounded(browser: Browser, echo: Daemon) -> None:
    """However long a block is, an update parses and creates a bounded part of it."""
    texts = ["".join(itertools.islice(itertools.cycle(parts), CHARS))[:CHARS] for parts in BLOCKS.values()]
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go()
        found = await visit.page.evaluate(WORK, texts)
    for name, each in zip(BLOCKS, found, strict=True):
        read, made = (max(column) for column in zip(*each["updates"], strict=True))
        logger.info("%s: at most %d characters read and %d nodes made", name, read, made)
        assert read <= MOST_READ, name
        assert made <= MOST_MADE, name
        assert len(each["steps"]) > CHARS / 4000, name
        assert max(each["steps"]) <= MOST_READ, name


async def test_long_answer_scrolls(browser: Browser, echo: Daemon) -> None:
    """10,000 tokens: the end stays in view unless the user scrolls up."""
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
        log_frames("while it comes", spent)
        left = "(each) => each.scrollHeight - each.scrollTop - each.clientHeight"
        messages = visit.page.get_by_role("region", name="Messages")
        assert await messages.evaluate(left) < 2
        await messages.hover()
        await visit.page.mouse.wheel(0, -2000)
        await expect(visit.button("Scroll to the end")).to_be_visible()
        await visit.button("Scroll to the end").click()
        await expect(visit.button("Scroll to the end")).to_have_count(0)
        assert await messages.evaluate(left) < 2
        assert letters_of(await said(shown)) == letters_of("".join(answer))


async def test_long_answer_opens(browser: Browser, echo: Daemon) -> None:
    """10,000 stored tokens are shown completely, with the end in view."""
    text = "".join(long_answer())
    messages = [{"role": "user", "content": "Tell me everything."}, {"role": "assistant", "content": text}]
    stored = {**STORED, "transcript": messages}
    stub = Stub(answers={"resume_session": lambda asked: stored})
    async with visiting(browser, origin_of(echo)) as visit:
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await browser.start_tracing(page=visit.page, categories=CATEGORIES)
        await visit.go("#/c/s1")
        shown = await visit.answered()
        log_frames("when it is opened", script_ms(await browser.stop_tracing()))
        assert letters_of(await said(shown)) == letters_of(text)
        region = visit.page.get_by_role("region", name="Messages")
        assert await region.evaluate("(each) => each.scrollHeight - each.scrollTop - each.clientHeight") < 2


CODE_LINE = "def function_{0}(x):  # a comment\n    return 'text', x * {0}\n"
CODE = "".join(CODE_LINE.format(number) for number in range(3500)) + '"""\n' + "in a string\n" * 300 + '"""\n'


async def test_long_code_is_highlighted_in_view(browser: Browser, echo: Daemon) -> None:
    """Of 200 KB only the visible part is laid out and highlighted; a selection has all of it."""
    text = f"Here:\n\n```python\n{CODE}```\n\nDone."
    stored = {**STORED, "transcript": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": text}]}
    stub = Stub(answers={"resume_session": lambda asked: stored})
    async with visiting(browser, origin_of(echo)) as visit:
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await visit.go("#/c/s1")
        shown = await visit.answered()
        parts = shown.locator(".code-part")
        n_parts = await parts.count()
        assert n_parts > 100
        await expect(parts.nth(n_parts - 2).locator("span")).not_to_have_count(0)
        highlighted = shown.locator(".code-part:has(span)")
        assert await highlighted.count() < n_parts / 4
        await visit.page.get_by_role("region", name="Messages").evaluate("(each) => each.scrollTo(0, 0)")
        await expect(parts.first.locator(".hljs-keyword")).not_to_have_count(0)
        assert await highlighted.count() < n_parts / 2
        select = "(code) => (getSelection().selectAllChildren(code), getSelection().toString())"
        assert (await shown.locator("code").evaluate(select)).strip() == CODE.strip()


def letters_of(text: str) -> str:
    """Return letters and digits, without the controls around code."""
    return bare(text).replace("python", "").replace("Copy", "")
