"""Tests of how the web page shows text while it is being written."""

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
)
COMPARE: Final = """async (stories) => {
  const main = document.querySelector("script[type=module]").src;
  const { MarkdownView } = await import(new URL("text/markdown.js", main));
  const shown = (texts) => {
    const root = document.createElement("div");
    const view = new MarkdownView(root);
    texts.forEach((text, index) => [...view.showing(text, index === texts.length - 1)]);
    for (const code of root.querySelectorAll("code")) code.replaceChildren(code.textContent); // colours may come later
    return root.innerHTML.replace(/>\\s+</g, "><");
  };
  return stories.map(([text, cuts]) => [shown([...cuts.map((cut) => text.slice(0, cut)), text]), shown([text])]);
}"""


async def test_a_text_that_grows_ends_as_one_that_came_at_once(browser: Browser, echo: Daemon) -> None:
    """However an answer is cut while it comes, what stands there at the end is what the whole text gives."""
    chance = random.Random(9)
    stories: list[tuple[str, list[int]]] = []
    for _ in range(150):
        text = "\n".join(chance.choices(PIECES, k=chance.randrange(1, 9))).replace("\r\n", "\n")
        cuts = sorted(chance.sample(range(len(text)), min(len(text), chance.randrange(1, 25))))
        stories.append((text, cuts))
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go()
        shown = await visit.page.evaluate(COMPARE, stories)
    for (text, cuts), (grown, whole) in zip(stories, shown, strict=True):
        assert grown == whole, (text, cuts)
