"""Submitted turns until the scheduler has them: workers turn their prompts into tokens."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.engine.inbox import Prepared, Unprepared
from inferencecenter.engine.outputs import Turn, TurnOutput
from inferencecenter.engine.scheduler.request import Request
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import unpack_tokens
from inferencecenter.protocol import params as turn_params

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.grammars import Grammars
    from inferencecenter.engine.inbox import Inbox
    from inferencecenter.engine.sampling.structured import Constraint
    from inferencecenter.ipc.messages import Submit
    from inferencecenter.ipc.pulse import Pulse
    from inferencecenter.protocol.params import Params


@dataclass(slots=True)
class Pending:
    """A submitted turn; ``at_s`` is the monotonic second at which it came, ``arrival`` counts the turns.

    With ``ending`` it is to end for this reason as soon as it is known what it has said.
    """

    submit: Submit
    arrival: int
    at_s: float
    prepared: Prepared | Unprepared | None = None
    ending: str | None = None

    def request(self, prepared: Prepared) -> Request:
        """Return the turn as the scheduler takes it."""
        submit = self.submit
        return Request(
            turn_id=submit.turn_id,
            session_id=submit.session_id,
            client_id=submit.client_id,
            priority=submit.priority,
            arrival=self.arrival,
            submitted_s=self.at_s,
            prefix_tokens=prepared.prefix_tokens,
            public=submit.public,
            durable=submit.durable,
            tokens=prepared.tokens,
        )


class Preparation:
    """Turns on their way to the scheduler. They leave in the order in which their sessions' turns came.

    Args:
        backend: Tokenizes, on the workers.
        grammars: Compiles, on a thread of its own: whoever needs no new grammar does not wait for one.
        pool: The workers.
        inbox: Where they put the tokens.
        pulse: Where they say whose prompt they work on.
        queue_timeout_s: Seconds in which a turn must have a slot; infinite for no such limit.
        on_ready: Called with each turn that leaves.
        on_log: Called with level and text, from any thread.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        backend: Backend,
        *,
        grammars: Grammars,
        pool: ThreadPoolExecutor,
        inbox: Inbox,
        pulse: Pulse,
        queue_timeout_s: float,
        on_ready: Callable[[Pending, Prepared | Unprepared], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._grammars = grammars
        self._pool = pool
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._inbox = inbox
        self._pulse = pulse
        self._queue_timeout_s = queue_timeout_s
        self._on_ready = on_ready
        self._on_log = on_log
        self._pending: dict[str, Pending] = {}
        self._sessions: dict[str, deque[str]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, turn_id: str) -> Pending | None:
        """Return a turn that is still here."""
        return self._pending.get(turn_id)

    def of_session(self, session_id: str) -> tuple[str, ...]:
        """Return a session's turns that are still here, the first one first."""
        return tuple(self._sessions.get(session_id, ()))

    def add(self, submit: Submit, *, at_s: float) -> None:
        """Take a turn that came at ``at_s``, and have a worker prepare it."""
        self._arrivals += 1
        self._pending[submit.turn_id] = Pending(submit, self._arrivals, at_s)
        self._sessions.setdefault(submit.session_id, deque()).append(submit.turn_id)
        is_new = submit.grammar is not None and not self._grammars.knows(submit.grammar, submit.markers)
        (self._compiler if is_new else self._pool).submit(self._prepare, submit, at_s=at_s)

    def take(self, prepared: Prepared | Unprepared) -> None:
        """Take what a worker has made; one whose turn has ended meanwhile is forgotten."""
        pending = self._pending.get(prepared.turn_id)
        if pending is not None:
            pending.prepared = prepared
            self._advance(pending.submit.session_id)

    def withdraw(self, turn_id: str) -> Pending | None:
        """Forget a turn, if it is still here, and return it."""
        pending = self._pending.pop(turn_id, None)
        if pending is not None:
            session_id = pending.submit.session_id
            self._sessions[session_id].remove(turn_id)
            self._advance(session_id)
        return pending

    def clear(self) -> None:
        """Forget all turns."""
        self._pending.clear()
        self._sessions.clear()

    def close(self) -> None:
        """End the thread that compiles, after what it is at."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _advance(self, session_id: str) -> None:
        turns = self._sessions[session_id]
        while turns and (prepared := self._pending[turns[0]].prepared) is not None:
            self._on_ready(self._pending.pop(turns.popleft()), prepared)
        if not turns:
            del self._sessions[session_id]

    def _prepare(self, submit: Submit, *, at_s: float) -> None:
        """Turn a submission into tokens, on a worker thread."""
        try:
            with self._pulse.preparing(submit.turn_id):
                prepared = self._prepared(submit, at_s=at_s)
            self._inbox.put(prepared)
        except InferenceCenterError as error:
            self._inbox.put(Unprepared(submit.turn_id, error))
        except Exception as error:  # noqa: BLE001 - a border: what one turn sent must not end the others
            self._on_log("error", f"preparing a turn failed: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The turn could not be prepared.")
            self._inbox.put(Unprepared(submit.turn_id, failure))

    def _prepared(self, submit: Submit, *, at_s: float) -> Prepared:
        history = unpack_tokens(submit.tokens)
        prompt = history + self._backend.tokenize(submit.pieces, first=not history)
        answer = unpack_tokens(submit.answer)
        params = turn_params.decode(submit.params_json)
        turn = Turn(
            turn_id=submit.turn_id,
            params=params,
            submitted_s=at_s,
            prompt_tokens=len(prompt),
            answer=tuple(answer),
            shown_chars=submit.shown_chars,
            may_shift=submit.may_shift,
            traced=submit.traced,
            markers=submit.markers,
            constraint=self._constraint(submit, params, answer),
        )
        output = TurnOutput(turn, self._backend, n_ctx=self._backend.model.n_ctx, queue_timeout_s=self._queue_timeout_s)
        return Prepared(submit.turn_id, prompt + answer, self._prefix_tokens(submit, prompt), output)

    def _constraint(self, submit: Submit, params: Params, answer: Sequence[int]) -> Constraint | None:
        """Return what holds the answer to its grammar, where it has one."""
        if submit.grammar is None:
            return None
        if params.ignore_eos:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "An answer that has a form ends where that is complete.",
                hint="Leave ignore_eos out, or ask for no form.",
                field="params.ignore_eos",
            )
        return self._grammars.constraint(submit.grammar, submit.markers, answer)

    def _prefix_tokens(self, submit: Submit, prompt: list[int]) -> int:
        """Return how many tokens the shared pieces are; none where a token reaches over their end."""
        if submit.tokens or not submit.shared_pieces:
            return 0
        prefix = self._backend.tokenize(submit.pieces[: submit.shared_pieces], first=True)
        return len(prefix) if prompt[: len(prefix)] == prefix else 0
