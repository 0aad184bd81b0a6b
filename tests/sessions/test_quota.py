"""Rate limits and quotas of a token: turns are refused, cut off, and counted exactly once."""

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
from inferencecenter.sessions.context import Principal, bound_max_tokens, check_model
from inferencecenter.sessions.journal import StorageFault, TurnEnded, TurnFailed, TurnQueued, UsageRecorded
from inferencecenter.sessions.turn_runner import COUNTED_TOKENS
from tests.sessions.conftest import SessionHarness
from tests.sessions.oracle import kept

PHONE = Principal("ada", 4, "normal", frozenset({"user"}), token_id="aabb")


@dataclass
class Counter:
    """A quota that counts usage and has the limits of a test."""

    limits: AccessLimits = NO_LIMITS
    left: int = 10**9
    used: int = 0
    begun: int = 0
    ended: int = 0
    taken_over: list[int] = field(default_factory=list)
    refusal: InferenceCenterError | None = None

    def check_turn(self) -> None:
        """Refuse the turn if the test says so."""
        if self.refusal is not None:
            raise self.refusal

    def begin_turn(self) -> None:
        """Count the turn."""
        self.begun += 1

    def resume_turn(self, n_tokens: int) -> None:
        """Count the restored turn."""
        self.taken_over.append(n_tokens)

    def use(self, n_tokens: int) -> bool:
        """Count the tokens."""
        self.used += n_tokens
        return self.used < self.left

    def end_turn(self) -> None:
        """Count the end."""
        self.ended += 1


def counted(**config: Any) -> tuple[SessionHarness, Counter]:
    """Sessions of a client with a quota for its phone; other tokens are unlimited."""
    counter, other = Counter(**config), Counter()
    world = SessionHarness(client=PHONE, quota_of=lambda _client, token: counter if token == "aabb" else other)
    return world, counter


def end_of(world: SessionHarness) -> End:
    """The end of the last turn."""
    assert isinstance(world.sink.last, End), world.sink.ops
    return world.sink.last


def test_prefilled_and_generated_tokens_are_counted() -> None:
    """Cached prompt tokens are free; each turn begins and ends once."""
    world, counter = counted()
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    prompt = len(world.engine.last_text)
    assert counter.used == prompt + len("Hello") + 1
    assert (counter.begun, counter.ended) == (1, 1)
    world.turn(session_id, "And?", "More")
    assert counter.used == prompt + 6 + len(world.engine.last_text) + 5, "what was cached does not count"


def test_last_token_of_a_quota_ends_the_turn() -> None:
    """The partial answer stays in the history, and the end reports usage and reason."""
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


def test_prompt_may_use_the_whole_quota() -> None:
    """The turn ends without an answer as soon as the engine has aborted it."""
    world, _ = counted(left=2)
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    assert world.engine.aborted == [world.engine.last.turn_id]
    world.engine.say(Cancelled(world.engine.last.turn_id))
    assert end_of(world).finish_reason == "quota_exceeded"
    assert world.sink.text == ""


def test_turn_ending_with_the_last_quota_token_keeps_its_finish_reason() -> None:
    """The finish reason of the engine is reported."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    counter.left = counter.used + 3
    world.engine.generate("abc")
    world.engine.finish("stop", kept="abc")
    assert end_of(world).finish_reason == "stop"


def test_abort_of_a_turn_over_quota_is_answered() -> None:
    """The turn ends as aborted, and its end answers the frame."""
    world, counter = counted()
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    counter.left = counter.used + 1
    world.engine.generate("a")
    world.abort(session_id, id="7")
    world.engine.finish("aborted", kept="a", end_text="")
    assert (end_of(world).finish_reason, end_of(world).id) == ("aborted", "7")


def test_turn_over_quota_is_not_resumed() -> None:
    """Neither a context shift nor the loss of the engine submits it again."""
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


def test_refused_turn_leaves_nothing() -> None:
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


def test_repeated_turn_key_is_not_counted() -> None:
    """A known key attaches to its turn, regardless of the limits."""
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
def test_each_counted_turn_ends_once(fates: list[str]) -> None:
    """As many turns have ended as have begun when none is running."""
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


def test_restored_turn_counts_for_its_token() -> None:
    """It is not a new request, and its end is charged to the same token."""
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


def test_sessions_that_are_not_stored_are_counted() -> None:
    """Only their usage is recorded, and only while the store can write."""
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
def test_recorded_usage_equals_counted_usage(fates: list[str], *, store: bool) -> None:
    """The next daemon sums the same usage, also of failed turns and after a crash."""
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
def test_long_answers_that_are_not_stored_are_counted_in_steps(fate: str) -> None:
    """Each token counts once; a stored answer is counted at its end."""
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


def spent_of(world: SessionHarness) -> list[UsageRecorded]:
    """All recorded usage."""
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


def counted_tokens(world: SessionHarness) -> int:
    """The tokens that the next daemon counts for today."""
    return sum(each.prompt_tokens - each.cached_tokens + each.completion_tokens for each in spent_of(world))


# Models and the length of answers.


def test_forbidden_models_are_refused() -> None:
    """Neither a new session nor a session of another token gives access."""
    world, _ = counted(limits=AccessLimits(models=("other",)))
    with pytest.raises(InferenceCenterError) as caught:
        world.create()
    assert (caught.value.code, caught.value.field) == (ErrorCode.FORBIDDEN, "model")
    session_id = world.create(client=replace(PHONE, token_id=""))
    with pytest.raises(InferenceCenterError, match="model is toy, which this token may not use"):
        world.infer(session_id)
    check_model("other", AccessLimits(models=("other",)))
    check_model("any", NO_LIMITS)


def test_answers_are_bounded_by_max_tokens() -> None:
    """Without a value the limit applies, a smaller value stays; the session is unchanged."""
    world, _ = counted(limits=AccessLimits(max_tokens=50))
    session_id = world.create()
    assert world.get(session_id).params["max_tokens"] is None
    for params, expected in (({}, 50), ({"max_tokens": 7}, 7), ({"max_tokens": 50}, 50), ({"max_tokens": -1}, 50)):
        world.turn(session_id, "Hi", "x", params=params)
        assert b'"max_tokens":%d' % expected in world.engine.last.params_json


def test_max_tokens_above_the_limit_is_refused() -> None:
    """The error names the field and the limit, whether the session or the turn asks for it."""
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


def test_configured_max_tokens_is_cut_to_the_limit() -> None:
    """A larger value of the configuration is cut, a smaller one stays."""
    limits = AccessLimits(max_tokens=50)
    assert bound_max_tokens(Params(), limits, session=Params(max_tokens=60), chosen=()).max_tokens == 50
    assert (
        "max_tokens"
        not in bound_max_tokens(Params(), limits, session=Params(max_tokens=40), chosen=()).model_fields_set
    )
    assert bound_max_tokens(Params(), NO_LIMITS, session=Params(), chosen=()) == Params()
