"""Assembly of answers with reasoning and calls: each part is sent once, across chunks and restarts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.ipc.messages import SampledLogprobs, TokenDelta, TokenLogprob
from inferencecenter.protocol.requests import Infer
from inferencecenter.sessions.output_parsing.assembler import (
    ResponseAssembler,
    assembler_for,
    decode_parts,
    encode_parts,
    joined,
    remaining_parts,
)
from inferencecenter.sessions.output_parsing.output_spec import OutputSpec, enforceable_schemas, output_spec
from inferencecenter.sessions.output_parsing.parts import ArgumentsDelta, Part, ReasoningDelta, TextDelta, ToolCallStart
from inferencecenter.sessions.prompt.template import ChatTemplate
from tests.sessions.conftest import make_model
from tests.sessions.tool_model import ANSWER, CALL, HERMES, WEATHER

CAPABILITIES = ChatTemplate(make_model(chat_template=HERMES)).capabilities
REQUEST = Infer.model_validate({"op": "infer", "session_id": "s", "prompt": "?", "tools": [WEATHER]})

texts = st.text("ab", max_size=3)
part = st.one_of(
    st.builds(TextDelta, texts),
    st.builds(ReasoningDelta, texts),
    st.builds(ArgumentsDelta, st.just(0), texts),
)


def speech() -> OutputSpec:
    """The output format of these tests."""
    return output_spec(REQUEST, schemas=enforceable_schemas(REQUEST), capabilities=CAPABILITIES, prompt="")


def delta(text: str, *, logprobs: int = 0) -> TokenDelta:
    """New text, with the logprobs of so many tokens."""
    entry = SampledLogprobs(TokenLogprob("x", 1, -1.0), ())
    return TokenDelta("t_1", b"", text, (entry,) * logprobs)


def whole(told: list[Part]) -> list[Part]:
    """Parts merged across chunks."""
    return joined(told)


@given(
    cuts=st.lists(st.integers(0, len(ANSWER)), max_size=6), lost_at=st.integers(0, len(ANSWER)), ends_at=st.integers(0)
)
def test_each_part_is_published_once_across_interruptions(cuts: list[int], lost_at: int, ends_at: int) -> None:
    """The parts sent before and after a restart are the answer, for every text and every split."""
    text = ANSWER[: ends_at % (len(ANSWER) + 1)]
    at_once = ResponseAssembler("t_1")
    at_once.set_parser(speech(), "")
    expected = [*at_once.feed(delta(text)).parts, *at_once.finish().parts]

    lost_at = min(lost_at, len(text))
    places = sorted({0, lost_at, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    told: list[Part] = []
    before = ResponseAssembler("t_1")
    before.set_parser(speech(), "")
    while pieces and sum(map(len, pieces)) > len(text) - lost_at:
        told += before.feed(delta(pieces.pop(0))).parts
    after = ResponseAssembler.restored("t_1", told)
    after.set_parser(speech(), text[:lost_at])
    for piece in pieces:
        told += after.feed(delta(piece)).parts
    told += after.finish().parts

    assert whole(told) == whole(expected)
    assert after.message() == at_once.message()


def test_truncated_tool_call_is_dropped() -> None:
    """The conversation keeps complete calls only, and a truncated one does not become text."""
    speaking = ResponseAssembler("t_1")
    speaking.set_parser(speech(), "")
    speaking.feed(delta(ANSWER[:-20]))
    speaking.finish()
    assert len(speaking.calls) == 2
    (call,) = speaking.message().tool_calls or ()
    assert (call.name, call.arguments, call.call_id) == ("weather", '{"city": "Oslo"}', "call_1_0")
    assert speaking.content == "Let me see."
    assert speaking.reasoning == "North or south?"


def tokens(text: str, n_tokens: int) -> TokenDelta:
    """New text of so many tokens."""
    return TokenDelta("t_1", b"\0\0\0\0" * n_tokens, text)


@pytest.mark.parametrize(
    ("pieces", "n_tokens"),
    [
        ((("<think>", 1), ("Hm", 1), ("</think>", 1), ("\n\n", 1), ("Yes", 5)), 3),
        ((("<think>Hm", 2), ("</", 1), ("think", 1), (">\n\n", 1), ("Yes", 5)), 5),
        ((("<think>", 1), ("Hm", 1), ("m</think>Yes yes ", 4), ("yes", 1)), 5),
        ((("<think>", 1), ("Hm", 3)), 4),
        ((("\n", 1), ("Yes", 5)), 0),
        ((("<think>", 1), ("\n\n", 1), ("</think>", 1), ("Yes", 1)), 0),
    ],
)
def test_reasoning_tokens_are_counted_up_to_the_closing_tag(pieces: tuple[tuple[str, int], ...], n_tokens: int) -> None:
    """The token that ends the tag is the last; tokens that arrive together count by their share of the text."""
    speaking = ResponseAssembler("t_1")
    speaking.set_parser(speech(), "")
    for text, count in pieces:
        speaking.feed(tokens(text, count))
    speaking.finish()
    assert speaking.reasoning_tokens == n_tokens


def test_reasoning_tokens_are_counted_across_a_restart() -> None:
    """Tokens before a restart all count while the reasoning is open, and by their share if it has ended."""
    for said, n_tokens, more in (("<think>Hm", 3, 2), ("<think>Hm</think>Yes, yes, yes.", 6, 0)):
        speaking = ResponseAssembler.restored("t_1", [ReasoningDelta("Hm")])
        speaking.set_parser(speech(), said, n_tokens=n_tokens)
        speaking.feed(tokens("m</think>", 2))
        assert speaking.reasoning_tokens == (n_tokens + more if more else 4)


def test_logprobs_wait_for_a_part() -> None:
    """Logprobs of text that is held back go with the next part, or with an empty text at the end."""
    speaking = ResponseAssembler("t_1")
    speaking.set_parser(speech(), "")
    assert speaking.feed(delta("<tool", logprobs=2)).parts == ()
    utterance = speaking.feed(delta("box> is", logprobs=1))
    assert len(utterance.logprobs) == 3
    assert whole(list(utterance.parts)) == [TextDelta("<toolbox> is")]
    silent = ResponseAssembler("t_1")
    silent.set_parser(speech(), "")
    silent.feed(delta(f"{CALL}"))
    assert silent.feed(delta("\n", logprobs=1)).parts == ()
    rest = silent.finish()
    assert (list(rest.parts), len(rest.logprobs)) == ([TextDelta("")], 1)


def test_resumed_answer_keeps_its_format() -> None:
    """A started plain answer stays plain; one without output is parsed in the current format."""
    plain, rich = OutputSpec(), speech()
    assert assembler_for(plain, None, turn_id="t", text="", n_tokens=0) is None
    fresh = assembler_for(rich, None, turn_id="t", text="", n_tokens=0)
    assert fresh is not None
    assert fresh.has_parser
    assert assembler_for(rich, None, turn_id="t", text="old", n_tokens=1) is None
    assert assembler_for(plain, fresh, turn_id="t", text="", n_tokens=0) is None
    assert assembler_for(rich, fresh, turn_id="t", text="x", n_tokens=1) is fresh
    restored = ResponseAssembler.restored("t", [TextDelta("x")])
    assert restored.finish().parts == ()
    assert assembler_for(rich, restored, turn_id="t", text="xy", n_tokens=1) is restored
    assert whole(list(restored.finish().parts)) == [TextDelta("y")]


@given(read=st.lists(part, max_size=6), n=st.integers(0, 6), tail=st.integers(0, 3))
def test_remaining_parts_follow_the_published_ones(read: list[Part], n: int, tail: int) -> None:
    """Sent and remaining parts together are the answer, also where a part was sent partially."""
    told = read[:n]
    if told and not isinstance(told[-1], ToolCallStart):
        last = told[-1]
        short = last.text[:tail]
        told = [
            *told[:-1],
            ArgumentsDelta(last.index, short) if isinstance(last, ArgumentsDelta) else type(last)(short),
        ]
    assert whole([*told, *remaining_parts(told, read)]) == whole(read)


def test_published_parts_stand_after_a_format_change() -> None:
    """Nothing is sent twice or revised."""
    assert remaining_parts([TextDelta("ab")], [TextDelta("a")]) == ()
    assert remaining_parts([TextDelta("a"), ReasoningDelta("b")], [TextDelta("ac")]) == ()
    assert remaining_parts([ToolCallStart(0, "x")], [ToolCallStart(0, "y"), ArgumentsDelta(0, "{}")]) == ()


@given(st.lists(st.lists(st.one_of(part, st.builds(TextDelta, st.text(max_size=4))), max_size=3), max_size=3))
def test_parts_survive_storage_in_columns(said: list[list[Part]]) -> None:
    """Any parts survive the round trip."""
    named: list[list[Part]] = [[ToolCallStart(0, "tool")], *said]
    assert decode_parts(map(encode_parts, named)) == tuple(each for column in named for each in column)


@pytest.mark.parametrize(
    "column", ["{}", "[1]", '[["said"]]', '[["said", 3]]', '[["argued", 0, "x"]]', '[["called", 1, "x"]]', "["]
)
def test_invalid_columns_are_refused(column: str) -> None:
    """Malformed columns raise ``ValueError``."""
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        decode_parts([column])
