"""The output of a turn, token by token."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Sampled
from inferencecenter.engine.output_processor import OutputProcessor, failed, never_ran
from inferencecenter.ipc.messages import (
    ContextFull,
    Failed,
    Finished,
    SampledLogprobs,
    Started,
    Submit,
    TokenDelta,
    TokenLogprob,
    TurnEvent,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.protocol.params import Params, encode
from tests.engine.harness import output_of_turn, submit

END = 0


class Words:
    """A vocabulary of given byte strings; token 0 is the end token."""

    def __init__(self, *words: bytes) -> None:
        self._words = (b"<end>", *words)

    def token_bytes(self, token: int) -> bytes:
        """Return the word."""
        return self._words[token]

    def token_text(self, token: int) -> str:
        """Return the word as text."""
        return self._words[token].decode()

    def is_end(self, token: int) -> bool:
        """Return whether it is the end token."""
        return token == END


def turn_with(
    params: dict[str, object], *, answer: tuple[int, ...] = (), shown_chars: int = 0, may_shift: bool = False
) -> Submit:
    """Return a turn, perhaps with an earlier ``answer``."""
    encoded = encode(Params.model_validate(params))
    return submit("t", "", params=encoded, answer=pack_tokens(answer), shown_chars=shown_chars, may_shift=may_shift)


def output_of(*words: bytes, n_ctx: int = 100, **params: object) -> OutputProcessor:
    """Return the output of a turn with a prompt of ten tokens, submitted at second 0 and started at 1."""
    output = output_of_turn(turn_with(params), Words(*words), n_ctx=n_ctx)
    output.start(range(10), cached_tokens=4, now=1.0)
    return output


def push_all(output: OutputProcessor, *tokens: int) -> list[TurnEvent]:
    """Push tokens, one each half second from second 2 on."""
    return [event for n, token in enumerate(tokens) for event in output.push(Sampled(token), now=2 + n / 2)]


def shown(events: list[TurnEvent]) -> str:
    """Return the text of all deltas."""
    return "".join(event.text for event in events if isinstance(event, TokenDelta))


def finished(events: list[TurnEvent]) -> Finished:
    """Return the one terminal event, which is the last."""
    *others, last = events
    assert isinstance(last, Finished)
    assert not any(isinstance(event, Finished) for event in others)
    return last


def test_start_reports_the_prompt() -> None:
    """The front gets the number of prompt tokens and of cached ones."""
    started = output_of_turn(turn_with({}), Words(), prompt_tokens=2, n_ctx=9).start([5, 6], cached_tokens=1, now=0.5)
    assert (unpack_tokens(started.tokens), started.cached_tokens) == ([5, 6], 1)


def test_tokens_become_text_at_once() -> None:
    """Each token is a delta with its id and its text."""
    output = output_of(b"Hello", b" world")
    assert push_all(output, 1, 2) == [
        TokenDelta("t", pack_tokens([1]), "Hello"),
        TokenDelta("t", pack_tokens([2]), " world"),
    ]


def test_end_token_ends_the_answer_and_is_kept() -> None:
    """It belongs to the history; it emits no text but is reported."""
    events = push_all(output_of(b"Hello"), 1, END)
    end = finished(events)
    assert shown(events) == "Hello"
    assert (end.reason, end.stop, end.kept_tokens, end.kept_chars, end.end_text) == ("stop", None, 2, 5, "<end>")


def test_times_and_counts() -> None:
    """Times count from the submission in milliseconds, speed from the first token on."""
    end = finished(push_all(output_of(b"a"), 1, 1, 1, END))
    assert (end.queue_ms, end.ttft_ms, end.total_ms) == (1000.0, 2000.0, 3500.0)
    assert (end.prompt_tokens, end.cached_tokens, end.generated_tokens) == (10, 4, 4)
    assert end.tokens_per_s == 2.0


def test_character_of_several_tokens_is_emitted_whole() -> None:
    """No delta has part of a character."""
    events = push_all(output_of(b"\xe2\x82", b"\xac!"), 1, 2)
    assert [event.text for event in events if isinstance(event, TokenDelta)] == ["", "€!"]


def test_stop_string_is_never_emitted() -> None:
    """A possible stop string is held back; tokens that were emitted whole are kept."""
    output = output_of(b"Hi", b" there.\n", b"Us", b"er", stop=["\nUser"])
    events = push_all(output, 1, 2, 3, 4)
    end = finished(events)
    assert [event.text for event in events if isinstance(event, TokenDelta)] == ["Hi", " there.", "", ""]
    # The second token's line feed belongs to the stop string, so that token is not kept.
    assert (end.reason, end.stop, end.kept_tokens, end.kept_chars, end.end_text) == ("stop", "\nUser", 1, 2, "")


def test_stop_pattern_ends_the_answer() -> None:
    """The pattern's source is reported."""
    events = push_all(output_of(b"a", b"1", b"2", stop_regex=["[0-9]{2}"]), 1, 2, 3)
    end = finished(events)
    assert shown(events) == "a"
    assert (end.reason, end.stop, end.kept_tokens, end.kept_chars) == ("stop", "[0-9]{2}", 1, 1)


def test_slow_stop_pattern_ends_its_turn() -> None:
    """A pattern that is slow with each token ends its turn and is named; a turn without patterns uses no budget."""
    works = itertools.count(0.0, 0.06)
    for patterns, fails in ((["(?<=a.*)z"], True), ([], False)):
        output = output_of_turn(turn_with({"stop_regex": patterns}), Words(b"a"), clock=lambda: next(works))
        output.start(range(10), cached_tokens=4, now=1.0)
        push_all(output, 1)
        with pytest.raises(InferenceCenterError, match="a\\.\\*") if fails else nullcontext():
            push_all(output, 1)


def test_held_back_text_is_released_by_an_end_token() -> None:
    """An incomplete stop string is ordinary text."""
    events = push_all(output_of(b"a\n", stop=["\nUser"]), 1, END)
    end = finished(events)
    assert shown(events) == "a\n"
    assert (end.stop, end.kept_tokens, end.kept_chars, end.end_text) == (None, 2, 2, "<end>")


@pytest.mark.parametrize("reason", ["aborted", "time"])
def test_abort_releases_held_back_text(reason: str) -> None:
    """Its tokens are kept."""
    output = output_of(b"a\n", stop=["\nUser"])
    push_all(output, 1)
    delta, end = output.end(reason, now=3.0)
    assert delta == TokenDelta("t", b"", "\n")
    assert isinstance(end, Finished)
    assert (end.reason, end.kept_tokens, end.kept_chars, end.end_text) == (reason, 1, 2, "")


def test_ending_without_held_text_is_one_event() -> None:
    """There is no empty delta, and a turn without output has zero counts."""
    (end,) = output_of().end("aborted", now=3.0)
    assert isinstance(end, Finished)
    assert (end.kept_tokens, end.generated_tokens, end.tokens_per_s, end.ttft_ms) == (0, 0, 0.0, 3000.0)


def test_max_tokens_ends_with_the_token_that_reaches_it() -> None:
    """The last token is emitted and kept."""
    events = push_all(output_of(b"a\n", stop=["\nUser"], max_tokens=2), 1, 1)
    end = finished(events)
    assert shown(events) == "a\na\n"
    assert (end.reason, end.kept_tokens, end.kept_chars) == ("length", 2, 4)


def test_full_context_ends_the_answer() -> None:
    """Prompt and answer together fill the context, no more."""
    end = finished(push_all(output_of(b"a", n_ctx=12), 1, 1))
    assert (end.reason, end.generated_tokens, end.kept_tokens) == ("context_full", 2, 2)


def test_repetition_loop_ends_the_answer() -> None:
    """Two alternating tokens that come three times end the answer."""
    end = finished(push_all(output_of(b"a", b"b", stop_on_repetition=3), 1, 2, 1, 2, 1, 2))
    assert (end.reason, end.generated_tokens, end.kept_tokens) == ("repetition", 6, 6)


def test_time_limit_counts_from_the_submission() -> None:
    """A turn is overdue from its limit on, and a later token is its last."""
    output = output_of(b"a", max_time_ms=2400)
    assert output.deadlines_s == (math.inf, 2.4)
    assert (output.timeout_reason(2.3), output.timeout_reason(2.4)) == (None, "time")
    end = finished(push_all(output, 1, 1))
    assert (end.reason, end.generated_tokens, end.kept_tokens) == ("time", 2, 2)


def test_without_a_limit_no_turn_is_overdue() -> None:
    """It has no deadlines."""
    assert output_of().deadlines_s == (math.inf, math.inf)
    assert output_of().timeout_reason(1e9) is None


def test_end_token_has_priority_over_limits() -> None:
    """An answer that ends with its last allowed token ended by itself."""
    assert finished(push_all(output_of(b"a", max_tokens=2), 1, END)).reason == "stop"


def test_incomplete_character_is_dropped_with_its_token() -> None:
    """The history has no gaps: after a dropped token, the end token is dropped too."""
    events = push_all(output_of(b"a", b"\xe2\x82"), 1, 2, END)
    end = finished(events)
    assert shown(events) == "a"
    assert (end.generated_tokens, end.kept_tokens, end.kept_chars, end.end_text) == (3, 1, 1, "")


def test_logprobs_are_sent_with_their_token() -> None:
    """They wait if its text is held back."""
    logprobs = SampledLogprobs(TokenLogprob("\n", 1, -0.1), ())
    (delta,) = output_of(b"\n", stop=["\nUser"], n_probs=1).push(Sampled(1, logprobs), now=2.0)
    assert delta == TokenDelta("t", pack_tokens([1]), "", (logprobs,))


def test_turn_ends_once() -> None:
    """A second terminal event raises instead of being sent."""
    output = output_of(b"a", max_tokens=1)
    assert not output.ended
    push_all(output, 1)
    assert output.ended
    with pytest.raises(ValueError, match="ended already"):
        output.end("aborted", now=9.0)
    with pytest.raises(ValueError, match="ended already"):
        output.fail(InferenceCenterError(ErrorCode.INTERNAL), now=0.0)


def test_failure_has_code_message_hint_and_field() -> None:
    """All of them reach the front."""
    error = InferenceCenterError(ErrorCode.INVALID_REQUEST, "No.", hint="Try.", field="params.seed")
    expected = Failed(turn_id="t", code="invalid_request", message="No.", hint="Try.", field="params.seed")
    assert output_of().fail(error, now=0.0) == expected == failed("t", error)


def test_turn_that_never_ran_has_only_queue_time() -> None:
    """It has times and no tokens."""
    end = never_ran("t", "aborted", waited_s=0.5)
    assert (end.reason, end.queue_ms, end.total_ms, end.generated_tokens) == ("aborted", 500.0, 500.0, 0)


def test_queue_timeout_ends_with_the_first_slot() -> None:
    """A resumed turn already had a slot, and its total time limit still counts."""
    turn = turn_with({"max_time_ms": 9000})
    output = output_of_turn(turn, Words(), prompt_tokens=1, n_ctx=9, submitted_s=1.0, queue_timeout_s=2.0)
    assert output.deadlines_s == (3.0, 10.0)
    assert [output.timeout_reason(now) for now in (2.9, 3.0, 10.0)] == [None, "queue_timeout", "time"]
    output.start([1], cached_tokens=0, now=2.0)
    assert [output.timeout_reason(now) for now in (3.0, 10.0)] == [None, "time"]
    turn = turn_with({"max_time_ms": 9000}, answer=(END,))
    goes_on = output_of_turn(turn, Words(), prompt_tokens=1, n_ctx=9, submitted_s=1.0, queue_timeout_s=2.0)
    assert goes_on.deadlines_s == (math.inf, 10.0)


def test_preemptions_are_counted() -> None:
    """The end has the number of preemptions."""
    output = output_of(b"a")
    output.preempt(now=0.0)
    output.preempt(now=0.0)
    assert finished(push_all(output, END)).preempted == 2


def shifting(
    *words: bytes, answer: tuple[int, ...] = (), shown_chars: int = 0, n_ctx: int = 100, **params: object
) -> OutputProcessor:
    """Return the output of a turn that may shift, with a prompt of ten tokens and an earlier ``answer``."""
    turn = turn_with(params, answer=answer, shown_chars=shown_chars, may_shift=True)
    return output_of_turn(turn, Words(*words), n_ctx=n_ctx)


def test_full_context_overflows_if_shifting_is_allowed() -> None:
    """The overflow carries the held-back text and the end it would have been, and the turn is over here."""
    output = shifting(b"a", b"\n", n_ctx=12, stop=["\nUser"])
    delta, overflowed = push_all(output, 1, 2)[1:]
    assert delta == TokenDelta("t", pack_tokens([2]), "")
    assert isinstance(overflowed, ContextFull)
    assert (overflowed.n_tokens, overflowed.text) == (12, "\n")
    assert overflowed.end is not None
    assert (overflowed.end.reason, overflowed.end.kept_tokens, overflowed.end.kept_chars) == ("context_full", 2, 2)
    assert output.ended


def test_other_limits_end_a_turn_that_may_shift() -> None:
    """A turn that ends with the last token that fits has ended."""
    end = finished(push_all(shifting(b"a", n_ctx=12, max_tokens=2), 1, 1))
    assert end.reason == "length"
    assert finished(push_all(shifting(b"a", n_ctx=12), 1, END)).reason == "stop"


def test_oversized_prompt_overflows_without_an_end() -> None:
    """It never started."""
    output = shifting(b"a")
    assert output.overflow(now=1.0) == ContextFull(turn_id="t", n_tokens=10)
    assert output.ended


def test_resumed_answer_that_no_longer_fits_overflows_with_its_end() -> None:
    """The end has the text that was held back, and the counts of the whole answer."""
    overflowed = shifting(b"a", b"\n", answer=(1, 2), shown_chars=1, stop=["\nUser"]).overflow(now=1.0)
    assert (overflowed.n_tokens, overflowed.text) == (12, "\n")
    assert overflowed.end is not None
    assert (overflowed.end.generated_tokens, overflowed.end.kept_chars) == (2, 2)


def test_resumed_turn_counts_its_whole_answer() -> None:
    """Limits and counts cover the whole answer; its prompt is reported without it, and so is its speed."""
    output = shifting(b"a", answer=(1, 1), shown_chars=2, max_tokens=5)
    started = output.start(range(10), cached_tokens=11, now=1.0)
    assert isinstance(started, Started)
    assert started.cached_tokens == 10
    end = finished(push_all(output, 1, 1, 1))
    assert (end.reason, end.generated_tokens, end.prompt_tokens, end.kept_tokens) == ("length", 5, 10, 5)
    assert end.tokens_per_s == 2.0


def test_repetition_is_detected_across_an_interruption() -> None:
    """The earlier answer counts."""
    output = shifting(b"a", b"b", answer=(1, 2, 1), shown_chars=3, stop_on_repetition=3)
    assert finished(push_all(output, 2, 1, 2)).reason == "repetition"


WORDS = (b"a", b"b", b"\n", b"ab", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"", b"aba\n", b"\xc3\xa9\xe2")


@given(
    tokens=st.lists(st.integers(1, len(WORDS)), min_size=1, max_size=40),
    cut=st.integers(0, 41),
    told=st.none() | st.integers(0, 80),
    stop=st.lists(st.sampled_from(["ab", "aba", "\n\nb", "b\n", "\u20acb"]), max_size=2, unique=True),
    patterns=st.lists(st.sampled_from(["ab{2,3}", "\\n+b", "(?<=a)\\u20ac"]), max_size=1),
    repeats=st.none() | st.just(3),
    n_ctx=st.sampled_from([22, 100]),
)
def test_interruption_anywhere_keeps_the_emitted_text(  # noqa: PLR0917 - drawn
    tokens: list[int],
    cut: int,
    told: int | None,
    stop: list[str],
    patterns: list[str],
    repeats: int | None,
    n_ctx: int,
) -> None:
    """For any number of characters sent before the cut, the rest of the uninterrupted answer and its end follow."""
    params: dict[str, Any] = {"stop": stop, "stop_regex": patterns, "max_tokens": 30, "n_ctx": n_ctx}
    if repeats is not None:
        params["stop_on_repetition"] = repeats
    tokens = [*tokens, END]
    whole = _spoken(going_on(*WORDS, **params), tokens)
    cut = min(cut, finished(whole).generated_tokens)
    before = _spoken(going_on(*WORDS, **params), tokens[:cut])
    shown_chars = len(shown(before)) if told is None else min(told, len(shown(whole)))
    output = going_on(*WORDS, answer=tuple(tokens[:cut]), shown_chars=shown_chars, **params)
    assert output.complete == (cut == finished(whole).generated_tokens)
    after = list(output.conclude(range(10), now=1.0)) if output.complete else _spoken(output, tokens[cut:])
    assert shown(whole)[:shown_chars] + shown(after) == shown(whole)
    if told is None and not output.complete:
        assert [event for event in before + after if isinstance(event, TokenDelta)] == [
            event for event in whole if isinstance(event, TokenDelta)
        ]
    first, second = finished(whole), finished(after)
    for name in ("reason", "stop", "kept_tokens", "kept_chars", "end_text", "generated_tokens"):
        assert getattr(first, name) == getattr(second, name), name


def going_on(
    *words: bytes, answer: tuple[int, ...] = (), shown_chars: int = 0, n_ctx: int, **params: object
) -> OutputProcessor:
    """Return the output of a turn whose context ends it, with a prompt of ten tokens and an earlier ``answer``."""
    return output_of_turn(turn_with(params, answer=answer, shown_chars=shown_chars), Words(*words), n_ctx=n_ctx)


def test_complete_answer_ends_without_prefill() -> None:
    """Its prompt is reported, with nothing prefilled, then its end; no text is left to emit."""
    output = going_on(b"a", b"b", answer=(1, 2), shown_chars=2, n_ctx=100, max_tokens=2)
    started, end = output.conclude(range(10), now=3.0)
    assert started == Started("t", pack_tokens(range(10)), 10)
    assert isinstance(end, Finished)
    assert (end.reason, end.generated_tokens, end.kept_tokens, end.cached_tokens) == ("length", 2, 2, 10)
    assert output.ended


def test_complete_answer_overflows_if_shifting_is_allowed() -> None:
    """A full context is not its end, and unsent text is carried along."""
    output = shifting(b"a", b"\n", answer=(1, 2), shown_chars=1, n_ctx=12, stop=["\nUser"])
    assert output.complete
    (overflowed,) = output.conclude(range(10), now=1.0)
    assert isinstance(overflowed, ContextFull)
    assert (overflowed.n_tokens, overflowed.text) == (12, "\n")


def test_end_token_beyond_a_full_context_is_found() -> None:
    """The prompt was shorter when the token was drawn."""
    output = shifting(b"a", answer=(1, 1, END), shown_chars=2, n_ctx=12)
    assert finished(list(output.conclude(range(10), now=1.0))).reason == "stop"


@pytest.mark.parametrize(("shown_chars", "told"), [(0, "ab"), (1, "b"), (2, "")])
def test_abort_in_the_queue_publishes_held_text(shown_chars: int, told: str) -> None:
    """No text is lost, although the turn never runs again."""
    output = going_on(b"ab", answer=(1,), shown_chars=shown_chars, n_ctx=100)
    events = list(output.end("aborted", now=1.0))
    assert shown(events) == told
    assert (finished(events).kept_tokens, finished(events).kept_chars) == (1, 2)


def test_abort_does_not_change_the_end_of_a_complete_answer() -> None:
    """A complete answer ended before it could be aborted."""
    output = going_on(b"a", answer=(1, END), shown_chars=1, n_ctx=100)
    assert finished(list(output.end("aborted", now=1.0))).reason == "stop"


def test_emitted_text_is_not_repeated() -> None:
    """The text of the next tokens is emitted from the first character not emitted before."""
    output = going_on(b"\n", b"U", b"x", answer=(1,), shown_chars=2, n_ctx=100, stop=["\nUser"])
    events = push_all(output, 2, 3, END)
    assert shown(events) == "x"
    assert finished(events).kept_chars == 3


@pytest.mark.parametrize(
    ("params", "warned"),
    [
        ({"mirostat": 1}, "mirostat"),
        ({"mirostat": 2}, "mirostat"),
        ({"adaptive_target": 0.5}, "adaptive-p"),
        ({"mirostat": 2, "temperature": 0}, None),
        ({"seed": 1, "repeat_penalty": 1.5, "dry_multiplier": 1.0}, None),
    ],
)
def test_reset_of_a_stateful_sampler_is_reported(params: dict[str, Any], warned: str | None) -> None:
    """It is reported only if there is one, and only after an interruption."""
    undisturbed = going_on(b"a", n_ctx=100, **params)
    undisturbed.start(range(10), cached_tokens=0, now=0.0)
    assert finished(push_all(undisturbed, END)).warnings == ()
    output = going_on(b"a", answer=(1, 1), shown_chars=2, n_ctx=100, **params)
    output.start(range(10), cached_tokens=0, now=0.0)
    warnings = finished(push_all(output, END)).warnings
    assert warnings == (
        () if warned is None else (f"{warned} lost its state after 2 tokens, where the answer resumed",)
    )


def _spoken(output: OutputProcessor, tokens: list[int]) -> list[TurnEvent]:
    """Push tokens until the turn has ended."""
    output.start(range(10), cached_tokens=0, now=0.0)
    events: list[TurnEvent] = []
    for token in tokens:
        if output.ended:
            break
        events += output.push(Sampled(token), now=1.0)
    return events
