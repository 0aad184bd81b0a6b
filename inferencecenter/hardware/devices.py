"""Finds the GPUs that a model can be placed on: those known to both the driver and the installed llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import ggml, nvml
from inferencecenter.hardware.placement import Device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inferencecenter.hardware.nvml import GpuReading

_log: Final = structlog.get_logger(__name__)


def find_devices(wanted: Sequence[str] = (), rpc_servers: Sequence[str] = ()) -> tuple[Device, ...]:
    """Return the wanted GPUs, or all: those of this machine, then those of RPC servers. Blocks.

    There is none if llama.cpp was built without GPU support. NVML is used if llama.cpp was built with CUDA. Other GPUs
    (of other vendors, MIG instances) are listed by llama.cpp, in a process that takes about a second, as does one for
    each server.

    Raises:
        InferenceCenterError: ``invalid_config`` if a wanted GPU does not exist, or llama.cpp was built without RPC.
    """
    return select_devices((*_local(), *_remote(rpc_servers)), wanted)


def _local() -> Sequence[Device]:
    kinds = ggml.gpu_backends()
    readings = nvml.read_gpus().readings if "cuda" in kinds else ()
    if readings and not any(reading.mig for reading in readings):
        return [from_reading(reading) for reading in readings]
    return ggml.probe() if kinds else ()


def _remote(servers: Sequence[str]) -> Iterator[Device]:
    if servers and not ggml.reaches_servers():
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "llama.cpp was built without RPC.",
            hint="Build it with CMAKE_ARGS=-DGGML_RPC=ON, or remove gpu.rpc_servers.",
            field="gpu.rpc_servers",
        )
    for server in servers:
        found = ggml.probe_server(server)
        if not found:
            _log.warning("rpc_server_unavailable", server=server)
        yield from found


def node_devices(servers: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices of RPC servers on nodes, by the address at which each node's is reached. Blocks.

    They are named by the node, as ``RPC0[box2]``, and llama.cpp's name is an alias: it changes with the address.
    """
    found: list[Device] = []
    for node, address in servers.items():
        devices = ggml.probe_server(address)
        if not devices:
            _log.warning("rpc_server_unavailable", server=node)
        for number, device in enumerate(devices):
            name = f"RPC{number}[{node}]"
            found.append(replace(device, id=name, name=name, aliases=(device.id,)))
    return tuple(found)


def from_reading(reading: GpuReading) -> Device:
    """Return the device of a reading that has memory figures."""
    index = reading.index or 0
    return Device(
        id=reading.pci_id or f"CUDA{index}",
        name=reading.name or f"GPU {index}",
        free_bytes=reading.vram_free_bytes or 0,
        total_bytes=reading.vram_total_bytes or 0,
        index=index,
        aliases=tuple(filter(None, (str(index), reading.uuid))),
    )


def select_devices(devices: Sequence[Device], wanted: Sequence[str]) -> tuple[Device, ...]:
    """Return the wanted devices in the order of ``wanted``; all if that is empty.

    Raises:
        InferenceCenterError: ``invalid_config`` if one does not exist.
    """
    if not wanted:
        return tuple(devices)
    known = {name: device for device in reversed(devices) for name in (device.id, *device.aliases)}
    for name in wanted:
        if name not in known:
            usable = "; ".join(f"{device.name}: {', '.join((*device.aliases, device.id))}" for device in devices)
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"There is no GPU {name}.",
                hint=f"llama.cpp can use: {usable}." if usable else "llama.cpp can use no GPU here.",
                field="gpu.devices",
            )
    return tuple(known[name] for name in dict.fromkeys(wanted))
