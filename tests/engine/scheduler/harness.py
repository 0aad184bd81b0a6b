"""A backend and a KV store made of lists, on which the scheduler's plans are executed and checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.placement import Match, common_prefix_tokens
from inferencecenter.engine.scheduler.plan import (
    CopySlot,
    DecodePass,
    ParkSlot,
    RestoreSlot,
    StepOutcome,
    StepPlan,
    SwapSlots,
    TruncateSlot,
)
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.scheduler.state import EngineRequest, RequestState
from inferencecenter.ipc.messages import EngineLimits, MoveTime, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from inferencecenter.engine.images import ImageSpan, ImageStore
    from inferencecenter.engine.scheduler.plan import DecodeRow, KvMove

GRID_TOKENS = 4
N_CTX = 64
STEP_S = 1.0

# A token in KV and the client whose turn computed it, no client's once it was offloaded as public.
Cell = tuple[int, str]


@dataclass
class Entry:
    """An offloaded entry; not ``ready`` while it is only on disk, ``load_failed`` when RAM had no room for it."""

    scope: str
    cells: list[Cell]
    durable: bool
    ready: bool = True
    redundant: bool = False
    load_failed: bool = False

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return [token for token, _ in self.cells]


def restore(slot: int, key: str, tokens: Sequence[int], turn_id: str) -> RestoreSlot:
    """Return the move that restores these tokens."""
    return RestoreSlot(slot, key, len(tokens), pack_tokens(tokens), turn_id)


class FakeStore:
    """Stores lists. ``limit_tokens`` is the longest entry that fits; spare copies fit up to ``room_tokens``."""

    def __init__(self, *, limit_tokens: int = N_CTX, room_tokens: int = N_CTX) -> None:
        self.entries: dict[str, Entry] = {}
        self.limit_tokens = limit_tokens
        self.room_tokens = room_tokens
        self.finds = 0

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the longest match, of equal ones the shortest entry, of those one that is ready."""
        self.finds += 1
        matches = [
            Match(
                key,
                common,
                len(entry.cells),
                entry.ready,
                pack_tokens(entry.tokens),
                entry.redundant,
                entry.load_failed,
            )
            for key, entry in self.entries.items()
            if entry.scope in ("", scope) and (common := common_prefix_tokens(entry.tokens, tokens))
        ]
        return max(matches, key=lambda match: (match.common_tokens, -match.n_tokens, match.ready), default=None)

    def fits(self, n_tokens: int) -> bool:
        """Return whether an entry is short enough."""
        return n_tokens <= self.limit_tokens

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Return whether a spare copy is short enough."""
        entry = self.entries.get(key)
        assert entry is None or entry.scope == scope
        return n_tokens <= self.room_tokens


@dataclass(frozen=True)
class Faults:
    """Faults of a step: numbers of the pass that fails, and of the one before which the step is interrupted."""

    cut: bool = False
    swap: bool = False
    park: bool = False
    restore: bool = False
    copy: bool = False
    broken_pass: int = -1
    interrupted_pass: int = -1


@dataclass
class Results:
    """The results of a step so far."""

    emptied: set[str] = field(default_factory=set)
    wiped: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    decoded: Counter[str] = field(default_factory=Counter)
    sampled: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafted: int = 0
    parked: int = 0
    interrupted: bool = False


class SchedulerHarness:
    """Slots and offloaded entries beside the scheduler's own state.

    Args:
        slots: Number of slots.
        quantum_tokens: The quantum; 0 is learned.
        store: Where sequences are parked.
        can_truncate: Whether a sequence can be cut anywhere.
        ageing_s: A turn rises a class each time it waited so long; a step takes ``STEP_S``.
        pass_tokens: Most tokens of a pass.
        answer_tokens: How long each turn's answer is.
        draft_tokens: How many tokens a turn may draft in a step; then answers change now and then.
        lookup: Whether turns draft from their own text.
        draft_cost: Cost of a decode of the draft model, which errs now and then; ``None`` without one.
        images: Pixels and embeddings of images; ``None`` for a model that does not see.
    """

    def __init__(
        self,
        *,
        slots: int = 2,
        quantum_tokens: int = 4,
        store: FakeStore | None = None,
        can_truncate: bool = True,
        ageing_s: float = 1000.0,
        pass_tokens: int = 64,
        answer_tokens: int = 5,
        target_step_s: float = 0.0,
        n_ctx: int = N_CTX,
        draft_tokens: int = 0,
        lookup: bool = True,
        draft_cost: float | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self.store = FakeStore() if store is None else store
        self.can_truncate = can_truncate
        self.n_ctx = n_ctx
        self.answer_tokens = answer_tokens
        self.kv: list[list[Cell]] = [[] for _ in range(slots)]
        self.scheduler = Scheduler(
            slots=slots,
            n_ctx=n_ctx,
            grid_tokens=GRID_TOKENS,
            pass_tokens=pass_tokens,
            target_step_s=target_step_s,
            parked=self.store,
            can_truncate=can_truncate,
            quantum_tokens=quantum_tokens,
            ageing_s=ageing_s,
            draft_tokens=draft_tokens,
            lookup=lookup,
            draft_cost=draft_cost,
            images=images,
        )
        self.images = images
        self.draft_tokens = draft_tokens
        self.pass_tokens = pass_tokens
        self.accepted_tokens = 0
        self.requests: dict[str, EngineRequest] = {}
        self.answers: dict[str, int] = {}
        self.terminals: Counter[str] = Counter()
        self.limits = EngineLimits(active_slots=slots)
        self.now = 0.0
        self.paused_steps = 0
        self.interrupted = False
        self.ended_early = False

    def add(
        self,
        tokens: Sequence[int],
        *,
        turn: str = "",
        session: str = "",
        client: str = "c",
        priority: int = 1,
        prefix_tokens: int = 0,
        public: bool = False,
        durable: bool = True,
        answer_tokens: int = 0,
        spans: tuple[ImageSpan, ...] = (),
    ) -> EngineRequest:
        """Queue a turn; turn and session are named by number if not given."""
        number = len(self.requests)
        request = EngineRequest(
            turn_id=turn or f"t{number}",
            session_id=session or turn or f"s{number}",
            client_id=client,
            priority=priority,
            arrival=number,
            submitted_s=self.now,
            tokens=list(tokens),
            prefix_tokens=prefix_tokens,
            public=public,
            durable=durable,
            spans=spans,
        )
        self.scheduler.add(request)
        self.requests[request.turn_id] = request
        self.answers[request.turn_id] = answer_tokens or self.answer_tokens
        return request

    def abort(self, turn_id: str) -> None:
        """End a turn."""
        if self.scheduler.abort(turn_id, now=self.now):
            self.terminals[turn_id] += 1

    def release(self, session_id: str) -> None:
        """Close a session, in the scheduler and in the store."""
        self.terminals.update(self.scheduler.release(session_id, now=self.now))
        self.store.entries.pop(session_id, None)

    def limit(self, limits: EngineLimits) -> None:
        """Set limits."""
        self.limits = limits
        self.scheduler.limit(limits, now=self.now)

    def lift_limits(self) -> None:
        """Remove all limits."""
        self.limit(EngineLimits(active_slots=len(self.kv)))

    def finish_fetches(self) -> None:
        """Fetch all entries from disk."""
        for entry in self.store.entries.values():
            entry.ready = True

    def run(self, steps: int, *, until: Callable[[], bool] = lambda: False) -> int:
        """Run steps without faults, and return how many it took until ``until`` held."""
        for step in range(steps):
            if until():
                return step
            self.step()
        return steps

    def run_to_end(self, *, most_steps: int = 10_000) -> None:
        """Run until no turn is left."""
        steps = self.run(most_steps, until=lambda: not self.scheduler.has_work)
        assert not self.scheduler.has_work, f"still at work after {steps} steps: {self.scheduler!r}"

    def save(self, *, fails: bool = False) -> ParkSlot | None:
        """Save a slot if the scheduler is idle; a saved state is not saved again."""
        assert not self.scheduler.has_work
        wanted = self.scheduler.checkpoints.pending
        park = self.scheduler.checkpoints.next()
        if park is None:
            assert not self.scheduler.checkpoints.pending
            return None
        slot = self.scheduler.slots[park.slot]
        assert wanted
        assert park.redundant
        assert park.durable
        assert slot.durable
        assert (park.key, park.scope) == (slot.session_id, slot.client_id)
        assert not any(entry.tokens == slot.tokens for key, entry in self.store.entries.items() if key == park.key)
        self._move(park, Faults(park=fails), Results())
        self.scheduler.check_integrity()
        return park

    def step(self, faults: Faults = Faults(), *, move_s: float = 0.0) -> StepPlan:
        """Execute one plan, and check its guarantees."""
        self.now += STEP_S
        before = self.scheduler.running
        plan = self.scheduler.step(self.now)
        assert self.scheduler.running <= max(before, self.limits.active_slots), "more run than may"
        assert all(self.requests[each.turn_id].base_class <= self.limits.lowest_class for each in plan.admissions), (
            "a barred turn began"
        )
        if self.limits == EngineLimits(active_slots=len(self.kv)):
            self._check_idle_slots(plan)
        self._check_pause(plan)
        results = Results()
        slots_moved: Counter[int] = Counter()
        for move in plan.moves:
            slots_moved.update([move.slot] if isinstance(move, ParkSlot) and not move.key.startswith("prefix-") else [])
            self._move(move, faults, results)
        assert all(count == 1 for count in slots_moved.values()), "a slot changed hands twice in a step"
        for turn_id in plan.preemptions:
            assert self.requests[turn_id].slot is None
            assert turn_id not in {row.turn_id for each in plan.passes for row in each.rows}
        results.stalled |= results.emptied | results.lost
        self._check_tenants(results.stalled)
        if plan.encoding is not None and self.images is not None:
            assert not plan.passes, "an image is encoded in a step of its own"
            self.images.encode(plan.encoding.span)
        for number, each in enumerate(plan.passes):
            if number and number == faults.interrupted_pass:
                results.interrupted = True
                break
            self._pass(each, number, faults=faults, results=results)
        self.interrupted = results.interrupted
        self._complete(plan, results, move_s=move_s)
        return plan

    def _move(self, move: KvMove, faults: Faults, results: Results) -> None:
        match move:
            case TruncateSlot():
                self._cut(move, faults, results)
            case SwapSlots():
                self._swap(move, faults, results)
            case ParkSlot():
                assert [token for token, _ in self.kv[move.slot]] == list(move.tokens)
                assert move.n_tokens == len(move.tokens) > 0
                if not faults.park:
                    cells = self._cells_to_park(move)
                    self.store.entries[move.key] = Entry(move.scope, cells, move.durable, redundant=move.redundant)
                    results.parked += 1
            case RestoreSlot():
                entry = self.store.entries.get(move.key)
                client = self.requests[move.turn_id].client_id
                assert entry is None or entry.scope in ("", client), "another client's KV is restored"
                # An offload of this step may have evicted or replaced the entry.
                good = (
                    entry is not None
                    and entry.ready
                    and pack_tokens(entry.tokens) == move.tokens
                    and not faults.restore
                )
                self.kv[move.slot] = list(entry.cells) if entry is not None and good else []
                results.emptied |= set() if good else {move.turn_id}
            case CopySlot():
                assert move.source != move.target
                assert 0 < move.n_tokens <= len(self.kv[move.source])
                assert self.can_truncate or move.n_tokens == len(self.kv[move.source])
                self.kv[move.target] = [] if faults.copy else self.kv[move.source][: move.n_tokens]
                results.emptied |= {move.turn_id} if faults.copy else set()

    def _cells_to_park(self, park: ParkSlot) -> list[Cell]:
        if park.scope:
            assert all(client in ("", park.scope) for _, client in self.kv[park.slot])
            return list(self.kv[park.slot])
        prefixes = [request.tokens[: request.prefix_tokens] for request in self.requests.values() if request.public]
        assert list(park.tokens) in prefixes, "private KV is offloaded as public"
        return [(token, "") for token in park.tokens]

    def _cut(self, cut: TruncateSlot, faults: Faults, results: Results) -> None:
        if cut.turn_id in results.emptied:
            return
        held = self.kv[cut.slot]
        assert cut.n_tokens < len(held), "a cut that cuts nothing"
        if cut.n_tokens and (faults.cut or not self.can_truncate):
            assert cut.turn_id is not None
            results.emptied.add(cut.turn_id)
            held.clear()
        del held[cut.n_tokens :]

    def _swap(self, swap: SwapSlots, faults: Faults, results: Results) -> None:
        self.kv[swap.a], self.kv[swap.b] = self.kv[swap.b], self.kv[swap.a]
        if not faults.swap:
            return
        for turn_id, slot in ((swap.turn_a, swap.b), (swap.turn_b, swap.a)):
            self.kv[slot].clear()
            if turn_id is None:
                results.wiped.add(slot)
            else:
                results.lost.add(turn_id)
                results.emptied.discard(turn_id)

    def _check_idle_slots(self, plan: StepPlan) -> None:
        """Beside an idle slot a turn waits only for the disk, for its session, or for a shared prefill."""
        slots = list(self.scheduler.slots)
        requests = [request for request in self.requests.values() if request.state is not RequestState.DONE]
        restoring = [request for request in requests if request.state is RequestState.RESTORING]
        if all(slot.busy for slot in slots) or len(restoring) >= len(slots):
            return
        assert not plan.preemptions
        readers = [request for request in requests if request.state is RequestState.PREFILL]
        taken = {request.session_id for request in requests if request.state is not RequestState.WAITING}
        for request in requests:
            if request.session_id not in taken:
                shared = request.tokens[: 2 * GRID_TOKENS]
                assert any(reader.tokens[: 2 * GRID_TOKENS] == shared for reader in readers), "waits for nothing"
            taken.add(request.session_id)

    def _check_pause(self, plan: StepPlan) -> None:
        """A turn that could decode waits for one budget of prefill, or in a burst 4 s.

        A budget continues after a step that was interrupted or that ended with a first token.
        """
        could_decode = any(
            request.state is RequestState.DECODE and request.slot is not None for request in self.requests.values()
        )
        decodes = any(not each.prefill for each in plan.passes)
        if not could_decode or decodes:
            self.paused_steps = 0
        elif not (self.interrupted or self.ended_early):
            self.paused_steps += 1
        self.ended_early = any(row.chunk.sample for row in plan.passes[-1].rows) if plan.passes else False
        assert self.paused_steps <= 1 + 4 / STEP_S, "a turn that could decode waits for too long"

    def _check_tenants(self, unsure: Collection[str]) -> None:
        """A turn's KV has its own tokens, computed for its client or offloaded as a public prefix."""
        for slot in self.scheduler.slots:
            if slot.turn_id is None or slot.turn_id in unsure:
                continue
            request = self.requests[slot.turn_id]
            cells = self.kv[slot.index]
            assert [token for token, _ in cells] == request.tokens[: request.kv_tokens]
            assert {client for _, client in cells} <= {"", request.client_id}

    def _with_drafts(self, row: DecodeRow) -> DecodeRow:
        """Add the draft model's tokens: right ones with occasional errors, and none during its prefill."""
        if row.draft is None:
            return row
        request, held = self.requests[row.turn_id], row.chunk.start + 1
        assert row.draft.slot == row.chunk.slot
        assert list(row.draft.tokens) == request.tokens
        if held % 4 == 3:
            return row.with_drafts([])
        return row.with_drafts([self._says(request, n) + (n % 9 == 8) for n in range(held, held + row.draft.n_tokens)])

    def _pass(self, each: DecodePass, number: int, *, faults: Faults, results: Results) -> None:
        each = DecodePass(tuple(map(self._with_drafts, each.rows)), each.prefill)
        slots = [row.chunk.slot for row in each.rows]
        assert slots == sorted(set(slots))
        assert len({len(row.chunk.tokens) - row.chunk.drafts for row in each.rows}) == 1
        if any(row.chunk.drafts for row in each.rows):
            assert not each.prefill
            assert sum(len(row.chunk.tokens) for row in each.rows) <= self.pass_tokens
        if not each.prefill:
            assert number == 0
            assert slots == list(range(slots[0], slots[0] + len(slots)))
        rows = [row for row in each.rows if row.turn_id not in results.stalled]
        if number == faults.broken_pass and rows:
            results.lost.add(rows[0].turn_id)
            self.kv[rows[0].chunk.slot].clear()
            results.stalled.update(row.turn_id for row in rows)
            return
        for row in rows:
            request = self.requests[row.turn_id]
            held = self.kv[row.chunk.slot]
            assert row.chunk.start == len(held)
            tokens = row.chunk.tokens[: len(row.chunk.tokens) - row.chunk.drafts]
            if row.span is not None and self.images is not None:
                assert len(each.rows) == 1, "a run of rows is a pass of its own"
                assert (row.chunk.start, len(tokens)) == (row.span.start, row.span.end - row.span.start)
                if self.images.rows(row.span) is None:
                    results.stalled.add(row.turn_id)
                    continue
            held += [(token, request.client_id) for token in tokens]
            results.decoded[row.turn_id] += len(tokens)
            assert [token for token, _ in held] == request.tokens[: len(held)]
            assert row.chunk.sample == (len(held) == len(request.tokens))
            if row.chunk.sample:
                self._sample(row, faults, results)
            else:
                cuts = {request.prefix_tokens, *(end for span in request.spans for end in span[:2])}
                assert len(held) % GRID_TOKENS == 0 or len(held) in cuts

    def _sample(self, row: DecodeRow, faults: Faults, results: Results) -> None:
        """Sample the next token, and those behind accepted drafts, up to the answer's end."""
        request, held = self.requests[row.turn_id], self.kv[row.chunk.slot]
        drafts = row.chunk.tokens[len(row.chunk.tokens) - row.chunk.drafts :]
        assert len(held) + len(drafts) < self.n_ctx
        accepted: list[int] = []
        token = self._says(request, len(held))
        for draft in drafts:
            if draft != token or request.generated_tokens + len(accepted) + 1 >= self.answers[row.turn_id]:
                break
            accepted.append(draft)
            held.append((draft, request.client_id))
            token = self._says(request, len(held))
        results.sampled[row.turn_id] = token
        if drafts:
            results.accepted[row.turn_id] = tuple(accepted)
        results.drafted += len(drafts)
        results.decoded[row.turn_id] += len(accepted)
        self.accepted_tokens += len(accepted)
        if faults.cut and len(accepted) < len(drafts):
            held.clear()
            del results.decoded[row.turn_id]
            ended = request.generated_tokens + len(accepted) + 1 >= self.answers[row.turn_id]
            (results.lost if ended else results.emptied).add(row.turn_id)

    def _says(self, request: EngineRequest, n_tokens: int) -> int:
        """Return the token that a turn samples behind ``n_tokens``."""
        return 100 + request.arrival + (self.draft_tokens > 0 and n_tokens % 7 == 0)

    def _complete(self, plan: StepPlan, results: Results, *, move_s: float) -> None:
        full = {
            turn_id
            for turn_id in results.sampled
            if self.requests[turn_id].generated_tokens + len(results.accepted.get(turn_id, ())) + 1
            >= self.answers[turn_id]
        }
        moves = sum(isinstance(move, ParkSlot | RestoreSlot | CopySlot) for move in plan.moves)
        outcome = StepOutcome(
            decoded=results.decoded,
            sampled=results.sampled,
            accepted=results.accepted,
            drafted=results.drafted,
            emptied=results.emptied,
            wiped=results.wiped,
            ended=full | results.lost,
            lost=results.lost,
            interrupted=results.interrupted,
            prefill_tokens=sum(results.decoded.values()),
            prefill_s=0.01,
            decode_s=0.1,
            move_times=[MoveTime("park", move_s)] * moves,
            n_parked=results.parked,
        )
        self.scheduler.completed(outcome, now=self.now)
        self.terminals.update(full | results.lost)
        self.scheduler.check_integrity()
        assert [slot.tokens for slot in self.scheduler.slots] == [[token for token, _ in cells] for cells in self.kv]


def new_request(slot: int, *, length: int = 80, priority: int = 0, due: int = 0, session: str = "") -> EngineRequest:
    """Return a request before its prefill."""
    return EngineRequest(
        turn_id=f"t{slot}",
        session_id=session or f"s{slot}",
        client_id="c",
        submitted_s=0.0,
        priority=priority,
        arrival=slot,
        tokens=[0] * length,
        slot=slot,
        due=due,
    )
