"""The choice of the model in the header of a conversation."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client, run_daemon
from tests.e2e.other_model import write_other_model
from tests.web.browser import MARKS, PHONE, barriers, origin_of, signed_in, visiting
from tests.web.conftest import ROOMY
from tests.web.stub import Stub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.async_api import Browser, Locator, Route

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon with two models and one whose file is not there."""
    directory = tmp_path_factory.mktemp("models")
    write_other_model(demo_model_path, directory / "other.gguf")
    missing = {"missing": {"path": str(directory / "missing.gguf")}}
    settings = {
        "INFERENCECENTER_MODELS_DIR": str(directory),
        "INFERENCECENTER_MODELS": json.dumps(missing),
        "INFERENCECENTER_MODEL__NAME": "demo",
    }
    with run_daemon(tmp_path_factory.mktemp("house") / "state", demo_model_path, **ROOMY, **settings) as running:
        yield running


def opener(visit: Visit) -> Locator:
    """The button with the model's name."""
    return visit.page.locator(".fact-model")


def option(visit: Visit, name: str) -> Locator:
    """The entry of a model."""
    return visit.page.get_by_role("option", name=re.compile(f"^{name}"))


async def test_model_of_a_new_chat(browser: Browser, house: Daemon) -> None:
    """It is chosen by the keyboard, and loaded by the question; its progress is shown meanwhile."""
    async with signed_in(browser, house) as visit:
        await expect(opener(visit)).to_have_text("demo")
        await opener(visit).focus()
        await visit.page.keyboard.press("Enter")
        await expect(visit.page.get_by_role("listbox", name="Model")).to_be_focused()
        await expect(visit.page.get_by_text("Models load automatically when you use them.")).to_be_visible()
        await expect(option(visit, "demo")).to_have_attribute("aria-selected", "true")
        await expect(option(visit, "demo")).to_contain_text("In memory · 8,192 tokens of context")
        assert await barriers(visit) == []
        await visit.page.keyboard.press("Escape")
        await expect(opener(visit)).to_be_focused()
        await visit.page.keyboard.press("Enter")
        await expect(visit.page.get_by_role("listbox", name="Model")).to_be_focused()
        await expect(option(visit, "other")).to_contain_text("Not loaded")
        await visit.page.keyboard.press("End")
        await expect(option(visit, "other")).to_have_attribute("data-active", "true")
        await visit.page.keyboard.press("d")
        await expect(option(visit, "demo")).to_have_attribute("data-active", "true")
        await visit.page.keyboard.press("ArrowUp")
        await visit.page.keyboard.press("o")
        await visit.page.keyboard.press("Enter")
        await expect(opener(visit)).to_contain_text("other")
        await expect(opener(visit)).to_be_focused()
        await visit.ask("Hello, who are you?")
        await visit.answered()
        await expect(opener(visit)).to_have_text("other")
        async with connect_client(house) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert told["model"] == "other"


async def test_models_fit_on_a_phone(browser: Browser, house: Daemon) -> None:
    """The list is within the screen, and nothing scrolls sideways when it gets the focus."""
    async with signed_in(browser, house, viewport=PHONE, is_mobile=True, has_touch=True) as visit:
        await opener(visit).tap()
        await expect(visit.page.get_by_role("listbox", name="Model")).to_be_focused()
        await expect(visit.page.locator(".picker")).to_be_in_viewport(ratio=1)
        await expect(visit.button("Conversations")).to_be_in_viewport(ratio=1)


async def test_model_of_an_open_conversation(browser: Browser, house: Daemon) -> None:
    """It answers from the next message on, and knows those before; other tabs follow, and a reload keeps it."""
    async with signed_in(browser, house) as visit, signed_in(browser, house) as tab:
        await visit.ask("My name is Ada.")
        await visit.answered()
        session = visit.session_id()
        await tab.conversation("My name is Ada.").first.click()
        await opener(visit).click()
        await option(visit, "other").click()
        await expect(opener(visit)).to_contain_text("other")
        await expect(opener(tab)).to_contain_text("other")
        assert visit.session_id() == session
        await visit.button("Continue here").click()
        await visit.ask("What is my name?")
        await expect(await visit.answered(count=2)).to_contain_text("Ada")
        await visit.page.reload()
        await expect(opener(visit)).to_contain_text("other")
        await opener(visit).click()
        await option(visit, "demo").click()
        await expect(opener(visit)).to_have_text("demo")


async def test_attached_files_are_counted_for_the_model(browser: Browser, house: Daemon) -> None:
    """They are counted again when it changes, in a new chat or an open conversation, but not after a reload."""
    counted: list[str] = []

    async def count(route: Route) -> None:
        asked: Any = route.request.post_data_json
        counted.append(asked["model"])
        await route.fulfill(json={"count": {"demo": 11, "other": 22}[asked["model"]]})

    async with signed_in(browser, house) as visit:
        await visit.page.route("**/tokenize", count)
        size = visit.page.get_by_role("group", name="Attached files").locator(".file-size")
        chooser = visit.page.get_by_label("Files to attach")
        await expect(opener(visit)).to_have_text("demo")
        await chooser.set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"words"})
        await expect(size).to_have_text("11 tokens")
        await opener(visit).click()
        await option(visit, "other").click()
        await expect(size).to_have_text("22 tokens")
        await visit.page.reload()
        await expect(size).to_have_text("22 tokens")
        assert counted == ["demo", "other"]
        await opener(visit).click()
        await option(visit, "demo").click()
        await expect(size).to_have_text("11 tokens")
        await visit.ask("My name is Ada.")
        await visit.answered()
        await chooser.set_input_files({"name": "b.txt", "mimeType": "text/plain", "buffer": b"more words"})
        await expect(size).to_have_text("11 tokens")
        await opener(visit).click()
        await option(visit, "other").click()
        await expect(size).to_have_text("22 tokens")


async def test_model_that_cannot_be_loaded(browser: Browser, house: Daemon) -> None:
    """The list and the answer say why."""
    async with signed_in(browser, house) as visit:
        await opener(visit).click()
        await option(visit, "missing").click()
        await visit.ask("Hello.")
        await expect(visit.page.get_by_role("article", name="Answer")).to_contain_text("missing.gguf does not exist")
        await opener(visit).click()
        await option(visit, "demo").click()
        await visit.button("Try again").click()
        await expect(await visit.answered()).to_contain_text(re.compile("[a-z]"))


CHAT: dict[str, Any] = {"default": False, "kind": "chat", "state": "unloaded"}


async def test_states_of_models(browser: Browser, echo: Daemon) -> None:
    """A loading model has its progress, a failed one its reason; those that do not chat are not offered."""
    reads = 0

    def listed(_: dict[str, Any]) -> dict[str, Any]:
        nonlocal reads
        reads += 1
        loading = {"state": "loading", "load_fraction": 0.42} if reads < 4 else {"state": "loaded"}
        return {
            "op": "models",
            "models": [
                CHAT | {"name": "stub", "default": True} | loading,
                CHAT | {"name": "broken", "state": "failed", "detail": "The file is truncated."},
                CHAT | {"name": "idle", "state": "asleep"},
                CHAT | {"name": "vectors", "kind": "embedding"},
            ],
        }

    async with visiting(browser, origin_of(echo), viewport=PHONE) as visit:
        await Stub(answers={"list_models": listed}).take_over(visit.page)
        await visit.go("#token=any")
        await expect(opener(visit)).to_have_text("stubLoading, 42 %")
        await opener(visit).click()
        await expect(visit.page.get_by_role("option")).to_have_count(3)
        await expect(option(visit, "broken")).to_contain_text("The file is truncated.")
        await expect(option(visit, "idle")).to_contain_text("Sleeping")
        assert await barriers(visit) == []
        await expect(option(visit, "stub")).to_contain_text("In memory")
        await expect(opener(visit)).to_have_text("stub")
        await visit.composer.focus()
        await expect(visit.page.get_by_role("listbox")).to_have_count(0)


SUGGESTED = {
    "stub": {"parameters": 2_000_000, "has_chat_template": True},
    "base": {"parameters": 7_000_000_000, "has_chat_template": False},
    "qwen-coder": {"parameters": 7_000_000_000, "has_chat_template": True},
    "large": {},
}


async def test_suggestions_fit_the_model(browser: Browser, echo: Daemon) -> None:
    """A small model gets what it was trained for, a base model the beginning of a text."""
    listed = [CHAT | {"name": name, "default": name == "stub"} | facts for name, facts in SUGGESTED.items()]
    async with visiting(browser, origin_of(echo)) as visit:
        await Stub(answers={"list_models": lambda _: {"op": "models", "models": listed}}).take_over(visit.page)
        await visit.go("#token=any")
        shown = visit.page.locator(".suggestions")
        await expect(visit.page.get_by_role("heading", name="What's on your mind?")).to_be_visible()
        await expect(shown).to_contain_text("capital of Austria")
        for name, words in (
            ("base", "Once upon a time"),
            ("qwen-coder", "palindrome"),
            ("large", "hash table"),
            ("stub", "Count"),
        ):
            await opener(visit).click()
            await option(visit, name).click()
            await expect(shown).to_contain_text(words)
        await visit.button("Count from 1 to 20.").click()
        await expect(visit.questions).to_have_text("Count from 1 to 20.")
