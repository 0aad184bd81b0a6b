"""The session manager: ownership, limits, expiry and levels of parameters."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import requests
from inferencecenter.protocol.params import decode, parse_params
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.session import LiveSession
from tests.sessions.conftest import FakeSink, SessionHarness, make_model
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from collections.abc import Callable

EVE = Principal("eve", 4, "normal", frozenset({"user"}))


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


def answers(world: SessionHarness, client: Principal, session_id: str) -> list[tuple[object, ...]]:
    """The replies to ``client`` of every op that names a session."""
    sessions, message = world.sessions, ChatMessage(role="user", content="x")
    calls: list[Callable[[], object]] = [
        lambda: sessions.infer(client, requests.Infer(op="infer", session_id=session_id, prompt="x"), world.sink),
        lambda: sessions.abort(client, requests.Abort(op="abort", session_id=session_id)),
        lambda: sessions.append(
            client, requests.Append(op="append", session_id=session_id, messages=[message]), world.sink
        ),
        lambda: sessions.fork(client, requests.ForkSession(op="fork_session", session_id=session_id), world.sink),
        lambda: sessions.rewind(
            client, requests.RewindSession(op="rewind_session", session_id=session_id, turn="start"), world.sink
        ),
        lambda: sessions.resume(
            client, requests.ResumeSession(op="resume_session", session_id=session_id, epoch="e"), world.sink
        ),
        lambda: sessions.set_metadata(
            client, requests.SetMetadata(op="set_metadata", session_id=session_id, metadata={})
        ),
        lambda: sessions.set_model(client, requests.SetModel(op="set_model", session_id=session_id)),
        lambda: sessions.get(client, requests.GetSession(op="get_session", session_id=session_id)),
        lambda: sessions.list(client, requests.ListSessions(op="list_sessions", after=session_id)),
        lambda: sessions.close(client, requests.CloseSession(op="close_session", session_id=session_id)),
    ]
    return [
        (error.code, error.message, error.hint, error.field, error.retry_after_ms)
        for error in (refused(ErrorCode.SESSION_NOT_FOUND, call) for call in calls)
    ]


def test_session_of_another_client_looks_nonexistent(world: SessionHarness) -> None:
    """No op reveals whether another client's session exists."""
    session_id = world.create()
    assert answers(world, EVE, session_id) == answers(world, EVE, "s_AAAAAAAAAAAAAAAAAAAAAA")
    assert world.get(session_id).state == "idle"


def test_ids_are_chosen_by_the_server(world: SessionHarness) -> None:
    """Session id and epoch differ for every session."""
    made = [
        world.sessions.create(world.client, requests.CreateSession(op="create_session"), world.sink) for _ in range(2)
    ]
    names = {name for created in made for name in (created.session_id, created.epoch)}
    assert len(names) == 4
    assert all(created.session_id.startswith("s_") and len(created.session_id) == 24 for created in made)


def test_parameter_levels_override_in_order(world: SessionHarness) -> None:
    """A turn's parameters override the session's, which override the configuration's and the model's."""
    world.engine.status = EngineStatus(
        state=EngineState.READY,
        model=make_model(sampling_defaults_json=b'{"temp": 0.1, "top_k": 11, "top_p": 0.1, "min_p": 0.01}'),
    )
    world.config_params = parse_params({"top_k": 12, "top_p": 0.2, "min_p": 0.02})
    world.reopen()
    request = requests.CreateSession(op="create_session", params={"top_p": 0.3, "min_p": 0.03})
    created = world.sessions.create(world.client, request, world.sink)
    assert (created.params["temperature"], created.params["top_k"], created.params["top_p"]) == (0.1, 12, 0.3)
    world.infer(created.session_id, params={"min_p": 0.04})
    params = decode(world.engine.last.params_json)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.1, 12, 0.3, 0.04)


def test_invalid_model_recommendation_is_ignored(world: SessionHarness) -> None:
    """The session works and the log has a warning."""
    world.engine.status = EngineStatus(
        state=EngineState.READY, model=make_model(sampling_defaults_json=b'{"temp": "hot"}')
    )
    with capture_logs() as logs:
        world.create()
    assert "model_recommendation_ignored" in [line["event"] for line in logs]


def test_parameter_errors_name_the_field(world: SessionHarness) -> None:
    """Invalid and duplicate values are errors of the request; the session is usable."""
    session_id = world.create()
    error = refused(ErrorCode.INVALID_REQUEST, world.infer, session_id, params={"temp": 99})
    assert error.field == "params.temp"
    assert refused(ErrorCode.INVALID_REQUEST, world.infer, session_id, n_probs=1, params={"n_probs": 2}).field == (
        "n_probs"
    )
    refused(ErrorCode.INVALID_REQUEST, world.create, params={"no_such": 1})
    world.turn(session_id, "Hi", "Hello")


def test_refused_session_is_not_opened(world: SessionHarness) -> None:
    """Conflicting parameters leave no session behind."""
    error = refused(ErrorCode.INVALID_REQUEST, world.create, params={"mirostat": 2, "adaptive_target": 0.5})
    assert error.field == "params.adaptive_target"
    assert world.sessions.totals().total_sessions == 0


def test_priority_comes_from_turn_session_or_client(world: SessionHarness) -> None:
    """Lowering is free for session and turn; raising needs the scope."""
    session_id = world.create(priority="batch")
    world.infer(session_id)
    assert world.engine.last.priority == 2
    world.engine.answer("x")
    world.infer(session_id, priority="normal")
    assert world.engine.last.priority == 1
    world.engine.answer("x")
    refused(ErrorCode.FORBIDDEN, world.infer, session_id, priority="interactive")
    refused(ErrorCode.FORBIDDEN, world.create, priority="interactive")


def test_unknown_model_is_refused(world: SessionHarness) -> None:
    """The error lists the available models."""
    world.create(model="toy")
    error = refused(ErrorCode.MODEL_NOT_FOUND, world.create, model="gpt")
    assert "toy" in (error.hint or "")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (EngineState.STARTING, ErrorCode.MODEL_LOADING),
        (EngineState.BACKOFF, ErrorCode.ENGINE_UNAVAILABLE),
        (EngineState.FAILED, ErrorCode.ENGINE_UNAVAILABLE),
    ],
)
def test_no_session_before_the_first_load(world: SessionHarness, state: EngineState, code: ErrorCode) -> None:
    """Without a model no session can be opened."""
    world.engine.status = EngineStatus(state=state)
    refused(code, world.create)


def test_limits_are_per_client_and_global(world: SessionHarness) -> None:
    """An attached session is never evicted; a closed one makes room."""
    own = [world.create() for _ in range(4)]
    error = refused(ErrorCode.SESSION_LIMIT, world.create)
    assert ("4 sessions of 4" in error.message, error.field) == (True, "max_sessions")
    for _ in range(2):
        world.create(EVE)
    error = refused(ErrorCode.SESSION_LIMIT, world.create, EVE)
    assert ("all 6 sessions" in error.message, error.field) == (True, "sessions.max_sessions")
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=own[0]))
    world.create(EVE)


def test_closed_socket_closes_only_its_sessions(world: SessionHarness) -> None:
    """Their turns are aborted, other sessions continue, and nothing is sent to the closed socket."""
    mine = world.create(on_disconnect="close")
    world.infer(mine)
    other = FakeSink()
    world.sessions.create(world.client, requests.CreateSession(op="create_session"), other)
    sent = len(world.sink.events)
    world.sessions.detach(world.sink)
    assert (world.engine.aborted, world.engine.released) == ([world.engine.last.turn_id], [mine])
    assert len(world.sink.events) == sent
    assert world.sessions.totals().total_sessions == 1


def test_oldest_detached_session_is_evicted_if_configured(world: SessionHarness) -> None:
    """A detached session is closed when its owner opens another at the limit."""
    world.reopen(when_full="evict")
    made = [world.create(on_disconnect="detach") for _ in range(4)]
    world.infer(made[0])
    world.sessions.detach(world.sink)
    assert world.sessions.totals().total_sessions == 4
    world.create()
    assert world.engine.released == [made[1]]


@pytest.mark.parametrize("max_sessions", [3, 6], ids=["of the daemon", "of the client"])
def test_stored_sessions_are_not_evicted_by_default(world: SessionHarness, max_sessions: int) -> None:
    """A new session is refused with a hint until the client closes one."""
    world.reopen(max_sessions=max_sessions)
    made = [world.create(on_disconnect="detach") for _ in range(min(4, max_sessions))]
    world.sessions.detach(world.sink)
    error = refused(ErrorCode.SESSION_LIMIT, world.create)
    assert (error.hint or "").startswith("Close one")
    assert ("sessions.when_full" in (error.hint or "")) is (max_sessions == 6)
    assert world.sessions.session_ids() == tuple(made)
    assert world.engine.released == []
    world.close(made[2])
    world.create()


def test_sessions_that_are_not_stored_are_evicted(world: SessionHarness) -> None:
    """The oldest of them is closed, though stored sessions are older."""
    made = [world.create(store=store) for store in (True, False, False, True)]
    world.sessions.detach(world.sink)
    world.create()
    assert world.engine.released == [made[1]]


def test_idle_session_expires(world: SessionHarness) -> None:
    """Use postpones the expiry without moving the timer; a running turn keeps the session."""
    session_id = world.create(ttl_s=10)
    assert world.timers[-1].delay_s == 10
    world.now += 6
    world.infer(session_id)
    world.now += 4
    world.fire()
    assert world.timers[-1].delay_s == 10
    world.engine.answer("Hello")
    world.now += 10
    world.fire()
    assert world.sink.last.op == "session_expired"
    assert world.engine.released == [session_id]
    refused(ErrorCode.SESSION_NOT_FOUND, world.get, session_id)


def test_closed_session_leaves_no_timer(world: SessionHarness) -> None:
    """Closing cancels the timer."""
    world.reopen(default_ttl_s=60)
    session_id = world.create()
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=session_id))
    assert world.timers[-1].cancelled


def test_tiny_ttl_is_raised_to_a_second(world: SessionHarness) -> None:
    """A session with a ttl of a nanosecond is checked once a second while it is busy."""
    request = requests.CreateSession(op="create_session", ttl_s=1e-9)
    created = world.sessions.create(world.client, request, world.sink)
    assert any("ttl_s" in warning for warning in created.warnings)
    world.infer(created.session_id)
    for _ in range(3):
        assert world.timers[-1].delay_s == 1.0
        world.now += 1.0
        world.fire()
    assert world.get(created.session_id).state == "busy"
    world.engine.answer("Hello")
    world.now += 1.0
    world.fire()
    refused(ErrorCode.SESSION_NOT_FOUND, world.get, created.session_id)


def test_many_sessions_expire_with_one_timer_in_batches(world: SessionHarness) -> None:
    """A thousand expiries at one time take one timer and batches of one hundred."""
    crowd = Principal("crowd", 1000, "normal", frozenset({"user"}))
    world.reopen(max_sessions=1000)
    for _ in range(1000):
        world.create(crowd, ttl_s=10)
    assert len(world.timers) == 1
    world.now += 10
    left = []
    while world.sessions.totals().total_sessions:
        world.fire()
        left.append(world.sessions.totals().total_sessions)
    assert left == list(range(900, -1, -100))
    assert [timer.delay_s for timer in world.timers] == [10.0] + [0.0] * 9


def test_closing_a_socket_reads_only_its_sessions(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detaching, counting and totals read no session of another socket."""
    crowd, other = Principal("crowd", 300, "normal", frozenset({"user"})), FakeSink()
    world.reopen(max_sessions=400)
    for _ in range(300):
        world.sessions.create(crowd, requests.CreateSession(op="create_session"), other)
    mine = [world.create() for _ in range(2)]
    world.infer(mine[0])
    looked = _looks(monkeypatch)
    world.sessions.detach(world.sink)
    assert world.sessions.totals().active_generations == 1
    assert world.sessions.session_counts("ada") == (2, 1)
    assert world.sessions.session_counts("crowd") == (300, 0)
    assert looked <= set(mine)


def test_stateless_session_is_evicted_without_a_scan(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one is closed, and no other is read."""
    others = [Principal(f"other-{n}", 1, "normal", frozenset({"user"})) for n in range(200)]
    world.reopen(max_sessions=200)
    request = requests.CreateSession(op="create_session")
    made = [world.sessions.create(each, request, world.sink, stateless=True).session_id for each in others]
    asked = requests.Infer(op="infer", session_id=made[0], prompt="Hi")
    world.sessions.infer(others[0], asked, world.sink)
    world.engine.answer("Hello")
    looked = _looks(monkeypatch)
    world.create()
    assert world.engine.released == [made[1]]
    assert made[1] in looked
    assert not looked & {made[0], *made[2:]}


def _looks(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    looked: set[str] = set()

    def watched(getter: Callable[[LiveSession], Any]) -> property:
        def get(session: LiveSession) -> Any:
            looked.add(session.config.session_id)
            return getter(session)

        return property(get)

    for name in ("sink", "state", "idle_s"):
        monkeypatch.setattr(LiveSession, name, watched(vars(LiveSession)[name].fget))
    return looked


_STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "resume", "detach", "close", "infer", "answer"]), st.integers(0, 5)),
    max_size=40,
)


@given(steps=_STEPS)
def test_indices_match_a_full_scan(steps: list[tuple[str, int]]) -> None:
    """After any operations the indices equal the result of a scan."""
    world = SessionHarness()
    sinks = [FakeSink() for _ in range(3)]
    names: list[str] = []
    for step, n in steps:
        _one_step(world, step, names, n=n, sink=sinks[n % 3])
        found = [session for name in names if (session := world.sessions._table.get(name)) is not None]
        for sink in sinks:
            attached = {session.config.session_id for session in world.sessions._table.attached_to(sink)}
            assert attached == {session.config.session_id for session in found if session.sink is sink}
        assert world.sessions.totals().active_generations == sum(session.state == "busy" for session in found)


def _one_step(world: SessionHarness, step: str, names: list[str], *, n: int, sink: FakeSink) -> None:
    name = names[n % len(names)] if names else "s_none"
    with contextlib.suppress(InferenceCenterError, IndexError, KeyError):
        match step:
            case "create":
                request = requests.CreateSession(op="create_session", on_disconnect="close" if n % 2 else "detach")
                names.append(world.sessions.create(world.client, request, sink).session_id)
            case "resume":
                world.resume(name, sink)
            case "detach":
                world.sessions.detach(sink)
            case "close":
                world.close(name)
            case "infer":
                world.sessions.infer(world.client, requests.Infer(op="infer", session_id=name, prompt="Hi"), sink)
            case "answer":
                world.engine.answer("Hello")


MI = 1024 * 1024


def test_text_of_a_client_is_limited(world: SessionHarness) -> None:
    """More text, also by a fork, is refused until a session is closed or rewound."""
    world.max_transcript_chars = 4 * MI
    world.reopen(max_client_mib=1)
    first = world.create(system="x" * (MI // 2))
    turn_id = world.turn(first, "y" * (MI // 4), "Hello")
    error = refused(ErrorCode.QUOTA_EXCEEDED, world.fork, first)
    assert "Close sessions" in (error.hint or "")
    refused(ErrorCode.QUOTA_EXCEEDED, world.create, system="x" * (MI // 3))
    refused(ErrorCode.QUOTA_EXCEEDED, world.append, first, ("user", "x" * (MI // 3)))
    refused(ErrorCode.QUOTA_EXCEEDED, world.infer, first, "x" * (MI // 3))
    assert world.get(first).state == "idle"
    world.create(EVE, system="x" * (MI // 2))
    second = world.create()
    world.append(second, ("user", "x" * 1000))
    world.rewind(first, "start")
    fork = world.fork(second)
    world.append(first, ("user", "z" * (MI // 4)))
    world.close(first)
    world.append(fork, ("user", "z" * (MI // 2)))
    assert turn_id


@given(st.lists(st.tuples(st.sampled_from(["create", "append", "turn", "fork", "rewind", "close"]), st.integers(0, 3))))
def test_text_usage_equals_the_size_of_the_histories(steps: list[tuple[str, int]]) -> None:
    """However sessions change, a client's sum equals the size of its histories."""
    world = SessionHarness()
    for step, n in steps:
        names = world.sessions.session_ids()
        name = names[n % len(names)] if names else "s_none"
        with contextlib.suppress(InferenceCenterError):
            match step:
                case "create":
                    world.create(system="s" * n)
                case "append":
                    world.append(name, ("user", "a" * n))
                case "turn":
                    world.turn(name, "q" * (n + 1), "answer")
                case "fork":
                    world.fork(name)
                case "rewind":
                    world.rewind(name, "start")
                case _:
                    world.close(name)
        sizes = (world.sessions.session_chars(world.client, each) for each in world.sessions.session_ids())
        assert world.sessions._text_quota.of("ada") == sum(sizes)


def test_restored_text_counts(world: SessionHarness) -> None:
    """The quota is the same after a restart."""
    session_id = world.create(system="x" * 100)
    world.turn(session_id, "Hi", "Hello")
    held = world.sessions._text_quota.of("ada")
    assert world.journal is not None
    kept_sessions = kept(world.journal.records)
    world.reopen().restore(kept_sessions, clean=True)
    assert world.sessions._text_quota.of("ada") == held == 107


def test_lists_are_paged_oldest_first(world: SessionHarness) -> None:
    """Pages have no gaps and contain only the client's own sessions."""
    world.create(EVE)
    own = [world.create(metadata={"n": str(n)}) for n in range(3)]
    first = world.sessions.list(world.client, requests.ListSessions(op="list_sessions", limit=2))
    assert ([session.session_id for session in first.sessions], first.next) == (own[:2], own[1])
    second = world.sessions.list(world.client, requests.ListSessions(op="list_sessions", limit=2, after=first.next))
    assert ([session.session_id for session in second.sessions], second.next) == (own[2:], None)
    assert second.sessions[0].metadata == {"n": "2"}


def test_totals_cover_all_sessions(world: SessionHarness) -> None:
    """They have running turns, sessions, all tokens, and speed and latency of the last turn."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id)
    totals = world.sessions.totals()
    assert (totals.active_generations, totals.total_sessions) == (1, 1)
    assert (totals.last_tps, totals.last_ttft_ms) == (4.0, 2.0)
    assert (totals.total_tokens_generated, totals.tokens_per_s) == (6, 0.6)


def test_raw_session_continues_plain_text(world: SessionHarness) -> None:
    """No template is applied and no special token is parsed."""
    session_id = world.create(mode="raw", system="Once <|im_end|>")
    world.infer(session_id, "upon")
    assert [(piece.text, piece.special) for piece in world.engine.last.pieces] == [("Once <|im_end|>upon", False)]
    world.engine.answer(" a time")
    assert world.transcript(session_id)[-1] == ("assistant", " a time")


def test_model_with_a_broken_template_serves_raw_sessions(world: SessionHarness) -> None:
    """The error names the template and suggests raw mode."""
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(chat_template="{% for %}"))
    error = refused(ErrorCode.INTERNAL, world.create)
    assert "raw" in (error.hint or "")
    world.create(mode="raw")
