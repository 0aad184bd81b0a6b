"""``inferencecenter doctor --plan MODEL``: how a model would be divided between GPUs and host, and why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from inferencecenter.cli.output import print_json, stdout
from inferencecenter.hardware.devices import find_devices
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.host import read_host
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.plan import Device, margin_bytes
from inferencecenter.hardware.split import plan
from inferencecenter.hardware.wording import mib
from inferencecenter.supervisor.planning import placement_constraints, plan_report

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inferencecenter.config.settings import Settings
    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.plan import Host, Plan, Wishes

_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*$", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes that a text as ``3GiB``, ``3G`` or ``2900 MiB`` means; ``3GB`` are 3,000,000,000.

    Raises:
        typer.BadParameter: It is no size.
    """
    found = _SIZE.match(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size; write it as 3GiB or 2900MiB.")
    number, letter, binary = found.groups()
    decimal = not binary and text.strip().upper().endswith("B") and letter
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[(letter or "").upper()])


def show_plan(
    settings: Settings, model: Path, *, vram_bytes: Sequence[int], ram_bytes: int | None, as_json: bool
) -> None:
    """Print the plan for a model: on this machine, or with GPUs of so many free bytes each, and so much memory.

    Raises:
        InferenceCenterError: ``invalid_model_file``, or ``invalid_config`` for a GPU that is set and not there.
    """
    shape = describe(read_gguf(model))
    wished = placement_constraints(settings.engine, settings.gpu)
    devices = gpus_of(vram_bytes) if vram_bytes else find_devices(settings.gpu.devices)
    host = read_host()
    if ram_bytes is not None:
        host = replace(host, available_bytes=ram_bytes)
    made = plan(shape, devices, host, wished)
    if as_json:
        print_json(as_data(shape, made, wished, host))
        return
    for table in (_numbers(shape, made), _memory(made, wished, host.available_bytes)):
        stdout.print(table)
    for line in made.advice:
        stdout.print(Text(line, style="" if made.fits else "bold red"), soft_wrap=True)


def gpus_of(vram_bytes: Sequence[int]) -> tuple[Device, ...]:
    """Return GPUs of which nothing is known but what they have free."""
    return tuple(
        Device(id=str(number), name=f"GPU {number} ({mib(size)})", free_bytes=size, total_bytes=size)
        for number, size in enumerate(vram_bytes)
    )


def as_data(shape: ModelShape, made: Plan, wished: Wishes, host: Host) -> dict[str, Any]:
    """Return a plan as scripts read it: as ``status`` tells it of a model that runs, and what llama.cpp is given."""
    return {
        "model": {
            "name": shape.name,
            "architecture": shape.architecture,
            "known": shape.known,
            "layers": shape.n_layers,
            "bytes": shape.bytes,
        },
        **plan_report(made, model=shape, host=host, wishes=wished).model_dump(),
        "main_gpu": made.main_gpu,
        "tensor_split": made.tensor_split,
        "cpu_tensors": made.cpu_tensors,
        "host_bytes": made.demand.host_bytes,
    }


def _numbers(shape: ModelShape, made: Plan) -> Table:
    title = f"{shape.name}: {shape.architecture}, {shape.n_layers} layers, {mib(shape.bytes)} of weights"
    table = Table("", "plan", "why", title=title, title_justify="left")
    for reason in made.reasons:
        table.add_row(reason.name, Text(reason.value, style="bold" if reason.explicit else ""), reason.why)
    return table


def _memory(made: Plan, wished: Wishes, available_bytes: int | None) -> Table:
    columns = ("memory", "weights", "KV", "buffers", "driver", "together", "margin", "free now")
    table = Table(*columns, title="What it takes", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for device, demand in zip(made.devices, made.demand.devices, strict=True):
        parts = (demand.weight_bytes, demand.kv_bytes, demand.compute_bytes, demand.context_bytes, demand.bytes)
        table.add_row(device.name, *map(mib, parts), mib(margin_bytes(device, wished)), mib(device.free_bytes))
    host = made.demand
    own = map(mib, (host.host_weight_bytes, host.host_kv_bytes, host.host_compute_bytes))
    table.add_row("host", *own, "", mib(host.host_bytes), "", "" if available_bytes is None else mib(available_bytes))
    return table
