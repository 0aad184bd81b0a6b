"""Images that a user sends from the page."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from tests.e2e.harness import command_line, connect_client, run_daemon
from tests.sessions.images.files import image_file
from tests.web import node
from tests.web.browser import MARKS, PHONE, barriers, origin_of, signed_in, visiting
from tests.web.test_transfer import exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.async_api import Browser, FilePayload, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS

RED: Final = image_file((64, 48))
PICTURE: Final = Path(__file__).parents[2] / "examples" / "pictures" / "red-circle.png"
WIDE: Final = image_file((2400, 300), color="blue", kind="JPEG")
GIVE: Final = """(area, [data, type]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "shot.png", { type: "image/png" }));
  const event = type === "paste"
    ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  area.dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the bundled model and its projector."""
    with run_daemon(tmp_path_factory.mktemp("seeing") / "state", None) as running:
        yield running


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model is set to take text only."""
    state = tmp_path_factory.mktemp("blind") / "state"
    with run_daemon(state, None, INFERENCECENTER_MODEL__MMPROJ="off") as running:
        yield running


def payload(name: str, content: bytes, kind: str) -> FilePayload:
    """A file as a browser's file input takes it."""
    return {"name": name, "mimeType": kind, "buffer": content}


async def attach(visit: Visit, *files: FilePayload) -> Locator:
    """Choose files and return their chips."""
    await visit.page.get_by_label("Files to attach").set_input_files(list(files))
    return visit.page.get_by_role("group", name="Attached files").locator(".chip")


async def transcript(daemon: Daemon, session: str) -> list[Any]:
    """The messages that the daemon has."""
    async with connect_client(daemon) as client:
        messages: list[Any] = (await client.ask(op="get_session", session_id=session))["transcript"]
    return messages


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE, "has_touch": True}])
async def test_chosen_images_are_sent_and_shown(browser: Browser, seeing: Daemon, options: dict[str, Any]) -> None:
    """Scaled down, after a reload from the daemon, and in full size."""
    async with signed_in(browser, seeing, **options) as visit:
        chips = await attach(visit, payload("red.png", RED, "image/png"), payload("wide.jpg", WIDE, "image/jpeg"))
        await expect(chips).to_contain_text(["red.png64", "wide.jpg1568"])
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(2)
        assert await barriers(visit) == []
        await visit.ask("What is it?")
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        assert question["content"] == "\ufffc\ufffcWhat is it?"
        assert [(each["width"], each["height"]) for each in question["images"]] == [(64, 48), (1568, 196)]
        assert [each["alt"] for each in question["images"]] == ["red.png", "wide.jpg"]
        await visit.page.reload()
        asked = visit.questions.first
        images = asked.locator("img[data-loaded=true]")
        await expect(images).to_have_count(2)
        assert await images.evaluate_all("(all) => all.map((each) => each.naturalWidth)") == [64, 1568]
        await expect(asked.locator(".bubble")).to_have_text("What is it?")
        assert await barriers(visit) == []
        opener = visit.button("Open wide.jpg", inside=asked)
        await opener.focus()
        await visit.page.keyboard.press("Enter")
        view = visit.page.get_by_role("dialog", name="wide.jpg")
        await expect(view.get_by_role("img", name="wide.jpg")).to_be_visible()
        assert await barriers(visit) == []
        await visit.page.keyboard.press("Escape")
        await expect(view).to_have_count(0)
        await expect(opener).to_be_focused()


async def test_picture_is_named(browser: Browser, seeing: Daemon) -> None:
    """The example of the README."""
    async with signed_in(browser, seeing) as visit:
        chips = await attach(visit, payload("red-circle.png", PICTURE.read_bytes(), "image/png"))
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(1)
        await visit.ask("What is in the picture?")
        await visit.answered()
        await expect(visit.answers.last.locator(".prose")).to_have_text("A red circle.")


async def test_phone_takes_a_photo(browser: Browser, seeing: Daemon, blind: Daemon) -> None:
    """With its camera, where the model takes images; a mouse has no camera, and text needs the room."""
    options: Any = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    async with signed_in(browser, seeing, **options) as visit:
        camera = visit.button("Take a photo")
        async with visit.page.expect_file_chooser() as choosing:
            await camera.click()
        chooser = await choosing.value
        assert await chooser.element.get_attribute("capture") == "environment"
        await chooser.set_files([payload("photo.jpg", WIDE, "image/jpeg")])
        chips = visit.page.get_by_role("group", name="Attached files").locator(".chip")
        await expect(chips).to_contain_text(["photo.jpg1568"])
        assert await barriers(visit) == []
        await visit.composer.fill("What is it?")
        await expect(camera).to_have_count(0)
    for other, no_camera in ((seeing, {}), (blind, options)):
        async with signed_in(browser, other, **no_camera) as visit:
            await expect(visit.button("Attach files")).to_be_visible()
            await expect(visit.button("Take a photo")).to_have_count(0)


async def test_images_are_pasted_and_dropped(browser: Browser, seeing: Daemon) -> None:
    """A message may consist of them alone; one is removed before."""
    data = base64.b64encode(RED).decode()
    async with signed_in(browser, seeing) as visit:
        await visit.composer.evaluate(GIVE, [data, "paste"])
        await visit.page.get_by_role("region", name="Messages").evaluate(GIVE, [data, "drop"])
        chips = visit.page.get_by_role("group", name="Attached files").locator(".chip")
        await expect(chips).to_contain_text(["shot.png64", "shot.png64"])
        await visit.button("Remove shot.png").first.click()
        await expect(chips).to_have_count(1)
        await visit.page.reload()
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(1)
        await visit.button("Send").click()
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        assert (question["content"], len(question["images"])) == ("\ufffc", 1)


async def test_chip_shows_its_own_image_after_another_is_removed(browser: Browser, seeing: Daemon) -> None:
    """Its name and its picture belong together."""
    blue = image_file((32, 32), color="blue")
    async with signed_in(browser, seeing) as visit:
        chips = await attach(visit, payload("red.png", RED, "image/png"), payload("blue.png", blue, "image/png"))
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(2)
        await visit.button("Remove red.png").click()
        await expect(chips).to_contain_text(["blue.png"])
        assert await chips.locator("img").evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 32


async def test_edited_question_keeps_its_images(browser: Browser, seeing: Daemon) -> None:
    """They are named by digest then, and can be removed."""
    async with signed_in(browser, seeing) as visit:
        chips = await attach(visit, payload("red.png", RED, "image/png"))
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(1)
        await visit.ask("What is it?")
        await visit.answered()
        await visit.page.reload()
        await visit.button("Edit", inside=visit.questions.first).click()
        editor = visit.page.get_by_role("textbox", name="Edit the message")
        await expect(editor).to_have_value("What is it?")
        await expect(visit.page.locator(".editor .chip")).to_contain_text("red.png")
        await editor.fill("What color?")
        await editor.press("Enter")
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("2/2")
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        assert (question["content"], question["images"][0]["alt"]) == ("\ufffcWhat color?", "red.png")


@pytest.mark.parametrize("options", [{}, {"viewport": PHONE, "has_touch": True, "is_mobile": True}])
async def test_alternative_text_is_edited(browser: Browser, seeing: Daemon, options: dict[str, Any]) -> None:
    """Before an image is sent, which Enter in it does not do, and when its message is edited; then it may be empty."""
    async with signed_in(browser, seeing, **options) as visit:
        chips = await attach(visit, payload("red.png", RED, "image/png"))
        await visit.composer.fill("What is it?")
        await visit.button("Edit the alternative text of red.png").click()
        dialog = visit.page.get_by_role("dialog", name="Alternative text")
        text = dialog.get_by_role("textbox", name="Alternative text")
        await expect(text).to_have_value("red.png")
        assert await barriers(visit) == []
        await text.fill("no")
        await visit.page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(chips).to_contain_text("red.png")
        await visit.button("Edit the alternative text of red.png").click()
        await text.fill("  A red\n field ")
        await text.press("Enter")
        await expect(dialog).to_have_count(0)
        await expect(chips).to_contain_text("A red field")
        await visit.page.reload()
        await expect(chips).to_contain_text("A red field")
        await visit.button("Send").click()
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        assert question["images"][0]["alt"] == "A red field"
        await expect(visit.questions.first.get_by_role("img", name="A red field")).to_be_visible()
        await visit.button("Edit", inside=visit.questions.first).click()
        editor = visit.page.get_by_role("textbox", name="Edit the message")
        await visit.button("Edit the alternative text of A red field").click()
        await text.fill("")
        await visit.button("Save", inside=dialog).click()
        await expect(visit.page.locator(".editor .chip")).to_contain_text("Image 1")
        await editor.press("Enter")
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("2/2")
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        assert question["images"][0].get("alt") is None


async def test_image_without_a_name_has_a_number(browser: Browser, seeing: Daemon) -> None:
    """As one that another program sent."""
    async with connect_client(seeing) as client:
        session = await client.create()
        image = {"type": "image", "data": base64.b64encode(RED).decode()}
        await client.ask(op="append", session_id=session, messages=[{"role": "user", "content": [image]}])
    async with signed_in(browser, seeing) as visit:
        await visit.go(f"#/c/{session}")
        await expect(visit.button("Open Image 1").get_by_role("img", name="Image 1")).to_be_visible()


async def test_file_that_is_no_image_is_refused(browser: Browser, seeing: Daemon) -> None:
    """Before it is sent."""
    async with signed_in(browser, seeing) as visit:
        await attach(visit, payload("broken.png", b"no image", "image/png"))
        await expect(visit.page.get_by_role("alert")).to_contain_text("The browser cannot read this image.")


async def test_image_for_a_blind_model_is_refused_before_it_is_sent(browser: Browser, blind: Daemon) -> None:
    """The message that is being written stays."""
    async with signed_in(browser, blind) as visit:
        await visit.composer.fill("What is it?")
        await visit.page.get_by_label("Files to attach").set_input_files([payload("red.png", RED, "image/png")])
        await expect(visit.page.get_by_role("alert")).to_contain_text("red.png The model demo does not take images.")
        await expect(visit.composer).to_have_value("What is it?")


async def test_exports_carry_images(browser: Browser, seeing: Daemon) -> None:
    """Markdown as data URLs; what is exported as JSON is imported by another account."""
    async with signed_in(browser, seeing) as visit:
        chips = await attach(visit, payload("a [red] one.png", RED, "image/png"))
        await expect(chips.locator("img[data-loaded=true]")).to_have_count(1)
        await visit.ask("What is it?")
        await visit.answered()
        (question, _) = await transcript(seeing, visit.session_id())
        (image,) = question["images"]
        async with connect_client(seeing) as client:
            data = (await client.ask(op="get_image", digest=image["digest"]))["data"]
        await visit.button("Conversation settings").click()
        _, markdown = await exported(visit, "Export as Markdown")
        label = image["digest"][:16]
        assert f"![a  red  one.png][{label}]\n\nWhat is it?" in markdown
        assert markdown.endswith(f"\n\n[{label}]: data:image/png;base64,{data}\n")
        _, text = await exported(visit, "Export as JSON")
        assert json.loads(text)["images"] == {image["digest"]: {"media_type": "image/png", "data": data}}
    other = command_line(seeing, "token", "create", "importer")["token"]
    async with visiting(browser, origin_of(seeing)) as visit:
        await visit.page.goto(origin_of(seeing))
        await visit.token.fill(other)
        await visit.button("Sign in").click()
        await visit.button("Conversation settings").click()
        chosen = visit.page.get_by_label("File to import")
        await chosen.set_input_files(payload("a.json", text.encode(), "application/json"))
        await expect(visit.page.get_by_text("1 conversation imported.")).to_be_visible()
        await visit.button("Close the settings").click()
        await visit.conversation("What is it?").click()
        shown = visit.questions.first.get_by_role("img", name="a [red] one.png")
        await expect(shown).to_have_attribute("data-loaded", "true")
        await expect(visit.questions.first.locator(".bubble")).to_have_text("What is it?")


async def test_import_says_where_images_were() -> None:
    """Those whose files are missing; the others stay."""
    images = [{"digest": str(n) * 64, "width": 2, "height": 1, "media_type": "image/png"} for n in range(2)]
    said = {"role": "user", "content": "\ufffcWhat is \ufffcit?", "images": images}
    body = """
      const { messages: [said], files } = input;
      const text = JSON.stringify({ conversations: [{ title: "T", messages: [said] }], images: files });
      const { conversations: [{ messages }] } = conversationsIn(text);
      return [asMarkdown({ title: "T", messages: [said] }, files), messages];
    """
    files = {"1" * 64: {"media_type": "image/png", "data": "AA=="}}
    imports = 'import { asMarkdown, conversationsIn } from "JS/transfer.js";'
    markdown, messages = node.run(imports, body, given={"messages": [said], "files": files})
    assert "\n\n[image]What is ![][1111111111111111]\n\nit?\n" in markdown
    assert messages == [{"role": "user", "content": "[image]What is \ufffcit?", "images": images[1:]}]
    _, nothing = node.run(imports, body, given={"messages": [said], "files": {}})
    assert nothing == [{"role": "user", "content": "[image]What is [image]it?"}]
