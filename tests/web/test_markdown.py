"""Incremental rendering of Markdown."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.web.browser import MARKS, origin_of, visiting
from tests.web.vectors import VECTORS

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

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

RENDER: Final = """async (texts) => {
  const main = document.querySelector("script[type=module]").src;
  const { MarkdownView } = await import(new URL("text/markdown.js", main));
  return texts.map((text) => {
    const root = document.createElement("div");
    for (const _ of new MarkdownView(root).showing(text.replaceAll("\\r\\n", "\\n"), true));
    for (const link of root.querySelectorAll("a[title]")) link.append(`(${link.title})`);
    for (const link of root.querySelectorAll("a[title]")) link.removeAttribute("title"); // the order may differ
    return root.innerHTML.replace(/>\\s+</g, "><").replace(/\\s+</g, "<").replace(/>\\s+/g, ">");
  });
}"""
IS_PLAIN: Final = "export function isPlain(token) {"
MARKUP: Final = (
    '[title](https://example.org "a title") and [no](javascript:x) and [up](../up) and <https://example.org>\n',
    "![image](https://example.org/a.png) ![](https://example.org/b.png) [![in](https://a.test)](https://b.test)\n",
    "[space](<https://example.org/a b>) [e](https://example.org/?a=1&b=%20&amp;c) https://example.org/x_y?z\n",
    "`<b>` and `&amp;` and a < b & c &copy; &#65; &nosuch; \\< \\& \\* ~~gone~~\n",
    "7. seven\n8. eight\n   ```py&thon\n   x < 1\n\n   ```\n",
    "- [ ] open\n- [x] done\n\n  loose\n",
    "| l | c | r |\n|:--|:-:|--:|\n| **1** | `2|` | [3](mailto:a@b.test) |\n",
    "###### deep\n# **high** `code`\n> # in a quote\n> 1. and\n>    - deeper\n",
    "a\x00b &\x00 <pre>\nraw *text* &lt;\n\n*more*\n",
)


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


async def render(browser: Browser, echo: Daemon, texts: list[str], is_plain: str) -> list[str]:
    """Return the HTML of texts, with another head of the function that decides how they are rendered."""

    async def fulfill(route: Route) -> None:
        answer = await route.fetch()
        source = await answer.text()
        assert source.count(IS_PLAIN) == 1
        await route.fulfill(response=answer, body=source.replace(IS_PLAIN, is_plain))

    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.route("**/text/nodes.js", fulfill)
        await visit.go()
        found: list[str] = await visit.page.evaluate(RENDER, texts)
        return found


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


async def test_nodes_equal_sanitized_html(browser: Browser, echo: Daemon) -> None:
    """Nodes that are created without HTML text are those of the sanitized HTML text."""
    chance = random.Random(11)
    texts = [*PIECES, *MARKUP, *VECTORS, *(long_block(chance) for _ in range(5))]
    texts += ["\n".join(chance.choices([*PIECES, *MARKUP], k=chance.randrange(2, 9))) for _ in range(200)]
    shown = [await render(browser, echo, texts, f"{IS_PLAIN} {body}") for body in ("", "return false;")]
    for text, direct, sanitized in zip(texts, *shown, strict=True):
        assert direct == sanitized, text
