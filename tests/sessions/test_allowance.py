"""Tests of turns that count for a token: refused, cut off, and counted once whatever becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Cancelled
from inferencecenter.protocol.events import End
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.client import Principal, check_model, limited
from inferencecenter.sessions.journal import StorageFault, TurnEnded, TurnFailed, TurnQueued, UsageRecorded
from inferencecenter.sessions.session import COUNTED_TOKENS
from tests.sessions.conftest import World
from tests.sessions.oracle import kept

PHONE = Principal("ada", 4, "normal", frozenset({"user"}), token_id="aabb")


@dataclass
class Counter:
    """An allowance that counts, and has what a test gives it."""

    limits: AccessLimits = NO_LIMITS
    left: int = 10**9
    used: int = 0
    begun: int = 0
    ended: int = 0
    taken_over: list[int] = field(default_factory=list)
    refusal: InferenceCenterError | None = None

    def check_turn(self) -> None:
        """Refuse if a test wants that."""
        if self.refusal is not None:
            raise self.refusal

    def begin_turn(self) -> None:
        """Count."""
        self.begun += 1

    def resume_turn(self, n_tokens: int) -> None:
        """Count."""
        self.taken_over.append(n_tokens)

    def use(self, n_tokens: int) -> bool:
        """Count."""
        self.used += n_tokens
        return self.used < self.left

    def end_turn(self) -> None:
        """Count."""
        self.ended += 1


def counted(**config: Any) -> tuple[World, Counter]:
    """Sessions of a client whose phone has an allowance; other tokens have one without limits."""
    counter, other = Counter(**config), Counter()
    world = World(client=PHONE, allowance_of=lambda _client, token: counter if token == "aabb" else other)
    return world, counter


def end_of(world: World) -> End:
    """The end of the last turn."""
    assert isinstance(world.sink.last, End), world.sink.ops
    return world.sink.last


def test_what_is_read_and_said_is_counted() -> None:
    """Of a prompt what has to be read, of an answer all; each turn begins and ends once."""
    world, counter = counted()
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    prompt = len(world.engine.last_text)
    assert counter.used == prompt + len("Hello") + 1
    assert (counter.begun, counter.ended) == (1, 1)
    world.turn(session_id, "And?", "More")
    assert counter.used == prompt + 6 + len(world.engine.last_text) + 5, "what was cached does not count"


def test_the_last_token_of_a_quota_ends_the_turn() -> None:
    """What was said stays in the history, the usage is right, and the reason is told."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    counter.left = counter.used + 3
    world.engine.generate("ab")
    assert world.engine.aborted == []
    world.engine.generate("cd")
    world.engine.generate("e")
    assert world.engine.aborted == [world.engine.last.turn_id], "asked once, and what comes meanwhile is taken"
    world.engine.finish("aborted", kept="abcde", end_text="")
    end = end_of(world)
    assert (end.finish_reason, end.id) == ("quota_exceeded", None)
    assert end.usage.completion_tokens == 5
    assert world.transcript(session_id)[-1] == ("assistant", "abcde")
    assert world.sink.text == "abcde"
    assert (counter.begun, counter.ended) == (1, 1)


def test_a_prompt_may_take_the_whole_quota() -> None:
    """Then nothing is said, and the turn ends when its engine has let go of it."""
    world, _ = counted(left=2)
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    assert world.engine.aborted == [world.engine.last.turn_id]
    world.engine.say(Cancelled(world.engine.last.turn_id))
    assert end_of(world).finish_reason == "quota_exceeded"
    assert world.sink.text == ""


def test_a_turn_that_ends_with_the_last_token_has_ended_by_itself() -> None:
    """The engine's own reason is told."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    counter.left = counter.used + 3
    world.engine.generate("abc")
    world.engine.finish("stop", kept="abc")
    assert end_of(world).finish_reason == "stop"


def test_who_aborts_a_turn_without_quota_is_answered() -> None:
    """It was aborted then, and its end answers the frame."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    counter.left = counter.used + 1
    world.engine.generate("a")
    world.abort(session_id, id="7")
    world.engine.finish("aborted", kept="a", end_text="")
    assert (end_of(world).finish_reason, end_of(world).id) == ("aborted", "7")


def test_a_turn_without_quota_is_not_continued() -> None:
    """Neither with a shorter prompt when its context is full, nor by another engine when its own is lost."""
    for lose in (True, False):
        world, counter = counted()
        session_id = world.create()
        world.infer(session_id)
        world.engine.start()
        counter.left = counter.used + 1
        world.engine.generate("a")
        if lose:
            world.engine.lose()
            world.engine.turns[world.engine.last.turn_id].on_engine_event(Cancelled(world.engine.last.turn_id))
        else:
            world.engine.overflow(1024, said="a", text="")
        assert end_of(world).finish_reason == "quota_exceeded"
        assert world.transcript(session_id)[-1] == ("assistant", "a")
        assert counter.ended == 1


def test_a_turn_that_is_refused_leaves_nothing() -> None:
    """The session is idle, nothing is counted, and the next turn runs."""
    world, counter = counted()
    session_id = world.create()
    counter.refusal = InferenceCenterError(ErrorCode.RATE_LIMITED, retry_after_ms=5)
    with pytest.raises(InferenceCenterError) as caught:
        world.infer(session_id)
    assert caught.value is counter.refusal
    assert world.engine.submitted == []
    counter.refusal = None
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL)
    with pytest.raises(InferenceCenterError):
        world.infer(session_id)
    assert counter.begun == 0, "nor is one that the engine refuses"
    world.engine.refusal = None
    world.turn(session_id, "Hi", "Hello")
    assert (counter.begun, counter.ended) == (1, 1)


def test_a_repeated_turn_is_no_other_request() -> None:
    """A key that is known attaches to its turn, whatever the limits."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id, turn_key="k")
    counter.refusal = InferenceCenterError(ErrorCode.RATE_LIMITED)
    world.infer(session_id, turn_key="k")
    world.engine.answer("Hello")
    world.infer(session_id, turn_key="k")
    assert world.sink.ops[-1] == "end"
    assert counter.begun == 1


@given(st.lists(st.sampled_from(["stop", "fail", "withdraw", "close", "lose", "expire"]), max_size=8))
def test_whatever_becomes_of_turns_each_ends_once(fates: list[str]) -> None:
    """As many have ended as have begun, when none runs."""
    world, counter = counted()
    for fate in fates:
        session_id = world.create()
        world.infer(session_id)
        match fate:
            case "stop":
                world.engine.answer("x")
            case "fail":
                world.engine.fail()
            case "withdraw":
                world.engine.say(Cancelled(world.engine.last.turn_id))
            case "lose":
                world.engine.lose()
                world.engine.ready()
                world.engine.answer("x")
            case "close":
                pass
            case _:
                world.engine.start()
        world.close(session_id)
    assert counter.begun == counter.ended == len(fates)


def test_a_turn_of_an_earlier_daemon_goes_on_for_its_token() -> None:
    """It takes its place with what it had said, is no new request, and its end counts for the same token."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("abc")
    assert world.journal is not None
    assert [record.spec.token_id for record in world.journal.of(TurnQueued)] == ["aabb"]
    found = kept(world.journal.records)
    world.reopen().restore(found, clean=True)
    assert (counter.taken_over, counter.begun) == ([3], 1)
    world.engine.start()
    world.engine.finish(kept="abc")
    assert [record.token_id for record in world.journal.of(TurnEnded)] == ["aabb"]
    assert counter.ended == 1


def test_sessions_that_may_not_be_kept_are_counted() -> None:
    """Nothing is written down of them but the sum, and not even that while nothing can be."""
    world, _ = counted()
    session_id = world.create(store=False)
    world.turn(session_id, "Hi", "Hello")
    assert world.journal is not None
    spent = world.journal.of(UsageRecorded)
    assert spent == world.journal.records
    assert {(each.client_id, each.token_id, each.at) for each in spent} == {("ada", "aabb", 1000.0)}
    assert [(each.completion_tokens, each.turns) for each in spent] == [(0, 0), (6, 1)]
    world.journal.fault = StorageFault("the disk is full")
    world.turn(session_id, "Hi", "Hello")
    assert len(world.journal.records) == 2


@given(fates=st.lists(st.sampled_from(["stop", "fail", "kill", "fail unread"]), max_size=4), store=st.booleans())
def test_what_is_written_down_is_what_was_counted(fates: list[str], *, store: bool) -> None:
    """Of turns that end or fail, and of the prompts of a daemon that is killed, when its next one adds them up."""
    world, counter = counted()
    assert world.journal is not None
    for fate in fates:
        session_id = world.create(store=store)
        world.infer(session_id)
        prompt = len(world.engine.last_text)
        said = 0
        if fate != "fail unread":
            world.engine.start()
            assert counted_tokens(world) == counter.used, "a daemon that is killed now has read the prompt"
            world.engine.generate("abc")
            said = 3
        match fate:
            case "stop":
                world.engine.finish(kept="abc", end_text="", prompt_tokens=prompt, cached_tokens=0)
            case "kill":
                counter.used -= said
                continue
            case _:
                world.engine.fail()
        assert counted_tokens(world) == counter.used
        world.close(session_id)
    turns = sum(each.turns for each in spent_of(world))
    assert turns == fates.count("stop")


@pytest.mark.parametrize("fate", ["stop", "fail", "kill"])
def test_long_answers_that_are_not_stored_are_counted_while_they_come(fate: str) -> None:
    """In coarse steps, each token once; those of a stored one with its end, which the next daemon reaches."""
    for store in (True, False):
        world, counter = counted()
        world.infer(world.create(store=store))
        prompt = len(world.engine.last_text)
        world.engine.start()
        counts = []
        for n_tokens in (COUNTED_TOKENS - 1, COUNTED_TOKENS, 1):
            world.engine.generate("a" * n_tokens)
            counts.append(counted_tokens(world) - prompt)
        assert counts == ([0, 0, 0] if store else [0, 2 * COUNTED_TOKENS - 1, 2 * COUNTED_TOKENS - 1])
        if fate == "stop":
            answer = "a" * (2 * COUNTED_TOKENS)
            world.engine.finish(kept=answer, end_text="", prompt_tokens=prompt, cached_tokens=0)
        elif fate == "fail":
            world.engine.fail()
        if fate != "kill":
            assert counted_tokens(world) == counter.used == prompt + 2 * COUNTED_TOKENS


def spent_of(world: World) -> list[UsageRecorded]:
    """All that is written down as spent."""
    assert world.journal is not None
    found: list[UsageRecorded] = []
    for record in world.journal.records:
        match record:
            case UsageRecorded():
                found.append(record)
            case TurnEnded():
                found.append(record.remaining_usage())
            case TurnFailed(usage=UsageRecorded() as spent):
                found.append(spent)
    return found


def counted_tokens(world: World) -> int:
    """Tokens that the next daemon counts for today."""
    return sum(each.prompt_tokens - each.cached_tokens + each.completion_tokens for each in spent_of(world))


# Models and the length of answers.


def test_models_that_may_not_be_used() -> None:
    """Neither by opening a session, nor in one that another token has opened."""
    world, _ = counted(limits=AccessLimits(models=("other",)))
    with pytest.raises(InferenceCenterError) as caught:
        world.create()
    assert (caught.value.code, caught.value.field) == (ErrorCode.FORBIDDEN, "model")
    session_id = world.create(client=replace(PHONE, token_id=""))
    with pytest.raises(InferenceCenterError, match="model is toy, which this token may not use"):
        world.infer(session_id)
    check_model("other", AccessLimits(models=("other",)))
    check_model("any", NO_LIMITS)


def test_answers_are_as_long_as_they_may_be() -> None:
    """A turn that asks for nothing gets the limit, one that asks for less gets that; the session stays as it was."""
    world, _ = counted(limits=AccessLimits(max_tokens=50))
    session_id = world.create()
    assert world.get(session_id).params["max_tokens"] is None
    for params, expected in (({}, 50), ({"max_tokens": 7}, 7), ({"max_tokens": 50}, 50), ({"max_tokens": -1}, 50)):
        world.turn(session_id, "Hi", "x", params=params)
        assert b'"max_tokens":%d' % expected in world.engine.last.params_json


def test_who_asks_for_longer_answers_is_told() -> None:
    """The field and the limit, whether the session asks, the turn, or a session that another token has opened."""
    world, _ = counted(limits=AccessLimits(max_tokens=50))
    more = {"max_tokens": 51}
    mine, others = world.create(), world.create(client=replace(PHONE, token_id=""), params=more)
    for ask in (
        lambda: world.create(params=more),
        lambda: world.infer(mine, params=more),
        lambda: world.infer(others),
    ):
        with pytest.raises(
            InferenceCenterError, match="max_tokens is 51; answers for this token have at most 50"
        ) as no:
            ask()
        assert (no.value.code, no.value.field) == (ErrorCode.INVALID_REQUEST, "params.max_tokens")


def test_what_the_daemon_sets_for_everybody_is_no_wish() -> None:
    """More tokens by configuration are cut to the limit, fewer stay."""
    limits = AccessLimits(max_tokens=50)
    assert limited(Params(), limits, session=Params(max_tokens=60), chosen=()).max_tokens == 50
    assert "max_tokens" not in limited(Params(), limits, session=Params(max_tokens=40), chosen=()).model_fields_set
    assert limited(Params(), NO_LIMITS, session=Params(), chosen=()) == Params()
