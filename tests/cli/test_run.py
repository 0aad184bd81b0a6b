"""The command ``inferencecenter run`` with the demo model, without a daemon."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from inferencecenter.cli.run import read_prompt
from inferencecenter.config.loader import load_settings
from inferencecenter.config.settings import bundled_model
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.one_shot import OneShotRequest, chosen_model, complete
from inferencecenter.protocol.events import End, Token
from tests.engine.llama.lora_files import write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.one_shot import Shown
    from tests.cli.conftest import Cli

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TIMEOUT_S = 60
ONE_THREAD = {"INFERENCECENTER_ENGINE__N_THREADS": "1", "INFERENCECENTER_ENGINE__N_THREADS_BATCH": "1"}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 3000}


@pytest.fixture(autouse=True)
def restored_logs() -> Iterator[None]:
    """Restore the loggers after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Decode on one thread to avoid contention; the other settings are those of ``cli``."""
    assert cli
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def engine_exits() -> Iterator[None]:
    """Assert that no engine process remains."""
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Return a function that pipes data into standard input; before that it is a service's."""
    with ExitStack() as opened:
        monkeypatch.setattr(sys, "stdin", opened.enter_context(Path(os.devnull).open()))

        def pipe_in(data: bytes) -> None:
            reading, writing = os.pipe()
            os.write(writing, data)
            os.close(writing)
            monkeypatch.setattr(sys, "stdin", opened.enter_context(io.TextIOWrapper(os.fdopen(reading, "rb"))))

        yield pipe_in


def children(pid: int) -> set[int]:
    """The child processes of a process, except that of which the tests fork programs."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {each for each in found if b"tests.prefork\0" not in Path(f"/proc/{each}/cmdline").read_bytes()}


def engines_of(pid: int) -> set[int]:
    """Its engine processes."""
    return {each for each in children(pid) if b"engine\0--fd\0" in Path(f"/proc/{each}/cmdline").read_bytes()}


def started(state_dir: Path) -> subprocess.Popen[bytes]:
    """Start an endless answer, as a shell does."""
    options = [f"-p{name}={json.dumps(value)}" for name, value in ENDLESS.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "inferencecenter", "run", "demo", QUESTION, *options],
        env={"INFERENCECENTER_STATE_DIR": str(state_dir), "PATH": os.environ["PATH"], **ONE_THREAD},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answer(*, on_event: Any = None, **params: Any) -> tuple[str, End]:
    """Run the demo model; return the text and the finish reason."""
    texts: list[str] = []

    def show(event: Shown) -> None:
        if isinstance(event, Token):
            texts.append(event.content)
        if on_event is not None:
            on_event(event)

    settings = load_settings(None, {"engine.n_ctx": 4096})
    question = OneShotRequest(prompt=QUESTION, params=params)
    model = chosen_model(settings, "demo")
    answered = asyncio.run(complete(model, question, settings, on_status=lambda _status: None, on_event=show))
    assert answered.end is not None
    return "".join(texts), answered.end


def test_answer_is_the_only_output(cli: Cli, state_dir: Path) -> None:
    """Standard output has the text and a newline, standard error nothing, and no state directory is created."""
    result = cli.run("run", "demo", QUESTION, "-p", "temperature=0")
    assert (result.code, result.out, result.err) == (0, f"{ANSWER}\n", "")
    assert not state_dir.exists()


def test_json_output_with_all_options(cli: Cli, demo_model_path: Path) -> None:
    """The options for file, system prompt, parameters and limit apply, and one object has all results."""
    options = ["--system", "Answer briefly.", "--max-tokens", "3", "--param", "temp=0", "-p", "n_probs=1"]
    result = cli.run("run", str(demo_model_path), QUESTION, *options, "--n-ctx", "512", "--json")
    found = json.loads(result.out)
    assert (result.code, found["model"], found["finish_reason"]) == (0, demo_model_path.stem, "length")
    assert (found["usage"]["completion_tokens"], len(found["logprobs"])) == (3, 3)
    assert ANSWER.startswith(found["text"])
    assert found["stats"]["total_ms"] > 0


def test_raw_mode_skips_the_template(cli: Cli, piped: Callable[[bytes], None]) -> None:
    """The prompt has fewer tokens."""
    used = {}
    for options in ((), ("--raw",)):
        piped(b"Once upon a time\n")
        result = cli.run("run", "demo", "-", *options, "--json", "--max-tokens", "1")
        used[options] = json.loads(result.out)["usage"]["prompt_tokens"]
    assert used["--raw",] < used[()]


@pytest.mark.slow
def test_registered_model_with_an_adapter(cli: Cli, tmp_path: Path, demo_model_path: Path) -> None:
    """A configured model runs with its parameters and its adapter."""
    adapter = write_adapter(tmp_path / "wanderer.gguf")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[models.wanderer]\npath = "{demo_model_path}"\nlora = [{{path = "{adapter}"}}]\n'
        "params = {temperature = 0, max_tokens = 9}\n"
    )
    result = cli.run("run", "wanderer", QUESTION, "--config", str(config), "--json")
    found = json.loads(result.out)
    assert found["model"] == "wanderer"
    assert found["text"].startswith("The capital of France is")
    assert "Paris" not in found["text"]
    assert found["usage"]["completion_tokens"] <= 9


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("/nowhere/model.gguf", "Hi"), 66, "invalid_model_file: /nowhere/model.gguf does not exist."),
        (("absent", "Hi"), 66, "model_not_found: no model is named 'absent'"),
        (("demo", "Hi", "-p", "temperature=9"), 64, "params.temperature must be"),
        (("demo", "Hi", "-p", "warmth=1"), 64, "warmth"),
        (("demo", "Hi", "--max-tokens", "-7"), 64, "max_tokens"),
        (("demo", "Hi", "--n-ctx", "-1"), 78, "n_ctx is -1"),
        (("demo", "Hi", "--n-gpu-layers", "-2"), 78, "n_gpu_layers is -2"),
        (("demo", "Hi", "--log-level", "loud"), 78, 'log.level is "loud"'),
        (("demo",), 64, "invalid_request: the prompt is empty"),
        (("demo", " "), 64, "invalid_request: the prompt is empty"),
        (("demo", "Hi " * 5000, "--n-ctx", "256"), 65, "prompt_too_long"),
    ],
    ids=["file", "name", "value", "parameter", "limit", "context", "layers", "log", "none", "blank", "long"],
)
def test_invalid_request_is_one_message(cli: Cli, arguments: tuple[str, ...], code: int, words: str) -> None:
    """The message is written to standard error, and the exit code is the error's."""
    result = cli.run("run", *arguments)
    assert words in result.err
    assert (result.code, result.out) == (code, "")


def test_prompt_from_a_pipe(piped: Callable[[bytes], None]) -> None:
    """Piped text is the prompt or follows the argument, without its final newline."""
    for argument, expected in ((None, " some\ntext"), ("-", " some\ntext"), ("Sum up:", "Sum up:\n\n some\ntext")):
        piped(b" some\ntext\n")
        assert read_prompt(argument) == expected
    piped(b"")
    assert read_prompt("Hi") == "Hi"


def test_standard_input_is_read_only_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a prompt nothing else is awaited; a terminal is never read."""
    assert read_prompt("Hi") == "Hi"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(InferenceCenterError, match="there is no prompt") as refused:
        read_prompt(None)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_piped_binary_data_is_refused(piped: Callable[[bytes], None]) -> None:
    """It is refused before a model is loaded."""
    piped(b"\x89PNG")
    with pytest.raises(InferenceCenterError, match="not UTF-8 at byte 0"):
        read_prompt("Look:")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_answer(state_dir: Path, number: signal.Signals, code: int) -> None:
    """The text so far is written, also as JSON, and the engine exits."""
    process = started(state_dir)
    assert process.stdout is not None
    first = process.stdout.read(5)
    engines = engines_of(process.pid)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (code, b"")
    assert (first + rest).startswith(b"The c")
    assert rest.endswith(b"\n")
    assert len(engines) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


@pytest.mark.slow
def test_closed_output_pipe_ends_the_program(state_dir: Path) -> None:
    """The program ends silently, like others in a pipe."""
    process = started(state_dir)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(TIMEOUT_S) == 141


@pytest.mark.slow
def test_killed_engine_resumes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its restart the text equals an uninterrupted answer."""
    monkeypatch.setenv("INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S", "0.01")
    killed: list[int] = []

    def kill_once(event: Shown) -> None:
        if isinstance(event, Token) and not killed:
            (engine,) = engines_of(os.getpid())
            killed.append(engine)
            os.kill(engine, signal.SIGKILL)

    undisturbed, _ = answer(temperature=0, ignore_eos=True, max_tokens=60)
    disturbed, end = answer(on_event=kill_once, temperature=0, ignore_eos=True, max_tokens=60)
    assert killed
    assert disturbed == undisturbed
    assert end.finish_reason == "length"


def test_repeatedly_killed_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its restarts the answer fails without a hang."""
    monkeypatch.setenv("INFERENCECENTER_ENGINE__MAX_RESTARTS", "0")

    def kill(event: Shown) -> None:
        if isinstance(event, Token):
            for engine in engines_of(os.getpid()):
                os.kill(engine, signal.SIGKILL)

    with pytest.raises(InferenceCenterError) as failed:
        answer(on_event=kill, **ENDLESS)
    assert failed.value.code is ErrorCode.ENGINE_UNAVAILABLE


def test_failing_output_ends_the_answer() -> None:
    """The exception is raised after the engine has exited."""

    def fail(_event: Shown) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answer(on_event=fail, **ENDLESS)


def test_model_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered name has precedence over a file, and the bundled model is registered unless its name is used."""
    model = tmp_path / "demo"
    model.touch()
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {})
    assert chosen_model(settings, "demo").path == bundled_model()
    assert chosen_model(settings, "./demo").path == Path("./demo")
    assert chosen_model(settings, "gone.gguf").name == "gone"
    registered = load_settings(None, {"models": {"demo": {"path": str(model), "n_ctx": 333}}})
    assert chosen_model(registered, "demo").engine.n_ctx == 333
