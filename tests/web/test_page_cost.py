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
SEQ = 9
STORED = {
    "op": "session_resumed", "session_id": "s1", "resumed": False, "reason": "no_position", "state": "idle",
    "epoch": "e1", "seq": SEQ, "turns": [{"turn_id": "t1", "finish_reason": "stop", "messages": 2}],
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
        await expect(parts.nth(100)).to_be_attached()
        await expect(shown.locator(".prose[aria-busy]")).to_have_count(0)
        n_parts = await parts.count()
        await expect(parts.nth(n_parts - 2).locator("span")).not_to_have_count(0)
        highlighted = shown.locator(".code-part:has(span)")
        assert await highlighted.count() < n_parts / 4
        await visit.page.get_by_role("region", name="Messages").evaluate("(each) => each.scrollTo(0, 0)")
        await expect(parts.first.locator(".hljs-keyword")).not_to_have_count(0)
        assert await highlighted.count() < n_parts / 2
        select = "(code) => (getSelection().selectAllChildren(code), getSelection().toString())"
        assert (await shown.locator("code").evaluate(select)).strip() == CODE.strip()


TURNS = 200
TURN = "Number {0} has **weight**.\n\n" + "".join(PARTS)
COUNT_RENDERS = """async () => {
  const main = document.querySelector("script[type=module]").src;
  const { options } = await import(new URL("../vendor/preact.js", main));
  const before = options.__r; // called with each component that is rendered
  window.rendered = new Set();
  options.__r = (vnode) => {
    if (vnode.type.name === "TurnView") rendered.add(vnode.key);
    before?.(vnode);
  };
}"""
TAKE_RENDERED = "() => [[...rendered], rendered.clear()][0]"
DELAY_IDLE = """
const waiting = [];
const run = (then) => setTimeout(() => then({ didTimeout: false, timeRemaining: () => 50 }));
let isIdle = false;
window.requestIdleCallback = (then) => (isIdle ? run(then) : waiting.push(then));
window.beIdle = () => {
  isIdle = true;
  waiting.forEach(run);
};
"""


def many_turns() -> Stub:
    """Return a daemon with a conversation of many turns."""
    asked = [{"role": "user", "content": f"Question {number}"} for number in range(TURNS)]
    answered = [{"role": "assistant", "content": TURN.format(number)} for number in range(TURNS)]
    turns = [
        {"turn_id": f"turn-{number}", "finish_reason": "stop", "messages": 2 * number + 2} for number in range(TURNS)
    ]
    transcript = list(itertools.chain.from_iterable(zip(asked, answered, strict=True)))
    stored = {**STORED, "transcript": transcript, "turns": turns}
    return Stub(answers={"resume_session": lambda asked: stored}, seq=SEQ)


RECORD_TURNS = """
window.drawn = [];
const record = () => {
  const turns = document.querySelectorAll(".turn");
  const last = turns[turns.length - 1];
  if (last) drawn.push([turns.length, last.querySelector(".prose strong") !== null]);
  requestAnimationFrame(record);
};
requestAnimationFrame(record);
"""


async def test_long_conversation_opens_with_its_last_turns(browser: Browser, echo: Daemon) -> None:
    """The last answer is formatted before the first turns are there; the view stays at the end when they appear."""
    stub = many_turns()
    async with visiting(browser, origin_of(echo)) as visit:
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await visit.page.evaluate(RECORD_TURNS)
        await visit.go("#/c/s1")
        await visit.answered(count=TURNS)
        await visit.page.wait_for_function("count => drawn.at(-1)[0] === count", arg=TURNS)
        drawn = await visit.page.evaluate("drawn")
        assert any(count < TURNS / 10 and is_formatted for count, is_formatted in drawn), drawn
        assert {count for count, _ in drawn} == {8, TURNS}
        await expect(visit.questions.first).to_have_text("Question 0")
        await expect(visit.answers.last).to_be_in_viewport()
        await expect(visit.button("Scroll to the end")).to_have_count(0)


async def test_answer_renders_no_earlier_turn(browser: Browser, echo: Daemon) -> None:
    """The begin of an answer renders its turn and the one before, which loses a button; its end renders its turn."""
    stub = many_turns()
    async with visiting(browser, origin_of(echo)) as visit:
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await visit.go("#/c/s1")
        await visit.answered(count=TURNS)
        edit = visit.button("Edit")
        await expect(edit).to_have_count(TURNS)
        await visit.page.evaluate(COUNT_RENDERS)
        await visit.ask("Next?")
        await expect(visit.questions).to_have_count(TURNS + 1)
        await expect(edit).to_have_count(0)
        begun = await visit.page.evaluate(TAKE_RENDERED)
        assert len(begun) == 2, begun
        assert f"turn-{TURNS - 1}" in begun
        await stub.give(["Some ", "words."], burst=1, pause_s=0.05)
        await visit.answered(count=TURNS + 1)
        await expect(edit).to_have_count(TURNS + 1)
        ended = await visit.page.evaluate(TAKE_RENDERED)
        assert len(ended) == 1, ended
        assert not set(ended) - set(begun)


async def test_turns_are_rendered_near_view_and_when_idle(browser: Browser, echo: Daemon) -> None:
    """The others are shown as their text; what is in view does not move when they are rendered."""
    stub = many_turns()
    waiting, key = ".prose[data-raw]", "has **weight**"
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.add_init_script(DELAY_IDLE)
        await stub.take_over(visit.page)
        await visit.go("#token=any")
        await expect(visit.composer).to_be_visible()
        await visit.go("#/c/s1")
        await visit.answered(count=TURNS)
        region = visit.page.get_by_role("region", name="Messages")
        raw = visit.page.locator(waiting)
        assert await raw.count() > TURNS * 3 / 4
        assert key in str(await visit.answers.nth(5).text_content())
        await region.hover()
        await visit.page.mouse.wheel(0, -6000)
        await expect(visit.button("Scroll to the end")).to_be_visible()
        await expect(visit.page.locator(f"{waiting}:visible >> nth=0")).not_to_be_in_viewport()
        assert await raw.count() > TURNS / 2
        place = """(each) => {
          const inView = [...each.querySelectorAll(".turn")].find((turn) => turn.getBoundingClientRect().bottom > 300);
          return [inView.dataset.turn, Math.round(inView.getBoundingClientRect().top)];
        }"""
        before = await region.evaluate(place)
        await visit.page.evaluate("beIdle()")
        await expect(raw).to_have_count(0)
        turn, top = await region.evaluate(place)
        assert turn == before[0]
        assert abs(top - before[1]) <= 2
        assert key not in str(await visit.answers.nth(5).text_content())
        await expect(visit.answers.nth(5).locator("table")).to_have_count(1)


def letters_of(text: str) -> str:
    """Return letters and digits, without the controls around code."""
    return bare(text).replace("python", "").replace("Copy", "")
