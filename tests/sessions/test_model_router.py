"""Several models: which one a session has, with which parameters, and what is said of one that is not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import requests
from inferencecenter.protocol.params import Params, decode
from inferencecenter.sessions.model_router import ModelRouter
from tests.sessions.conftest import BRACKETS, FakeEngines, InlineTemplates, World, make_model, one_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sessions.conftest import FakeEngine, InlineTemplates


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


@pytest.fixture
def large(world: World) -> FakeEngine:
    """Another model beside the default one, with another template and more room."""
    return world.add_model("large", chat_template=BRACKETS, n_ctx=4096, n_vocab=512)


def listed(world: World) -> dict[str, str]:
    """The models of all sessions as a list shows them."""
    page = world.sessions.list(world.client, requests.ListSessions(op="list_sessions"))
    return {session.session_id: session.model for session in page.sessions}


def sampling(engine: FakeEngine) -> dict[str, Any]:
    """The parameters of the turn submitted last that were set by somebody, without its seed."""
    return decode(engine.last.params_json).model_dump(exclude_unset=True, exclude={"seed"})


# Which model a session has.


def test_a_session_has_the_model_that_it_names(world: World, large: FakeEngine) -> None:
    """Its turns go there, and it says so; one that names none has the default."""
    named, other = world.create(model="large"), world.create()
    world.infer(named)
    assert large.last_text == "[user]Hi[assistant]"
    assert world.engine.submitted == []
    world.infer(other)
    assert "<|im_start|>user\nHi" in world.engine.last_text
    assert (world.get(named).model, world.get(named).n_ctx) == ("large", 4096)
    assert listed(world) == {named: "large", other: "toy"}


def test_who_named_none_goes_with_the_default(world: World, large: FakeEngine) -> None:
    """Also when that changes; whoever named a model keeps it, be it the one that was the default."""
    going, staying = world.create(), world.create(model="toy")
    toy, world.engines.default = world.engine, "large"
    assert listed(world) == {going: "large", staying: "toy"}
    assert (world.get(going).n_ctx, world.get(staying).n_ctx) == (4096, 1024)
    world.turn(going, "Hi", "Hello")
    world.infer(staying)
    assert (len(large.submitted), len(toy.submitted)) == (1, 1)
    assert [record.model for record in world.records] == ["large"]


def test_a_name_that_nobody_has_is_refused(world: World, large: FakeEngine) -> None:
    """With the names that there are."""
    error = refused(ErrorCode.MODEL_NOT_FOUND, world.create, model="gpt")
    assert (error.field, error.hint) == ("model", "There are large, toy.")
    refused(ErrorCode.MODEL_NOT_FOUND, world.create, model="")
    assert large.submitted == []


def test_a_model_that_is_taken_away_leaves_its_sessions_readable(world: World, large: FakeEngine) -> None:
    """They are described as they were; a question or a fork says what is missing, and closing works."""
    session_id = world.create(model="large")
    world.turn_on(large, session_id, "Hi", "Hello")
    before = world.get(session_id)
    del world.engines.engines["large"]
    assert world.get(session_id) == before
    refused(ErrorCode.MODEL_NOT_FOUND, world.infer, session_id)
    refused(ErrorCode.MODEL_NOT_FOUND, world.fork, session_id)
    world.close(session_id)


def test_all_engines_forget_a_session(world: World, large: FakeEngine) -> None:
    """It may have left KV in each that it ever had."""
    session_id = world.create()
    world.close(session_id)
    assert world.engines.released == world.engine.released == large.released == [session_id]


def test_waits_are_told_by_model(world: World, large: FakeEngine) -> None:
    """How long turns of one take says nothing of another's."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.engine.position = large.position = 1
    world.infer(session_id)
    assert world.sink.last.eta_ms is not None
    world.infer(world.create(model="large"))
    assert (world.sink.last.position, world.sink.last.eta_ms) == (1, None)


# With which parameters.


def test_levels_of_a_model(world: World) -> None:
    """What its file recommends, what the configuration gives it, what that gives all, what the client sets."""
    recommended = b'{"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.1}'
    large = world.add_model("large", sampling_defaults_json=recommended)
    world.engines.own_params["large"] = {"top_k": 2, "top_p": 0.2, "min_p": 0.2}
    world.config_params = Params(top_p=0.3, min_p=0.3)
    world.reopen()
    session_id = world.create(model="large", params={"min_p": 0.4})
    world.infer(session_id)
    assert sampling(large) == {"temperature": 0.1, "top_k": 2, "top_p": 0.3, "min_p": 0.4}


def test_another_default_brings_its_own_parameters(world: World) -> None:
    """Of the session only what the client chose itself goes with it; going back, all is as it was."""
    world.engine.status = EngineStatus(
        EngineState.READY, model=make_model(sampling_defaults_json=b'{"temperature": 0.1, "top_k": 1}')
    )
    large = world.add_model("large", sampling_defaults_json=b'{"temperature": 0.9, "min_p": 0.2}')
    world.engines.own_params["large"] = {"top_p": 0.7}
    session_id = world.create(params={"min_p": 0.4})
    before = world.get(session_id).params
    world.engines.default = "large"
    after = world.get(session_id).params
    assert {name: value for name, value in after.items() if value != before[name]} == {
        "temperature": 0.9,
        "top_k": Params().top_k,
        "top_p": 0.7,
    }
    world.turn(session_id, "Hi", "Hello", params={"typical_p": 0.5})
    assert sampling(large) == {"temperature": 0.9, "min_p": 0.4, "top_p": 0.7, "typical_p": 0.5}
    world.engines.default = "toy"
    world.infer(session_id)
    assert sampling(world.engine) == {"temperature": 0.1, "top_k": 1, "min_p": 0.4}
    assert world.get(session_id).params == before


def test_a_conflict_with_another_models_parameters_is_told(world: World) -> None:
    """What the client chose was legal beside the first model's; beside another's it is refused, and nothing ends."""
    world.add_model("large", sampling_defaults_json=b'{"mirostat": 2}')
    session_id = world.create(params={"adaptive_target": 0.5})
    world.engines.default = "large"
    refused(ErrorCode.INVALID_REQUEST, world.infer, session_id)
    world.engines.default = "toy"
    world.infer(session_id)


# One that is not loaded.


@pytest.mark.parametrize("state", [EngineState.STOPPED, EngineState.STARTING, EngineState.ASLEEP])
def test_a_model_that_was_never_loaded_is_loaded_for_whoever_wants_it(world: World, state: EngineState) -> None:
    """A session cannot be opened, forked or used before; each time it is said when to ask again."""
    large = world.add_model("large")
    session_id = world.create(model="large")
    large.status = EngineStatus(state=state, load_fraction=0.25)
    for call, kwargs in ((world.create, {"model": "large"}), (world.infer, {}), (world.fork, {})):
        args = () if call == world.create else (session_id,)
        error = refused(ErrorCode.MODEL_LOADING, call, *args, **kwargs)
        assert (error.message, error.retry_after_ms) == ("large is loading: 25%", 1000)
    assert world.engines.wanted == ["large"] * 3
    assert (world.get(session_id).model, world.get(session_id).n_ctx) == ("large", 1024)
    large.ready(make_model(name="large"))
    world.infer(session_id)
    assert world.engines.wanted == ["large"] * 3


def test_a_model_that_sleeps_is_known(world: World) -> None:
    """Its turn wakes it; nobody has to ask for that first."""
    large = world.add_model("large")
    large.status = EngineStatus(EngineState.ASLEEP, model=make_model(name="large"))
    world.infer(world.create(model="large"))
    assert world.engines.wanted == []
    assert len(large.turns) == 1


def test_a_model_that_cannot_be_loaded_says_why(world: World) -> None:
    """Whoever wants it is told what went wrong."""
    world.add_model("large", loaded=False)
    world.engines.unloadable["large"] = InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "no tensors in it")
    assert refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large").message == "no tensors in it"


def test_what_is_wrong_with_a_file_is_told_in_words(world: World) -> None:
    """Its code is for the command line; a client hears that there is no engine, and why."""
    world.add_model("large", loaded=False)
    reason = InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, "no GGUF file", hint="Pull it again.")
    world.engines.unloadable["large"] = reason
    error = refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large")
    assert (error.message, error.hint) == ("large cannot be loaded: no GGUF file", "Pull it again.")


def test_a_lost_engine_of_an_unknown_model_is_told_as_such(world: World) -> None:
    """It is not loading: it has failed and may be tried again."""
    large = world.add_model("large", loaded=False)
    large.status = EngineStatus(EngineState.BACKOFF, detail="it died")
    assert refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large").message == "it died"


def test_who_may_not_use_a_model_has_nobody_load_it(world: World) -> None:
    """Refused before anything is done for it: to open, fork or use a session on it."""
    large = world.add_model("large")
    session_id = world.create(model="large")
    large.status = EngineStatus(EngineState.ASLEEP)
    world.limits = AccessLimits(models=("toy",))
    refused(ErrorCode.FORBIDDEN, world.create, model="large")
    refused(ErrorCode.FORBIDDEN, world.fork, session_id)
    refused(ErrorCode.FORBIDDEN, world.infer, session_id)
    assert world.engines.wanted == []


# The cache.


def test_one_serving_for_each_engine_of_a_name() -> None:
    """Templates are compiled once for a model, and anew for the engine that takes its place."""
    engines = FakeEngines()
    models = ModelRouter(engines, config_params=Params(), renderers=InlineTemplates())
    first = models.resolve(None)
    assert models.resolve("toy") is first
    assert first.renderer("chat") is first.renderer("chat")
    engines.engines = one_model(World().engine).engines
    assert models.resolve(None) is not first
    assert repr(first) == "ServedModel('toy', ready)"
