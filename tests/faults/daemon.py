"""A daemon that runs into traps, and whose engines do: ``python -m tests.faults.daemon serve``.

Its places are ``before-<Record>`` and ``after-<Record>`` a commit of sessions with such a record, as
``before-TurnEnded``.
What a client is told follows what is committed, so that these are all the moments that make a difference to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.cli import main
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.supervisor import process
from tests.faults.traps import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.sessions.store.recorder import Entry


def lay_traps(walk: Walk) -> None:
    """Put traps around every commit."""
    commit = Recorder.commit

    def trapped(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        names = [type(entry).__name__ for entry in entries]
        for name in names:
            walk.past(f"before-{name}")
        commit(self, entries, durable=durable)
        for name in names:
            walk.past(f"after-{name}")

    vars(process)["MODULE"] = "tests.faults.engine"
    setattr(Recorder, "commit", trapped)  # noqa: B010 - mypy takes the plain assignment for a mistake


if __name__ == "__main__":
    lay_traps(Walk.from_environment())
    main()
