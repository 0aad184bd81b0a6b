"""A daemon with fault points, also in its engines: ``python -m tests.faults.daemon serve``.

Its points are ``before-<Record>`` and ``after-<Record>`` a commit of sessions with such a record, as
``before-TurnEnded``. Events are published after they are committed, so these are all the moments that make a difference
to a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.cli import main
from inferencecenter.ipc import engine_child
from inferencecenter.sessions.store.recorder import Recorder
from tests.faults.fault_injection import FaultPoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.sessions.store.recorder import Entry


def install_fault_points(points: FaultPoints) -> None:
    """Add fault points around every commit."""
    commit = Recorder.commit

    def commit_with_faults(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        names = [type(entry).__name__ for entry in entries]
        for name in names:
            points.reach(f"before-{name}")
        commit(self, entries, durable=durable)
        for name in names:
            points.reach(f"after-{name}")

    vars(engine_child)["MODULE"] = "tests.faults.engine"
    setattr(Recorder, "commit", commit_with_faults)  # noqa: B010 - mypy takes the plain assignment for a mistake


if __name__ == "__main__":
    install_fault_points(FaultPoints.from_environment())
    main()
