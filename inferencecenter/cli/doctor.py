"""``inferencecenter doctor``: check this machine and its configuration."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from inferencecenter.cli import checks
from inferencecenter.cli.checks import Check, CheckResult, proxy, storage
from inferencecenter.cli.cluster_checks import devices_of_nodes, front_checks, node_checks
from inferencecenter.cli.node import split_address
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.config.loader import load_settings, read_layers
from inferencecenter.config.sections import expand
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.hardware.devices import find_devices, select_devices
from inferencecenter.hardware.explain import mib
from inferencecenter.hardware.memory import read_host
from inferencecenter.hardware.placement import Device, margin_bytes
from inferencecenter.hardware.split import plan
from inferencecenter.models.registry import draft_file, kind_of_file, read_registry
from inferencecenter.supervisor.planning import constraints_of, first_share, plan_report, read_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.config.settings import Settings
    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.placement import Host, PlacementConstraints, PlacementPlan


_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*$", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``3GiB``, ``3G`` or ``2900 MiB``; ``3GB`` is 3,000,000,000.

    Raises:
        typer.BadParameter: It is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it as 3GiB or 2900MiB.")
    number, letter, binary = match.groups()
    decimal = not binary and text.strip().upper().endswith("B") and letter
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[(letter or "").upper()])


def show_plan(
    settings: Settings, model: Path, *, vram_bytes: Sequence[int], ram_bytes: int | None, as_json: bool
) -> None:
    """Print the plan for a model, on this machine or for the given free GPU memory and available host memory.

    Raises:
        InferenceCenterError: ``invalid_model_file``, or ``invalid_config`` for a configured GPU that does not exist.
    """
    models = read_registry(settings).models
    spec = next((each for each in models.values() if each.path == expand(model)), None)
    draft = spec.draft if spec else draft_file(settings.engine, models, of=model.name)
    shape = read_shape(model, spec.lora if spec else (), draft, spec.mmproj if spec else None)
    constraints = constraints_of(settings.engine, settings.gpu, shape, spec.kind if spec else kind_of_file(model))
    if vram_bytes:
        devices = gpus_of(vram_bytes)
    elif spec is not None and spec.rpc_nodes:
        on_nodes = devices_of_nodes(settings, spec)
        devices = select_devices((*find_devices((), settings.gpu.rpc_servers), *on_nodes), settings.gpu.devices)
    else:
        devices = find_devices(settings.gpu.devices, settings.gpu.rpc_servers)
    host = read_host()
    if ram_bytes is not None:
        host = replace(host, available_bytes=ram_bytes)
    if spec is not None:
        devices, host = first_share(spec, settings.gpu, devices, host)
    placement = plan(shape, devices, host, constraints)
    if as_json:
        print_json(as_data(shape, placement, constraints, host))
        return
    for table in (_numbers(shape, placement), _memory(placement, constraints, host.available_bytes)):
        stdout.print(table)
    for line in placement.advice:
        stdout.print(Text(line, style="" if placement.fits else "bold red"), soft_wrap=True)


def gpus_of(vram_bytes: Sequence[int]) -> tuple[Device, ...]:
    """Return hypothetical GPUs with this much free memory."""
    return tuple(
        Device(id=str(number), name=f"GPU {number} ({mib(size)})", free_bytes=size, total_bytes=size)
        for number, size in enumerate(vram_bytes)
    )


def as_data(
    shape: ModelShape, placement: PlacementPlan, constraints: PlacementConstraints, host: Host
) -> dict[str, Any]:
    """Return a plan as JSON data: as ``status`` reports it for a loaded model, with llama.cpp's parameters."""
    return {
        "model": {
            "name": shape.name,
            "architecture": shape.architecture,
            "known": shape.known,
            "layers": shape.n_layers,
            "bytes": shape.bytes,
        },
        **plan_report(placement, model=shape, host=host, constraints=constraints).model_dump(),
        "main_gpu": placement.main_gpu,
        "tensor_split": placement.tensor_split,
        "cpu_tensors": placement.cpu_tensors,
        "host_bytes": placement.demand.host_bytes,
    }


def _numbers(shape: ModelShape, placement: PlacementPlan) -> Table:
    title = f"{shape.name}: {shape.architecture}, {shape.n_layers} layers, {mib(shape.bytes)} of weights"
    table = Table("", "plan", "why", title=title, title_justify="left")
    for reason in placement.reasons:
        table.add_row(reason.name, Text(reason.value, style="bold" if reason.explicit else ""), reason.why)
    return table


def _memory(placement: PlacementPlan, constraints: PlacementConstraints, available_bytes: int | None) -> Table:
    columns = ("memory", "weights", "KV", "buffers", "driver", "total", "margin", "free now")
    table = Table(*columns, title="Memory use", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for device, demand in zip(placement.devices, placement.demand.devices, strict=True):
        parts = (demand.weight_bytes, demand.kv_bytes, demand.compute_bytes, demand.context_bytes, demand.bytes)
        table.add_row(device.name, *map(mib, parts), mib(margin_bytes(device, constraints)), mib(device.free_bytes))
    host = placement.demand
    own = map(mib, (host.host_weight_bytes, host.host_kv_bytes, host.host_compute_bytes))
    table.add_row("host", *own, "", mib(host.host_bytes), "", "" if available_bytes is None else mib(available_bytes))
    return table


_STYLES: Final = {CheckResult.OK: "green", CheckResult.WARNING: "yellow", CheckResult.FAILED: "bold red"}


def doctor(  # noqa: PLR0913 - one argument an option
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
    plan: Annotated[
        Path | None, typer.Option(help="Show how this GGUF file would be run, with the reasons.", metavar="MODEL")
    ] = None,
    vram: Annotated[
        list[str] | None,
        typer.Option(help="With --plan: free memory of a GPU, such as 3GiB; repeat for several GPUs.", metavar="SIZE"),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="With --plan: available host memory.", metavar="SIZE", show_default=False)
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Check this machine as a node of the cluster whose head is there.", metavar="HOST[:PORT]"),
    ] = None,
    front: Annotated[
        str | None,
        typer.Option(
            help="With --node: where the daemon listens for hosts, if not at the head, port 6381.", metavar="HOST:PORT"
        ),
    ] = None,
    files_port: Annotated[
        int | None, typer.Option(help="With --node: cluster.files_port of the daemon, if not 6382.", show_default=False)
    ] = None,
    rpc_port: Annotated[
        int | None, typer.Option(help="With --node: cluster.rpc_port of the daemon, if not 6383.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="With --node: the cluster's token; ~/.ray/auth_token by default.")
    ] = None,
) -> None:
    """Check Python, llama.cpp, memory, files, port, GPU and cluster; the exit code is that of the first failure."""
    if plan is not None:
        show_plan(
            load_settings(config, given(state_dir=state_dir)),
            plan,
            vram_bytes=[parse_size(size) for size in vram or ()],
            ram_bytes=None if ram is None else parse_size(ram),
            as_json=json,
        )
        return
    if vram or ram:
        raise typer.BadParameter("--vram and --ram describe a machine for --plan MODEL.")
    if node is None and (front or files_port or rpc_port or token_file):
        raise typer.BadParameter("--front, --files-port, --rpc-port and --token-file are for --node HOST.")
    if node is None:
        results = examine(config, state_dir)
    else:
        results = examine_node(node, token_file, front, files_port=files_port, rpc_port=rpc_port)
    if json:
        print_json([asdict(check) for check in results])
    else:
        table = Table("check", "", "found")
        for check in results:
            detail = Text.assemble(check.detail, ("\n" + check.hint, "dim") if check.hint else "")
            table.add_row(check.name, Text(check.verdict.value, style=_STYLES[check.verdict]), detail)
        stdout.print(table)
    failed = next((check for check in results if check.verdict is CheckResult.FAILED), None)
    if failed is not None:
        raise typer.Exit(ERRORS[failed.code or ErrorCode.INTERNAL].exit_code)


def examine(config: ConfigOption, state_dir: StateDirOption) -> list[Check]:
    """Run every check that is possible; most need valid settings."""
    results = [checks.python()]
    try:
        layers = read_layers(config, given(state_dir=state_dir))
        settings = layers.settings()
    except InferenceCenterError as error:
        return [*results, Check("settings", CheckResult.FAILED, error.message, error.hint or "", error.code)]
    gpu = checks.gpu()
    return [
        *results,
        Check("settings", CheckResult.OK, str(layers.path or "no file; defaults and environment")),
        checks.llama_cpp(needed=settings.engine.backend == "llama", gpu=gpu.verdict is CheckResult.OK),
        gpu,
        checks.cores(),
        *checks.model_files(settings),
        checks.memory(settings),
        *checks.placement(settings),
        checks.state_dir(settings.state_dir),
        *storage(settings),
        checks.port(settings),
        *checks.unix_listener(settings),
        proxy(settings),
        *front_checks(settings),
    ]


def examine_node(
    address: str, token_file: Path | None, front: str | None, *, files_port: int | None, rpc_port: int | None
) -> list[Check]:
    """Run the checks of a machine that runs engines for a daemon elsewhere, which needs no settings."""
    host, port = split_address(address)
    gpu = checks.gpu()
    return [
        checks.python(),
        checks.llama_cpp(needed=True, gpu=gpu.verdict is CheckResult.OK),
        gpu,
        checks.cores(),
        *node_checks(f"{host}:{port}", token_file, front, files_port=files_port, rpc_port=rpc_port),
    ]
