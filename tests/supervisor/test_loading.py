"""The progress of loading, and the retry after a failure."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import LoadFailed, Loading
from inferencecenter.supervisor.engine_status import LoadProgress, with_fewer_layers
from tests.supervisor.stub_engine import MODEL

ALL = EngineOptions(backend="llama", parent_pid=0)


def test_load_progress_is_throttled() -> None:
    """The rate of llama.cpp's reports does not matter."""
    now = [10.0]
    progress = LoadProgress(monotonic=lambda: now[0])
    told = []
    with capture_logs() as logs:
        for percent in range(101):
            now[0] += 0.05
            told += [percent] if progress.advance(Loading(percent / 100)) else []
    assert len(told) == 10
    assert progress.fraction == 1.0
    assert [line["percent"] for line in logs] == [10, 30, 50, 70, 90]


@pytest.mark.parametrize(
    ("loading", "layers", "refusal", "lacks"),
    [
        (Loading(0.5, offloads=True), -1, None, True),
        (Loading(0.5, offloads=True), 0, None, False),
        (Loading(0.5), -1, None, False),
        (
            Loading(0.5, offloads=True),
            8,
            LoadFailed("invalid_config", "failed to allocate the KV cache", ""),
            True,
        ),
        (Loading(0.5, offloads=True), 8, LoadFailed("invalid_model_file", "wrong magic", ""), False),
    ],
)
def test_out_of_memory_is_suspected_for_gpu_loads(
    loading: Loading, layers: int, refusal: LoadFailed | None, *, lacks: bool
) -> None:
    """It is suspected if layers were loaded to a GPU and the engine died or reported a lack of memory."""
    progress = LoadProgress(monotonic=lambda: 0.0)
    progress.begin()
    progress.advance(loading)
    if refusal is not None:
        progress.refuse(refusal)
    options = EngineOptions(backend="llama", parent_pid=0, n_gpu_layers=layers)
    assert progress.may_lack_gpu_memory(options) is lacks
    progress.begin()
    assert not progress.may_lack_gpu_memory(options)


def test_reduced_layers_are_stored() -> None:
    """The number of attempts is stored, too; a model that was loaded once has a known number of layers."""
    with capture_logs() as logs:
        assert with_fewer_layers(ALL, None).n_gpu_layers == 32
        assert with_fewer_layers(ALL, MODEL).n_gpu_layers == MODEL.n_layers // 2
    assert [(line["before"], line["n_gpu_layers"]) for line in logs] == [(-1, 32), (-1, MODEL.n_layers // 2)]
