"""The plan in texts and parts."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.web import node
from tests.web.test_dashboard import GIB, device, plan

NAMES: Final = """
import { caveatOf, placesOf, processorInWords, settingsOf } from "JS/board/division.js";
import { loadTexts } from "JS/i18n.js";
await loadTexts("board");
"""


def divided(told: dict[str, Any], expression: str) -> Any:
    """Evaluate an expression of ``input``, a plan."""
    return node.run(NAMES, f"return {expression};", given=told)


def test_parts_of_a_device_add_up() -> None:
    """Memory of other programs and free memory are parts; a device that is too small has no negative part."""
    full = device(1, weight_bytes=9 * GIB)
    first, second, host = divided(plan(device(0), full), "placesOf(input)")
    assert sum(part["bytes"] for part in first["parts"]) == 8 * GIB
    assert [part["name"] for part in first["parts"]] == ["weights", "kv", "buffers", "driver", "others", "free"]
    assert (first["short"], second["short"], host["short"]) == (False, True, False)
    for place in (first, second, host):
        assert sum(part["fraction"] for part in place["parts"]) == pytest.approx(1)
        assert all(part["bytes"] >= 0 for part in place["parts"])
    assert host["notes"] == ["1 of 29 layers", "1.13 GiB planned"]


@pytest.mark.parametrize(
    ("used", "words"),
    [(5144, "5.02 GiB used, 5 % more"), (4908, "4.79 GiB used, as planned"), (4400, "4.30 GiB used, 10 % less")],
)
def test_measured_memory(used: int, words: str) -> None:
    """It is compared with the plan."""
    (first, *_) = divided(plan(device(0, used_bytes=used * 2**20)), "placesOf(input)")
    assert first["notes"][-1] == words


def test_unknown_host_memory() -> None:
    """The bar is what is used, experts included."""
    host = {"weight_bytes": GIB, "kv_bytes": 0, "compute_bytes": 0, "expert_layers": 12}
    told = divided(plan(device(0), host=host), "placesOf(input).at(-1)")
    assert [part["name"] for part in told["parts"]] == ["weights", "kv", "buffers"]
    assert told["notes"][-1] == "the experts of 12 layers on GPUs"


def test_cpu_plan() -> None:
    """It shows the plan's reason, or the setting; with a GPU it shows neither."""
    set_so = plan(reasons=[{"name": "n_gpu_layers", "value": "0 of 29", "why": "set", "explicit": True}])
    words = "Everything is on the CPU: "
    assert divided(plan(), "processorInWords(input)") == f"{words}llama.cpp can use no GPU."
    assert divided(set_so, "processorInWords(input)") == f"{words}set by engine.n_gpu_layers."
    assert divided(plan(device(0)), "processorInWords(input)") == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"state": "ready", "gpu_layers": 14}, ""),
        ({"state": "asleep"}, "No engine is running"),
        ({"state": "ready", "gpu_layers": 0}, "found no usable GPU"),
        ({"state": "starting"}, ""),
    ],
)
def test_outdated_plan_is_marked(values: dict[str, Any], words: str) -> None:
    """It differs from what runs."""
    found = node.run(NAMES, "return caveatOf(...input);", given=[plan(device(0)), values])
    assert words in found
    assert bool(words) == bool(found)


def test_settings_of_a_plan() -> None:
    """They are shown in readable form."""
    assert divided(plan(device(0), device(1)), "settingsOf(input).map(([, text]) => text)") == [
        "8", "f16 keys, q8_0 values", "2,048 tokens, 512 at once", "on", "2, divided by layers",
    ]  # fmt: skip
