"""Where a traced turn spends its time in the engine."""

from __future__ import annotations

from typing import Final

from inferencecenter.ipc.messages import Stage

MAX_STAGES: Final = 256
"""A turn that was preempted so often that it has more of them tells the first ones and its last."""


class Timeline:
    """One turn's stages from its submission to its end: it waits, is read, generates, and may wait again.

    Seconds are of the monotonic clock. Each stage is told once.

    Args:
        submitted_s: When the turn came, and began to wait.
    """

    def __init__(self, submitted_s: float) -> None:
        self._stages: list[Stage] = []
        self._name: str | None = "queue"
        self._since_s = submitted_s
        self._n_tokens = 0

    def enter(self, name: str, *, at_s: float, n_tokens: int) -> None:
        """End the stage that it is in and begin another, with ``n_tokens`` of prompt and answer done."""
        # A prompt was read as a whole if the answer follows; of any other it is not known how far it was read.
        known = self._name == "decode" or (self._name == "prefill" and name == "decode")
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if known else 0)
        self._name, self._since_s, self._n_tokens = name, at_s, n_tokens

    def moved(self, stage: Stage) -> None:
        """Take note that the turn's KV was moved; what is put into a slot for it ends its waiting."""
        if self._name == "queue" and stage.name != "park":
            self._leave(at_s=stage.began_s)
        self._add(stage)

    def end(self, *, at_s: float, n_tokens: int) -> None:
        """End the last stage, with ``n_tokens`` of prompt and answer done."""
        if len(self._stages) == MAX_STAGES:
            del self._stages[-1]
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if self._name == "decode" else 0)

    def tell(self) -> tuple[Stage, ...]:
        """Return the stages that have ended and not been told."""
        stages, self._stages = tuple(self._stages), []
        return stages

    def _leave(self, *, at_s: float, done: int = 0) -> None:
        if self._name is not None:
            self._add(Stage(self._name, self._since_s, at_s, done))
            self._name = None

    def _add(self, stage: Stage) -> None:
        if len(self._stages) < MAX_STAGES:
            self._stages.append(stage)
