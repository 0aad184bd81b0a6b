"""What turns and clients were served, and who may take whose slot.

Service is counted in units of a sixteenth of a token: one for a prompt token that is read, sixteen for one that is
generated. A prompt token costs between a third (a small CPU) and a fiftieth (a GPU) of a generated one; a sixteenth is
about the geometric mean. Whole numbers, so that equal claims are equal. What is read again, because KV was lost, is not
counted: so a turn that has its slot for a quantum has come on by a quantum, however often its KV is lost.
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
    """What each client was served, as far as it is needed to compare those that are here.

    Idling saves nothing up: a client that begins to wait is raised to the least that another one waiting was served,
    or, where nobody waits, to the most that a running one was, because then nobody lacks anything. Nor does a newcomer
    owe: it starts there too (virtual token counters: Sheng et al., Fairness in Serving Large Language Models, 2024).
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
        """Count a turn of the client out; when nobody is left, all are equal again."""
        self._turns[client_id] -= 1
        if not self._turns[client_id]:
            del self._turns[client_id]
        if not self._turns:
            self._served.clear()

    def raise_to(self, client_id: str, units: int) -> None:
        """Let a client count as served so much at least."""
        if units > self.served(client_id):
            self._served[client_id] = units

    def charge(self, request: EngineRequest, units: int) -> None:
        """Book what a turn was served."""
        request.served += units
        request.used += units
        self._served[request.client_id] = self.served(request.client_id) + units

    def most(self, client_ids: Iterable[str]) -> int:
        """Return the most that one of these clients was served."""
        return max(map(self.served, client_ids), default=0)

    def check_integrity(self, turns: Iterable[EngineRequest]) -> None:
        """Raise ``AssertionError`` when the counters contradict the turns that are here."""
        assert self._turns == Counter(request.client_id for request in turns), f"turns counted wrong: {self._turns}"
        assert all(units > 0 for units in self._served.values()), f"a counter is not positive: {self._served}"


def charge_prefill(counters: ServiceCounters, request: EngineRequest) -> None:
    """Book what was read of a prompt for the first time."""
    read = min(request.kv_tokens, request.prompt_tokens)
    if read > request.read_tokens:
        counters.charge(request, (read - request.read_tokens) * PREFILL_UNITS)
        request.read_tokens = read


def charge_decode(counters: ServiceCounters, request: EngineRequest, n_tokens: int) -> None:
    """Book tokens that were sampled."""
    counters.charge(request, n_tokens * DECODE_UNITS)


class PreemptionPolicy:
    """Which running turn loses its slot to a waiting one.

    A turn that has used up its quantum yields to any claim that is at least equal: class, then what its client was
    served, then what it was served itself. After a quarter of it a generating turn yields to an equal claim of a turn
    that counts as never served, so that this gets its first token soon, and of one whose client is more than a quantum
    behind, so that new turns do not keep it out; and every turn yields to a higher class. A turn that rose a class by
    waiting keeps it for one quantum.

    A turn that still reads yields only to one with less to read: prompts that take turns would all be late.

    Args:
        counters: What clients were served.
        quantum_units: The quantum of this step in service units.
    """

    def __init__(self, counters: ServiceCounters, quantum_units: int) -> None:
        self._counters = counters
        self._quantum_units = quantum_units

    def possible(self, running: EngineRequest) -> bool:
        """Tell whether a turn can lose its slot to any other at all."""
        return 4 * running.used >= self._quantum_units

    def spent(self, running: EngineRequest) -> bool:
        """Tell whether a turn has used up its quantum."""
        return running.used >= self._quantum_units

    def allowed(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Tell whether the claims allow a waiting turn to take a running one's slot."""
        if not self.possible(running):
            return False
        rank = self._rank(running)
        if waiting.effective_priority != rank:
            return waiting.effective_priority < rank
        claim, other = (self._counters.served(waiting.client_id), waiting.claimed_service), self._claim(running)
        if claim > other:
            return False
        if self.spent(running):
            return True
        soon = waiting.claimed_service == 0 or claim[0] + self._quantum_units < other[0]
        return soon and running.state is RequestState.DECODE

    def overtakes(self, waiting: EngineRequest, running: EngineRequest, *, cached_tokens: int) -> bool:
        """Tell whether a waiting turn with so much in KV may stop a turn from reading, where ``allowed`` says so."""
        if running.state is not RequestState.PREFILL or waiting.effective_priority < self._rank(running):
            return True
        return len(waiting.tokens) - cached_tokens < running.pending_tokens

    def weakness(self, running: EngineRequest) -> tuple[int, int, int, int]:
        """Return a key by which the weakest claim of running turns is the largest."""
        return (self._rank(running), *self._claim(running), running.arrival)

    def _rank(self, running: EngineRequest) -> int:
        return running.base_class if self.spent(running) else running.effective_priority

    def _claim(self, running: EngineRequest) -> tuple[int, int]:
        return (self._counters.served(running.client_id), running.served)
