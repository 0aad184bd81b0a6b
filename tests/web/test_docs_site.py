"""Tests of the documentation's site as a browser shows it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.web.browser import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.async_api import Browser

pytestmark = MARKS
ROOT = Path(__file__).parents[2]


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Drop the line."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built and served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_diagrams_are_drawn_without_another_origin(browser: Browser, site: str) -> None:
    """Every diagram of the states is drawn, and the browser requests nothing from elsewhere."""
    page = await browser.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    await page.goto(f"{site}/states.html")
    diagrams = (ROOT / "docs/states.md").read_text(encoding="utf-8").count("```mermaid")
    await expect(page.locator("div.mermaid")).to_have_count(diagrams)
    assert [url for url in requested if not url.startswith((site, "blob:", "data:"))] == []
    await page.close()
