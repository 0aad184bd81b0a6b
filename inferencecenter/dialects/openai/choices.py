"""Several answers to one question: each is a turn in a session of its own."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from inferencecenter.dialects.answer import Turns
from inferencecenter.dialects.conversation import closed, forked, place_for
from inferencecenter.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.dialects.caller import Visit
    from inferencecenter.dialects.conversation import Conversation, Place
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.server.context import Context


@contextmanager
def answered(
    context: Context,
    visit: Visit,
    conversations: Sequence[Conversation],
    *,
    n: int,
    infer: Callable[[Place, int], Infer],
) -> Iterator[Turns]:
    """Have each conversation answered ``n`` times; turn ``i * n + j`` is the ``j``-th answer to the ``i``-th.

    The session of a conversation's first answer stays, for what its engine remembers: what comes next may begin alike.
    Those of the others are closed at the end.

    Args:
        context: The rest of the daemon.
        visit: The request.
        conversations: What is to be answered.
        n: How often.
        infer: Makes the request of an answer, of the place and the answer's number from 0.

    Raises:
        InferenceCenterError: See ``place_for`` and ``Turns.begin``.
    """
    sessions, client = context.sessions, visit.caller.client
    spare: list[str] = []
    try:
        with Turns(context, visit) as turns:
            for conversation in conversations:
                first = place_for(sessions, client, conversation)
                places = [first]
                for _ in range(n - 1):
                    spare.append(forked(sessions, client, first.session_id))
                    places.append(replace(first, session_id=spare[-1]))
                for choice, place in enumerate(places):
                    turns.begin(infer(place, choice))
            yield turns
    finally:
        for session_id in spare:
            with suppress(InferenceCenterError):  # it was purged meanwhile
                closed(sessions, client, session_id)
