"""The C library on a real daemon, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.c_library.conftest import (
    INVALID_ARGUMENT,
    INVALID_ENCODING,
    MODEL_NOT_FOUND,
    NOT_FOUND,
    RUNTIME_ERROR,
    SECURITY,
    SUCCESS,
    TIMEOUT,
    TOO_LARGE,
    compiled,
    running,
)
from tests.e2e.harness import run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.c_library.conftest import Driver
    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

BUFFER = 65536
STATUS_KINDS = ("queue", "memory", "sessions", "performance", "model")
PAGE = Path(__file__).parents[2] / "docs" / "c-library.md"


def opened(driver: Driver, config: str = "") -> str:
    """Load the default model and open a context."""
    return driver.must("open", driver.must("load", "default", config))


def test_turns_and_their_outputs(driver: Driver) -> None:
    """The prompt is input 0, the text output 0, counts and the reason output 1."""
    context = opened(driver)
    driver.must("input", context, 0, "hello there")
    driver.must("compute", context)
    text = driver.must("output", context, 0, BUFFER)
    assert "hello there" in text
    metadata = json.loads(driver.must("output", context, 1, BUFFER))
    assert metadata["finish_reason"] == "stop"
    assert metadata["output_tokens"] > 0
    assert set(metadata) == {"input_tokens", "output_tokens", "cached_tokens", "finish_reason"}
    assert driver.must("run", context, 'caf\u00e9 \U0001f600 "quoted"', BUFFER).count("\U0001f600") > 0
    driver.must("string", context, "ends with NUL")  # in a larger buffer
    driver.must("compute", context)
    assert "ends with NUL" in driver.must("output", context, 0, BUFFER)
    driver.must("close", context)
    assert driver.call("compute", context).error == INVALID_ARGUMENT


def test_small_buffer_gets_the_size_and_nothing_else(driver: Driver) -> None:
    """The exact size suffices, and a buffer of no bytes asks for it."""
    context = opened(driver)
    text = driver.must("run", context, "a long enough answer", BUFFER)
    size = len(text.encode())
    for too_small in (0, 1, size - 1):
        reply = driver.call("output", context, 0, too_small)
        assert reply.error == TOO_LARGE
        assert f"{size} bytes" in reply.text
    assert driver.must("output", context, 0, size) == text


def test_wrong_calls_are_errors_with_a_reason(driver: Driver) -> None:
    """NULL, closed and foreign handles, indexes, sizes and dimensions, for every function."""
    assert opened(driver) == "0"
    assert int(driver.must("wrong")) > 30
    driver.must("run", 0, "still usable", BUFFER)


def test_closed_handle_stays_invalid(driver: Driver) -> None:
    """Though its place is used again."""
    graph = driver.must("load", "", "")
    first = driver.must("open", graph)
    driver.must("close", first)
    second = driver.must("open", graph)
    assert second != first
    assert driver.call("close", first).error == INVALID_ARGUMENT
    driver.must("run", second, "x", BUFFER)


def test_status_has_the_documented_keys(driver: Driver) -> None:
    """Of every kind."""
    page = PAGE.read_text()
    for number, kind in enumerate(STATUS_KINDS):
        readings = json.loads(driver.must("status", number, BUFFER))
        (documented,) = re.findall(rf"^\| {number} \| `{kind}` \| (.*) \|$", page, re.MULTILINE)
        assert set(readings) == set(re.findall(r"`(\w+)`", documented.partition(";")[0])), kind
    assert driver.call("status", 0, 3).error == TOO_LARGE


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ('{"temperature": 99}', INVALID_ARGUMENT, "temperature"),
        ('{"sampling": {"top_k": "many"}}', INVALID_ARGUMENT, "top_k"),
        ('{"stopping": {"n_predict": 0}}', INVALID_ARGUMENT, "max_tokens"),
        ('{"ctx_size": -5}', INVALID_ARGUMENT, "ctx_size must be an integer from 0"),
        ('{"backend": {"max_sessions": 0}}', INVALID_ARGUMENT, "backend.max_sessions must be an integer from 1"),
        ('{"backend": []}', INVALID_ARGUMENT, "backend must be an object"),
        ('{"logging": {"level": "loud"}}', INVALID_ARGUMENT, "logging.level must be one of debug"),
        ('{"mode": "song"}', INVALID_ARGUMENT, "mode must be one of chat, raw"),
        ('{"mode": "chat\\u0000"}', INVALID_ARGUMENT, "mode must be one of chat, raw"),
        ('{"json_schema": "{"}', INVALID_ARGUMENT, "json_schema"),
        ("[]", INVALID_ARGUMENT, "object"),
        ("{", INVALID_ENCODING, "at byte 1"),
        ('{"a": "\\ud800"}', INVALID_ENCODING, "escape"),
        ("[" * 1000, INVALID_ENCODING, "nested"),
    ],
)
def test_wrong_configuration_is_refused(driver: Driver, config: str, error: int, words: str) -> None:
    """With the key and what is allowed; the backend stays usable."""
    reply = driver.call("load", "default", config)
    assert (reply.error, words in reply.text) == (error, True), reply
    opened(driver)


def test_keys_apply_or_are_named_in_a_warning(driver: Driver) -> None:
    """Flat, in groups, with hyphens, and by other spellings; groups take precedence."""
    config = {
        "n-predict": 500,
        "stopping": {"max_tokens": 3},
        "n_gpu_layers": 5,
        "temp": 0.5,
        "cache_policy": {"a": 1},
        "shade": "red",
        "max_tokens\0": 100,
        "\u00e9" * 70: 1,
        "system": "Be brief.",
    }
    context = opened(driver, json.dumps(config))
    driver.must("run", context, "one two three four five six seven", BUFFER)
    assert json.loads(driver.must("output", context, 1, BUFFER))["finish_reason"] == "length"
    warnings = [line for line in driver.log.splitlines() if "has no effect" in line]
    assert [line.split()[2] for line in warnings] == ["n_gpu_layers", "cache_policy", "shade", "?", "\u00e9" * 63 + "?"]
    assert "engine.n_gpu_layers" in warnings[0]
    driver.must("load", "", '{"logging": {"level": "none"}, "threads": 3}')
    assert "threads" not in driver.log


def test_metadata_and_options_change_parameters(driver: Driver) -> None:
    """Those of input 1 for all later turns, those of ``run_inference`` for one."""
    context = opened(driver)
    prompt = "one two three four five six seven"
    limited = '{"max_tokens": 2}'

    def reason() -> str:
        return str(json.loads(driver.must("output", context, 1, BUFFER))["finish_reason"])

    driver.must("run", context, prompt, BUFFER, limited)
    assert reason() == "length"
    driver.must("run", context, prompt, BUFFER)
    assert reason() == "stop"
    driver.must("input", context, 1, limited)
    driver.must("run", context, prompt, BUFFER)
    assert reason() == "length"
    assert driver.call("input", context, 1, "{").error == INVALID_ENCODING
    reply = driver.call("run", context, prompt, BUFFER, '{"top_p": 7}')
    assert (reply.error, "top_p" in reply.text) == (INVALID_ARGUMENT, True)
    driver.must("input", context, 1, '{"system": "x"}')
    assert "system has no effect" in driver.log
    driver.must("run", context, prompt, BUFFER, '{"max_time_ms": 60000}')


def test_contexts_are_limited(driver: Driver) -> None:
    """One more is refused, or closes the least recently used one."""
    strict = driver.must("load", "", '{"max_sessions": 2}')
    first, second = driver.must("open", strict), driver.must("open", strict)
    assert "2 execution contexts" in driver.call("open", strict).text
    recycling = driver.must("load", "", '{"backend": {"max_sessions": 2, "auto_cleanup": true}}')
    mine = [driver.must("open", recycling) for _ in range(2)]
    driver.must("run", mine[0], "x", BUFFER)
    driver.must("open", recycling)
    assert driver.call("compute", mine[1]).error == INVALID_ARGUMENT
    for context in (first, second, mine[0]):
        driver.must("run", context, "x", BUFFER)


def test_unknown_model(driver: Driver) -> None:
    """Names may be those of files."""
    assert driver.call("load", "missing", "").error == MODEL_NOT_FOUND
    assert driver.call("load", "./models/missing.gguf", "").text.count("missing") >= 1
    assert driver.call("load", "x" * 300, "").error == INVALID_ARGUMENT


def test_threads_share_a_backend(driver: Driver) -> None:
    """Their calls run one after another."""
    driver.must("load", "", "")
    driver.must("threads")


def test_text_is_streamed_in_whole_characters(driver: Driver) -> None:
    """The pieces, several, make the text; another context has no callback."""
    context, other = opened(driver), driver.must("open", 0)
    driver.must("stream", context)
    text = driver.must("run", context, "caf\u00e9 \U0001f600 na\u00efve", BUFFER)
    *pieces, rest = driver.must("streamed").split("|")
    assert ("".join(pieces), rest) == (text, "")
    assert len(pieces) > 1
    assert all(pieces)
    driver.must("run", other, "quiet", BUFFER)
    assert "quiet" not in driver.must("streamed")
    driver.must("close", context)
    assert driver.must("open", 0) != context
    driver.must("run", driver.must("open", 0), "a callback ends with its context", BUFFER)
    assert "ends" not in driver.must("streamed")


@pytest.fixture(scope="module")
def slow_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a daemon listens whose answers take seconds."""
    folder = tmp_path_factory.mktemp("slow")
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "20",
        "INFERENCECENTER_SERVER__PING_INTERVAL_S": "0.05",
        "INFERENCECENTER_SERVER__UNIX_SOCKET": str(folder / "s"),
    }
    with run_daemon(folder / "state", None, **settings):
        yield folder / "s"


def check_aborts(driver: Driver) -> None:
    """A turn is aborted by another thread, and by a callback; the text so far can be read, and the next turn runs."""
    context = opened(driver)
    driver.must("input", context, 0, "word " * 1000)
    reply = driver.call("interrupt", context)
    assert (reply.error, "aborted" in reply.text) == (RUNTIME_ERROR, True), reply
    assert json.loads(driver.must("output", context, 1, BUFFER))["finish_reason"] == "aborted"
    driver.must("stream", context, 2)
    reply = driver.call("run", context, "word " * 1000, BUFFER)
    assert (reply.error, "aborted" in reply.text) == (RUNTIME_ERROR, True), reply
    text = driver.must("output", context, 0, BUFFER)
    assert text == driver.must("streamed").replace("|", "")
    assert 0 < len(text) < 1000
    driver.must("stream", context)
    assert "short" in driver.must("run", context, "short", BUFFER)


def test_turn_is_aborted(program: Path, slow_socket: Path, tmp_path: Path) -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer."""
    with running((program,), slow_socket, tmp_path / "log") as driver:
        driver.must("init", "")
        check_aborts(driver)
        driver.must("deinit")


@pytest.mark.skipif(shutil.which("setarch") is None, reason="setarch is not installed")
def test_aborts_have_no_data_race(slow_socket: Path, tmp_path: Path) -> None:
    """Under ThreadSanitizer, as below."""
    program = compiled(tmp_path / "driver", Path(__file__).with_name("driver.c"), options=("-O1", "-fsanitize=thread"))
    with running(("setarch", "-R", program), slow_socket, tmp_path / "log") as driver:
        driver.must("init", "")
        check_aborts(driver)
        driver.must("deinit")


@pytest.mark.skipif(shutil.which("setarch") is None, reason="setarch is not installed")
def test_threads_have_no_data_race(tmp_path: Path) -> None:
    """Under ThreadSanitizer, with frequent pings; it needs addresses that are not random."""
    program = compiled(tmp_path / "driver", Path(__file__).with_name("driver.c"), options=("-O1", "-fsanitize=thread"))
    socket = tmp_path / "s"
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_SERVER__PING_INTERVAL_S": "0.05",
        "INFERENCECENTER_SERVER__UNIX_SOCKET": str(socket),
    }
    command = ("setarch", "-R", program)
    with run_daemon(tmp_path / "state", None, **settings), running(command, socket, tmp_path / "log") as driver:
        driver.must("init", "")
        driver.must("load", "", "")
        for _ in range(5):
            driver.must("threads")
        driver.must("deinit")


def test_answer_reaches_its_time_limit(driver: Driver) -> None:
    """What was computed until then can be read."""
    context = opened(driver, '{"max_time_ms": 1}')
    driver.must("input", context, 0, "word " * 800)
    reply = driver.call("compute", context)
    assert reply.error == TIMEOUT
    driver.must("output", context, 0, 2**20)


def test_large_prompts(driver: Driver) -> None:
    """Above the daemon's maximum of a frame they are not sent, and the connection stays."""
    context = opened(driver)
    driver.must("input", context, 0, "x" * 2**20)
    assert driver.call("compute", context).error == TOO_LARGE
    reply = driver.call("input", context, 0, "x" * (8 * 2**20 + 1))
    assert reply.error == TOO_LARGE
    driver.must("run", context, "short", BUFFER)


def test_wrong_token_and_absent_daemon(program: Path, echo: Daemon, echo_socket: Path, tmp_path: Path) -> None:
    """Neither has a backend."""
    with running((program,), echo_socket, tmp_path / "log", token="ic_wrong") as driver:
        reply = driver.call("init", "")
        assert (reply.error, "INFERENCECENTER_TOKEN" in reply.text) == (SECURITY, True)
        reply = driver.call("init", json.dumps({"socket": str(tmp_path / "none")}))
        assert (reply.error, "No such file" in reply.text) == (RUNTIME_ERROR, True)
        assert driver.call("init", json.dumps({"socket": "/" + "x" * 200})).error == RUNTIME_ERROR
        assert driver.call("init", json.dumps({"socket": f"{echo_socket}\0x"})).error == INVALID_ARGUMENT
    with running((program,), tmp_path / "none", tmp_path / "log", token=echo.admin_token) as driver:
        driver.must("init", json.dumps({"socket": str(echo_socket)}))
        opened(driver)
        driver.must("deinit")


def test_daemon_gone_during_an_answer(program: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The call fails, as do later ones; nothing waits or leaks."""
    socket = tmp_path_factory.mktemp("gone") / "sock"
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "50",
        "INFERENCECENTER_SERVER__UNIX_SOCKET": str(socket),
    }
    with (
        run_daemon(tmp_path / "state", None, **settings) as daemon,
        running((program,), socket, tmp_path / "log") as driver,
    ):
        driver.must("init", '{"stream_stdout": false}')
        context = opened(driver)
        driver.must("input", context, 0, "word " * 1000)
        assert driver.process.stdin is not None
        driver.process.stdin.write(f"compute\t{context}\n".encode())
        driver.process.stdin.flush()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        assert driver.process.stdout is not None
        assert driver.process.stdout.readline().split()[0] == b"4"
        driver.process.stdout.readline()
        reply = driver.call("status", 0, BUFFER)
        assert (reply.error, bool(reply.text)) == (RUNTIME_ERROR, True)
        assert driver.call("open", 0).error == RUNTIME_ERROR
        driver.must("deinit")


def test_idle_program_keeps_its_connection(program: Path, tmp_path: Path) -> None:
    """The library answers pings between calls."""
    socket = tmp_path / "s"
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_SERVER__PING_INTERVAL_S": "0.1",
        "INFERENCECENTER_SERVER__PING_TIMEOUT_S": "0.3",
        "INFERENCECENTER_SERVER__UNIX_SOCKET": str(socket),
    }
    with run_daemon(tmp_path / "state", None, **settings), running((program,), socket, tmp_path / "log") as driver:
        driver.must("init", "")
        context = opened(driver)
        time.sleep(2)  # twenty pings
        driver.must("run", context, "still here", BUFFER)
        driver.must("deinit")


def test_contexts_remember_their_own_turns_only(program: Path, tmp_path: Path) -> None:
    """The scripted model answers by the number of the turn in its conversation."""
    script = tmp_path / "script.toml"
    script.write_text("".join(f'[[rules]]\nwhen = {{turn = {n}}}\nreply = {{text = "turn {n}"}}\n' for n in (1, 2, 3)))
    socket = tmp_path / "s"
    settings = {
        "INFERENCECENTER_ENGINE__BACKEND": "script",
        "INFERENCECENTER_ENGINE__SCRIPT": str(script),
        "INFERENCECENTER_SERVER__UNIX_SOCKET": str(socket),
    }
    with run_daemon(tmp_path / "state", None, **settings), running((program,), socket, tmp_path / "log") as driver:
        driver.must("init", "")
        graph = driver.must("load", "", "")
        one, other = driver.must("open", graph), driver.must("open", graph)
        answers = [driver.must("run", context, "Hello.", BUFFER) for context in (one, one, other, one, other)]
        assert answers == ["turn 1", "turn 2", "turn 1", "turn 3", "turn 2"]
        driver.must("close", one)
        assert driver.must("run", driver.must("open", graph), "Hello.", BUFFER) == "turn 1"
        driver.must("deinit")


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(echo: Daemon, echo_socket: Path, tmp_path: Path) -> None:
    """Neither uses of uninitialized memory nor leaks."""
    plain = compiled(tmp_path / "plain", Path(__file__).with_name("driver.c"), options=("-O1",))
    command = ("valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=all", plain)
    with running(command, echo_socket, tmp_path / "log") as driver:
        driver.must("init", '{"logging": {"level": "warn"}, "shade": 1}')
        context = opened(driver, '{"sampling": {"temp": 0.5, "stop": ["x", "\\u00e9"]}, "json_schema": "{}"}')
        assert driver.call("run", context, "hello", BUFFER).error in (SUCCESS, INVALID_ARGUMENT)
        driver.must("run", opened(driver), "hello", BUFFER, '{"seed": 1}')
        for number in range(len(STATUS_KINDS)):
            driver.must("status", number, BUFFER)
        assert driver.call("load", "missing", "").error == MODEL_NOT_FOUND
        driver.must("deinit")


def test_expired_context_is_not_found(driver: Driver) -> None:
    """Its session ended after the configured idle time."""
    context = opened(driver, '{"idle_timeout_ms": 1000}')
    for _ in range(100):
        time.sleep(0.2)
        if json.loads(driver.must("status", 2, BUFFER))["sessions"] == 0:
            break
    driver.must("input", context, 0, "late")
    assert driver.call("compute", context).error == NOT_FOUND
    driver.must("close", context)
