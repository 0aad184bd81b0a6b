"""Incremental rendering of Markdown."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.web.browser import MARKS, origin_of, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

PIECES: Final = (
    "# A heading\n",
    "A paragraph with **bold**, `code` and a [link](https://example.org).\n",
    "- one\n- two\n  - nested\n\n- loose\n",
    "1. first\n2. second\n\n   more of it\n",
    "```python\ndef f():\n    return 1\n```\n",
    "~~~\nnot closed\n",
    "> quoted\n> again\n",
    "| a | b |\n|--:|---|\n| 1 | 2 |\n",
    "Title\n=====\n",
    "\n\n",
    "    indented code\n",
    "\ttabbed\n",
    "[ref]: https://example.org\n",
    "A [ref] to it.\n",
    "<details><summary>s</summary>\n\ntext\n\n</details>\n",
    "line  \nbreak\\\nbreak\r\nreturn\n",
    "***\n",
    "- [x] done\n",
    "H<sub>2</sub>O & <b>raw\n",
    r"Let \(a_1 * b\) and $c*d$ cost $5." + "\n",
    "So:\n\\[\n- a\n= b_1\n\\]\nand so on\n",
    "$$\nx\n$$\n",
    "\\[ not closed\n- a\n",
)
LONG: Final = (
    (
        "Words with **weight** and `code`. ",
        "A [link](https://example.org) and a_name of *things that go* on. ",
        "一句话。",
    ),
    ("An open * star. ", "Here <b>raw</b> text & more &amp; entities. ", "One `` code ` tick `` two. ", "end  \nmore "),
    ("- item **b**\n", "- two\n  - nested\n", "- p\n\n  second\n", "- <b>open\n", "- text\nlazy\n", "- x\n\n"),
    ("> quoted **text**\n", ">\n", "lazy\n", "> - item\n", "> > deep\n", "> ```\n> code\n> ```\n"),
    ("| **x** | `y` |\n", "| <i>z | w |\n", "| a |\n"),
    ("x = 'not closed\n", "\n", "    indented  \n", "~~~\n", "# no heading\n"),
)
"""What long blocks are made of; those after the quote begin with a line of their own."""
BEGINNINGS: Final = ("", "", "", "", "| a | b |\n|--:|---|\n", "```\n")
COMPARE: Final = """async (stories) => {
  const main = document.querySelector("script[type=module]").src;
  const { MarkdownView } = await import(new URL("text/markdown.js", main));
  const shown = (texts) => {
    const root = document.createElement("div");
    const view = new MarkdownView(root);
    texts.forEach((text, index) => [...view.showing(text, index === texts.length - 1)]);
    for (const code of root.querySelectorAll("code")) code.replaceChildren(code.textContent); // colors may come later
    return root.innerHTML.replace(/>\\s+</g, "><");
  };
  return stories.map(([text, cuts]) => [shown([...cuts.map((cut) => text.slice(0, cut)), text]), shown([text])]);
}"""


Story = tuple[str, list[int]]


def story(chance: random.Random, text: str) -> Story:
    """Draw a text with the positions at which it is split."""
    return text, sorted(chance.sample(range(len(text)), min(len(text), chance.randrange(1, 25))))


def long_block(chance: random.Random) -> str:
    """Draw a block of a few thousand characters."""
    kind = chance.randrange(len(LONG))
    return BEGINNINGS[kind] + "".join(chance.choices(LONG[kind], k=250))


async def compare(browser: Browser, echo: Daemon, stories: list[Story]) -> None:
    """Assert that incremental and complete rendering are equal."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go()
        shown = await visit.page.evaluate(COMPARE, stories)
    for (text, cuts), (grown, whole) in zip(stories, shown, strict=True):
        assert grown == whole, (text, cuts)


async def test_incremental_rendering_equals_complete(browser: Browser, echo: Daemon) -> None:
    """An answer may be split at any place."""
    chance = random.Random(9)
    texts = ["\n".join(chance.choices(PIECES, k=chance.randrange(1, 9))).replace("\r\n", "\n") for _ in range(150)]
    await compare(browser, echo, [story(chance, text) for text in texts])


async def test_long_blocks_are_divided_deterministically(browser: Browser, echo: Daemon) -> None:
    """The division depends on the text only."""
    chance = random.Random(10)
    texts = ["\n".join(long_block(chance) for _ in range(chance.randrange(1, 4))) for _ in range(20)]
    await compare(browser, echo, [story(chance, text) for text in texts])
