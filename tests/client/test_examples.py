"""Each program in examples/ works when run as its reader would run it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import async_playwright, expect

from tests.client.test_real_daemon import proxy_to
from tests.e2e.harness import Daemon, run_daemon
from tests.ports import free_port
from tests.web.browser import find_browser, launch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 60.0
ELSEWHERE = {"chat.py", "resume.py", "fastapi_proxy.py", "browser.html"}
"""Those that are more than a program which is run once, and have tests of their own here."""
SAYS = {
    "many_sessions.py": r"France: .*Paris.*\n(.*\n)*Canada: .*Ottawa",
    "abort.py": r"after a sentence: aborted, 1 full stop\nafter half a second: aborted\nfrom another task: aborted\n",
    "tool_loop.py": r'get_weather\({"city": "Oslo"}\)\n.*21.*\n',
    "langchain_chat.py": r"\A.*Paris.*\n.*Rome.*\n.*Madrid.*\n.*Oslo.*\n\Z",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model."""
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path) as running:
        yield running


def environment(daemon: Daemon) -> dict[str, str]:
    """Return the environment with the daemon's address and token."""
    return {
        **os.environ,
        "INFERENCECENTER_URL": f"http://127.0.0.1:{daemon.port}",
        "INFERENCECENTER_TOKEN": daemon.admin_token,
        "PYTHONPATH": str(ROOT),
    }


def run(daemon: Daemon, name: str, *arguments: str, typed: str = "") -> str:
    """Run an example to its end and return its output."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env=environment(daemon),
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    """A new example needs its expected output here."""
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == SAYS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", SAYS)
def test_examples_print_the_expected_output(daemon: Daemon, name: str) -> None:
    """They exit with 0."""
    assert re.search(SAYS[name], run(daemon, name))


def test_piped_conversation_remembers(daemon: Daemon) -> None:
    """The second question is answered from the first."""
    first, second = run(daemon, "chat.py", typed="My name is Ada.\nWhat is my name?\n").splitlines()
    assert first
    assert "Ada" in second


def test_answer_survives_the_asking_program(daemon: Daemon) -> None:
    """The program is killed midway, and the next one reads the whole answer."""
    program = subprocess.Popen(
        [sys.executable, EXAMPLES / "resume.py"], env=environment(daemon), stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program.stdout as output:
        session_id = output.readline().strip()
        first_part = output.read(20)
        program.kill()
        program.wait()
        first_part += output.read()
    whole = run(daemon, "resume.py", session_id)
    assert whole.startswith(first_part.rstrip("\n"))
    assert len(whole) > len(first_part)


def test_service_streams_answers(daemon: Daemon) -> None:
    """Answers arrive in pieces, refusals are HTTP statuses, and no session is left."""
    sessions = daemon.metric("sessions")
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--port", str(port), "fastapi_proxy:app"]
    service = subprocess.Popen(command, env=environment(daemon), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert "Paris" in _post(port, b'{"question": "What is the capital of France?"}')
        with pytest.raises(urllib.error.HTTPError, match="422"):
            _post(port, b'{"question": ""}')
    finally:
        service.terminate()
        service.wait()
    assert daemon.metric("sessions") == sessions


def _post(port: int, body: bytes) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/ask", data=body, headers={"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_browser_page_resumes_after_a_disconnect(tmp_path: Path) -> None:
    """The answer is whole after the socket was lost midway: no library, another origin."""
    find_browser()
    port = free_port()
    question = "".join(f"{number} bottles, " for number in range(60))
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "4",
        "INFERENCECENTER_SERVER__ALLOWED_ORIGINS": f'["http://127.0.0.1:{port}"]',
    }
    with serve_folder(EXAMPLES, port), run_daemon(tmp_path / "state", Path("/dev/null"), **settings) as daemon:
        async with proxy_to(daemon.port) as (proxy, url), async_playwright() as playwright:
            browser = await launch(playwright)
            page = await browser.new_page()
            await page.goto(f"http://127.0.0.1:{port}/browser.html")
            await page.get_by_label("Daemon").fill(url)
            await page.get_by_label("Token").fill(daemon.admin_token)
            await page.get_by_label("Question").fill(question)
            await page.get_by_role("button", name="Ask").click()
            answer = page.get_by_role("status")
            await expect(answer).to_contain_text("9 bottles")
            proxy.disconnect()
            await expect(page.locator("#state")).to_contain_text("tokens", timeout=TIMEOUT_S * 1000)
            assert await answer.text_content() == question
            await page.get_by_role("button", name="Ask").click()
            await expect(answer).to_contain_text("9 bottles")
            await page.get_by_role("button", name="Stop").click()
            await expect(page.locator("#state")).to_contain_text("aborted")
            await browser.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serve_folder(folder: Path, port: int) -> Iterator[None]:
    """Serve a folder like `python -m http.server`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


async def test_unclosed_client_does_not_block_exit(daemon: Daemon) -> None:
    """The blocking client's thread is a daemon thread."""
    program = (
        "import os\nfrom inferencecenter.client.blocking import Client\n"
        "client = Client(os.environ['INFERENCECENTER_URL'], os.environ['INFERENCECENTER_TOKEN'])\n"
        "client.open()\nprint(len(client.models()))\n"
    )
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], env=environment(daemon), capture_output=True, timeout=TIMEOUT_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"1\n", b"")
