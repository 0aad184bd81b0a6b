"""Sampling what a decode gave: each turn's next token, and those behind its drafts as long as these are right."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Delta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from inferencecenter.engine.backend import TurnSampler
    from inferencecenter.engine.outputs import TurnOutput
    from inferencecenter.engine.scheduler.plan import Row
    from inferencecenter.ipc.messages import TurnEvent


@dataclass(frozen=True, slots=True)
class Sample:
    """What a row's turn made of its logits.

    ``accepted`` are the drafts that were right, ``token`` what was sampled behind them; ``None`` when that failed.
    """

    row: Row
    accepted: tuple[int, ...]
    token: int | None
    events: tuple[TurnEvent, ...]


class RowSampling:
    """Samples the rows of the last decode, on several threads.

    Args:
        outputs: The turns' outputs by id, which take the tokens in.
        samplers: The turns' samplers by id.
        pool: Threads that sample beside the caller's; other work may wait in it.
        workers: How many rows are sampled at once at most.
        clock: Monotonic seconds.
        on_log: Called with level and text, from any thread.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        outputs: Mapping[str, TurnOutput],
        samplers: Mapping[str, TurnSampler],
        *,
        pool: ThreadPoolExecutor,
        workers: int,
        clock: Callable[[], float],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._outputs = outputs
        self._samplers = samplers
        self._pool = pool
        self._workers = workers
        self._clock = clock
        self._on_log = on_log

    def run(self, rows: Sequence[Row]) -> list[Sample]:
        """Sample all rows of the last decode, the caller's thread and the pool's taking the next one in turn."""
        firsts = accumulate((row.chunk.n_sampled for row in rows), initial=0)
        left = deque(zip(firsts, rows, strict=False))
        samples: dict[str, Sample] = {}

        def work() -> None:
            while left:
                try:
                    first, row = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                samples[row.turn_id] = self._sample(row, first)

        others = [self._pool.submit(work) for _ in range(min(self._workers, len(rows)) - 1)]
        work()
        for other in others:
            # One that has not begun sits behind a long tokenization, and all rows are taken: do not wait for it.
            if not other.cancel():
                other.result()
        return [samples[row.turn_id] for row in rows]

    def _sample(self, row: Row, first: int) -> Sample:
        """Sample what follows the row's token, of which the logits are the ``first``, and what follows its drafts."""
        output, drafts = self._outputs[row.turn_id], row.chunk.drafts
        expected = (*row.chunk.tokens[len(row.chunk.tokens) - drafts :], None)
        accepted: list[int] = []
        events: list[TurnEvent] = []
        token = None
        try:
            for draft in expected:
                sampled = self._samplers[row.turn_id].sample(first + len(accepted))
                events += output.push(sampled, now=self._clock())
                if sampled.token != draft or output.ended:
                    token = sampled.token
                    break
                accepted.append(sampled.token)
        except InferenceCenterError as error:
            events.append(output.fail(error, now=self._clock()))
        except Exception as error:  # noqa: BLE001 - a border: one turn's sampler or stop pattern must not end the others
            self._on_log("error", f"sampling failed: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The next token could not be sampled.")
            events.append(output.fail(failure, now=self._clock()))
        return Sample(row, tuple(accepted), token, _told_together(events))


def _told_together(events: Sequence[TurnEvent]) -> tuple[TurnEvent, ...]:
    """Return the events of one turn with what is told in succession told at once."""
    told: list[TurnEvent] = []
    for event in events:
        last = told[-1] if told else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            told[-1] = Delta(
                event.turn_id, last.tokens + event.tokens, last.text + event.text, last.logprobs + event.logprobs
            )
        else:
            told.append(event)
    return tuple(told)
