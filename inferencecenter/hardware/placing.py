"""Puts one set-up of a model on given GPUs, and says what that takes where. Pure."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.hardware.footprint import compute_bytes, host_compute_bytes, kv_bytes, lending_bytes
from inferencecenter.hardware.plan import MIB, Demand, DeviceDemand, Place, usable_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.hardware.footprint import SetUp
    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.plan import Device, Wishes

_Unit = TypeVar("_Unit")

CONTEXT_BYTES: Final = 300 * MIB
"""What a driver takes for a process that computes: its context, kernels and the workspace of its matrix library."""

# Further embeddings on a GPU whose batches overlap with those of others: its own inputs, and what it is sent.
_FIRST_TRANSFERS, _OTHER_TRANSFERS = 4, 8
_FILLED_PERCENT: Final = range(10, 101, 5)


def place(
    model: ModelShape, setup: SetUp, devices: tuple[Device, ...], division: tuple[int, int], wishes: Wishes
) -> Place:
    """Put as many layers on the devices as ``division`` says; those with more room get more.

    The division is ``n_gpu_layers`` as llama.cpp counts them, and of how many layers on GPUs the experts are not there.
    """
    n_gpu_layers, experts_in_host = division
    start = first_on_gpu(model, n_gpu_layers)
    units = list(_units(model, setup, start, experts_in_host)) if n_gpu_layers else []
    buffers = [_buffer_bytes(model, setup, number, len(devices), division) for number in range(len(devices))]
    rooms = [
        usable_bytes(device, wishes) - buffer - CONTEXT_BYTES for device, buffer in zip(devices, buffers, strict=True)
    ]
    sizes = [weights + kv for weights, kv in units]
    counts = None
    if wishes.tensor_split and len(devices) == len(wishes.tensor_split):
        counts = by_proportion(wishes.tensor_split, len(sizes))
    elif devices:
        counts = _evenly_filled(sizes, rooms)
    fits = counts is not None and _holds(sizes, counts, rooms)
    if counts is None:
        counts = by_proportion([max(1, room) for room in rooms], len(sizes)) if devices else ()
    return Place(
        setup=setup,
        devices=devices,
        counts=counts,
        n_gpu_layers=n_gpu_layers,
        experts_in_host=experts_in_host,
        cpu_tensors=_cpu_tensors(model, start, experts_in_host),
        demand=Demand(
            devices=tuple(
                DeviceDemand(
                    weight_bytes=sum(weights for weights, _ in own),
                    kv_bytes=sum(kv for _, kv in own),
                    compute_bytes=buffer,
                    context_bytes=CONTEXT_BYTES,
                )
                for own, buffer in zip(_cut(units, counts), buffers, strict=True)
            ),
            host_weight_bytes=_host_weight_bytes(model, start, experts_in_host, output=n_gpu_layers == 0),
            host_kv_bytes=sum(kv_bytes(layer, setup) for layer in model.layers[:start]),
            host_compute_bytes=host_compute_bytes(
                model, setup, n_devices=len(devices), overlaps=len(devices) > 1 and not (start or experts_in_host)
            ),
        ),
        fits=fits or not devices,
    )


def first_on_gpu(model: ModelShape, n_gpu_layers: int) -> int:
    """Return the number of the first layer on a GPU: the last ones are there, and the output counts as one."""
    return min(model.n_layers, max(0, model.n_layers + 1 - n_gpu_layers))


def by_proportion(shares: Sequence[float], n_units: int) -> tuple[int, ...]:
    """Divide units as llama.cpp does: unit ``i`` goes to the first device whose part of the shares ends after it."""
    total = sum(shares)
    ends = [end / total for end in accumulate(shares)]
    owners = [min(bisect_right(ends, unit / n_units), len(shares) - 1) for unit in range(n_units)]
    return tuple(owners.count(device) for device in range(len(shares)))


def _units(model: ModelShape, setup: SetUp, start: int, experts_in_host: int) -> Iterator[tuple[int, int]]:
    """Yield weights and KV of each layer on a GPU, and at last of the output."""
    for number, layer in enumerate(model.layers[start:]):
        yield layer.dense_bytes if number < experts_in_host else layer.bytes, kv_bytes(layer, setup)
    yield model.output_bytes, 0


def _buffer_bytes(model: ModelShape, setup: SetUp, number: int, n_devices: int, division: tuple[int, int]) -> int:
    """Return the compute buffer of one of several devices."""
    n_gpu_layers, experts_in_host = division
    start = first_on_gpu(model, n_gpu_layers)
    if start or experts_in_host:
        if number:
            return compute_bytes(model, setup)
        in_host = [*model.layers[:start], *model.layers[start : start + experts_in_host]]
        return lending_bytes(
            model,
            setup,
            largest_bytes=max(layer.largest_bytes for layer in in_host),
            kv_layer_bytes=max((kv_bytes(layer, setup) for layer in model.layers[:start]), default=0),
        )
    if n_devices == 1:
        return compute_bytes(model, setup)
    return compute_bytes(model, setup, transfers=_OTHER_TRANSFERS if number else _FIRST_TRANSFERS)


def _host_weight_bytes(model: ModelShape, start: int, experts_in_host: int, *, output: bool) -> int:
    layers = sum(layer.bytes for layer in model.layers[:start])
    experts = sum(layer.expert_bytes for layer in model.layers[start : start + experts_in_host])
    # A tied output that is on no GPU is the embeddings themselves.
    own_output = model.output_bytes - (model.embedding_bytes if model.tied else 0)
    return model.embedding_bytes + layers + experts + (own_output if output else 0)


def _evenly_filled(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many consecutive units each device gets when all are filled to about the same part."""
    if len(rooms) == 1:
        return (len(sizes),) if sum(sizes) <= rooms[0] else None
    for percent in _FILLED_PERCENT:
        counts = _filled(sizes, [room * percent // 100 for room in rooms])
        if counts is not None:
            return counts
    return None


def _filled(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many consecutive units each device gets when one after the other is filled."""
    counts, next_unit = [], 0
    for room in rooms:
        left, count = room, 0
        while next_unit < len(sizes) and sizes[next_unit] <= left:
            left -= sizes[next_unit]
            next_unit += 1
            count += 1
        counts.append(count)
    return tuple(counts) if next_unit == len(sizes) else None


def _holds(sizes: Sequence[int], counts: Sequence[int], rooms: Sequence[int]) -> bool:
    return all(sum(own) <= room for own, room in zip(_cut(sizes, counts), rooms, strict=True))


def _cut(units: Sequence[_Unit], counts: Sequence[int]) -> Iterator[Sequence[_Unit]]:
    start = 0
    for count in counts:
        yield units[start : start + count]
        start += count


def _cpu_tensors(model: ModelShape, start: int, experts_in_host: int) -> tuple[str, ...]:
    if not experts_in_host:
        return ()
    layers = "|".join(str(layer) for layer in range(start, min(model.n_layers, start + experts_in_host)))
    return (rf"^blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps",)
