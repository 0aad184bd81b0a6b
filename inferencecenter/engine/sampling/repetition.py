"""Noticing that a model is caught in a loop."""

from __future__ import annotations

from collections import deque

_LONGEST = 64
# Rulers, blanks and padding repeat one token in good text; longer units hardly do.
_SINGLE_TOKEN_FACTOR = 4


class RepetitionDetector:
    """Tells when the same run of 1 to 64 tokens came several times in a row.

    For each distance d it counts how many tokens in a row equalled the token d places before: a run of d tokens has
    come r times when that count is d * (r - 1). One token alone must come four times as often.

    Args:
        repeats: How often a run must come in a row, at least 2.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        # Nothing equals -1, so a distance that reaches before the first token counts nothing.
        self._recent = deque([-1] * _LONGEST, maxlen=_LONGEST)
        self._matched = [0] * _LONGEST

    def push(self, token: int) -> bool:
        """Add a token and tell whether the tokens now end in a loop; takes 64 comparisons."""
        self._matched = [
            count + 1 if token == earlier else 0 for count, earlier in zip(self._matched, self._recent, strict=True)
        ]
        self._recent.appendleft(token)
        same = self._matched[0] + 1
        if same >= self._repeats * _SINGLE_TOKEN_FACTOR:
            return True
        # A stretch of one token is also a repeated run of two, three, …; only the rule above judges it.
        return any(
            count >= length * (self._repeats - 1) and same < length * self._repeats
            for length, count in enumerate(self._matched[1:], start=2)
        )
