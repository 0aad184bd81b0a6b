"""What those who generate draft in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.engine.speculation import Drafter, allot, most_drafts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from inferencecenter.engine.scheduler.request import Request


class Drafting:
    """Drafts for the turns of a step, as far as it has room.

    Args:
        draft_tokens: Most drafts of one turn; 0 for none at all.
        n_ctx: Tokens that fit one slot.
        pass_tokens: Most tokens that the backend decodes without cutting them again.
    """

    def __init__(self, *, draft_tokens: int, n_ctx: int, pass_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._n_ctx = n_ctx
        self._pass_tokens = pass_tokens

    def drafts(self, decoding: Collection[Request]) -> Mapping[str, list[int]]:
        """Return what is drafted for turns that decode one token each, by id."""
        if not self._draft_tokens:
            return {}
        looked = [(self._look(request), request) for request in decoding]
        if not any(chance for chance, _ in looked):
            return {}
        looked.sort(key=lambda each: -1 if each[1].slot is None else each[1].slot)
        lengths = allot(
            [chance for chance, _ in looked],
            each=self._draft_tokens,
            together=min(most_drafts(self._draft_tokens), self._pass_tokens - len(looked)),
        )
        drafts: dict[str, list[int]] = {}
        for length, (_, request) in zip(lengths, looked, strict=True):
            # The last token of a full context is sampled, not decoded.
            n_tokens = min(length, self._n_ctx - 1 - len(request.tokens))
            if n_tokens > 0 and request.drafter is not None:
                drafts[request.turn_id] = request.drafter.draft(request.tokens, n_tokens)
        return drafts

    def _look(self, request: Request) -> float:
        if request.drafter is None:
            request.drafter = Drafter(self._n_ctx)
        return request.drafter.look(request.tokens)
