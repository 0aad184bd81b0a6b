"""Fair sharing of slots: service counters per client and turn, and the preemption rules built on them.

Mechanism: service is counted in units of a sixteenth of a token, one per prefilled prompt token and sixteen per
generated token. A prompt token costs between a third (small CPU) and a fiftieth (GPU) of a generated one; a sixteenth
is about the geometric mean. Units are integers, so equal claims compare equal. Waiting turns are ordered by priority
class, then by their client's counter, then by their own; a running turn yields its slot to an equal or stronger claim
once it has used its quantum. Invariant: tokens that are prefilled again because KV was lost are never charged, so a
turn that holds a slot for a quantum advances by a quantum, however often its KV is lost.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.engine.scheduler.request import EngineRequest

PREFILL_UNITS: Final = 1
DECODE_UNITS: Final = 16


class ServiceCounters:
    """Service per client, kept only as long as it is needed to compare the clients present.

    Idle time earns no credit: an arriving client is raised to the lowest counter among waiting clients or, if none
    waits, to the highest among running ones. It owes nothing either, because it starts at that value (virtual token
    counters: Sheng et al., Fairness in Serving Large Language Models, 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._turns: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._served)

    def served(self, client_id: str) -> int:
        """Return a client's counter in service units."""
        return self._served.get(client_id, 0)

    def enter(self, client_id: str) -> None:
        """Count a turn of the client in."""
        self._turns[client_id] += 1

    def leave(self, client_id: str) -> None:
        """Count a turn of the client out; the last turn of all clears every counter."""
        self._turns[client_id] -= 1
        if not self._turns[client_id]:
            del self._turns[client_id]
        if not self._turns:
            self._served.clear()

    def raise_to(self, client_id: str, units: int) -> None:
        """Raise a client's counter to at least ``units``."""
        if units > self.served(client_id):
            self._served[client_id] = units

    def charge(self, request: EngineRequest, units: int) -> None:
        """Charge a turn and its client."""
        request.served += units
        request.used += units
        self._served[request.client_id] = self.served(request.client_id) + units

    def most(self, client_ids: Iterable[str]) -> int:
        """Return the highest counter of these clients."""
        return max(map(self.served, client_ids), default=0)

    def check_integrity(self, turns: Iterable[EngineRequest]) -> None:
        """Raise ``AssertionError`` when the counters contradict the turns present."""
        assert self._turns == Counter(request.client_id for request in turns), f"turns counted wrong: {self._turns}"
        assert all(units > 0 for units in self._served.values()), f"a counter is not positive: {self._served}"


def charge_prefill(counters: ServiceCounters, request: EngineRequest) -> None:
    """Charge prompt tokens that were prefilled for the first time."""
    read = min(request.kv_tokens, request.prompt_tokens)
    if read > request.read_tokens:
        counters.charge(request, (read - request.read_tokens) * PREFILL_UNITS)
        request.read_tokens = read


def charge_decode(counters: ServiceCounters, request: EngineRequest, n_tokens: int) -> None:
    """Charge sampled tokens."""
    counters.charge(request, n_tokens * DECODE_UNITS)


class PreemptionPolicy:
    """Decides which running turn loses its slot to a waiting one.

    A turn that has used its quantum yields to any claim that is at least equal: class, then its client's service, then
    its own. After a quarter of the quantum a decoding turn yields to an equal claim of a turn that counts as never
    served, which shortens the time to first token, and to a turn whose client is more than a quantum behind, so that
    new turns do not starve it. Every turn yields to a higher class. A turn that rose a class by waiting keeps that
    class for one quantum.

    A turn in prefill yields only to a turn with less to prefill: prompts that take turns would all be late.

    Args:
        counters: Service per client.
        quantum_units: The quantum of this step in service units.
    """

    def __init__(self, counters: ServiceCounters, quantum_units: int) -> None:
        self._counters = counters
        self._quantum_units = quantum_units

    def possible(self, running: EngineRequest) -> bool:
        """Return whether a turn can lose its slot to any other turn."""
        return 4 * running.used >= self._quantum_units

    def spent(self, running: EngineRequest) -> bool:
        """Return whether a turn has used its quantum."""
        return running.used >= self._quantum_units

    def allowed(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Return whether the claims allow a waiting turn to preempt a running one."""
        if not self.possible(running):
            return False
        priority = self._effective_priority(running)
        if waiting.effective_priority != priority:
            return waiting.effective_priority < priority
        claim, other = (self._counters.served(waiting.client_id), waiting.claimed_service), self._claim(running)
        if claim > other:
            return False
        if self.spent(running):
            return True
        soon = waiting.claimed_service == 0 or claim[0] + self._quantum_units < other[0]
        return soon and running.state is RequestState.DECODE

    def overtakes(self, waiting: EngineRequest, running: EngineRequest, *, cached_tokens: int) -> bool:
        """Return whether a waiting turn with ``cached_tokens`` in KV may interrupt a prefill, given ``allowed``."""
        if running.state is not RequestState.PREFILL or waiting.effective_priority < self._effective_priority(running):
            return True
        return len(waiting.tokens) - cached_tokens < running.pending_tokens

    def weakness(self, running: EngineRequest) -> tuple[int, int, int, int]:
        """Return a sort key; the weakest claim among running turns has the largest key."""
        return (self._effective_priority(running), *self._claim(running), running.arrival)

    def _effective_priority(self, running: EngineRequest) -> int:
        return running.base_class if self.spent(running) else running.effective_priority

    def _claim(self, running: EngineRequest) -> tuple[int, int]:
        return (self._counters.served(running.client_id), running.served)
