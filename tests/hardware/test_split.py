"""How models are divided between GPUs and host.

The golden table has the numbers of each plan with their arithmetic, in MiB. A GPU's budget is its free memory less the
margin (5 %, at least 300) and 300 for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.hardware import split
from inferencecenter.hardware.footprint import RuntimeConfig
from inferencecenter.hardware.model_shape import ProjectorShape, with_adapters
from inferencecenter.hardware.placement import (
    MIB,
    Device,
    Host,
    PlacementConstraints,
    decode_threads,
    margin_bytes,
    usable_bytes,
)
from inferencecenter.hardware.split import plan
from tests.hardware.conftest import GIB, HOST, gpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.header import HeaderName
    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.placement import PlacementPlan

    ShapeOf = Callable[[HeaderName], ModelShape]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine, and its plan; ``parts`` is weights, KV and buffers of each GPU in MiB."""

    model: HeaderName
    gib: tuple[float, ...]
    layers: int
    slots: int
    n_ctx: int
    parts: tuple[tuple[int, int, int], ...]
    split: tuple[float, ...] = ()
    n_ubatch: int = 512
    experts_in_host: int = 0


GOLDEN = [
    # Llama 3.2 1B: 16 layers of 32.6 or 37.0 (557.3 together), output and embeddings 205.5 each. KV 32 KiB a token: 128
    # for a slot of 4096. Buffers 3 x 16 (ffn 8192 x 512 x 4 bytes) + 3 x 4 (width 2048) + 4 (mask).
    # 3 GiB: room 3072 - 300 - 300 = 2472; 762.8 + 8 x 128 + 64 = 1851. Twice the context would take 2879.
    Case(model="llama3.2-1b", gib=(3,), layers=17, slots=8, n_ctx=4096, parts=((763, 1024, 64),)),
    # 12 GiB: room 12288 - 614 - 300 = 11374; 8 slots of 32768 take 8192, which is as far as many slots grow.
    Case(model="llama3.2-1b", gib=(12,), layers=17, slots=8, n_ctx=32768, parts=((763, 8192, 92),)),
    Case(model="llama3.2-1b", gib=(24,), layers=17, slots=8, n_ctx=32768, parts=((763, 8192, 92),)),
    # 4 and 6 GiB: the larger holds all of it: 6144 - 307 - 300 = 5537; 763 + 8 x 512 + 76 = 4935.
    Case(model="llama3.2-1b", gib=(4, 6), layers=17, slots=8, n_ctx=16384, parts=((763, 4096, 76),)),
    Case(model="llama3.2-1b", gib=(), layers=0, slots=8, n_ctx=4096, parts=()),
    # Llama 3.2 3B: 28 layers (1610.1), output 308.2; KV 112 KiB a token: 448 a slot. Buffers 3 x 16 + 3 x 6 + 4 = 70.
    # 3 GiB: room 2472; 1918.4 + 448 + 70 = 2436, and a second slot does not fit.
    Case(model="llama3.2-3b", gib=(3,), layers=29, slots=1, n_ctx=4096, parts=((1918, 448, 70),)),
    # 12 GiB: room 11374; 8 x 896 = 7168 for contexts of 8192, and 14336 would be too much.
    Case(model="llama3.2-3b", gib=(12,), layers=29, slots=8, n_ctx=8192, parts=((1918, 7168, 74),)),
    # 24 GiB: room 24576 - 1229 - 300 = 23047; 8 x 1792 = 14336.
    Case(model="llama3.2-3b", gib=(24,), layers=29, slots=8, n_ctx=16384, parts=((1918, 14336, 82),)),
    # 4 and 6 GiB: 1918 + 8 x 448 + 70 = 5572 is more than the larger has (5537), so that both are used.
    # 11 layers against 17 and the output. Buffers of overlapping batches: + 4 x 6 and + 8 x 6, and 3 more masks (12).
    Case(
        model="llama3.2-3b",
        gib=(4, 6),
        layers=29,
        slots=8,
        n_ctx=4096,
        split=(11, 18),
        parts=((629, 1408, 106), (1289, 2176, 130)),
    ),
    Case(model="llama3.2-3b", gib=(), layers=0, slots=8, n_ctx=4096, parts=()),
    # Qwen2.5 7B: 28 layers of 125.1 or 142.2 (3741.7), output 426.4; KV 56 KiB a token: 224 a slot, 8 a layer of it.
    # 3 GiB: room 2472. Buffers 3 x 37 (18944 x 512 x 4) + 3 x 7 + 4 = 136, and 57.1 for what the host keeps, whose
    # largest tensor (ffn_down in Q6_K, 53.1) is copied for prompts: 193. 426.4 + 13 layers (1745.9) + 13 x 8 = 2276,
    # and with 193: 2469. The next layer would take 150.
    Case(model="qwen2.5-7b", gib=(3,), layers=14, slots=1, n_ctx=4096, parts=((2172, 104, 193),)),
    # 12 GiB: room 11374; 4168.1 + 8 x 448 + 140 = 7892; contexts of 16384 would take 11480.
    Case(model="qwen2.5-7b", gib=(12,), layers=29, slots=8, n_ctx=8192, parts=((4168, 3584, 140),)),
    Case(model="qwen2.5-7b", gib=(24,), layers=29, slots=8, n_ctx=32768, parts=((4168, 14336, 164),)),
    Case(
        model="qwen2.5-7b",
        gib=(4, 6),
        layers=29,
        slots=8,
        n_ctx=8192,
        split=(11, 18),
        parts=((1461, 1408, 192), (2707, 2176, 220)),
    ),
    Case(model="qwen2.5-7b", gib=(), layers=0, slots=8, n_ctx=4096, parts=()),
    # Llama 3.1 8B: 32 layers of 117.0 or 132.5 (3992.5), output 411.0; KV 128 KiB a token: 512 a slot, 16 a layer.
    # 3 GiB: room 2472. Buffers 3 x 28 + 3 x 8 + 4 = 112, + 45.9 (ffn_down in Q6_K) + 4 = 162.
    # 411.0 + 13 layers (1629.7) + 13 x 16 + 162 = 2411; the next layer would take 133.
    Case(model="llama3.1-8b", gib=(3,), layers=14, slots=1, n_ctx=4096, parts=((2041, 208, 162),)),
    # 12 GiB: room 11374; 4403.5 + 8 x 512 + 112 = 8611; twice the context would take 12711.
    Case(model="llama3.1-8b", gib=(12,), layers=33, slots=8, n_ctx=4096, parts=((4403, 4096, 112),)),
    # 24 GiB: room 23047; 4403.5 + 8 x 2048 + 124 = 20911.
    Case(model="llama3.1-8b", gib=(24,), layers=33, slots=8, n_ctx=16384, parts=((4403, 16384, 124),)),
    Case(
        model="llama3.1-8b",
        gib=(4, 6),
        layers=33,
        slots=8,
        n_ctx=4096,
        split=(13, 20),
        parts=((1630, 1664, 156), (2774, 2432, 188)),
    ),
    Case(model="llama3.1-8b", gib=(), layers=0, slots=8, n_ctx=4096, parts=()),
    # Qwen3 30B-A3B: 48 layers of 335.1 or 384.9 (17281.0), of which experts 309.2 or 359.1; output 243.4. KV 96 KiB a
    # token: 384 a slot. Buffers: 8 experts a token, 2 x 8 x 4 + 8 x 1.5 + 3 x 4 + 4 = 92, and + 165 (the experts'
    # ffn_down of a layer) where some stay with the host: 254 (with 3f + 3e, 12 less).
    # 3 GiB: room 2472; the output, 48 x 25 without experts, and those of 2 layers: 1531; with the KV of 1 slot 2169.
    Case(
        model="qwen3-30b-a3b", gib=(3,), layers=49, slots=1, n_ctx=4096, experts_in_host=46, parts=((1531, 384, 254),)
    ),
    # 12 GiB: room 11374; 11187, and the experts of one layer more would take 309.
    Case(
        model="qwen3-30b-a3b", gib=(12,), layers=49, slots=1, n_ctx=4096, experts_in_host=20, parts=((10549, 384, 254),)
    ),
    # 24 GiB: room 23047; 17524 + 8 x 384 + 92 = 20688.
    Case(model="qwen3-30b-a3b", gib=(24,), layers=49, slots=8, n_ctx=4096, parts=((17524, 3072, 92),)),
    # 4 and 6 GiB: batches of 128 make room for the experts of one layer more.
    Case(
        model="qwen3-30b-a3b",
        gib=(4, 6),
        layers=49,
        slots=1,
        n_ctx=4096,
        n_ubatch=128,
        experts_in_host=27,
        split=(34, 15),
        parts=((2750, 272, 184), (5383, 112, 23)),
    ),
    Case(model="qwen3-30b-a3b", gib=(), layers=0, slots=8, n_ctx=4096, parts=()),
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case.model} on {case.gib}")
def test_golden_plans(shape_of: ShapeOf, case: Case) -> None:
    """Every number of the plan equals the one calculated by hand."""
    made = plan(shape_of(case.model), gpus(*case.gib), HOST, PlacementConstraints())
    setup = made.setup
    assert made.fits
    assert (made.n_gpu_layers, setup.slots, setup.n_ctx, setup.n_ubatch) == (
        case.layers,
        case.slots,
        case.n_ctx,
        case.n_ubatch,
    )
    assert made.tensor_split == case.split
    assert made.split_mode == ("layer" if case.split else "none")
    assert _experts(made) == case.experts_in_host
    assert [
        tuple(round(part / MIB) for part in (gpu.weight_bytes, gpu.kv_bytes, gpu.compute_bytes))
        for gpu in made.demand.devices
    ] == list(case.parts)
    _assert_it_fits(made, PlacementConstraints())


def _experts(made: PlacementPlan) -> int:
    return made.cpu_tensors[0].split(")")[0].count("|") + 1 if made.cpu_tensors else 0


def _assert_it_fits(made: PlacementPlan, constraints: PlacementConstraints) -> None:
    for device, demand in zip(made.devices, made.demand.devices, strict=True):
        assert demand.bytes <= usable_bytes(device, constraints)
        assert demand.bytes + margin_bytes(device, constraints) + device.correction_bytes <= device.free_bytes
    assert HOST.available_bytes is not None
    assert made.demand.host_bytes <= HOST.available_bytes


SIZES = st.lists(st.integers(min_value=256, max_value=48 * 1024), min_size=1, max_size=3)
MODELS = st.sampled_from(["llama3.2-1b", "llama3.2-3b", "qwen2.5-7b", "llama3.1-8b", "qwen3-30b-a3b"])
WISHES = st.builds(
    PlacementConstraints,
    slots=st.sampled_from([0, 0, 1, 4, 32]),
    n_ctx=st.sampled_from([0, 0, 2048, 16384]),
    n_ubatch=st.sampled_from([0, 0, 64]),
    quantized_kv=st.booleans(),
    prefer=st.sampled_from(["many", "long"]),
    flash_attention=st.sampled_from(["auto", "off"]),
    margin_bytes=st.sampled_from([None, 0, 512 * MIB]),
    split_mode=st.sampled_from(["auto", "layer", "none"]),
    expert_offload=st.sampled_from(["auto", "never", "all"]),
)


def _machine(sizes: list[int]) -> tuple[Device, ...]:
    return gpus(*(size / 1024 for size in sizes))


@settings(deadline=None)
@given(name=MODELS, sizes=SIZES, constraints=WISHES)
def test_plan_stays_within_the_budget(
    shape_of: ShapeOf, name: HeaderName, sizes: list[int], constraints: PlacementConstraints
) -> None:
    """This holds for any machine and any constraints that leave the layers open; set values are kept."""
    made = plan(shape_of(name), _machine(sizes), HOST, constraints)
    if made.fits:
        _assert_it_fits(made, constraints)
    assert sum(made.tensor_split) in (0, made.n_gpu_layers)
    assert constraints.slots in (0, made.setup.slots)
    assert constraints.n_ctx in (0, made.setup.n_ctx)
    assert constraints.n_ubatch in (0, made.setup.n_ubatch)
    assert made.setup.n_ubatch <= made.setup.n_batch


@settings(deadline=None)
@given(name=MODELS, sizes=SIZES, more=st.integers(min_value=1, max_value=8192), which=st.integers(0, 2))
def test_more_memory_gives_no_worse_plan(
    shape_of: ShapeOf, name: HeaderName, sizes: list[int], more: int, which: int
) -> None:
    """Layers count first (of a mixture: with experts), then slots, then context length."""
    model = shape_of(name)
    larger = list(sizes)
    larger[which % len(sizes)] += more

    def rank(made: PlacementPlan) -> tuple[int, int, int, int]:
        return made.n_gpu_layers, -_experts(made), made.setup.n_ubatch, made.setup.slots

    before = plan(model, _machine(sizes), HOST, PlacementConstraints())
    after = plan(model, _machine(larger), HOST, PlacementConstraints())
    assert rank(after) >= rank(before)


def test_order_of_concessions(shape_of: ShapeOf) -> None:
    """Less memory costs slots first, then KV precision if allowed, the batch, layers, and last the GPU."""
    model = shape_of("llama3.1-8b")
    seen: list[str] = []
    for mib in range(12 * 1024, 0, -64):
        made = plan(model, gpus(mib / 1024), HOST, PlacementConstraints(quantized_kv=True))
        setup = made.setup
        given_up = (
            "gpu" if not made.n_gpu_layers else "layers" if made.n_gpu_layers < 33 else "",
            "batch" if setup.n_ubatch < 512 else "",
            "kv" if setup.kv_type_k != "f16" else "",
            "slots" if setup.slots < 8 else "",
        )
        worst = next((what for what in given_up if what), "nothing")
        if not seen or seen[-1] != worst:
            seen.append(worst)
    assert seen == ["nothing", "slots", "kv", "batch", "layers", "gpu"]


@pytest.mark.parametrize(
    ("gib", "constraints", "flashes"),
    [
        ((), {}, False),
        ((12,), {}, True),
        ((12,), {"n_gpu_layers": 0}, False),
        ((12,), {"n_gpu_layers": 1}, True),
        ((), {"kv_type_v": "q8_0"}, True),
        ((), {"flash_attention": "on"}, True),
        ((12,), {"flash_attention": "off"}, False),
    ],
)
def test_flash_attention_default(
    shape_of: ShapeOf, gib: tuple[float, ...], constraints: dict[str, Any], flashes: bool
) -> None:
    """It is on for GPUs and for quantized KV, off for a CPU; a set value takes precedence."""
    made = plan(shape_of("llama3.2-1b"), gpus(*gib), HOST, PlacementConstraints(**constraints))
    reason = next(each for each in made.reasons if each.name == "flash_attention")
    assert made.setup.flash_attention is flashes
    assert (reason.value, reason.explicit) == ("on" if flashes else "off", "flash_attention" in constraints)


@pytest.mark.parametrize(
    ("constraints", "expected", "reason"),
    [
        ({"slots": 2}, {"slots": 2}, "slots"),
        ({"n_ctx": 1024}, {"n_ctx": 1024}, "n_ctx"),
        ({"n_ubatch": 64}, {"n_ubatch": 64}, "n_batch, n_ubatch"),
        ({"n_batch": 96}, {"n_batch": 96, "n_ubatch": 96}, "n_batch, n_ubatch"),
        ({"kv_type_v": "q8_0"}, {"kv_type_k": "f16", "kv_type_v": "q8_0"}, "kv_type_k, kv_type_v"),
    ],
)
def test_set_values_win(shape_of: ShapeOf, constraints: dict[str, Any], expected: dict[str, Any], reason: str) -> None:
    """The rest is planned around them, and the report marks them."""
    made = plan(shape_of("llama3.1-8b"), gpus(6), HOST, PlacementConstraints(**constraints))
    assert {name: getattr(made.setup, name) for name in expected} == expected
    assert [each.name for each in made.reasons if each.explicit] == [reason]


def test_set_values_that_do_not_fit_are_kept(shape_of: ShapeOf) -> None:
    """The report gives available and required memory."""
    made = plan(shape_of("llama3.1-8b"), gpus(3), HOST, PlacementConstraints(n_gpu_layers=33, slots=8, n_ctx=4096))
    assert not made.fits
    assert (made.n_gpu_layers, made.setup.slots, made.setup.n_ctx) == (33, 8, 4096)
    assert made.advice[0].startswith("Does not fit on GPU 0: has 2,772 MiB after a margin of 300 MiB, needs 8,8")


def test_too_small_host_memory(shape_of: ShapeOf) -> None:
    """Slots and then context shrink; a model that cannot fit reports both figures."""
    model = shape_of("llama3.1-8b")
    tight = plan(model, (), Host(available_bytes=6 * GIB, cores=2), PlacementConstraints())
    assert tight.fits
    assert (tight.setup.slots, tight.setup.n_ctx) == (2, 4096)
    tighter = plan(model, (), Host(available_bytes=5 * GIB, cores=2), PlacementConstraints())
    assert tighter.fits
    assert tighter.setup.n_ctx < 4096
    none = plan(model, (), Host(available_bytes=4 * GIB, cores=2), PlacementConstraints())
    assert not none.fits
    assert none.advice[0].startswith("Does not fit in memory: has 4,096 MiB, needs 4,7")


def test_unknown_host_memory_is_sufficient(shape_of: ShapeOf) -> None:
    """The plan has the usual numbers."""
    made = plan(shape_of("llama3.1-8b"), (), Host(available_bytes=None, cores=2), PlacementConstraints())
    assert (made.fits, made.setup.slots, made.setup.n_ctx, made.n_threads) == (True, 8, 4096, 2)


def test_one_long_context(shape_of: ShapeOf) -> None:
    """One slot gets the context that fits in the memory of many; the plan for many mentions this option."""
    model = shape_of("llama3.1-8b")
    many = plan(model, gpus(12), HOST, PlacementConstraints())
    long = plan(model, gpus(12), HOST, PlacementConstraints(prefer="long"))
    assert (many.setup.slots, many.setup.n_ctx) == (8, 4096)
    assert (long.setup.slots, long.setup.n_ctx) == (1, 32768)
    assert any("1 slot of 32768 tokens" in line for line in many.advice)
    assert long.n_gpu_layers == many.n_gpu_layers == 33


def test_layer_limit_after_a_failed_start(shape_of: ShapeOf) -> None:
    """The plan has no more layers than the limit, however much memory is free."""
    made = plan(shape_of("llama3.2-1b"), gpus(24), HOST, PlacementConstraints(most_gpu_layers=8))
    assert made.n_gpu_layers == 8
    assert "failed to load" in made.reasons[0].why


def test_measurement_corrects_the_estimate(shape_of: ShapeOf) -> None:
    """A GPU that used more than estimated gets less at the next start."""
    model, (device,) = shape_of("qwen2.5-7b"), gpus(3)
    usual = plan(model, [device], HOST, PlacementConstraints())
    corrected = plan(model, [replace(device, correction_bytes=160 * MIB)], HOST, PlacementConstraints())
    assert corrected.n_gpu_layers == usual.n_gpu_layers - 1


@pytest.mark.parametrize(("mode", "n_devices"), [("auto", 1), ("none", 1), ("layer", 2)])
def test_split_modes(shape_of: ShapeOf, mode: str, n_devices: int) -> None:
    """A model that fits on one GPU is on one, unless spreading is set."""
    made = plan(shape_of("llama3.2-1b"), gpus(8, 8), HOST, PlacementConstraints(split_mode=mode))
    assert len(made.devices) == n_devices


def test_gpus_of_this_machine_come_first(shape_of: ShapeOf) -> None:
    """A server's devices take only what these cannot hold, however much memory they have."""
    near, far = gpus(4, 64)
    far = replace(far, remote=True)
    small = plan(shape_of("llama3.2-1b"), (near, far), HOST, PlacementConstraints())
    assert small.devices == (near,)
    large = plan(shape_of("llama3.1-8b"), (near, far), HOST, PlacementConstraints())
    assert large.devices == (near, far)
    assert large.n_gpu_layers == 33


def test_layers_are_spread_over_gpus_much_larger_than_the_model(shape_of: ShapeOf) -> None:
    """Each gets its part of a model that would fit into a hundredth of one."""
    made = plan(shape_of("llama3.2-1b"), gpus(400, 400, 400), HOST, PlacementConstraints(split_mode="layer"))
    taken = [demand.weight_bytes + demand.kv_bytes for demand in made.demand.devices]
    assert min(taken) > sum(taken) / 5


def test_set_main_gpu_and_shares(shape_of: ShapeOf) -> None:
    """The named GPU is used though another is larger; shares are cut as llama.cpp cuts them."""
    model = shape_of("llama3.2-1b")
    assert [device.name for device in plan(model, gpus(24, 6), HOST, PlacementConstraints(main_gpu=1)).devices] == [
        "GPU 1"
    ]
    assert plan(model, gpus(24, 6), HOST, PlacementConstraints(tensor_split=(3, 1))).tensor_split == (13, 4)


@pytest.mark.parametrize(("wish", "experts"), [("never", 0), ("all", 48), ("auto", 20)])
def test_expert_offload_patterns(shape_of: ShapeOf, wish: str, experts: int) -> None:
    """Experts stay on the host by patterns that match no other tensor."""
    made = plan(shape_of("qwen3-30b-a3b"), gpus(12), HOST, PlacementConstraints(expert_offload=wish))
    assert _experts(made) == experts
    assert made.n_gpu_layers == 49 or wish == "never"


def test_unknown_architecture_is_planned(shape_of: ShapeOf) -> None:
    """The plan contains a warning."""
    model = replace(shape_of("llama3.2-1b"), known=False, architecture="novel")
    made = plan(model, gpus(3), HOST, PlacementConstraints())
    assert made.fits
    assert any("'novel' is unknown" in line for line in made.advice)


def test_adapters_take_memory_with_their_layers(shape_of: ShapeOf) -> None:
    """The plan mentions LoRA adapters only where there are some."""
    plain = shape_of("llama3.1-8b")
    adapted = with_adapters(plain, 320 * MIB)
    assert adapted.bytes - plain.bytes == 320 * MIB
    assert with_adapters(plain, 0) is plain

    whole = plan(adapted, gpus(24), HOST, PlacementConstraints())
    extra = (
        whole.demand.devices[0].weight_bytes
        - plan(plain, gpus(24), HOST, PlacementConstraints()).demand.devices[0].weight_bytes
    )
    assert extra == 320 * MIB
    (reason,) = (each for each in whole.reasons if each.name == "lora")
    assert (reason.value, reason.explicit) == ("320 MiB", True)
    assert "on GPUs" in reason.why
    assert not any(each.name == "lora" for each in plan(plain, gpus(24), HOST, PlacementConstraints()).reasons)

    # 16 of 32 layers on the GPU, and half of the adapter with them.
    half = plan(adapted, gpus(24), HOST, PlacementConstraints(n_gpu_layers=17))
    without = plan(plain, gpus(24), HOST, PlacementConstraints(n_gpu_layers=17))
    assert half.demand.devices[0].weight_bytes - without.demand.devices[0].weight_bytes == 160 * MIB
    assert half.demand.host_weight_bytes - without.demand.host_weight_bytes == 160 * MIB

    in_memory = plan(adapted, (), HOST, PlacementConstraints())
    assert (
        in_memory.demand.host_weight_bytes - plan(plain, (), HOST, PlacementConstraints()).demand.host_weight_bytes
        == 320 * MIB
    )
    assert "in host memory" in next(each.why for each in in_memory.reasons if each.name == "lora")


def test_adapter_may_cost_a_layer(shape_of: ShapeOf) -> None:
    """Its memory is missing for slots and layers."""
    model = shape_of("llama3.1-8b")
    tight = plan(model, gpus(5), HOST, PlacementConstraints())
    assert (
        plan(with_adapters(model, 700 * MIB), gpus(5), HOST, PlacementConstraints()).n_gpu_layers < tight.n_gpu_layers
    )


def test_thread_counts(shape_of: ShapeOf) -> None:
    """One per core for CPU inference, few for embeddings only, and a set value wins."""
    model = shape_of("llama3.2-1b")
    assert plan(model, (), HOST, PlacementConstraints()).n_threads == 6
    assert plan(model, gpus(3), HOST, PlacementConstraints()).n_threads == 4
    assert plan(model, gpus(3), HOST, PlacementConstraints(n_threads=5)).n_threads == 5


@pytest.mark.parametrize(
    ("mib", "cores", "n_threads"), [(3, 8, 1), (6, 8, 1), (8, 8, 2), (16, 2, 2), (28, 16, 7), (500, 16, 16)]
)
def test_tiny_models_are_decoded_with_few_threads(mib: int, cores: int, n_threads: int) -> None:
    """A thread has at least 4 MiB of weights to read, if there is more than one."""
    assert decode_threads(mib * MIB, cores) == n_threads


def test_plan_of_a_tiny_model_has_one_thread(shape_of: ShapeOf) -> None:
    """Barriers between threads take longer than the work they divide; embeddings have long batches."""
    shape = replace(shape_of("llama3.2-1b"), embedding_bytes=MIB, output_bytes=MIB, layers=())
    tiny = plan(shape, (), HOST, PlacementConstraints())
    assert tiny.n_threads == 1
    assert "for each 4 MiB of weights" in next(each.why for each in tiny.reasons if each.name == "n_threads")
    assert plan(shape, (), HOST, PlacementConstraints(embeds=True)).n_threads == 6


def test_search_for_a_model_that_never_fits_is_bounded(shape_of: ShapeOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of layers and context length only the smallest plan is tried."""
    model = shape_of("qwen2.5-7b")
    layer = replace(model.layers[0], k_width=2**20, v_width=2**20)
    hostile = replace(model, n_layers=64, layers=(layer,) * 64, n_ctx_train=2**24, output_bytes=2**50)
    made: list[RuntimeConfig] = []

    def counted(**fields: Any) -> RuntimeConfig:
        made.append(RuntimeConfig(**fields))
        return made[-1]

    monkeypatch.setattr(split, "RuntimeConfig", counted)
    assert not plan(
        hostile, gpus(8), Host(available_bytes=GIB, cores=4), PlacementConstraints(prefer="long", quantized_kv=True)
    ).fits
    n_lengths = 5  # 4096 tokens, halved down to 256
    assert len(made) <= n_lengths * (hostile.n_layers + 2) + 1


def test_draft_model_without_a_gpu_is_in_host_memory(shape_of: ShapeOf) -> None:
    """Its weights, KV and buffer are part of the demand, and may be what does not fit."""
    alone = shape_of("llama3.1-8b")
    both = replace(alone, draft=shape_of("llama3.2-1b"))
    plain, made = (plan(model, (), HOST, PlacementConstraints()) for model in (alone, both))
    assert made.setup == plain.setup
    assert made.draft_device == ""
    # 16 layers with 32 KiB of KV a token in 8 slots of 4096.
    assert made.demand.host_kv_bytes - plain.demand.host_kv_bytes == 1024 * MIB
    assert made.demand.host_weight_bytes - plain.demand.host_weight_bytes == shape_of("llama3.2-1b").bytes
    assert made.demand.host_compute_bytes > plain.demand.host_compute_bytes
    tight = replace(HOST, available_bytes=plain.demand.host_bytes)
    assert plan(alone, (), tight, PlacementConstraints()).setup.slots == 8
    assert plan(both, (), tight, PlacementConstraints()).setup.slots < 8
    (reason,) = (each for each in made.reasons if each.name == "draft")
    assert (reason.value, reason.explicit) == (shape_of("llama3.2-1b").name, True)
    assert "1,024 MiB of KV in host memory" in reason.why


def test_draft_model_is_on_a_gpu_with_room(shape_of: ShapeOf) -> None:
    """It is on the first GPU, beside the model; contexts grow into the remaining memory."""
    draft = shape_of("llama3.2-1b")
    alone = shape_of("llama3.1-8b")
    constraints = PlacementConstraints(n_ctx=4096)
    plain, made = (plan(model, gpus(24), HOST, constraints) for model in (alone, replace(alone, draft=draft)))
    assert made.fits
    assert (made.draft_device, made.n_gpu_layers, made.setup) == ("0", 33, plain.setup)
    (before,), (after,) = plain.demand.devices, made.demand.devices
    assert after.kv_bytes - before.kv_bytes == 1024 * MIB
    assert after.weight_bytes - before.weight_bytes == draft.output_bytes + sum(layer.bytes for layer in draft.layers)
    assert after.compute_bytes > before.compute_bytes
    assert made.demand.host_weight_bytes - plain.demand.host_weight_bytes == draft.embedding_bytes
    free = plan(replace(alone, draft=draft), gpus(24), HOST, PlacementConstraints())
    assert free.fits
    assert free.draft_device == "0"
    assert free.demand.devices[0].bytes <= usable_bytes(gpus(24)[0], PlacementConstraints())


def test_draft_model_displaces_no_layer_from_a_gpu(shape_of: ShapeOf) -> None:
    """It displaces no slot, either: without room it is in host memory, which the plan reports."""
    alone = shape_of("llama3.1-8b")
    for gib in (3.0, 6.0, 7.0, 8.0):
        plain = plan(alone, gpus(gib), HOST, PlacementConstraints())
        made = plan(replace(alone, draft=shape_of("llama3.2-1b")), gpus(gib), HOST, PlacementConstraints())
        assert (made.n_gpu_layers, made.setup.slots) == (plain.n_gpu_layers, plain.setup.slots)
        assert made.draft_device == ""
        assert "no GPU has room" in next(each.why for each in made.reasons if each.name == "draft")


def test_projector_takes_the_room_of_layers(shape_of: ShapeOf) -> None:
    """It is on the GPU with the layers, or in host memory without any; the plan says how much it takes."""
    alone = shape_of("llama3.1-8b")
    projector = ProjectorShape("vit", weight_bytes=600 * MIB, compute_bytes=40 * MIB)
    seeing = replace(alone, projector=projector)
    plain, made = (plan(model, gpus(24), HOST, PlacementConstraints(n_ctx=4096)) for model in (alone, seeing))
    (before,), (after,) = plain.demand.devices, made.demand.devices
    assert made.setup == plain.setup
    assert after.weight_bytes - before.weight_bytes == projector.weight_bytes
    assert after.compute_bytes - before.compute_bytes == projector.compute_bytes
    assert made.demand.host_bytes == plain.demand.host_bytes
    (reason,) = (each for each in made.reasons if each.name == "mmproj")
    assert (reason.value, reason.explicit) == ("vit", True)
    assert "600 MiB of weights, and 40 MiB for an image, on" in reason.why
    fewer = [plan(model, gpus(5), HOST, PlacementConstraints()).n_gpu_layers for model in (alone, seeing)]
    assert fewer[1] < fewer[0]
    host = plan(seeing, (), HOST, PlacementConstraints())
    assert host.demand.host_bytes - plan(alone, (), HOST, PlacementConstraints()).demand.host_bytes == projector.bytes
    assert "in host memory" in next(each.why for each in host.reasons if each.name == "mmproj")


def test_projector_without_room_on_a_gpu_is_in_host_memory(shape_of: ShapeOf) -> None:
    """With layers as configured it displaces none; otherwise it is on the GPU before them."""
    alone = shape_of("llama3.1-8b")
    projector = ProjectorShape("vit", weight_bytes=600 * MIB, compute_bytes=40 * MIB)
    seeing = replace(alone, projector=projector)
    most = plan(alone, gpus(6), HOST, PlacementConstraints())
    constraints = PlacementConstraints(
        n_gpu_layers=most.n_gpu_layers, slots=most.setup.slots, n_ctx=most.setup.n_ctx, n_ubatch=most.setup.n_ubatch
    )
    plain, made = (plan(model, gpus(6), HOST, constraints) for model in (alone, seeing))
    assert made.fits
    assert (made.n_gpu_layers, made.mmproj_device) == (most.n_gpu_layers, "")
    assert made.demand.host_bytes - plain.demand.host_bytes == projector.bytes
    assert "no GPU has room" in next(each.why for each in made.reasons if each.name == "mmproj")
    for gib in (3.0, 6.0, 24.0):
        made = plan(seeing, gpus(gib), HOST, PlacementConstraints())
        assert (made.fits, made.mmproj_device) == (True, "0")
        assert made.demand.devices[0].bytes <= usable_bytes(gpus(gib)[0], PlacementConstraints())
