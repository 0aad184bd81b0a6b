"""Formulas in answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from playwright.async_api import expect

from tests.web.browser import MARKS, barriers, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

FORMULAS: Final = (r"\(a\,b\)", r"\[\int_0^1 x\,dx = \frac{1}{2}\]", "$$\nE = mc^2\n$$", "$e^{i\\pi}$")
ANSWER: Final = (
    f"Let {FORMULAS[0]} and {FORMULAS[3]}-like be:\n{FORMULAS[1]}\n\n{FORMULAS[2]}\n\nIt costs $5 or $6, `\\(x\\)`."
)


async def test_formulas_are_drawn(browser: Browser, echo: Daemon) -> None:
    """The library is loaded with the first one; text that only looks like one stays."""
    async with signed_in(browser, echo) as visit:
        loaded: list[str] = []
        visit.page.on("request", lambda request: loaded.append(request.url))
        await visit.ask("No formula: $5 or $6.")
        await visit.answered()
        assert not any("katex" in url for url in loaded)
        await visit.ask(ANSWER)
        answer = await visit.answered(count=2)
        await expect(answer.locator(".math-drawn")).to_have_count(len(FORMULAS))
        await expect(answer.locator(".math-display")).to_have_count(2)
        await expect(answer.locator("mfrac")).to_have_count(1)
        await expect(answer).to_contain_text("It costs $5 or $6, \\(x\\).")
        assert [url for url in loaded if url.endswith((".ttf", ".woff"))] == []
        assert any(url.endswith(".woff2") for url in loaded)
        sizes = await answer.locator(".katex .vlist").evaluate_all("(all) => all.map((each) => each.clientHeight)")
        assert max(sizes) > 0
        assert await barriers(visit) == []


async def test_copied_formulas_are_their_source(browser: Browser, echo: Daemon) -> None:
    """They are in a copied selection and in a copy of the whole answer."""
    async with signed_in(browser, echo, permissions=["clipboard-read", "clipboard-write"]) as visit:
        await visit.ask(ANSWER)
        answer = await visit.answered()
        await expect(answer.locator(".math-drawn")).to_have_count(len(FORMULAS))
        await answer.locator(".prose").evaluate("(prose) => getSelection().selectAllChildren(prose)")
        await visit.page.keyboard.press("Control+c")
        copied = await visit.page.evaluate("() => navigator.clipboard.readText()")
        for formula in FORMULAS:
            assert copied.count(formula) == 1, copied
        assert "mc2" not in copied
        await visit.button("Copy", inside=answer).click()
        assert await visit.page.evaluate("() => navigator.clipboard.readText()") == ANSWER


async def test_formula_that_cannot_be_drawn_shows_its_source(browser: Browser, echo: Daemon) -> None:
    """The reason is shown; an incomplete formula is handled alike."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Wrong: \\(\\frac{1}{\\), too deep: \\(" + "{" * 60 + "}" * 60 + "\\).\n\n\\[ open\n- x")
        answer = await visit.answered()
        await expect(answer.locator(".math-failed")).to_have_count(2)
        await expect(answer.locator(".math-failed").first).to_have_text("\\(\\frac{1}{\\)")
        assert "expected '}'" in (await answer.locator(".math-failed").first.get_attribute("title") or "")
        await expect(answer.locator(".math-failed").last).to_have_attribute("title", "The formula is too large.")
        await expect(answer).to_contain_text("\\[ open")
        await expect(answer.locator("li")).to_have_count(0)
