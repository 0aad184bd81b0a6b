"""Frames between the processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.ipc.framing import MAX_FRAME_BYTES, FramingError, encode, from_engine_decoder, to_engine_decoder
from inferencecenter.ipc.messages import (
    AbortTurn,
    Configure,
    EngineLimits,
    Failed,
    KvRamLimit,
    LogLine,
    PrefillProgress,
    PromptSegment,
    QueuePosition,
    ReleaseSession,
    SampledLogprobs,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    TokenDelta,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)

SUBMIT = Submit(
    turn_id="t",
    session_id="s",
    client_id="c",
    priority=1,
    tokens=pack_tokens([1, 2]),
    pieces=(PromptSegment("<|im_end|>", special=True), PromptSegment("zwölf €")),
    params_json=b"{}",
)
TO_ENGINE: list[ToEngine] = [
    Configure(b"{}"),
    SUBMIT,
    AbortTurn("t"),
    ReleaseSession("s"),
    EngineLimits(active_slots=2, prefill_share=0.5, lowest_class=0, pause_ms=200),
    KvRamLimit(1 << 40),
    KvRamLimit(None),
]
STEP = StepOutput(
    events=(
        QueuePosition("t", 3),
        Started("t", pack_tokens([1]), 0),
        PrefillProgress("t", 1, 2),
        TokenDelta("t", pack_tokens([7]), "€", (SampledLogprobs(TokenLogprob("€", 7, -0.5), ()),)),
        Failed(turn_id="t", code="internal", message="No."),
    ),
    running=1,
    waiting=2,
    rss_bytes=3,
)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_packed_tokens_round_trip(tokens: list[int]) -> None:
    """Tokens are packed into four bytes each and come back unchanged."""
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed) == tokens


def test_packed_tokens_are_little_endian() -> None:
    """The bytes are the same on any machine that reads them."""
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


@given(st.lists(st.integers(1, 40), max_size=40))
def test_decoding_of_any_fragments(cuts: list[int]) -> None:
    """However the bytes are split, the messages come out complete and in order."""
    data = b"".join(map(encode, TO_ENGINE))
    decoder = to_engine_decoder()
    received: list[ToEngine] = []
    for cut in cuts:
        received += decoder.feed(data[:cut])
        data = data[cut:]
    received += decoder.feed(data)
    assert received == TO_ENGINE
    assert decoder.feed(encode(SUBMIT)) == [SUBMIT], "nothing is left over"


def test_step_events_keep_their_order() -> None:
    """The union of events is distinguished by tag."""
    decoder = from_engine_decoder()
    assert decoder.feed(encode(STEP) + encode(LogLine("info", "x", "engine"))) == [STEP, LogLine("info", "x", "engine")]


def test_partial_frame_is_pending() -> None:
    """A torn frame is complete with its last byte."""
    decoder = to_engine_decoder()
    assert decoder.feed(encode(SUBMIT)[:-1]) == []
    assert decoder.feed(encode(SUBMIT)[-1:]) == [SUBMIT]


def test_oversized_frame_is_refused_by_its_length() -> None:
    """The decoder does not wait for 4 GiB."""
    with pytest.raises(FramingError, match="4294967295 bytes exceeds"):
        to_engine_decoder().feed(b"\xff\xff\xff\xff")
    decoder = to_engine_decoder(max_frame_bytes=len(encode(SUBMIT)) - 5)
    with pytest.raises(FramingError, match="exceeds"):
        decoder.feed(encode(SUBMIT))


def test_oversized_message_is_not_sent() -> None:
    """The sender gets the error."""
    with pytest.raises(FramingError, match="a ReleaseSession of"):
        encode(ReleaseSession("x" * MAX_FRAME_BYTES))


@given(st.binary(min_size=1, max_size=60))
def test_random_bytes_are_refused_or_pending(garbage: bytes) -> None:
    """The decoder raises nothing but its own error."""
    decoder = to_engine_decoder()
    try:
        messages = decoder.feed(len(garbage).to_bytes(4, "little") + garbage)
    except FramingError:
        return
    assert all(isinstance(message, ToEngine) for message in messages)


def test_messages_of_the_wrong_direction_are_refused() -> None:
    """A frame of the wrong direction is no message."""
    with pytest.raises(FramingError, match="no message"):
        to_engine_decoder().feed(encode(STEP))
    with pytest.raises(FramingError, match="no message"):
        from_engine_decoder().feed(encode(SUBMIT))
