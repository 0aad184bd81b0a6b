"""The page's languages: which is chosen, plural forms, numbers, and that each view is complete in them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from inferencecenter.auth.audit import AuditEvent
from tests.e2e.harness import command_line
from tests.web import node
from tests.web.browser import origin_of, signed_in, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

TEXTS: Final = Path(__file__).parents[2] / "inferencecenter/web/js/texts"
GERMAN: Final = {"locale": "de-AT"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["de-AT", "en"], ["de", "de-AT"]),
        (["fr", "de"], ["de", "de"]),
        (["fr"], ["en", "en"]),
        (["pt-br", "pt"], ["pt-BR", "pt-br"]),
        ([], ["en", "en"]),
    ],
)
def test_first_available_language_is_chosen(wanted: list[str], found: list[str]) -> None:
    """A variant is used for numbers where only the language itself has texts."""
    body = 'return languageOf(input, ["de", "en", "pt-BR"]);'
    assert node.run('import { languageOf } from "JS/i18n.js";', body, given=wanted) == found


def test_texts_have_plurals_and_numbers() -> None:
    """Without a browser they are those of English."""
    body = """return [
      t("outcome.tokens", { n: 1 }), t("outcome.tokens", { n: 1234 }), number(0.5, 2),
      known("ending", "length") ?? null, known("ending", "other") ?? null, rich("message.called", { name: [1] }),
    ];"""
    found = node.run('import { known, number, rich, t } from "JS/i18n.js";', body)
    assert found == ["1 token", "1,234 tokens", "0.50", "Reached the token limit", None, ["Called ", [1], ""]]


def test_loaded_part_adds_its_texts() -> None:
    """They are known once the part is loaded."""
    names = """
    import { known, loadTexts } from "JS/i18n.js";
    const before = known("limit", "models");
    await loadTexts("admin");
    """
    assert node.run(names, 'return [before ?? null, known("limit", "models")];') == [None, "Models"]


@pytest.mark.parametrize("language", ["en", "de"])
def test_every_audit_event_has_a_text(language: str) -> None:
    """No text is without an event."""
    source = (TEXTS / language / "admin.js").read_text(encoding="utf-8")
    assert sorted(re.findall(r'"audit_event\.(\w+)": "', source)) == sorted(AuditEvent)


VIEWS: Final = ("#/", "#/dashboard", "#/models")
TABS: Final = {
    "accounts": "Neues Konto",
    "usage": "Konten nach Token",
    "models": "herunterladen",
    "sessions": "Filter der Sitzungen",
    "audit": "Filter des Auditprotokolls",
    "log": "Zeilen des Logs",
}
"""Tabs of administration, and the name of a part of each."""
WORDS: Final = re.compile(
    r"\b(the|and|of|is|are|not|with|new|search|settings|send|copy|tokens|sessions|turns|loading|close|delete|load"
    r"|minutes|memory|queue|usage|slots in use|waiting|connected|answer|conversation|conversations|edit|regenerate"
    r"|account|accounts|create|revoke|save|show|scopes|from|limits of)\b",
    re.IGNORECASE,
)
"""English words; none is also a German one, or a name."""
SHOWN: Final = """() => {
  const words = [document.body.innerText];
  for (const each of document.querySelectorAll(".log-lines p, .admin-detail")) {
    if (each.innerText) words[0] = words[0].replace(each.innerText, () => "");
  }
  for (const each of document.querySelectorAll("*")) {
    for (const name of ["aria-label", "title", "placeholder"]) {
      if (each.hasAttribute(name)) words.push(each.getAttribute(name));
    }
  }
  return words;
}"""
SERVERS: Final = re.compile(r"\(set\)|n_gpu_layers|\bset by\b")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_browsers_language_is_used(browser: Browser, echo: Daemon) -> None:
    """Only its texts are loaded; numbers have the format of its variant."""
    async with visiting(browser, origin_of(echo), **GERMAN) as visit:
        texts: list[str] = []
        visit.page.on("request", lambda request: texts.extend(re.findall(r"/texts/(.+)\.js", request.url)))
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.page.get_by_role("heading", name="Was beschäftigt Sie gerade?")).to_be_visible()
        assert texts == ["de"]
        html = visit.page.locator("html")
        await expect(html).to_have_attribute("lang", "de")
        await expect(html).to_have_attribute("dir", "ltr")
        await visit.page.get_by_role("textbox", name="Nachricht").fill("Hallo")
        await visit.button("Senden").click()
        await expect(visit.page.get_by_role("article", name="Antwort")).to_contain_text("Hallo")
        await expect(visit.page.locator(".outcome")).to_contain_text(re.compile(r"\d+ Token"))
        assert texts == ["de"]
        await visit.go("#/admin/accounts")
        await expect(visit.page.get_by_role("heading", name="Verwaltung")).to_be_visible()
        assert sorted(texts) == ["de", "de/admin", "de/board"]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_no_view_has_words_of_another_language(browser: Browser, echo: Daemon) -> None:
    """All texts are German, apart from what the daemon sends in English."""
    async with visiting(browser, origin_of(echo), **GERMAN) as visit:
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.page.get_by_role("textbox", name="Nachricht")).to_be_visible()
        for view in VIEWS:
            await visit.go(view)
            await expect(visit.page.locator("main")).to_be_visible()
            await visit.page.wait_for_load_state("networkidle")
            await _check(visit.page, view)
        await visit.go("#/")
        await visit.button("Einstellungen der Unterhaltung").click()
        await expect(visit.page.get_by_role("heading", name="Export und Import")).to_be_visible()
        await expect(visit.page.get_by_role("group", name="Voreinstellungen")).to_be_visible()
        await _check(visit.page, "settings")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_administration_has_no_words_of_another_language(browser: Browser, echo: Daemon) -> None:
    """All texts are German, apart from lines of the log and details of the audit log."""
    await asyncio.to_thread(command_line, echo, "token", "create", "begrenzt")
    async with visiting(browser, origin_of(echo), **GERMAN) as visit:
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.page.get_by_role("textbox", name="Nachricht")).to_be_visible()
        for tab, part in TABS.items():
            await visit.go(f"#/admin/{tab}")
            panel = visit.page.get_by_role("tabpanel")
            found = panel.get_by_role("heading", name=part).or_(panel.get_by_role("form", name=part))
            await expect(found.or_(panel.get_by_role("region", name=part)).first).to_be_visible()
            await visit.page.wait_for_load_state("networkidle")
            await _check(visit.page, tab)
        await visit.go("#/admin/audit")
        cell = visit.page.get_by_role("cell", name="Anmeldung", exact=True)
        await expect(cell.first).to_be_visible()
        await visit.go("#/admin/accounts")
        heading = visit.page.get_by_role("heading", name="begrenzt", exact=True)
        entry = visit.page.get_by_role("listitem").filter(has=heading)
        await visit.button("Verwalten", inside=entry).click()
        await visit.button("Token erstellen", inside=entry).click()
        await expect(entry.get_by_role("group", name="Neues Token")).to_be_visible()
        settings = entry.get_by_role("form", name="Einstellungen von begrenzt")
        await settings.get_by_label("Gleichzeitige Anfragen").fill("unbegrenzt")
        await settings.get_by_label("Token pro Tag").fill("5000000")
        await visit.button("Speichern", inside=settings).click()
        await expect(settings.get_by_text("Gespeichert.")).to_be_visible()
        await expect(entry).to_contain_text(re.compile("Token pro Tag: 5.000.000; Gleichzeitige Anfragen: unbegrenzt"))
        await _check(visit.page, "an account")


async def _check(page: Any, view: str) -> None:
    shown: list[str] = await page.evaluate(SHOWN)
    lines = [line for text in shown for line in text.split("\n") if not SERVERS.search(line)]
    assert [line for line in lines if WORDS.search(line)] == [], view


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_choice_of_language_is_kept(browser: Browser, echo: Daemon) -> None:
    """The settings have it; the page reloads with it, and drafts stay."""
    async with signed_in(browser, echo) as visit:
        await visit.composer.fill("A draft")
        await visit.button("Conversation settings").click()
        chooser = visit.page.get_by_role("combobox", name="Language")
        await expect(chooser.locator("option")).to_have_text(["As in the browser", "Deutsch", "English"])
        await chooser.select_option("de")
        message = visit.page.get_by_role("textbox", name="Nachricht")
        await expect(message).to_have_value("A draft")
        await visit.page.reload()
        await expect(message).to_be_visible()
        await visit.button("Einstellungen der Unterhaltung").click()
        await visit.page.get_by_role("combobox", name="Sprache").select_option("")
        await expect(visit.composer).to_be_visible()
