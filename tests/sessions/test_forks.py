"""Forks and rewinds restore the history of a turn exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.params import decode
from inferencecenter.protocol.requests import START
from inferencecenter.sessions.context import Principal
from tests.sessions.conftest import SessionHarness, packed

if TYPE_CHECKING:
    from collections.abc import Callable

EVE = Principal("eve", 4, "normal", frozenset({"user"}))


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


def talk(world: SessionHarness, **fields: Any) -> tuple[str, list[str]]:
    """A session with three turns, and their ids."""
    session_id = world.create(**fields)
    turns = [world.turn(session_id, prompt, answer) for prompt, answer in (("a", "one"), ("b", "two"), ("c", "three"))]
    return session_id, turns


def test_rewound_session_reuses_its_tokens(world: SessionHarness) -> None:
    """Generated tokens are not tokenized again: the next turn submits them with the new question."""
    session_id, turns = talk(world, system="Be kind.")
    world.infer(session_id, "b again")
    kept = world.engine.last.tokens
    world.engine.answer("x")
    rewound = world.rewind(session_id, turns[2])
    assert (rewound.turn, rewound.messages, rewound.session_id) == (turns[2], 7, session_id)
    world.infer(session_id, "d")
    assert world.engine.last.tokens == kept
    assert world.engine.last_text == "\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"


def test_editing_the_last_question_submits_only_the_new_text(world: SessionHarness) -> None:
    """After a rewind the prompt contains nothing of the old question."""
    session_id, turns = talk(world)
    world.rewind(session_id, turns[1])
    world.infer(session_id, "C")
    assert packed("two") in world.engine.last.tokens
    assert packed("three") not in world.engine.last.tokens
    assert world.engine.last_text == "\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    world.engine.answer("drei")
    assert [content for _, content in world.transcript(session_id)] == ["a", "one", "b", "two", "C", "drei"]


def test_rewind_drops_turns_usage_and_keys(world: SessionHarness) -> None:
    """Turns, usage and turn keys end with the named turn."""
    session_id = world.create()
    first = world.turn(session_id, "a", "one", turn_key="k1")
    usage = world.get(session_id).usage
    world.turn(session_id, "b", "two", turn_key="k2")
    world.rewind(session_id, first)
    session = world.get(session_id)
    assert ([turn.turn_id for turn in session.turns], session.usage) == ([first], usage)
    submitted = len(world.engine.submitted)
    world.infer(session_id, "a", turn_key="k1")
    assert (len(world.engine.submitted), world.sink.last.turn_id) == (submitted, first)
    world.infer(session_id, "b", turn_key="k2")
    assert len(world.engine.submitted) == submitted + 1


def test_event_numbers_continue_after_a_rewind(world: SessionHarness) -> None:
    """The reply to the rewind and the events after it take the next numbers."""
    session_id, turns = talk(world)
    last = world.sink.last.seq
    assert world.rewind(session_id, turns[0]).seq == last + 1
    world.infer(session_id)
    assert world.sink.last.seq == last + 2


def test_start_is_before_the_first_turn(world: SessionHarness) -> None:
    """The system prompt and messages appended before the first turn stay; later ones are removed."""
    session_id = world.create(system="Be kind.")
    world.append(session_id, ("user", "1+1?"), ("assistant", "2"))
    world.turn(session_id, "2+2?", "4")
    world.append(session_id, ("assistant", "By the way"))
    assert world.rewind(session_id, START).messages == 3
    session = world.get(session_id)
    assert (session.turns, session.n_tokens, session.usage.prompt_tokens) == ((), 0, 0)
    assert world.rewind(session_id, START).messages == 3
    world.turn(session_id, "3+3?", "6")
    assert [content for _, content in world.transcript(session_id)] == ["Be kind.", "1+1?", "2", "3+3?", "6"]


def test_rewind_removes_messages_appended_after_the_turn(world: SessionHarness) -> None:
    """A rewind to the last turn removes them."""
    session_id, turns = talk(world)
    world.append(session_id, ("user", "x"), ("assistant", "y"))
    assert world.rewind(session_id, turns[2]).messages == 6


def test_fork_is_independent_of_its_parent(world: SessionHarness) -> None:
    """Both begin with the same tokens; neither receives the other's changes."""
    parent, turns = talk(world)
    child = world.fork(parent, turns[1])
    assert world.transcript(child) == world.transcript(parent)[:4]
    world.infer(child, "C")
    in_child = world.engine.last
    world.engine.answer("drei")
    world.infer(parent, "d")
    assert world.engine.last.tokens.startswith(in_child.tokens)
    assert (in_child.session_id, world.engine.last.session_id) == (child, parent)
    world.engine.answer("four")
    assert [content for _, content in world.transcript(child)][-2:] == ["C", "drei"]
    assert [content for _, content in world.transcript(parent)][-2:] == ["d", "four"]


def test_fork_keeps_the_configuration(world: SessionHarness) -> None:
    """Parameters, priority, metadata, ttl and policies are copied."""
    parent = world.create(
        params={"top_k": 7}, priority="batch", metadata={"a": "b"}, ttl_s=9, on_full="stop", store=False, mode="raw"
    )
    world.turn(parent, "a", "one")
    created = world.sessions.fork(world.client, requests.ForkSession(op="fork_session", session_id=parent), world.sink)
    assert (created.parent, created.params["top_k"], created.model, created.n_ctx) == (parent, 7, "toy", 1024)
    assert created.session_id != parent
    assert created.epoch != world.get(parent).epoch
    assert (world.get(created.session_id).metadata, world.get(created.session_id).on_full) == ({"a": "b"}, "stop")
    assert world.timers[-1].delay_s == 9
    world.infer(created.session_id, "b")
    turn = world.engine.last
    assert (turn.priority, turn.may_shift, turn.durable, decode(turn.params_json).top_k) == (2, False, False, 7)
    assert [(piece.text, piece.special) for piece in turn.pieces] == [("b", False)]


def test_fork_without_a_turn_copies_all_messages(world: SessionHarness) -> None:
    """Without a turn appended messages are copied too; ``START`` copies only the opening."""
    parent, turns = talk(world, system="Be kind.")
    world.append(parent, ("user", "x"), ("assistant", "y"))
    whole = world.get(world.fork(parent))
    assert whole.transcript == world.get(parent).transcript
    assert ([turn.turn_id for turn in whole.turns], whole.usage) == (turns, world.get(parent).usage)
    opening = world.get(world.fork(parent, START))
    assert ([message.content for message in opening.transcript], opening.turns) == (["Be kind."], ())


def test_fork_can_be_rewound_to_its_parents_turns(world: SessionHarness) -> None:
    """Turns keep their ids; their keys stay with the parent."""
    parent = world.create()
    first = world.turn(parent, "a", "one", turn_key="k")
    world.turn(parent, "b", "two")
    child = world.fork(parent)
    assert world.rewind(child, first).messages == 2
    assert world.rewind(child, first).seq == 2
    submitted = len(world.engine.submitted)
    world.infer(child, "a", turn_key="k")
    assert len(world.engine.submitted) == submitted + 1


def test_busy_session_is_neither_forked_nor_rewound(world: SessionHarness) -> None:
    """The fork and the rewind work after the turn has ended."""
    session_id, turns = talk(world)
    world.infer(session_id, "d")
    steps: list[Callable[[], None]] = [lambda: None, world.engine.start, lambda: world.engine.generate("f")]
    for step in steps:
        step()
        refused(ErrorCode.SESSION_BUSY, world.fork, session_id, turns[0])
        refused(ErrorCode.SESSION_BUSY, world.rewind, session_id, turns[0])
    world.engine.finish(kept="f")
    world.fork(session_id, turns[0])
    world.rewind(session_id, turns[0])


@pytest.mark.parametrize("turn", ["t_unknown", "START", "s_1"])
def test_unknown_turn_changes_nothing(world: SessionHarness, turn: str) -> None:
    """The error names the turn, and the session is unchanged."""
    session_id, _ = talk(world)
    before = world.get(session_id)
    for call in (world.fork, world.rewind):
        assert refused(ErrorCode.TURN_NOT_FOUND, call, session_id, turn).field == "turn"
    assert world.get(session_id) == before
    assert world.sessions.totals().total_sessions == 1


def test_turns_outside_the_history_are_unknown(world: SessionHarness) -> None:
    """Failed, discarded and rewound turns cannot be named."""
    session_id = world.create()
    first = world.turn(session_id, "a", "one")
    world.infer(session_id, "b")
    failed = world.engine.last.turn_id
    world.engine.fail()
    world.infer(session_id, "c")
    discarded = world.engine.last.turn_id
    world.engine.start()
    world.abort(session_id, discard=True)
    world.engine.finish("aborted", end_text="")
    second = world.turn(session_id, "d", "two")
    world.rewind(session_id, first)
    for turn in (failed, discarded, second):
        refused(ErrorCode.TURN_NOT_FOUND, world.rewind, session_id, turn)


def test_rewind_to_an_aborted_turn_works(world: SessionHarness) -> None:
    """Its partial answer is part of the history."""
    session_id = world.create()
    world.infer(session_id, "a")
    world.engine.start()
    world.engine.generate("par")
    world.abort(session_id)
    world.engine.finish("aborted", kept="par", end_text="")
    aborted = world.engine.last.turn_id
    world.turn(session_id, "b", "two")
    world.rewind(session_id, aborted)
    world.infer(session_id, "c")
    assert world.engine.last.tokens.endswith(packed("par"))
    assert world.engine.last_text.startswith("<|im_end|>\n<|im_start|>user\nc")


def test_rewind_to_a_turn_aborted_in_the_queue_works(world: SessionHarness) -> None:
    """It has no tokens of its own; those before it stay."""
    session_id = world.create()
    world.turn(session_id, "a", "one")
    world.infer(session_id, "b")
    kept, waited = world.engine.last.tokens, world.engine.last.turn_id
    world.abort(session_id)
    world.engine.finish("aborted", end_text="")
    world.turn(session_id, "c", "three")
    world.rewind(session_id, waited)
    world.infer(session_id, "d")
    assert world.engine.last.tokens == kept
    assert "b<|im_end|>" in world.engine.last_text


def test_forks_count_as_sessions(world: SessionHarness) -> None:
    """At the client's limit a fork is refused and its parent stays."""
    parent, _ = talk(world)
    for _ in range(3):
        world.fork(parent)
    refused(ErrorCode.SESSION_LIMIT, world.fork, parent)
    assert world.sessions.totals().total_sessions == 4


def test_fork_never_evicts_its_parent(world: SessionHarness) -> None:
    """Another detached session makes room for it."""
    world.reopen(when_full="evict")
    made = [
        world.sessions.create(
            world.client,
            requests.CreateSession.model_construct(
                **(requests.CreateSession(op="create_session").model_dump() | {"on_disconnect": "detach"})
            ),
            world.sink,
        ).session_id
        for _ in range(4)
    ]
    world.sessions.detach(world.sink)
    world.fork(made[0])
    assert world.engine.released == [made[1]]


def test_session_of_another_client_is_not_found(world: SessionHarness) -> None:
    """The answer is the same as for a random id, in every state."""
    session_id, turns = talk(world)
    answers = set()
    for target in (session_id, "s_AAAAAAAAAAAAAAAAAAAAAA"):
        for turn in (turns[0], START, "t_unknown", None):
            error = refused(ErrorCode.SESSION_NOT_FOUND, world.fork, target, turn, EVE)
            answers.add((error.message, error.hint, error.field, error.retry_after_ms))
    assert len(answers) == 1
    world.infer(session_id)
    refused(ErrorCode.SESSION_NOT_FOUND, world.fork, session_id, None, EVE)


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["turn", "append", "fork", "discard"]),
        st.tuples(st.just("rewind"), st.integers(min_value=0, max_value=9)),
    ),
    max_size=14,
)


@given(steps=STEPS)
def test_rewinding_restores_the_earlier_history(steps: list[Any]) -> None:
    """After any mix of turns, forks and rewinds the session equals a plain model of its turns."""
    world = SessionHarness(client=Principal("ada", 1000, "normal", frozenset({"user"})))
    world.reopen(max_sessions=1000)
    session_id = world.create(system="s")
    model = [(START, ["s"])]
    now = ["s"]
    for number, step in enumerate(steps):
        if step == "turn":
            turn = world.turn(session_id, f"q{number}", f"a{number}")
            now = [*now, f"q{number}", f"a{number}"]
            model.append((turn, now))
        elif step == "append":
            world.append(session_id, ("assistant", f"n{number}"))
            now = [*now, f"n{number}"]
            if len(model) == 1:
                model[0] = (START, now)
        elif step == "fork":
            session_id = world.fork(session_id)
        elif step == "discard":
            world.infer(session_id, "no")
            world.engine.start()
            world.abort(session_id, discard=True)
            world.engine.finish("aborted", end_text="")
        else:
            del model[1 + step[1] % len(model) :]
            world.rewind(session_id, model[-1][0])
            now = model[-1][1]
        assert [content for _, content in world.transcript(session_id)] == now
    known = {turn for turn, _ in model} - {START}
    listed = [turn.turn_id for turn in world.get(session_id).turns]
    assert known <= set(listed)
    world.infer(session_id, "last")
    spelled = "".join(map(chr, memoryview(world.engine.last.tokens).cast("i"))).replace("\0", "<|im_end|>")
    assert (spelled + world.engine.last_text).count("<|im_start|>") == len(now) + 2
