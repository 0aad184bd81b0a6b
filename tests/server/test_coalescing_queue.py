"""Tests of the queue to a slow reader: nothing is lost or reordered, whatever is coalesced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.protocol import events
from inferencecenter.protocol.events import MAX_JOINED_BYTES, text_of
from inferencecenter.protocol.values import TokenLogprobs
from inferencecenter.server.coalescing_queue import EventQueue
from inferencecenter.telemetry.metrics import DaemonMetrics

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event

LOGPROBS = (TokenLogprobs(token="x", token_id=1, logprob=-0.5, top=()),)
TURN: Any = {"session_id": "s", "turn_id": "t"}


def token(text: str, *, seq: int = 1, logprobs: bool = False) -> events.Token:
    """Return text of an answer."""
    return events.Token(**TURN, seq=seq, content=text, logprobs=LOGPROBS if logprobs else None)


def thought(text: str) -> events.Reasoning:
    """Return text of the reasoning."""
    return events.Reasoning(**TURN, seq=1, content=text)


def argument(text: str, index: int, name: str | None) -> events.ToolCall:
    """Return a part of a tool call."""
    return events.ToolCall(**TURN, seq=1, index=index, call_id=f"c{index}", name=name, arguments=text)


TEXT = st.text(max_size=3)
EVENTS = st.one_of(
    st.builds(token, TEXT, logprobs=st.booleans()),
    st.builds(thought, TEXT),
    st.builds(argument, TEXT, st.integers(0, 1), st.sampled_from([None, None, "f"])),
    st.just(events.Progress(**TURN, seq=1, done=1, total=2)),
)
STEPS = st.lists(st.one_of(st.tuples(st.integers(0, 2), EVENTS), st.none()), max_size=80)


def spelled(given_events: list[Any]) -> list[Any]:
    """Return the events of one key with neighboring text joined, as lists of kind, text, number and probabilities."""
    joined: list[Any] = []
    for event in given_events:
        if isinstance(event, events.Progress):
            joined.append(["progress", "", event.seq, None])
            continue
        kind = (event.op, getattr(event, "index", None))
        starts = getattr(event, "name", None) is not None or event.logprobs is not None
        if joined and joined[-1][0] == kind and joined[-1][3] is None and not starts:
            joined[-1][1:3] = [joined[-1][1] + text_of(event), event.seq]
        else:
            joined.append([kind, text_of(event), event.seq, event.logprobs])
    return joined


@given(STEPS, st.integers(0, 9))
def test_each_keys_text_is_whole_and_in_order(steps: list[tuple[int, Any] | None], n_separate: int) -> None:
    """This holds for any coalescing and any times of reading; the byte count returns to zero."""
    metrics = DaemonMetrics()
    queue: EventQueue[int, Any] = EventQueue(
        limit_bytes=2**20, overflowed=lambda: None, metrics=metrics, n_separate=n_separate
    )
    sent: dict[int, list[Event]] = {}
    taken: dict[int, list[Event]] = {}
    for seq, step in enumerate(steps, start=1):
        if step is None:
            if queue:
                key, item = queue.pop()
                taken.setdefault(key, []).append(item)
            continue
        event = step[1].model_copy(update={"seq": seq})
        sent.setdefault(step[0], []).append(event)
        queue.put_event(step[0], event)
    for key, item in queue.pop_all():
        taken.setdefault(key, []).append(item)
    assert {key: spelled(each) for key, each in taken.items()} == {key: spelled(each) for key, each in sent.items()}
    assert (queue.n_bytes, metrics.outbox_bytes.value, metrics.outbox_overflows.value) == (0, 0, 0)


def test_coalesced_events_stay_small() -> None:
    """Long text becomes several events, none beyond what clients read by default."""
    queue: EventQueue[int, Any] = EventQueue(limit_bytes=2**20, overflowed=lambda: None, metrics=DaemonMetrics())
    for seq in range(1, 301):
        queue.put_event(0, token(f"{seq:1000}", seq=seq))
    items: list[Any] = [item for _, item in queue.pop_all()]
    assert len(items) == 5
    assert max(len(item.content) for item in items) <= MAX_JOINED_BYTES
    assert "".join(item.content for item in items) == "".join(f"{seq:1000}" for seq in range(1, 301))
    assert items[-1].seq == 300
