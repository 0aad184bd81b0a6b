"""``inferencecenter run``: one prompt to a model from the shell, without a daemon."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from inferencecenter.cli.options import ConfigOption, JsonOption, given, read_params
from inferencecenter.cli.output import print_json, stderr, stdout
from inferencecenter.cli.view import PlainView, TerminalView
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.one_shot import OneShotRequest, chosen_model, complete
from inferencecenter.protocol.events import End, Token
from inferencecenter.telemetry import logs

if TYPE_CHECKING:
    from inferencecenter.cli.view import TurnView
    from inferencecenter.config.settings import Settings
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.one_shot import OneShotResult, Shown

_SIGNALLED: Final = 128
"""Offset of the exit code for a program ended by a signal, as in shells."""
_SIGINT, _SIGPIPE = 2, 13


def run(  # noqa: PLR0913 - one argument an option
    model: Annotated[str, typer.Argument(help="GGUF file, name of a registered model, or demo.", metavar="MODEL")],
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    *,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "--params", "-p", help="A parameter as name=value; may be repeated.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Maximum tokens of the answer.", show_default=False)
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", help="Image file for models with a projector; may be repeated.", dir_okay=False, exists=True
        ),
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option("--mmproj", help="The model's projector.", dir_okay=False, exists=True)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    json: JsonOption = False,
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", help="Tokens of context.", show_default=False)] = None,
    n_gpu_layers: Annotated[
        int | None, typer.Option("--n-gpu-layers", help="Layers on the GPU; -1 is all.", show_default=False)
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level", help="Log to standard error: debug, info, warning or error.", show_default="no log"
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Run one prompt and print the answer as it is generated; neither needs nor contacts a daemon.

    Piped input is the prompt, or is appended to it.
    """
    turn_params = read_params([*(params or []), *([] if max_tokens is None else [f"max_tokens={max_tokens}"])])
    overrides = given(engine__n_ctx=n_ctx, engine__n_gpu_layers=n_gpu_layers, log__level=log_level)
    settings = load_settings(config, overrides)
    # An error that prevents the answer is reported once, by the command.
    logs.configure(
        level=settings.log.level if log_level else "error",
        log_format=settings.log.format,
        stream=None if log_level else io.StringIO(),
    )
    spec = _with_overrides(chosen_model(settings, model), settings, n_ctx=n_ctx, n_gpu_layers=n_gpu_layers)
    if mmproj is not None:
        spec = replace(spec, mmproj=mmproj)
    try:
        question = OneShotRequest(
            prompt=read_prompt(prompt),
            params=turn_params,
            images=tuple(path.read_bytes() for path in image or ()),
            system=system,
            raw=raw,
        )
        answered = _run(spec, question, settings, as_json=json)
    except BrokenPipeError:
        # The reader is gone; the flush at Python's exit would fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_SIGNALLED + _SIGPIPE) from None
    except KeyboardInterrupt:
        raise typer.Exit(_SIGNALLED + _SIGINT) from None
    if answered.interrupted:
        raise typer.Exit(_SIGNALLED + answered.interrupted)


def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, standard input if it is ``-`` or missing, or both if input is piped.

    Raises:
        InferenceCenterError: ``invalid_request`` for an empty prompt or invalid text.
    """
    if argument is None and sys.stdin.isatty():
        raise _refused("there is no prompt", hint='Give one, as in: inferencecenter run demo "What is a llama?"')
    from_stdin = argument in (None, "-") or _is_piped()
    try:
        piped = sys.stdin.buffer.read().decode().removesuffix("\n") if from_stdin else ""
    except UnicodeDecodeError as error:
        raise _refused(f"the piped input is not UTF-8 at byte {error.start}", hint="Pipe UTF-8 text.") from None
    prompt = "\n\n".join(part for part in ("" if argument in (None, "-") else argument, piped) if part)
    if not prompt.strip():
        raise _refused("the prompt is empty", hint="Give one as an argument, or pipe it in.")
    return prompt


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a file; a terminal or ``/dev/null`` is neither."""
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def _refused(message: str, *, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, hint=hint, field="prompt")


def _with_overrides(spec: ModelSpec, settings: Settings, **overrides: int | None) -> ModelSpec:
    """Return the model with command line values, which override its registered ones."""
    own = {name: getattr(settings.engine, name) for name, value in overrides.items() if value is not None}
    return replace(spec, engine=spec.engine.model_copy(update=own))


def _run(spec: ModelSpec, question: OneShotRequest, settings: Settings, *, as_json: bool) -> OneShotResult:
    screen = _Screen(None if as_json else TerminalView(stdout) if stdout.is_terminal else PlainView(), spec.name)
    try:
        answered = asyncio.run(complete(spec, question, settings, on_status=screen.moved, on_event=screen.show))
    except InferenceCenterError:
        screen.finish()
        raise
    finally:
        screen.stop_waiting()
    screen.finish()
    if as_json and answered.end is not None:
        print_json(screen.as_data(answered.end))
    return answered


class _Screen:
    """Output while the model loads and answers; without a view the answer is only collected."""

    def __init__(self, view: TurnView | None, model: str) -> None:
        self._view = view
        self._model = model
        self._waiting = stderr.status(f"loading {model}", spinner_style="dim") if stderr.is_terminal else None
        self._has_begun = False
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def moved(self, status: EngineStatus) -> None:
        """Show the loading progress; after the engine is lost, keep waiting."""
        if self._has_begun:
            return
        if status.state is EngineState.READY:
            self.stop_waiting()
            self._has_begun = True
            if self._view is not None:
                self._view.begin()
        elif self._waiting is not None:
            self._waiting.start()
            self._waiting.update(f"loading {self._model}: {status.load_fraction:.0%}")

    def show(self, event: Shown) -> None:
        """Show an event of the turn."""
        if isinstance(event, Token):
            self._texts.append(event.content)
            self._logprobs += [each.model_dump(mode="json") for each in event.logprobs or ()]
        if self._view is not None:
            self._view.show(event)

    def stop_waiting(self) -> None:
        """Remove the loading message."""
        if self._waiting is not None:
            self._waiting.stop()

    def finish(self) -> None:
        """End the output line; a pipe to which nothing was written stays empty."""
        is_drawn = self._has_begun and stdout.is_terminal
        if self._view is not None and (is_drawn or self._texts):
            self._view.finish()

    def as_data(self, end: End) -> dict[str, Any]:
        """Return the answer as JSON data."""
        fields = end.model_dump(mode="json", include={"finish_reason", "stop", "warnings", "usage", "stats"})
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"model": self._model, "text": "".join(self._texts), **fields, **logprobs}
