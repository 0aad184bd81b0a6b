"""Placement of recorded turns on replicas, simulated on virtual time.

``python -m benchmarks.placement record LOG TRACE`` makes a trace of a daemon's log (``log.format = "json"``): when each
turn was asked, its conversation, and the tokens of its prompt and answer. ``simulate TRACE`` lets replicas run the
trace, each with a copy of its own that is shifted in time, and prints a table.

A replica has slots and a queue. A turn holds a slot while what is not in KV is prefilled, and for a step of each token;
turns do not slow each other otherwise, and none is preempted. A replica keeps the KV of the conversations that ran
there last, within ``kv_tokens``. The next turn of a conversation is asked as long after the answer as it was recorded,
so slow answers delay it. Times are scaled so that slots are busy for a given share of the time if nothing is prefilled
twice. The rule and its measured rates are the daemon's own code.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import typer

from benchmarks.stats import percentile
from inferencecenter.ipc.messages import Finished, StepOutput, StepStats
from inferencecenter.supervisor.replica_placement import (
    ASSUMED_HELD_S,
    ASSUMED_PREFILL_TOKEN_S,
    ReplicaLoad,
    ReplicaRates,
    choose_replica,
)

RECORDED: Final = Path(__file__).parent / "traces" / "conversations.csv"
_HEADER: Final = "conversation,asked_s,ended_s,prompt_tokens,tokens"
_TURN: Final = "turn"


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """A recorded turn; times are seconds since the first one was asked, ``prompt_tokens`` include the history."""

    conversation: int
    asked_s: float
    ended_s: float
    prompt_tokens: int
    tokens: int


class _LoggedTurn(msgspec.Struct, frozen=True):
    """The line that the daemon logs for a turn."""

    event: str
    timestamp: datetime | None = None
    session: str = ""
    total_ms: float = 0.0
    prompt: int = 0
    tokens: int = 0


def turns_of_log(lines: Sequence[bytes]) -> tuple[TracedTurn, ...]:
    """Return the turns of a daemon's log in the order in which they were asked."""
    found = []
    numbers: dict[str, int] = {}
    for line in lines:
        try:
            logged = msgspec.json.decode(line, type=_LoggedTurn)
        except msgspec.MsgspecError:
            continue  # output for people
        if logged.event != _TURN or logged.timestamp is None or not logged.session or not logged.tokens:
            continue
        ended_s = logged.timestamp.timestamp()
        number = numbers.setdefault(logged.session, len(numbers))
        found.append((ended_s - logged.total_ms / 1000, ended_s, number, logged.prompt, logged.tokens))
    found.sort()
    return tuple(
        TracedTurn(number, round(asked_s - found[0][0], 3), round(ended_s - found[0][0], 3), prompt, tokens)
        for asked_s, ended_s, number, prompt, tokens in found
    )


def read_trace(path: Path) -> tuple[TracedTurn, ...]:
    """Return the turns of a trace.

    Raises:
        ValueError: It is no trace.
    """
    header, *lines = path.read_text(encoding="ascii").splitlines()
    if header != _HEADER:
        raise ValueError(f"{path} is no trace: its first line is not {_HEADER}")
    rows = [line.split(",") for line in lines]
    return tuple(TracedTurn(int(a), float(b), float(c), int(d), int(e)) for a, b, c, d, e in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a simulated replica can do."""

    slots: int = 4
    step_s: float = 0.02
    prefill_token_s: float = 0.0005
    kv_tokens: int = 100_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn as one copy of the trace has it: the next is asked ``think_s`` after the answer."""

    conversation: tuple[int, int]
    prompt_tokens: int
    tokens: int
    think_s: float


@dataclass(slots=True)
class Replica:
    """A replica on virtual time."""

    engine: Engine
    running: int = 0
    queue: deque[tuple[float, Ask]] = field(default_factory=deque)
    rates: ReplicaRates = field(default_factory=ReplicaRates)
    kv: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    kv_used: int = 0

    def load(self) -> ReplicaLoad:
        """Return what the rule compares, as ``ReplicaSet`` does."""
        return ReplicaLoad(
            turns=self.running + len(self.queue),
            slots=self.engine.slots,
            held_s=self.rates.held_s or ASSUMED_HELD_S,
            prefill_token_s=self.rates.prefill_token_s or ASSUMED_PREFILL_TOKEN_S,
        )

    def cached(self, ask: Ask) -> int:
        """Return the tokens of its prompt that are in KV."""
        return min(self.kv.get(ask.conversation, 0), ask.prompt_tokens - 1)

    def store(self, ask: Ask) -> None:
        """Keep a turn's KV, and drop that of the conversations which ran longest ago."""
        self.kv_used += ask.prompt_tokens + ask.tokens - self.kv.pop(ask.conversation, 0)
        self.kv[ask.conversation] = ask.prompt_tokens + ask.tokens
        while self.kv_used > self.engine.kv_tokens:
            self.kv_used -= self.kv.popitem(last=False)[1]


Rule: TypeAlias = Callable[[Sequence[Replica], int | None, int], int]
"""Returns the replica for a turn, given the replica of its conversation's last turn and the tokens of the history."""


def by_kv(replicas: Sequence[Replica], holder: int | None, n_tokens: int) -> int:
    """Place as the daemon does."""
    return choose_replica([each.load() for each in replicas], holder=holder, n_tokens=n_tokens)


def least_loaded(replicas: Sequence[Replica], _holder: int | None, _n_tokens: int) -> int:
    """Place where the wait is shortest, then where the smallest share of the slots is taken."""
    return choose_replica([each.load() for each in replicas])


def round_robin() -> Rule:
    """Return a rule that takes one replica after the other."""
    turn = itertools.count()
    return lambda replicas, _holder, _n_tokens: next(turn) % len(replicas)


RULES: Final[dict[str, Callable[[], Rule]]] = {
    "KV": lambda: by_kv,
    "least loaded": lambda: least_loaded,
    "round robin": round_robin,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all turns.

    ``found_kv`` is the share of returning turns that had more than half of the prompt in KV, ``busy`` the share of time
    for which slots were taken.
    """

    turns: int
    found_kv: float
    ttft_s: tuple[float, ...]
    busy: float


class Simulation:
    """Replicas that run a trace, each with a copy of it.

    Args:
        trace: The recorded turns.
        replicas: Their number.
        rule: Places each turn.
        engine: What each replica can do.
        load: Share of the time for which slots are busy if nothing is prefilled twice.
        seed: Of the order in which copies of the trace begin.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for the first
        self, trace: Sequence[TracedTurn], *, replicas: int, rule: Rule, engine: Engine, load: float, seed: int = 1
    ) -> None:
        self._engine = engine
        self._rule = rule
        self._replicas = [Replica(engine) for _ in range(replicas)]
        self._conversations: dict[tuple[int, int], deque[Ask]] = {}
        # The replica of a conversation's last turn, and the tokens of its history.
        self._holders: dict[tuple[int, int], tuple[int, int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._busy_s = 0.0
        self._ttft_s: list[float] = []
        self._returning = self._found = 0
        self._schedule(trace, replicas, load=load, seed=seed)

    def run(self) -> Outcome:
        """Run to the end of the last turn."""
        while self._events:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        slot_s = self._now_s * self._engine.slots * len(self._replicas)
        return Outcome(
            len(self._ttft_s), self._found / max(1, self._returning), tuple(self._ttft_s), self._busy_s / slot_s
        )

    def _schedule(self, trace: Sequence[TracedTurn], copies: int, *, load: float, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - the same simulation for the same seed
        span_s = max(turn.ended_s for turn in trace)
        work_s, seen = 0.0, dict[int, TracedTurn]()
        think_s: list[float] = []
        for turn in trace:
            last = seen.get(turn.conversation)
            known = last.prompt_tokens + last.tokens if last else 0
            work_s += self._held_s(turn.tokens, read=max(1, turn.prompt_tokens - known))
            think_s.append(max(0.0, turn.asked_s - last.ended_s) if last else turn.asked_s)
            seen[turn.conversation] = turn
        scale = work_s / (self._engine.slots * load * span_s)
        for copy in range(copies):
            shift_s = chance.random() * span_s
            begun_s: dict[int, float] = {}
            for turn, pause_s in zip(trace, think_s, strict=True):
                key = (copy, turn.conversation)
                if turn.conversation not in begun_s:
                    begun_s[turn.conversation] = (turn.asked_s + shift_s) % span_s * scale
                    self._conversations[key] = deque()
                    self._at(begun_s[turn.conversation], lambda key=key: self._ask(key))  # type: ignore[misc]
                self._conversations[key].append(Ask(key, turn.prompt_tokens, turn.tokens, pause_s * scale))

    def _held_s(self, tokens: int, *, read: int) -> float:
        return read * self._engine.prefill_token_s + tokens * self._engine.step_s

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _ask(self, key: tuple[int, int]) -> None:
        ask = self._conversations[key].popleft()
        holder, n_tokens = self._holders.get(key, (None, 0))
        index = self._rule(self._replicas, holder, n_tokens)
        replica = self._replicas[index]
        self._holders[key] = index, ask.prompt_tokens + ask.tokens
        if holder is not None:
            self._returning += 1
            self._found += 2 * replica.cached(ask) > ask.prompt_tokens
        replica.queue.append((self._now_s, ask))
        self._start(replica)

    def _start(self, replica: Replica) -> None:
        while replica.queue and replica.running < self._engine.slots:
            asked_s, ask = replica.queue.popleft()
            read = ask.prompt_tokens - replica.cached(ask)
            prefill_s = read * self._engine.prefill_token_s
            replica.running += 1
            held_s = self._held_s(ask.tokens, read=read)
            self._busy_s += held_s
            self._ttft_s.append(self._now_s - asked_s + prefill_s + self._engine.step_s)
            replica.rates.step(_step((), StepStats(prefill_s, prefill_tokens=read, prefill_s=prefill_s)))
            begun_s = self._now_s
            self._at(
                self._now_s + held_s,
                lambda ask=ask, asked_s=asked_s, begun_s=begun_s: self._end(replica, ask, asked_s, begun_s),  # type: ignore[misc]
            )

    def _end(self, replica: Replica, ask: Ask, asked_s: float, begun_s: float) -> None:
        replica.running -= 1
        replica.store(ask)
        finished = Finished(
            turn_id="",
            reason="stop",
            stop=None,
            kept_tokens=ask.tokens,
            kept_chars=0,
            end_text="",
            prompt_tokens=ask.prompt_tokens,
            cached_tokens=0,
            generated_tokens=ask.tokens,
            queue_ms=(begun_s - asked_s) * 1000,
            ttft_ms=0.0,
            total_ms=(self._now_s - asked_s) * 1000,
            tokens_per_s=0.0,
        )
        replica.rates.step(_step((finished,), None))
        if later := self._conversations[ask.conversation]:
            self._at(self._now_s + later[0].think_s, lambda: self._ask(ask.conversation))
        self._start(replica)


def _step(events: tuple[Finished, ...], work: StepStats | None) -> StepOutput:
    return StepOutput(events=events, running=0, waiting=0, rss_bytes=0, work=work)


app = typer.Typer(help="Record arrivals, and simulate their placement on replicas.", no_args_is_help=True)


@app.command()
def record(
    log: Annotated[Path, typer.Argument(help="The daemon's log, in JSON.", exists=True, dir_okay=False)],
    trace: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Make a trace of a daemon's log. It has times and numbers of tokens, but neither names nor texts."""
    turns = turns_of_log(log.read_bytes().splitlines())
    rows = (f"{t.conversation},{t.asked_s},{t.ended_s},{t.prompt_tokens},{t.tokens}" for t in turns)
    trace.write_text("\n".join((_HEADER, *rows)) + "\n", encoding="ascii")
    typer.echo(f"{len(turns)} turns of {len({turn.conversation for turn in turns})} conversations")


@app.command()
def simulate(  # noqa: PLR0913 - one argument an option
    trace: Annotated[Path, typer.Argument(help="The trace.", exists=True, dir_okay=False)] = RECORDED,
    *,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas.")] = "1,2,4,8,16,32,64",
    loads: Annotated[str, typer.Option(help="Shares of the time for which slots are busy.")] = "0.6,0.9",
    slots: Annotated[int, typer.Option(min=1, help="Slots of a replica.")] = 4,
    step_ms: Annotated[float, typer.Option(help="Milliseconds for a token of each turn.")] = 20.0,
    prefill_ms: Annotated[float, typer.Option(help="Milliseconds to prefill a token.")] = 0.5,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens whose KV a replica keeps.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the times at which copies of the trace begin.")] = 1,
) -> None:
    """Print, for each rule, the share of returning turns that find their KV, and TTFT at p50 and p99 in seconds."""
    turns = read_trace(trace)
    engine = Engine(slots=slots, step_s=step_ms / 1000, prefill_token_s=prefill_ms / 1000, kv_tokens=kv_tokens)
    typer.echo(f"| replicas, load | {' | '.join(RULES)} |\n| --- |{' --- |' * len(RULES)}")
    for number, load in itertools.product(replicas.split(","), loads.split(",")):
        cells = []
        for rule in RULES.values():
            found = Simulation(
                turns, replicas=int(number), rule=rule(), engine=engine, load=float(load), seed=seed
            ).run()
            p50, p99 = (percentile(found.ttft_s, each) for each in (50, 99))
            cells.append(f"{found.found_kv:.2f}, {p50:.2f}, {p99:.1f}")
        typer.echo(f"| {number}, {float(load):.0%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    app()
