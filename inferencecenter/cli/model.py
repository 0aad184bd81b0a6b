"""``inferencecenter model``: download, list, inspect, verify and delete model files; load and unload models."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, print_rows, stderr, stdout
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, admin_token_file, reach_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.models import files
from inferencecenter.models.registry import configured_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.config.settings import Settings
    from inferencecenter.models.files import IntegrityReport, ModelFacts, ModelFiles
    from inferencecenter.protocol.events import Swap
    from inferencecenter.protocol.values import ModelSummary


NameArgument: TypeAlias = Annotated[str, typer.Argument(help="Name of the model.")]

_LIST_TIMEOUT_S: Final = 3.0
_PHASES: Final = {"draining": "waiting for the turns of the model whose memory it needs", "loading": "loading"}


def load(  # noqa: PLR0913 - one argument an option
    name: NameArgument,
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Load a model in the running daemon and make it the default of sessions that name none; no turn is cut off."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    try:
        with _shown_swap(name) as show:
            asyncio.run(_load(daemon, name, show))
    except KeyboardInterrupt:
        stderr.print("The daemon continues to load it.", style="dim")
        raise
    if json:
        print_json({"model": name, "default": True})
    else:
        stdout.print(f"{name} is now the default model.", markup=False)


def unload(  # noqa: PLR0913 - one argument an option
    name: NameArgument,
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Free a model's memory in the running daemon once its turns have ended; the next turn loads it again."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    asyncio.run(_unload(daemon, name))
    if json:
        print_json({"model": name, "unloaded": True})
    else:
        stdout.print(f"{name} is unloaded once its turns have ended.", markup=False)


def models_of_daemon(
    settings: Settings, *, url: str | None, token: str | None, token_file: Path | None
) -> dict[str, ModelSummary]:
    """Return the running daemon's models by name; empty if there is no daemon.

    If the daemon was named explicitly, or refuses, the error is printed to standard error.
    """
    nothing_given = url is None and token is None and token_file is None
    if nothing_given and not os.path.exists(admin_token_file(settings)):  # noqa: PTH110 - Path.exists raises
        return {}
    try:
        daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
        return asyncio.run(_list_models(daemon))
    except InferenceCenterError as error:
        if url is not None or error.code is not ErrorCode.DAEMON_UNREACHABLE:
            stderr.print(f"The daemon's loaded models are unknown: {error.message}", markup=False, soft_wrap=True)
        return {}


def state(model: ModelSummary) -> str:
    words = f"{model.state}, default" if model.default else model.state
    if model.replicas:
        n_loaded = sum(each.state == "loaded" for each in model.replicas)
        words = f"{words}, {n_loaded} of {len(model.replicas)} replicas"
    if model.roll is not None and model.roll.failed:
        words = f"{words}, change failed: {model.roll.detail}"
    elif model.roll is not None:
        words = f"{words}, {model.roll.done} of {model.roll.total} replaced"
        words = f"{words}: {model.roll.detail}" if model.roll.detail else words
    return f"{words}: {model.detail}" if model.state == "failed" and model.detail else words


async def _load(daemon: DaemonAccess, name: str, show: Callable[[Swap], None]) -> None:
    async with daemon.client() as client:
        await client.load_model(name, on_progress=show)


async def _unload(daemon: DaemonAccess, name: str) -> None:
    async with daemon.client() as client:
        await client.unload_model(name)


async def _list_models(daemon: DaemonAccess) -> dict[str, ModelSummary]:
    async with daemon.client(open_timeout_s=_LIST_TIMEOUT_S, reconnect=False) as client:
        return {model.name: model for model in await client.models()}


@contextmanager
def _shown_swap(name: str) -> Iterator[Callable[[Swap], None]]:
    """Show a swap's progress on standard error: a bar on a terminal, otherwise a line per phase."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    shown_phase = ""
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as shown:
        task = shown.add_task(name, total=1.0)

        def show(swap: Swap) -> None:
            nonlocal shown_phase
            words = f"{name}: {_PHASES[swap.phase]}"
            shown.update(task, description=words, completed=swap.done)
            if not stderr.is_terminal and words != shown_phase:
                stderr.print(words, markup=False)
            shown_phase = words

        yield show


ModelsDirOption = Annotated[Path | None, typer.Option("--models-dir", help="Directory of models.", show_default=False)]

app = typer.Typer(
    help="Download, list, inspect, verify and delete model files; load and unload models in the daemon.",
    no_args_is_help=True,
)
app.command("load")(load)
app.command("unload")(unload)


@app.command("list")
def list_models(  # noqa: PLR0913 - one argument an option
    *,
    models_dir: ModelsDirOption = None,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the models in the models directory and those of a running daemon; tab-separated when piped."""
    settings = load_settings(config, given(models_dir=models_dir, state_dir=state_dir))
    names = configured_files(settings)
    served = models_of_daemon(settings, url=url, token=token, token_file=token_file)
    lines: list[_LocalModel | _RemoteModel] = [
        _LocalModel(model, names, served.pop(model.name, None)) for model in files.list_models(settings.models_dir)
    ]
    lines += map(_RemoteModel, served.values())
    if json:
        print_json([line.as_data() for line in lines])
        return
    right = [Column(name, justify="right") for name in ("parameters", "size")]
    print_rows(("model", "architecture", "weights", *right, "from", "state", ""), [line.cells() for line in lines])
    if stdout.is_terminal:
        stdout.print(f"in {settings.models_dir}", style="dim", markup=False)


@app.command("info")
def info(
    model: Annotated[str, typer.Argument(help="Name of a model, or path of a GGUF file.")],
    *,
    models_dir: ModelsDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show the metadata in a model's header."""
    settings = load_settings(config, given(models_dir=models_dir))
    found = _find(settings, model)
    path = found.paths[0] if found else Path(model)
    facts = files.read_facts(path)
    manifest = found.manifest if found else None
    data = {"path": str(path), **asdict(facts), "source": manifest.source if manifest else None}
    if json:
        print_json(data)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in described(facts).items():
        table.add_row(label, Text(value))
    table.add_row("files", Text(f"{facts.n_files} · {path}" if facts.n_files > 1 else str(path), overflow="fold"))
    if manifest is not None:
        table.add_row("from", Text(f"{manifest.source}, {_date(manifest.pulled_at)}"))
    stdout.print(table)


@app.command("pull")
def pull_model(  # noqa: PLR0913 - one argument an option
    reference: Annotated[
        str, typer.Argument(help="owner/repo:Q4_K_M, owner/repo/file.gguf, or owner/repo.", metavar="REFERENCE")
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="Name in the models directory.", show_default="the name of its file")
    ] = None,
    no_mmproj: Annotated[bool, typer.Option("--no-mmproj", help="Without its projector, for text only.")] = False,
    models_dir: ModelsDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Download a model from a Hugging Face hub: HF_ENDPOINT selects another hub, HF_TOKEN its token.

    The projector of a model that takes images is downloaded with it. An interrupted download resumes. A model becomes
    available when it is complete and its checksum is correct.
    """
    settings = load_settings(config, given(models_dir=models_dir))
    # Imported here: other commands start faster without the hub's library.
    from inferencecenter.models.hub import hub_of  # noqa: PLC0415
    from inferencecenter.models.pull import pull  # noqa: PLC0415

    with _shown_progress(reference) as show:
        pulled = pull(
            hub_of(os.environ),
            reference,
            directory=settings.models_dir,
            name=name,
            with_projector=not no_mmproj,
            report=lambda progress: show(progress.done_bytes, progress.total_bytes),
        )
    model = pulled.model
    if json:
        print_json({**_as_data(model), "fetched": pulled.fetched})
    else:
        words = "was downloaded" if pulled.fetched else "is already present"
        stdout.print(f"{model.name} {words}: {size(model.size_bytes)} in {settings.models_dir}", markup=False)


@app.command("remove")
def remove(
    name: NameArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    models_dir: ModelsDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a model's files from the models directory; a configured model is not deleted."""
    settings = load_settings(config, given(models_dir=models_dir))
    found = files.find_model(settings.models_dir, name)
    if not yes:
        typer.confirm(f"Delete {found.name}, {size(found.size_bytes)}?", abort=True, err=True)
    data = _as_data(found)
    files.remove(settings.models_dir, name, configured=configured_files(settings))
    if json:
        print_json({**data, "removed": True})
    else:
        stdout.print(f"Deleted {found.name}.", markup=False)


@app.command("verify")
def verify(
    name: Annotated[str | None, typer.Argument(help="Name of the model.", show_default="all models")] = None,
    *,
    models_dir: ModelsDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Read model files completely and compare them with their checksums; exits with 66 if one is damaged."""
    settings = load_settings(config, given(models_dir=models_dir))
    models = files.list_models(settings.models_dir)
    if name is not None:
        models = (files.find_model(settings.models_dir, name),)
    verdicts: list[IntegrityReport] = []
    for model in models:
        with _shown_progress(model.name) as show:
            verdicts.append(files.verify(model, report=show))
    if json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            stdout.print(worded(verdict), soft_wrap=True)
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(ERRORS[ErrorCode.INVALID_MODEL_FILE].exit_code)


def described(facts: ModelFacts) -> dict[str, str]:
    """Return a header's metadata as text."""
    return {
        "name": facts.title,
        "architecture": facts.architecture,
        "parameters": count(facts.parameters),
        "weights": facts.quantization,
        "size": size(facts.size_bytes),
        "context": f"{facts.n_ctx_train} tokens",
        "layers": str(facts.n_layers),
        "vocabulary": f"{facts.n_vocab} tokens",
        "chat template": "yes" if facts.has_template else "no: sessions of mode raw only",
    }


def worded(verdict: IntegrityReport) -> Text:
    """Return the result of a verification, with a line per problem."""
    if not verdict.problems:
        known = (
            "complete" if verdict.checksum_known else "its header is valid; it was not pulled, so it has no checksum"
        )
        return Text.assemble((verdict.name, "bold"), ": ", (known, "green"))
    lines = "\n".join(f"  {problem}" for problem in verdict.problems)
    return Text.assemble((verdict.name, "bold"), ": ", ("damaged", "bold red"), "\n", lines)


def size(n_bytes: int) -> str:
    """Return a number of bytes in human-readable form, in powers of 1024."""
    if n_bytes < 2**30:
        return f"{n_bytes / 2**20:.1f} MiB"
    return f"{n_bytes / 2**30:.2f} GiB"


def count(number: int) -> str:
    """Return a number of parameters in human-readable form: 7.6 B, 2.5 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


class _LocalModel:
    """A model in the list; an unreadable header is reported in its row."""

    def __init__(self, model: ModelFiles, configured: dict[Path, str], served: ModelSummary | None) -> None:
        self._model = model
        self._served = served
        self._setting = configured.get(model.paths[0].resolve())
        self._facts: ModelFacts | None = None
        self._problem = ""
        try:
            self._facts = files.read_facts(model.paths[0])
        except InferenceCenterError as error:
            self._problem = error.message

    def cells(self) -> tuple[str, ...]:
        """Return name, architecture, weights, parameters, size, source, state and notes."""
        facts, manifest = self._facts, self._model.manifest
        header = ("", "", "") if facts is None else (facts.architecture, facts.quantization, count(facts.parameters))
        source = manifest.source if manifest else ""
        now = state(self._served) if self._served else ""
        return (
            self._model.name,
            *header,
            size(self._model.size_bytes),
            source,
            now,
            self._problem or self._setting or "",
        )

    def as_data(self) -> dict[str, Any]:
        """Return the model as JSON data."""
        facts = None if self._facts is None else asdict(self._facts)
        found = {"facts": facts, "problem": self._problem or None, "setting": self._setting}
        return {**_as_data(self._model), **found, "served": _served_data(self._served)}


class _RemoteModel:
    """A model of the daemon that is not in the models directory."""

    def __init__(self, model: ModelSummary) -> None:
        self._model = model

    def cells(self) -> tuple[str, ...]:
        """Return the columns of ``_LocalModel``, as far as the daemon reports them."""
        model = self._model
        parameters = "" if model.parameters is None else count(model.parameters)
        weights = "" if model.size_mb is None else size(round(model.size_mb * 2**20))
        return model.name, "", "", parameters, weights, "", state(model), ""

    def as_data(self) -> dict[str, Any]:
        """Return the model as JSON data; values known only from a file are null."""
        unknown = dict.fromkeys(("size_bytes", "source", "pulled_at", "facts", "problem", "setting"))
        return {"name": self._model.name, "files": [], **unknown, "served": _served_data(self._model)}


def _served_data(model: ModelSummary | None) -> dict[str, Any] | None:
    return None if model is None else model.model_dump(exclude={"name"})


def _as_data(model: ModelFiles) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "name": model.name,
        "files": [str(path) for path in model.files],
        "size_bytes": model.size_bytes,
        "source": manifest.source if manifest else None,
        "pulled_at": manifest.pulled_at if manifest else None,
    }


def _find(settings: Settings, model: str) -> ModelFiles | None:
    """Return a model of the models directory; ``None`` for the path of a file."""
    is_path = "/" in model or (model.endswith(".gguf") and Path(model).is_file())
    return None if is_path else files.find_model(settings.models_dir, model)


@contextmanager
def _shown_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes, speed and remaining time on standard error if that is a terminal; yields the progress callback."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _date(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")
