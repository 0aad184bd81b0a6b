"""The scenarios, one module each."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from benchmarks.scenarios import (
    abort,
    abuse,
    agents,
    burst,
    cluster,
    context,
    crash,
    dialects,
    embeddings,
    front,
    gateway,
    idle,
    images,
    interference,
    overload,
    parking,
    replicas,
    report,
    resend,
    restart,
    returning,
    shared_prefix,
    soak,
    sparse,
    speculation,
    start,
    store,
    structured,
    swap,
    throughput,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.scenario import Scenario

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        module.SCENARIO.name: module.SCENARIO
        for module in (
            throughput,
            burst,
            overload,
            interference,
            shared_prefix,
            returning,
            replicas,
            cluster,
            sparse,
            parking,
            context,
            abort,
            gateway,
            front,
            idle,
            start,
            crash,
            restart,
            swap,
            soak,
            abuse,
            store,
            speculation,
            dialects,
            embeddings,
            resend,
            images,
            agents,
            structured,
            report,
        )
    }
)


def find(name: str) -> Scenario:
    """Return the scenario of that name.

    Raises:
        InferenceCenterError: ``invalid_request`` naming those that exist.
    """
    if name in SCENARIOS:
        return SCENARIOS[name]
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"there is no scenario {name!r}",
        hint=f"Scenarios are {', '.join(SCENARIOS)}; `inferencecenter bench list` describes them.",
        field="scenario",
    )
