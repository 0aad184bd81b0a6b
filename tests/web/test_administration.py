"""The view of administration: what it does, and who sees it."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import websockets
from playwright.async_api import expect

from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.config.limits import AccessLimits
from tests.e2e.harness import command_line, connect_client, run_daemon
from tests.models.hub_stub import StubFile, StubHub, serving
from tests.web.browser import MARKS, barriers, origin_of, signed_in, visiting
from tests.web.conftest import ECHO
from tests.web.test_accessibility import DEVICES, SMALL, fits

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Literal

    from playwright.async_api import Browser, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS


async def open_tab(visit: Visit, name: str) -> Locator:
    """Open a tab of the view, and return its panel."""
    await visit.go("#/admin")
    await visit.page.get_by_role("tab", name=name, exact=True).click()
    return visit.page.get_by_role("tabpanel", name=name, exact=True)


async def manage(visit: Visit, account: str) -> Locator:
    """Open the part of an account, and return it."""
    panel = await open_tab(visit, "Accounts")
    entry = panel.get_by_role("listitem").filter(has=visit.page.get_by_role("heading", name=account, exact=True))
    await visit.button("Manage", inside=entry).click()
    return entry


async def audit_lines(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    """Return the entries of an event in the audit log."""
    found: list[dict[str, Any]] = await asyncio.to_thread(command_line, daemon, "audit", "--event", event)
    return found


async def accepts(daemon: Daemon, token: str) -> bool:
    """Return whether the daemon accepts a token."""
    try:
        headers = {"Authorization": f"Bearer {token}"}
        async with websockets.connect(f"ws://127.0.0.1:{daemon.port}/ws", additional_headers=headers):
            return True
    except websockets.exceptions.InvalidStatus:
        return False


async def test_view_is_for_administrators(browser: Browser, echo: Daemon) -> None:
    """Other accounts have no entry in the list, and its address shows a conversation."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "onlooker")
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(made["token"])
        await expect(visit.button("Models")).to_be_visible()
        await expect(visit.button("Administration")).to_have_count(0)
        await visit.go("#/admin")
        await visit.page.reload()
        await expect(visit.composer).to_be_visible()
        await expect(visit.page.get_by_role("tab")).to_have_count(0)
    async with signed_in(browser, echo) as visit:
        await visit.button("Administration").click()
        await expect(visit.page.get_by_role("heading", name="Administration")).to_be_visible()


async def test_account_and_token_are_created_with_the_keyboard(browser: Browser, echo: Daemon) -> None:
    """The token is shown once, authenticates, and is kept nowhere; the audit log names the administrator."""
    async with signed_in(browser, echo) as visit:
        panel = await open_tab(visit, "Accounts")
        name = panel.get_by_label("Name")
        await name.focus()
        await visit.page.keyboard.type("keyboard")
        await visit.page.keyboard.press("Enter")
        await expect(panel.get_by_text("keyboard was created")).to_be_visible()
        purpose = panel.get_by_label("Purpose")
        await expect(purpose).to_be_visible()
        await purpose.focus()
        await visit.page.keyboard.type("phone")
        await visit.page.keyboard.press("Enter")
        shown = panel.get_by_role("group", name="New token")
        token = await shown.locator("code").inner_text()
        assert await accepts(echo, token)
        await expect(visit.button("Copy", inside=shown)).to_be_focused()
        await visit.page.keyboard.press("Tab")
        await visit.page.keyboard.press("Enter")
        await expect(shown).to_have_count(0)
        assert not await visit.page.evaluate("() => document.activeElement === document.body")
        stored = await visit.page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])")
        secret = token.rpartition("_")[2]
        assert secret not in stored + await visit.page.content()
    assert secret not in echo.log.read_text()
    created = (await audit_lines(echo, "token_created"))[-1]
    assert (created["client_id"], created["actor"], created["detail"]) == ("keyboard", "admin", "phone")


async def test_limits_are_edited_with_errors_by_field(browser: Browser, echo: Daemon) -> None:
    """A refused value is marked at its field and nothing is saved; valid ones are shown."""
    await asyncio.to_thread(command_line, echo, "token", "create", "limited")
    async with signed_in(browser, echo) as visit:
        entry = await manage(visit, "limited")
        settings = entry.get_by_role("form", name="Settings of limited")
        await settings.get_by_label("Tokens per day").fill("many")
        await settings.get_by_label("Tokens per answer").fill("50")
        await visit.button("Save", inside=settings).click()
        field = settings.get_by_label("Tokens per day")
        await expect(field).to_have_attribute("aria-invalid", "true")
        note = await field.get_attribute("aria-describedby")
        await expect(visit.page.locator(f"[id='{note}']")).to_contain_text("access_limits.tokens_per_day")
        await expect(settings.get_by_label("Tokens per answer")).to_have_attribute("aria-invalid", "false")
        listed = await asyncio.to_thread(command_line, echo, "client", "limits", "limited")
        assert listed["limits"] == {}
        await field.fill("5000")
        await settings.get_by_label("Addresses").fill("127.0.0.0/8, 10.0.0.1")
        await settings.get_by_label("Concurrent turns").fill("none")
        await visit.button("Save", inside=settings).click()
        await expect(settings.get_by_text("Saved.")).to_be_visible()
        await expect(entry).to_contain_text("Tokens per day: 5,000")
        listed = await asyncio.to_thread(command_line, echo, "client", "limits", "limited")
        assert listed["limits"] == {
            "tokens_per_day": 5000,
            "concurrent_turns": None,
            "max_tokens": 50,
            "addresses": ["127.0.0.0/8", "10.0.0.1"],
        }


@pytest.mark.parametrize(
    ("locale", "manage", "save"), [("en-US", "Manage", "Save"), ("de-DE", "Verwalten", "Speichern")]
)
async def test_no_limit_is_written_in_either_language(
    browser: Browser, echo: Daemon, locale: str, manage: str, save: str
) -> None:
    """The words of both, in any case, remove a limit."""
    name = f"unlimited-{locale}"
    await asyncio.to_thread(command_line, echo, "token", "create", name)
    async with visiting(browser, origin_of(echo), locale=locale) as visit:
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.page.locator("#composer")).to_be_visible()
        await visit.go("#/admin/accounts")
        heading = visit.page.get_by_role("heading", name=name, exact=True)
        entry = visit.page.get_by_role("tabpanel").get_by_role("listitem").filter(has=heading)
        await visit.button(manage, inside=entry).click()
        for field, word in (("concurrent_turns", "none"), ("max_tokens", "Unbegrenzt"), ("models", "NONE")):
            await entry.locator(f"[name='access_limits.{field}']").fill(word)
        await visit.button(save, inside=entry).first.click()
        await expect(entry.locator("[aria-invalid=true]")).to_have_count(0)
        for _ in range(100):
            listed = await asyncio.to_thread(command_line, echo, "client", "limits", name)
            if listed["limits"]:
                break
        assert listed["limits"] == {"concurrent_turns": None, "max_tokens": None, "models": None}


async def test_storage_of_an_account_is_limited(browser: Browser, echo: Daemon) -> None:
    """The daemon's refusal is shown at the field; an empty field selects the daemon's setting."""
    await asyncio.to_thread(command_line, echo, "token", "create", "storing")
    async with signed_in(browser, echo) as visit:
        entry = await manage(visit, "storing")
        settings = entry.get_by_role("form", name="Settings of storing")
        days, mib = settings.get_by_label("Days until unused"), settings.get_by_label("MiB of stored text")
        await days.fill("0")
        await mib.fill("12")
        await visit.button("Save", inside=settings).click()
        await expect(days).to_have_attribute("aria-invalid", "true")
        await expect(mib).to_have_attribute("aria-invalid", "false")
        await days.fill("2.5")
        await visit.button("Save", inside=settings).click()
        await expect(entry).to_contain_text("kept for 2.5 days · 12 MiB of text")
        listed = await asyncio.to_thread(command_line, echo, "client", "limits", "storing")
        assert (listed["retention_days"], listed["archive_mib"]) == (2.5, 12)
        await mib.fill("")
        await visit.button("Save", inside=settings).click()
        await expect(entry).not_to_contain_text("12 MiB")
        listed = await asyncio.to_thread(command_line, echo, "client", "limits", "storing")
        assert (listed["retention_days"], "archive_mib" in listed) == (2.5, False)
    changes = [line["detail"] for line in await audit_lines(echo, "client_changed") if line["client_id"] == "storing"]
    assert ["archive_mib=default" in each for each in changes] == [False, True]


@pytest.mark.parametrize("fate", ["are deleted", "stay stored"])
async def test_account_is_deleted_after_it_is_told_what_is_lost(browser: Browser, echo: Daemon, fate: str) -> None:
    """Its name has to be typed and the fate of its sessions chosen; its sockets are closed."""
    name = f"doomed-{fate.split(maxsplit=1)[0]}"
    made = await asyncio.to_thread(command_line, echo, "token", "create", name)
    async with connect_client(echo, made["token"]) as client, signed_in(browser, echo) as visit:
        session = await client.create(system="x" * 524_288)
        entry = await manage(visit, name)
        await visit.button("Delete account…", inside=entry).click()
        dialog = visit.page.get_by_role("dialog")
        await expect(dialog).to_contain_text("1 token, 1 session, 0.5 MiB of text")
        assert await barriers(visit) == []
        delete = visit.button("Delete account", inside=dialog)
        await dialog.get_by_role("textbox").fill(name)
        await expect(delete).to_be_disabled()
        await dialog.get_by_role("radio", name=re.compile(fate)).check()
        await dialog.get_by_role("textbox").fill("another")
        await expect(delete).to_be_disabled()
        await dialog.get_by_role("textbox").fill(name)
        await delete.click()
        await expect(visit.page.get_by_text(f"The account {name} was deleted.")).to_be_visible()
        await expect(visit.page.get_by_role("heading", name=name, exact=True)).to_have_count(0)
        assert not await visit.page.evaluate("() => document.activeElement === document.body")
    assert not await accepts(echo, made["token"])
    stored = await asyncio.to_thread(command_line, echo, "session", "list", "--client", name)
    assert [each["session_id"] for each in stored] == ([] if fate == "are deleted" else [session])
    removed = [line for line in await audit_lines(echo, "client_removed") if line["client_id"] == name]
    assert [(line["actor"], line["detail"]) for line in removed] == [
        ("admin", "sessions deleted" if fate == "are deleted" else "sessions kept")
    ]


async def test_token_is_replaced_and_revoked_after_a_question(browser: Browser, echo: Daemon) -> None:
    """Cancel does nothing; a revoked token stays in the list."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "tokens", "--name", "laptop")
    async with signed_in(browser, echo) as visit:
        entry = await manage(visit, "tokens")
        dialog = visit.page.get_by_role("dialog")
        await visit.button("Replace laptop", inside=entry).click()
        await visit.button("Cancel", inside=dialog).click()
        assert await accepts(echo, made["token"])
        await visit.button("Replace laptop", inside=entry).click()
        await visit.button("Replace", inside=dialog).click()
        shown = entry.get_by_role("group", name="New token")
        token = await shown.locator("code").inner_text()
        assert not await accepts(echo, made["token"])
        assert await accepts(echo, token)
        await visit.button("Done", inside=shown).click()
        await visit.button("Revoke laptop", inside=entry).click()
        await visit.button("Revoke", inside=dialog).click()
        await expect(entry.get_by_text("Revoked", exact=True)).to_have_count(2)
        await expect(entry).to_contain_text("0 tokens")
        assert not await visit.page.evaluate("() => document.activeElement === document.body")
        assert not await accepts(echo, token)
    assert [line["actor"] for line in await audit_lines(echo, "token_revoked")][-2:] == ["admin", "admin"]


async def test_page_goes_on_with_its_own_replaced_token(browser: Browser, echo: Daemon) -> None:
    """The page signs in with the new one, and shows it."""
    made = await asyncio.to_thread(
        command_line, echo, "token", "create", "second-admin", "--scope", "user", "--scope", "admin"
    )
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(made["token"])
        await expect(visit.composer).to_be_visible()
        entry = await manage(visit, "second-admin")
        await visit.button(f"Replace {made['token_id']}", inside=entry).click()
        await visit.button("Replace", inside=visit.page.get_by_role("dialog")).click()
        token = await entry.get_by_role("group", name="New token").locator("code").inner_text()
        assert not await accepts(echo, made["token"])
        await visit.page.reload()
        await expect(visit.page.get_by_role("tab", name="Accounts")).to_be_visible()
        assert await accepts(echo, token)


async def test_model_is_downloaded_and_deleted(browser: Browser, tmp_path: Path, demo_model_path: Path) -> None:
    """The page shows progress and can cancel; deletion needs the typed name. The audit log has each step."""
    content = await asyncio.to_thread(demo_model_path.read_bytes)
    repo = {"tiny-Q8_0.gguf": StubFile(content)}
    with serving(StubHub(repos={"ada/tiny": repo})) as hub:
        settings = {**ECHO, "HF_ENDPOINT": hub.url, "INFERENCECENTER_MODELS_DIR": str(tmp_path / "models")}
        with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
            async with signed_in(browser, daemon) as visit:
                panel = await open_tab(visit, "Models")
                hub.pause.clear()
                await panel.get_by_label("Model", exact=True).fill("ada/tiny:Q8_0")
                await visit.page.keyboard.press("Enter")
                bar = panel.get_by_role("progressbar", name="Downloading ada/tiny:Q8_0")
                await expect(bar).to_be_visible()
                await expect(panel.get_by_text(re.compile(r"of .* [KM]iB, \d+ %"))).to_be_visible()
                await visit.button("Cancel ada/tiny:Q8_0", inside=panel).click()
                hub.pause.set()
                await expect(panel.get_by_text("Cancelled", exact=True)).to_be_visible()
                assert not await visit.page.evaluate("() => document.activeElement === document.body")
                await panel.get_by_label("Model", exact=True).fill("ada/tiny:Q8_0")
                await visit.button("Download", inside=panel).click()
                await expect(panel.get_by_text("Complete", exact=True)).to_be_visible()
                await visit.button("Delete tiny-Q8_0", inside=panel).click()
                dialog = visit.page.get_by_role("dialog")
                await expect(visit.button("Delete", inside=dialog)).to_be_disabled()
                await dialog.get_by_role("textbox").fill("tiny-Q8_0")
                await visit.button("Delete", inside=dialog).click()
                await expect(panel.get_by_text("The files of tiny-Q8_0 were deleted.")).to_be_visible()
                await expect(panel.get_by_role("heading", name="tiny-Q8_0")).to_have_count(0)
                assert not await visit.page.evaluate("() => document.activeElement === document.body")
        assert not list((tmp_path / "models").glob("*.gguf"))
        lines = await asyncio.to_thread(command_line, daemon, "audit", "--client", "admin")  # written when it ends
        done = [(each["event"], each["count"]) for each in lines if re.search("model|pull", each["event"])]
        assert done == [("model_pulled", 2), ("pull_cancelled", 1), ("model_removed", 1)]


async def test_operator_sees_its_tabs_only(browser: Browser, echo: Daemon) -> None:
    """An operator has the tab of models and no tab of accounts."""
    made = await asyncio.to_thread(
        command_line, echo, "token", "create", "only-operator", "--scope", "user", "--scope", "operator"
    )
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(made["token"])
        await visit.button("Administration").click()
        await expect(visit.page.get_by_role("tab", name="Models")).to_be_visible()
        await expect(visit.page.get_by_role("tab", name="Accounts")).to_have_count(0)


async def test_session_of_another_account_is_deleted_unread(browser: Browser, echo: Daemon) -> None:
    """Its title and text are not shown, and its deletion is asked about and in the audit log."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "talker")
    async with connect_client(echo, made["token"]) as client, signed_in(browser, echo) as visit:
        session = await client.create(metadata={"title": "My hidden title"})
        await client.turn(session, "My hidden words.")
        panel = await open_tab(visit, "Sessions")
        await panel.get_by_label("Account").fill("talker")
        await visit.page.keyboard.press("Enter")
        await expect(panel.get_by_text(session, exact=True)).to_be_visible()
        await expect(panel.get_by_role("listitem")).to_have_count(1)
        assert "hidden" not in await panel.inner_text()
        await visit.button(f"Delete {session}", inside=panel).click()
        await visit.button("Delete", inside=visit.page.get_by_role("dialog")).click()
        await expect(panel.get_by_text(f"{session} was deleted.")).to_be_visible()
        await expect(panel.get_by_text("No sessions.")).to_be_visible()
        assert not await visit.page.evaluate("() => document.activeElement === document.body")
        assert (await client.ask(op="get_session", session_id=session))["code"] == "session_not_found"
        panel = await open_tab(visit, "Audit log")
        await panel.get_by_label("Event").select_option("session_purged")
        await visit.button("Show", inside=panel).click()
        table = panel.get_by_role("region", name="Audit log as a table")
        await expect(table.get_by_role("row").filter(has_text=session)).to_contain_text("admin")


async def test_audit_log_is_filtered_and_read_by_windows(browser: Browser, echo: Daemon) -> None:
    """The newest lines come first, and older ones are shown on request."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "busy")
    for number in range(51):
        await asyncio.to_thread(_limit, echo, made["token_id"], number + 1)
    async with signed_in(browser, echo) as visit:
        panel = await open_tab(visit, "Audit log")
        await panel.get_by_label("Account").fill("busy")
        await panel.get_by_label("Event").select_option("token_changed")
        await visit.button("Show", inside=panel).press("Enter")
        rows = panel.get_by_role("row").filter(has_text="max_tokens=")
        await expect(rows).to_have_count(50)
        await expect(rows.first).to_contain_text("max_tokens=51")
        await visit.button("Show more", inside=panel).press("Enter")
        await expect(rows).to_have_count(51)
        await expect(rows.last).to_contain_text(f"max_tokens=1{made['token_id']}")
        # The last window removes the button; the focus moves after the rows have been drawn.
        await visit.page.wait_for_function("() => document.activeElement !== document.body")


def _limit(daemon: Daemon, token_id: str, number: int) -> None:
    """Change a token in the daemon's file, as the command line does."""
    with closing(Accounts.open(daemon.state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        accounts.limit_token(token_id, AccessLimits(max_tokens=number))


async def test_usage_of_all_accounts_is_shown(browser: Browser, echo: Daemon) -> None:
    """It is shown by day and by account, or for one account."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "user-of-tokens")
    async with connect_client(echo, made["token"]) as client, signed_in(browser, echo) as visit:
        session = await client.create()
        await client.turn(session, "Some words.")
        panel = await open_tab(visit, "Usage")
        table = panel.get_by_role("region", name="Accounts by tokens as a table")
        row = table.get_by_role("row").filter(has_text="user-of-tokens")
        await expect(row.get_by_role("cell").first).to_have_text("1")
        await panel.get_by_label("Account", exact=True).select_option("user-of-tokens")
        await expect(panel.get_by_role("region", name="Usage by day").get_by_role("row")).to_have_count(2)
        parts = await panel.locator(".usage-columns i").evaluate_all(
            "(all) => all.map((each) => Number(each.style.getPropertyValue('--part')))"
        )
        assert parts == [0] * 29 + [1]


async def test_log_is_followed_without_secrets(browser: Browser, echo: Daemon) -> None:
    """Lines appear while the tab is open; a token in one is redacted, and the level filters."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "logged")
    async with signed_in(browser, echo) as visit:
        panel = await open_tab(visit, "Log")
        lines = panel.get_by_role("region", name="Lines of the log")
        async with connect_client(echo, made["token"]):
            await expect(lines.get_by_text(re.compile("client_connected.*client=logged")).first).to_be_visible()
        await expect(lines.get_by_text(re.compile("client_disconnected.*client=logged")).first).to_be_visible()
        assert made["token"].rpartition("_")[2] not in await lines.inner_text()
        await panel.get_by_label("From level").select_option("error")
        await expect(lines.get_by_text("client_connected")).to_have_count(0)


READY = {
    "Accounts": "since",
    "Usage": "No usage|Generated",
    "Models": "In memory",
    "Sessions": "tokens|No sessions",
    "Audit log": "^admin$",
    "Log": "client_connected",
}
"""Text that shows that a tab has read its data."""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("device", DEVICES)
async def test_administration_meets_the_accessibility_rules(
    browser: Browser, echo: Daemon, device: str, theme: Literal["light", "dark"]
) -> None:
    """On each tab axe finds no serious or critical problem, everything fits, and touch targets are large."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", f"axe-{device}-{theme}")
    found: dict[str, list[str]] = {}
    async with signed_in(browser, echo, color_scheme=theme, **DEVICES[device]) as visit:
        for name, ready in READY.items():
            panel = await open_tab(visit, name)
            await expect(panel.get_by_text(re.compile(ready)).first).to_be_visible()
            found[name] = await barriers(visit)
            if device == "phone":
                found[f"targets of {name}"] = await visit.page.evaluate(SMALL)
            await fits(visit)
        entry = await manage(visit, f"axe-{device}-{theme}")
        await visit.button(f"Limits of {made['token_id']}", inside=entry).click()
        await visit.button("Create token", inside=entry).click()
        await expect(entry.get_by_role("group", name="New token")).to_be_visible()
        found["an account"] = await barriers(visit)
        await fits(visit)
        cut = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"
        found["tabs that are cut"] = await visit.page.get_by_role("tab").evaluate_all(cut)
        if device == "phone":
            found["targets"] = await visit.page.evaluate(SMALL)
    assert not any(found.values()), found


async def test_tab_is_in_the_address(browser: Browser, echo: Daemon) -> None:
    """A reload, an address and the way back show it; an unknown one shows the first."""
    async with signed_in(browser, echo) as visit:
        await open_tab(visit, "Audit log")
        assert visit.page.url.endswith("#/admin/audit")
        await visit.page.reload()
        audit = visit.page.get_by_role("tabpanel", name="Audit log")
        await expect(audit).to_be_visible()
        assert visit.page.url.endswith("#/admin/audit")
        await visit.page.get_by_role("tab", name="Sessions").click()
        await expect(audit).to_have_count(0)
        await visit.page.go_back()
        await expect(audit).to_be_visible()
        await visit.button("Dashboard").click()
        await expect(visit.page.get_by_role("heading", name="Dashboard")).to_be_visible()
        await visit.button("Administration").click()
        await expect(audit).to_be_visible()
        await visit.go("#/admin/unknown")
        await expect(visit.page.get_by_role("tabpanel", name="Accounts")).to_be_visible()


async def test_tabs_are_chosen_with_the_keyboard(browser: Browser, echo: Daemon) -> None:
    """Every stop of the focus is visible."""
    async with signed_in(browser, echo) as visit:
        await open_tab(visit, "Accounts")
        names = await visit.tab_through()
        assert "Accounts" in names
        assert "Create account" in names
