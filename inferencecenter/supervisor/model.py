"""One model: its entry in the registry, and what plans and runs its engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from inferencecenter.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.values import ModelSummary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.supervisor.planning import Planner
    from inferencecenter.supervisor.supervisor import Supervisor

_MIB: Final = 2**20
_STATES: Final[Mapping[EngineState, Literal["loading", "loaded", "failed"]]] = {
    EngineState.STARTING: "loading",
    EngineState.BACKOFF: "loading",
    EngineState.READY: "loaded",
    EngineState.FAILED: "failed",
}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model that was asked for, with what plans and runs its engines. Implements ``residency.Tenant``."""

    spec: ModelSpec
    planner: Planner
    supervisor: Supervisor

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.spec.name

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it to be loaded."""
        return self.supervisor.wanted

    @property
    def holds_memory(self) -> bool:
        """Whether it is loaded, or about to be, or on its way out."""
        return self.supervisor.holds_memory

    @property
    def busy(self) -> bool:
        """Whether its engine has turns."""
        return self.supervisor.busy

    @property
    def last_used_s(self) -> float:
        """When it was asked last."""
        return self.supervisor.last_used_s

    @property
    def clients(self) -> frozenset[str]:
        """Who waits for it to be loaded, as far as that is known."""
        return self.supervisor.clients

    @property
    def users(self) -> frozenset[str]:
        """Whose turns it has run since it was loaded."""
        return self.supervisor.users

    @property
    def loaded_at_s(self) -> float | None:
        """When it was loaded, now for one that is being loaded; ``None`` where it is neither."""
        return self.supervisor.loaded_at_s

    @property
    def is_urgent(self) -> bool:
        """Whether an operator wants it loaded."""
        return self.supervisor.is_urgent

    def delay(self, seconds: float) -> None:
        """Tell the turns that wait for it how long the others keep their place at least."""
        self.supervisor.delay(seconds)

    async def make_way(self) -> None:
        """Give up its memory, as soon as its turns have ended or have had the time that they get."""
        await self.supervisor.make_way(patience_s=self.spec.engine.swap_patience_s)


async def fits_beside(model: Model, others: Sequence[Model]) -> bool:
    """Tell whether a model has as much beside the others, which are loaded, as it would have alone.

    Raises:
        InferenceCenterError: Why that cannot be told, whatever the planner raises: the model has failed to load then.
    """
    planners = [each.planner for each in others]
    with foreign_input(partial(_not_planned, model.name)):
        return await asyncio.to_thread(model.planner.fits_beside, planners, model.supervisor.options)


def _not_planned(name: str, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_MODEL_FILE, f"{name} cannot be planned for: {reason}.", field=f"models.{name}"
    )


def summary(name: str, model: Model | None, *, default: bool) -> ModelSummary:
    """Return a model in a list; nobody has asked for one that is ``None``."""
    status = model.supervisor.status if model else None
    loaded = status.model if status else None
    if status is None:
        return ModelSummary(name=name, default=default, state="unloaded")
    if loaded is None:
        return ModelSummary(
            name=name, default=default, state=_STATES.get(status.state, "unloaded"), detail=status.detail
        )
    return ModelSummary(
        name=name,
        default=default,
        state=_STATES.get(status.state, "asleep"),
        detail=status.detail,
        n_ctx=loaded.n_ctx,
        slots=loaded.slots,
        parameters=loaded.n_params,
        size_mb=round(loaded.size_bytes / _MIB, 1),
    )
