"""Planned starts: unset options, measurements, and retries after a failure."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from gguf import GGUFWriter
from structlog.testing import capture_logs

from benchmarks.header import HEADERS, write_header
from inferencecenter.config.sections import EngineSettings, LoraSettings
from inferencecenter.config.settings import GpuSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.placement import MIB, Device, Host
from inferencecenter.hardware.vram_calibration import VramCalibration
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import BufferUse
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor import planning
from inferencecenter.supervisor.engine_status import with_fewer_layers
from inferencecenter.supervisor.planning import Planner, ReplicaShare, RpcPlanner, read_shape
from inferencecenter.supervisor.supervisor import Supervisor
from tests.engine.llama.tiny_projectors import write_projector
from tests.supervisor.stub_engine import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GIB = 1024 * MIB
CARD = Device(id="0000:01:00.0", name="GTX 1060", free_bytes=3 * GIB, total_bytes=3 * GIB, index=0)


@dataclass
class Machine:
    """GPUs that a test changes between plans."""

    devices: tuple[Device, ...] = (CARD,)
    used: dict[int, int] = field(default_factory=dict)
    available_bytes: int = 16 * GIB
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def find(self, _wanted: Sequence[str], rpc_servers: Sequence[str]) -> tuple[Device, ...]:
        """Return the GPUs now."""
        self.asked.append(tuple(rpc_servers))
        return self.devices

    def planner(
        self, folder: Path, *, gpu: dict[str, Any] | None = None, share: ReplicaShare | None = None, **engine: Any
    ) -> Planner:
        """Return a planner for this machine that keeps its corrections in a directory."""
        return Planner(
            engine=EngineSettings(**engine),
            gpu=GpuSettings(**gpu or {}),
            calibration=VramCalibration(folder / "plan.json"),
            share=share,
            devices=self.find,
            host=lambda: Host(available_bytes=self.available_bytes, cores=4),
            used_bytes=lambda _index, pid: self.used.get(pid),
        )

    def replicas(self, folder: Path, count: int, *, loaded: list[Planner], **fields: Any) -> list[Planner]:
        """Return the planners of the replicas of a model, of which some are loaded."""
        made: list[Planner] = []

        def siblings(index: int) -> list[Planner]:
            return [each for each in loaded if each is not made[index]]

        for index in range(count):
            share = ReplicaShare(index, count, siblings=partial(siblings, index))
            made.append(self.planner(folder, share=share, **fields))
        return made


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """Options for a 7B model of which only the header exists."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_header(path, HEADERS["qwen2.5-7b"], name="7B")
    return EngineOptions(backend="llama", parent_pid=0, model_path=str(path))


def test_unset_options_are_planned(tmp_path: Path, options: EngineOptions) -> None:
    """The plan sets layers, slots and the GPU by its address; without configured layers the GPU is optional."""
    planned = Machine().planner(tmp_path).first(options)
    assert (planned.n_gpu_layers, planned.slots, planned.n_ctx) == (14, 1, 4096)
    assert planned.devices == ("0000:01:00.0",)
    assert (planned.split_mode, planned.main_gpu, planned.gpu_optional) == ("none", 0, True)
    assert planned.flash_attention == "auto"


def test_embedding_models_are_planned_with_one_text_at_once(tmp_path: Path, options: EngineOptions) -> None:
    """The longest text is computed in one batch and is what the memory is planned for; batches stay usual."""
    planner = Machine().planner(tmp_path)
    planned = planner.first(options.replace(kind="embedding"))
    assert (planned.slots, planned.n_ctx, planned.n_ubatch) == (1, 2048, 512)
    assert planner.report is not None
    assert (planner.report.n_ctx, planner.report.n_ubatch) == (2048, 2048)
    assert Machine(devices=()).planner(tmp_path).first(options.replace(kind="embedding")).flash_attention == "auto"
    assert Machine(devices=()).planner(tmp_path).first(options).flash_attention == "off"
    longer = Machine().planner(tmp_path, n_ctx=8192).first(options.replace(kind="embedding"))
    assert longer.n_ctx == 8192


def test_plan_includes_adapters(tmp_path: Path, options: EngineOptions) -> None:
    """Their files are part of the demand; a missing one is left to the engine to refuse."""
    heavy = tmp_path / "heavy.gguf"
    with heavy.open("wb") as file:
        file.truncate(GIB)
    adapted = options.replace(lora=(LoraSettings(path=heavy), LoraSettings(path=tmp_path / "none.gguf")))
    plain = Machine().planner(tmp_path).first(options)
    assert Machine().planner(tmp_path).first(adapted).n_gpu_layers < plain.n_gpu_layers
    missing = options.replace(lora=adapted.lora[1:])
    assert Machine().planner(tmp_path).first(missing).n_gpu_layers == plain.n_gpu_layers


def test_plan_includes_the_draft_model(tmp_path: Path, options: EngineOptions) -> None:
    """It is on the GPU if it has room, else in host memory; the engine refuses an unreadable one."""
    draft = tmp_path / "draft.gguf"
    write_header(draft, HEADERS["llama3.2-1b"], name="1B")
    drafting = options.replace(draft_path=str(draft))
    large = replace(CARD, free_bytes=24 * GIB, total_bytes=24 * GIB)
    assert Machine(devices=(large,)).planner(tmp_path).first(drafting).draft_device == large.id
    assert Machine().planner(tmp_path).first(drafting).draft_device == ""
    missing = options.replace(draft_path=str(tmp_path / "none.gguf"))
    with capture_logs() as logs:
        assert Machine(devices=()).planner(tmp_path).first(missing).draft_device == ""
    assert [line["event"] for line in logs] == ["plan_impossible"]


def test_plan_includes_the_projector(tmp_path: Path, options: EngineOptions) -> None:
    """Its size is read from its header."""
    mmproj = tmp_path / "mmproj.gguf"
    write_projector(mmproj, n_embd=64)
    shape = read_shape(Path(options.model_path), mmproj=mmproj)
    assert shape.projector is not None
    assert shape.projector.name == "tiny projector"
    # 16 patches of at most 64 + 4 * 32 numbers, and a score for each of two heads and each pair of them.
    assert shape.projector.compute_bytes == 4 * (16 * (64 + 4 * 32) + 16 * 16 * 2)
    assert 50_000 < shape.projector.weight_bytes < mmproj.stat().st_size
    reported = Machine().planner(tmp_path)
    reported.first(options.replace(mmproj_path=str(mmproj)))
    assert reported.report is not None
    assert "mmproj" in [reason.name for reason in reported.report.reasons]


@pytest.mark.parametrize("length", [-(2**31), 2**31 - 1])
def test_implausible_projector_frees_no_memory(tmp_path: Path, options: EngineOptions, length: int) -> None:
    """What its header cannot mean counts as nothing: the engine refuses the file."""
    mmproj = tmp_path / "mmproj.gguf"
    writer = GGUFWriter(mmproj, "clip")
    for name in ("image_size", "patch_size", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_int32(f"clip.vision.{name}", length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shape = read_shape(Path(options.model_path), mmproj=mmproj)
    assert shape.projector is not None
    assert shape.projector.bytes == 0


def test_projector_is_loaded_on_the_planned_device(tmp_path: Path, options: EngineOptions) -> None:
    """It is the GPU that has the layers, and none where there is no GPU."""
    mmproj = tmp_path / "mmproj.gguf"
    write_projector(mmproj, n_embd=64)
    seeing = options.replace(mmproj_path=str(mmproj))
    assert Machine().planner(tmp_path).first(seeing).mmproj_device == CARD.id
    assert Machine().planner(tmp_path, n_gpu_layers=0).first(seeing).mmproj_device == ""
    assert Machine(devices=()).planner(tmp_path).first(seeing).mmproj_device == ""
    assert Machine().planner(tmp_path).first(options).mmproj_device == ""


def test_defaults_without_a_gpu(tmp_path: Path, options: EngineOptions) -> None:
    """They are 8 slots and 4096 tokens; the engine chooses its number of threads itself."""
    planned = Machine(devices=()).planner(tmp_path).first(options)
    assert (planned.n_gpu_layers, planned.slots, planned.n_ctx, planned.n_threads) == (0, 8, 4096, 0)
    assert (planned.n_batch, planned.n_ubatch, planned.kv_type_k) == (2048, 512, "f16")
    assert planned.flash_attention == "off"
    assert planned.devices == ()


def test_small_memory_reduces_slots(tmp_path: Path, options: EngineOptions) -> None:
    """8 slots would not fit."""
    planned = Machine(devices=(), available_bytes=5 * GIB).planner(tmp_path).first(options)
    assert 1 <= planned.slots < 8


def test_configured_options_are_kept(tmp_path: Path, options: EngineOptions) -> None:
    """They are kept if the model does not fit; then both sizes are logged."""
    planner = Machine().planner(tmp_path, slots=4, n_ctx=8192, n_gpu_layers=29, gpu={"margin_mib": 100})
    with capture_logs() as logs:
        planned = planner.first(options)
    assert (planned.slots, planned.n_ctx, planned.n_gpu_layers, planned.gpu_optional) == (4, 8192, 29, False)
    (warning,) = (line for line in logs if line["event"] == "plan_does_not_fit")
    assert "has 2,972 MiB after a margin of 100 MiB, needs 6," in warning["reason"]


def test_configured_layers_without_a_gpu_are_left_to_the_engine(tmp_path: Path, options: EngineOptions) -> None:
    """It reports that there is no GPU."""
    planned = Machine(devices=()).planner(tmp_path, n_gpu_layers=5).first(options.replace(n_gpu_layers=5))
    assert planned.n_gpu_layers == 5


def test_unparsed_files_are_not_planned(tmp_path: Path, options: EngineOptions) -> None:
    """llama.cpp may still be able to load them."""
    planner = Machine().planner(tmp_path)
    echo = options.replace(backend="echo")
    assert planner.first(echo) is echo
    assert planner.report is None
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and more")
    unknown = options.replace(model_path=str(broken))
    with capture_logs() as logs:
        assert planner.first(unknown) is unknown
        assert planner.again(unknown) is unknown
    assert [line["event"] for line in logs] == ["plan_impossible"]


def test_failing_device_query_disables_the_plan(tmp_path: Path, options: EngineOptions) -> None:
    """The engine starts with the configured options; a check whether the model fits gets a defined error."""
    planner = Machine(devices=cast("tuple[Device, ...]", (None,))).planner(tmp_path)
    with capture_logs() as logs:
        assert planner.first(options) is options
        assert planner.again(options) is options
    assert [line["event"] for line in logs] == ["plan_impossible"] * 2
    with pytest.raises(InferenceCenterError, match="cannot be planned for: AttributeError") as caught:
        planner.fits_beside([], options)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_MODEL_FILE, "model.path")


async def test_failing_measurement_is_logged(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception is left in the event loop."""
    planner = Machine().planner(tmp_path)
    planner.first(options)
    monkeypatch.setattr(planner, "compare", lambda *_: 1 / 0)
    with capture_logs() as logs:
        planner.on_status(EngineStatus(state=EngineState.READY, model=MODEL, pid=5))
        await asyncio.get_running_loop().shutdown_default_executor()
    assert [line["reason"] for line in logs] == ["ZeroDivisionError: division by zero"]


def test_each_start_queries_the_servers(tmp_path: Path, options: EngineOptions) -> None:
    """They may have come or gone; the comparison of a GPU's memory disturbs none."""
    machine = Machine()
    planner = machine.planner(tmp_path, gpu={"rpc_servers": ("a:1",)})
    planner.first(options)
    planner.compare(MODEL, pid=7)
    planner.again(options)
    assert machine.asked == [("a:1",), (), ("a:1",)]


def rpc_planner(machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, **gpu: Any) -> RpcPlanner:
    """Return a planner whose nodes have a device of 8 GiB each."""

    def node_devices(servers: Mapping[str, str]) -> tuple[Device, ...]:
        return tuple(
            Device(
                id=f"RPC0[{node}]",
                name=f"RPC0[{node}]",
                free_bytes=8 * GIB,
                total_bytes=8 * GIB,
                aliases=(f"RPC0[{address}]",),
                remote=True,
            )
            for node, address in servers.items()
        )

    monkeypatch.setattr(planning, "node_devices", node_devices)
    return RpcPlanner(
        engine=EngineSettings(),
        gpu=GpuSettings(**gpu),
        calibration=VramCalibration(folder / "plan.json"),
        devices=machine.find,
        host=lambda: Host(available_bytes=machine.available_bytes, cores=4),
    )


def test_devices_of_nodes_are_planned_at_each_launch(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan names them by their node, and the engine gets llama.cpp's names, which change with the address."""
    planner = rpc_planner(Machine(), tmp_path, monkeypatch)
    assert planner.first(options) == planner.again(options) == options
    assert planner.fits_beside([], options)
    for port in (1, 2):
        planned = planner.at_launch(options, {"box2": f"127.0.0.1:{port}"})
        assert planned.devices == (CARD.id, f"RPC0[127.0.0.1:{port}]")
        assert planned.n_gpu_layers == 29
        assert planner.report is not None
        assert [device.id for device in planner.report.devices] == [CARD.id, "RPC0[box2]"]
    assert planner.fits_beside([], options)
    without = planner.at_launch(options, {})
    assert without.devices == (CARD.id,)
    assert without.n_gpu_layers < 29


def test_plan_without_nodes_must_fit_this_machine(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its engine would page its weights in and out."""
    machine = Machine(devices=())
    planner = rpc_planner(machine, tmp_path, monkeypatch)
    planner.at_launch(options, {})
    assert planner.fits_host
    machine.available_bytes = GIB
    planner.at_launch(options, {})
    assert not planner.fits_host
    planner.at_launch(options, {"box2": "127.0.0.1:1"})
    assert planner.fits_host


def test_fewer_layers_after_a_failed_load_on_nodes(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that name no number are no limit, and halved ones are."""
    planner = rpc_planner(Machine(), tmp_path, monkeypatch)
    servers = {"box2": "127.0.0.1:1"}
    for _ in range(2):
        assert planner.at_launch(options, servers).n_gpu_layers == 29
    assert planner.at_launch(options.replace(n_gpu_layers=14), servers).n_gpu_layers == 14


def test_configured_device_of_a_node(tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the plan has; without its node there is no such device."""
    planner = rpc_planner(Machine(), tmp_path, monkeypatch, devices=("RPC0[box2]",))
    assert planner.at_launch(options, {"box2": "127.0.0.1:1"}).devices == ("RPC0[127.0.0.1:1]",)
    with pytest.raises(InferenceCenterError, match=r"There is no GPU RPC0\[box2\]"):
        planner.at_launch(options, {})


def test_missing_configured_gpu_prevents_the_start(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon exits at its start; later, no engine is started until the GPU is there."""
    machine = Machine()
    planner = machine.planner(tmp_path)
    planned = planner.first(options)

    def missing(_wanted: Sequence[str], _rpc_servers: Sequence[str]) -> tuple[Device, ...]:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")

    monkeypatch.setattr(planner, "_find_devices", missing)
    for plan in (planner.first, planner.again):
        with pytest.raises(InferenceCenterError, match="no GPU 7"):
            plan(planned)


def test_plan_follows_free_memory(tmp_path: Path, options: EngineOptions) -> None:
    """Each start gets what is free at that time."""
    machine = Machine()
    planner = machine.planner(tmp_path)
    planned = planner.first(options)
    machine.devices = (replace(CARD, free_bytes=2 * GIB),)
    less = planner.again(planned)
    assert 0 < less.n_gpu_layers < planned.n_gpu_layers
    machine.devices = (CARD,)
    assert planner.again(less).n_gpu_layers == planned.n_gpu_layers
    machine.devices = (replace(CARD, free_bytes=200 * MIB),)
    none = planner.again(planned)
    assert (none.n_gpu_layers, none.devices, none.main_gpu) == (0, (), -1)


def test_failed_load_halves_the_layers(tmp_path: Path, options: EngineOptions) -> None:
    """The next start uses half of the planned layers, and later plans never use more."""
    planner = Machine(devices=(replace(CARD, free_bytes=8 * GIB, total_bytes=8 * GIB),)).planner(tmp_path)
    planned = planner.first(options)
    assert planned.n_gpu_layers == 29
    halved = planner.again(with_fewer_layers(planned, None))
    assert halved.n_gpu_layers == 14
    assert planner.again(halved).n_gpu_layers == 14
    assert planner.again(with_fewer_layers(halved, None)).n_gpu_layers == 7


def test_slots_are_fixed_after_the_first_start(tmp_path: Path, options: EngineOptions) -> None:
    """Waiting turns must still fit, and saved KV be usable; fewer layers are offloaded instead."""
    machine = Machine(devices=(replace(CARD, free_bytes=8 * GIB, total_bytes=8 * GIB),))
    planner = machine.planner(tmp_path)
    planned = planner.first(options)
    planner.compare(MODEL, pid=7)
    machine.devices = (replace(CARD, free_bytes=4 * GIB, total_bytes=8 * GIB),)
    again = planner.again(planned)
    assert (again.slots, again.n_ctx, again.kv_type_k) == (planned.slots, planned.n_ctx, planned.kv_type_k)
    assert again.n_gpu_layers < planned.n_gpu_layers


def test_measurement_corrects_the_next_plan(tmp_path: Path, options: EngineOptions) -> None:
    """The difference is logged and stored; another daemon in the same state directory plans with it."""
    machine = Machine()
    planner = machine.planner(tmp_path)
    planned = planner.first(options)
    machine.used[7] = 2769 * MIB + 160 * MIB
    assert planner.report is not None
    assert [each.used_bytes for each in planner.report.devices] == [None]
    with capture_logs() as logs:
        planner.compare(MODEL, pid=7)
    assert [each.used_bytes for each in planner.report.devices] == [2929 * MIB]
    (line,) = logs
    assert (line["event"], line["planned_mib"], line["used_mib"], line["off_percent"]) == (
        "vram_compared",
        2769,
        2929,
        5.8,
    )
    assert machine.planner(tmp_path).first(options).n_gpu_layers < planned.n_gpu_layers
    machine.used[8] = 2769 * MIB - 200 * MIB
    planner.compare(MODEL, pid=8)
    assert machine.planner(tmp_path).first(options).n_gpu_layers > planned.n_gpu_layers


def test_without_process_memory_the_change_of_free_memory_counts(tmp_path: Path, options: EngineOptions) -> None:
    """The comparison is logged only while the GPU can be found."""
    machine = Machine()
    planner = machine.planner(tmp_path)
    planned = planner.first(options)
    machine.devices = ()
    with capture_logs() as logs:
        planner.compare(MODEL, pid=7)
        machine.devices = (replace(CARD, free_bytes=300 * MIB),)
        planner.compare(MODEL, pid=7)
    assert [(line["event"], line["used_mib"]) for line in logs] == [("vram_compared", 2772)]
    assert planned.n_gpu_layers == 14


@pytest.mark.parametrize("used_mib", [0, 2000, 4500])
def test_implausible_measurement_is_dropped(tmp_path: Path, options: EngineOptions, used_mib: int) -> None:
    """Less than weights and KV, or far more than planned, is due to other programs."""
    machine = Machine(used={7: used_mib * MIB})
    planner = machine.planner(tmp_path)
    planned = planner.first(options)
    with capture_logs() as logs:
        planner.compare(MODEL, pid=7)
    assert [line["event"] for line in logs] == ["vram_not_compared"]
    assert planner.report is not None
    assert planner.report.devices[0].used_bytes is None
    assert machine.planner(tmp_path).first(options) == planned


def test_gpu_unknown_to_nvml_uses_llama_cpps_figures(tmp_path: Path, options: EngineOptions) -> None:
    """The driver's part is added as planned."""
    machine = Machine(devices=(replace(CARD, id="Vulkan0", index=-1, aliases=("Vulkan0",)),))
    planner = machine.planner(tmp_path)
    planner.first(options)
    memory = (
        BufferUse(name="Vulkan0", weight_bytes=2000 * MIB, kv_bytes=100 * MIB, compute_bytes=200 * MIB),
        BufferUse(name="CPU", weight_bytes=500 * MIB),
    )
    with capture_logs() as logs:
        planner.compare(MODEL, pid=7)
        planner.compare(replace_model(memory), pid=7)
    assert [line["used_mib"] for line in logs] == [2600]


def replace_model(memory: tuple[BufferUse, ...]) -> Any:
    """Return the model with its measured memory."""
    return type(MODEL)(**{name: getattr(MODEL, name) for name in MODEL.__struct_fields__} | {"memory": memory})


async def test_each_ready_engine_is_compared_once(
    tmp_path: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread does it, so the event loop does not wait for the driver."""
    planner = Machine().planner(tmp_path)
    planner.first(options)
    compared: list[int] = []
    monkeypatch.setattr(
        asyncio.get_running_loop(), "run_in_executor", lambda _pool, _function, _model, pid: compared.append(pid)
    )
    for state, pid in (
        (EngineState.STARTING, 7),
        (EngineState.READY, 7),
        (EngineState.READY, 7),
        (EngineState.READY, 8),
        (EngineState.READY, None),
    ):
        planner.on_status(EngineStatus(state=state, model=MODEL, pid=pid))
    assert compared == [7, 8]


def test_without_a_plan_there_is_nothing_to_compare(tmp_path: Path, options: EngineOptions) -> None:
    """The echo backend has none."""
    planner = Machine().planner(tmp_path)
    planner.first(options.replace(backend="echo"))
    with capture_logs() as logs:
        planner.compare(MODEL, pid=7)
    assert logs == []


def test_fit_beside_other_models(tmp_path: Path, options: EngineOptions) -> None:
    """A model fits if it has as much as it would have alone; memory of the others would be free without them."""
    machine = Machine(devices=(), available_bytes=32 * GIB)
    first, second = machine.planner(tmp_path, slots=1), machine.planner(tmp_path, slots=1)
    assert first.fits_beside([], options)
    taken = first.first(options)
    assert taken.slots == 1
    assert second.fits_beside([first], options)
    machine.available_bytes = 4 * GIB
    assert not second.fits_beside([first], options)


def test_replicas_have_gpus_of_their_own(tmp_path: Path, options: EngineOptions) -> None:
    """Each has whole ones if there are as many GPUs as replicas; what is left over goes to one of them."""
    cards = tuple(replace(CARD, id=f"0000:0{number}:00.0", index=number, free_bytes=24 * GIB) for number in range(3))
    cards = tuple(replace(card, total_bytes=24 * GIB) for card in cards)
    pair = Machine(devices=cards).replicas(tmp_path, 2, loaded=[])
    assert pair[0].first(options).devices == (cards[0].id,)
    second = pair[1].first(options)
    assert set(second.devices) <= {cards[1].id, cards[2].id}
    assert second.n_threads == 2


@pytest.mark.parametrize("gpu", [{}, {"main_gpu": 0}, {"tensor_split": (1.0,)}])
def test_replicas_divide_the_memory_of_a_gpu(tmp_path: Path, options: EngineOptions, gpu: dict[str, Any]) -> None:
    """A half for each, before the other is loaded and after; settings that name GPUs hold for all replicas."""
    card = replace(CARD, free_bytes=24 * GIB, total_bytes=24 * GIB)
    machine, loaded = Machine(devices=(card,)), list[Planner]()
    pair = machine.replicas(tmp_path, 2, loaded=loaded, gpu=gpu)
    first = pair[0].first(options)
    assert pair[0].placement is not None
    used_bytes = pair[0].placement.demand.devices[0].bytes
    assert used_bytes <= 12 * GIB
    loaded.append(pair[0])
    machine.devices = (replace(card, free_bytes=card.free_bytes - used_bytes),)
    assert pair[1].fits_beside([], options)
    assert pair[1].first(options) == first
    assert pair[1].placement is not None
    assert pair[1].placement.demand.devices[0].bytes <= machine.devices[0].free_bytes


def test_replicas_on_processors_divide_cores_and_memory(tmp_path: Path, options: EngineOptions) -> None:
    """Two engines with all cores each would be slower together than one."""
    machine = Machine(devices=(), available_bytes=32 * GIB)
    pair = machine.replicas(tmp_path, 2, loaded=[])
    planned = [each.first(options) for each in pair]
    assert [each.n_threads for each in planned] == [2, 2]
    alone = machine.planner(tmp_path).first(options)
    assert alone.n_threads == 0
    machine.available_bytes = 12 * GIB
    assert machine.planner(tmp_path).fits_beside([], options)
    with pytest.raises(InferenceCenterError):
        machine.replicas(tmp_path, 4, loaded=[])[0].fits_beside([], options)


async def test_shared_gpu_is_measured_by_the_driver_or_llama_cpp(tmp_path: Path, options: EngineOptions) -> None:
    """The change of free memory says nothing where another replica uses the GPU too."""
    machine = Machine(devices=(replace(CARD, free_bytes=24 * GIB, total_bytes=24 * GIB),))
    pair = machine.replicas(tmp_path, 2, loaded=[])
    for each in pair:
        each.first(options)
    machine.devices = (CARD,)
    pair[0].compare(replace_model(()), 1)
    assert pair[0].report is not None
    assert pair[0].report.devices[0].used_bytes is None
    machine.used = {1: pair[0].placement.demand.devices[0].bytes if pair[0].placement else 0}
    pair[0].compare(replace_model(()), 1)
    assert pair[0].report.devices[0].used_bytes == machine.used[1]


def test_model_that_fits_nowhere_is_refused(tmp_path: Path, options: EngineOptions) -> None:
    """The error has the missing amount; a model loaded before is not refused, since the shortage may pass."""
    machine = Machine(devices=(), available_bytes=32 * GIB)
    other = machine.planner(tmp_path)
    other.first(options)
    huge = machine.planner(tmp_path, slots=64, n_ctx=2**20)
    for others in ([], [other]):
        with pytest.raises(InferenceCenterError, match=r"Does not fit in memory: has .* MiB, needs") as refused:
            huge.fits_beside(others, options)
        assert refused.value.code is ErrorCode.INVALID_CONFIG
    small = machine.planner(tmp_path)
    assert small.fits_beside([], options)
    small.first(options)
    machine.available_bytes = GIB
    assert not small.fits_beside([], options)


async def test_every_engine_but_the_first_is_planned_again() -> None:
    """A thread plans it from the options of the previous one; it is started with the result."""
    given: list[EngineOptions] = []

    def plan_again(options: EngineOptions) -> EngineOptions:
        given.append(options)
        return options.replace(slots=options.slots + 1)

    options = EngineOptions(
        backend="echo", slots=2, max_queue=1, restart_backoff_min_s=0.01, restart_backoff_max_s=0.01
    )
    supervisor = Supervisor(options, plan_again=plan_again)
    ready = asyncio.Event()
    supervisor.subscribe(lambda status: ready.set() if status.state is EngineState.READY else None)
    slots = []
    supervisor.start()
    try:
        for _ in range(3):
            async with asyncio.timeout(30):
                await ready.wait()
            ready.clear()
            status = supervisor.status
            assert status.model
            assert status.pid
            slots.append(status.model.slots)
            os.kill(status.pid, signal.SIGKILL)
    finally:
        await supervisor.stop()
    assert slots == [2, 3, 4]
    assert [options.slots for options in given[:2]] == [2, 3]
