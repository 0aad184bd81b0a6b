"""Reading answers that are text and nothing else."""

from __future__ import annotations

from inferencecenter.sessions.formats.parts import Part, Said


class PlainReader:
    """Whatever comes is said."""

    behind_thoughts = 0

    def feed(self, text: str) -> tuple[Part, ...]:
        """Return ``text`` as what is said."""
        return (Said(text),) if text else ()

    def finish(self) -> tuple[Part, ...]:
        """Return nothing: nothing is held back."""
        return ()
