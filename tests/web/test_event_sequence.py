"""How the page follows a session: event numbers, reconnects, ownership of text."""

from __future__ import annotations

import itertools
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.protocol.close import CLOSE_CODES
from tests.web import node

ADMIT: Final = """
  return input.map((story) => {
    const position = new Position("e", story.seq);
    if (story.resumed !== undefined) position.resume({ resumed: true, epoch: "e", seq: story.resumed });
    return story.events.map(([op, seq]) => position.admit({ op, seq }));
  });
"""


def admit(*stories: dict[str, Any]) -> list[list[str]]:
    """Return the result of each sequence of events."""
    found: list[list[str]] = node.run('import { Position } from "JS/wire/position.js";', ADMIT, given=list(stories))
    return found


def test_events_count_once_and_in_order() -> None:
    """A repeated event is dropped, one after a gap refused; a text event may cover several numbers."""
    events = [["queued", 1], ["token", 2], ["token", 9], ["token", 9], ["end", 10], ["end", 10], ["queued", 12]]
    assert admit({"seq": 0, "events": events}) == [["next", "next", "next", "repeated", "next", "repeated", "gap"]]


def test_gap_after_a_resume_is_accepted() -> None:
    """Missing numbers were not for this page."""
    assert admit({"seq": 3, "resumed": 9, "events": [["end", 8], ["queued", 10]]}) == [["next", "gap"]]


def test_backoff_grows_to_half_a_minute() -> None:
    """The daemon's retry time is a minimum."""
    body = "return input.map(([attempt, atLeast, chance]) => waitMs(attempt, atLeast, chance));"
    given_ = [[attempt, 0, chance] for attempt in (*range(12), 1000) for chance in (0, 0.999)] + [[0, 60_000, 0.5]]
    *waits, asked_for = node.run('import { waitMs } from "JS/wire/link.js";', body, given=given_)
    longest = waits[1::2]
    assert all(100 <= wait <= 30_000 for wait in waits)
    assert all(later >= sooner for sooner, later in itertools.pairwise(longest))
    assert longest[-1] > 29_000
    assert asked_for >= 60_000


def test_close_codes() -> None:
    """Some are final; every other one is retried, as is none."""
    body = 'return input.map((code) => verdictOf(code, "").final);'
    codes = [row.code for row in CLOSE_CODES]
    found = node.run('import { verdictOf } from "JS/wire/link.js";', body, given=[*codes, 1006, 4999])
    final = {code for code, is_final in zip(codes, found, strict=False) if is_final}
    assert final == {row.code for row in CLOSE_CODES if row.client_should == "stop" and row.code != 1000}
    assert found[-2:] == [False, False]


MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant", "tool"]), st.text()
)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.lists(MESSAGE, max_size=4), max_size=5), st.lists(MESSAGE)), min_size=8
    )
)
def test_every_message_is_shown_once(
    stories: list[tuple[bool, list[list[dict[str, Any]]], list[dict[str, Any]]]],
) -> None:
    """Turns and other messages together are the transcript, in order."""
    given_: list[dict[str, Any]] = []
    for has_system, parts, rest in stories:
        transcript = [{"role": "system", "content": "s"}] if has_system else []
        turns = []
        for index, part in enumerate(parts):
            transcript = transcript + part
            turns.append({"turn_id": f"t{index}", "finish_reason": "stop", "messages": len(transcript), "usage": None})
        given_.append({"transcript": transcript + rest, "turns": turns, "system": has_system})
    body = """
      return input.map(({ transcript, turns }) => {
        const { turns: divided, rest } = divide(transcript, turns);
        const all = divided.flatMap(({ asked, answer }) => (answer ? [...asked, answer] : asked));
        return [all.map((each) => each.content), rest.map((each) => each.content)];
      });
    """
    found = node.run('import { divide } from "JS/wire/transcript.js";', body, given=given_)
    for story, (in_turns, left) in zip(given_, found, strict=True):
        assert in_turns + left == [each["content"] for each in story["transcript"][story["system"] :]]


def test_titles_are_the_first_words() -> None:
    """A title is one line of at most 60 characters, cut between words where possible."""
    body = "return input.map(titleOf);"
    texts = ["  Hello\n world ", "", "x" * 80, "word " * 40]
    found = node.run('import { titleOf } from "JS/wire/transcript.js";', body, given=texts)
    assert found == ["Hello world", "New chat", "x" * 60 + "…", ("word " * 12).rstrip()[:59] + "…"]
