"""Several models: the model of a session, its parameters, and models that are not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import requests
from inferencecenter.protocol.params import Params, decode
from inferencecenter.sessions.model_router import ModelRouter
from tests.sessions.conftest import BRACKETS, FakeEngines, InlineTemplates, SessionHarness, make_model, one_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.prompt.renderer import InlineRenderer
    from tests.sessions.conftest import FakeEngine


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


@pytest.fixture
def large(world: SessionHarness) -> FakeEngine:
    """A second model with another template and a larger context."""
    return world.add_model("large", chat_template=BRACKETS, n_ctx=4096, n_vocab=512)


def listed(world: SessionHarness) -> dict[str, str]:
    """The models of all sessions in the list."""
    page = world.sessions.list(world.client, requests.ListSessions(op="list_sessions"))
    return {session.session_id: session.model for session in page.sessions}


def sampling(engine: FakeEngine) -> dict[str, Any]:
    """The parameters set in the last submission, without its seed."""
    return decode(engine.last.params_json).model_dump(exclude_unset=True, exclude={"seed"})


# The model of a session.


def test_session_may_name_its_model_by_an_alias(world: SessionHarness, large: FakeEngine) -> None:
    """Its turns run on the alias's model."""
    world.engines.aliases["gpt"] = "large"
    created = world.create(model="gpt")
    assert listed(world)[created] == "large"


@pytest.mark.parametrize(("kind", "path"), [("embedding", "/v1/embeddings"), ("reranking", "/v1/rerank")])
def test_session_on_an_embedding_model_is_refused(
    world: SessionHarness, large: FakeEngine, kind: str, path: str
) -> None:
    """It is refused before the model is loaded; the error names the API for its requests."""
    world.engines.kinds["large"] = kind
    error = refused(ErrorCode.INVALID_REQUEST, world.create, model="large")
    assert error.field == "model"
    assert path in (error.hint or "")
    assert world.engines.wanted == []


def test_session_uses_the_model_it_names(world: SessionHarness, large: FakeEngine) -> None:
    """Its turns go to that model; without a name it uses the default."""
    named, other = world.create(model="large"), world.create()
    world.infer(named)
    assert large.last_text == "[user]Hi[assistant]"
    assert world.engine.submitted == []
    world.infer(other)
    assert "<|im_start|>user\nHi" in world.engine.last_text
    assert (world.get(named).model, world.get(named).n_ctx) == ("large", 4096)
    assert listed(world) == {named: "large", other: "toy"}


def test_session_without_a_model_follows_the_default(world: SessionHarness, large: FakeEngine) -> None:
    """A session that named a model keeps it when the default changes."""
    going, staying = world.create(), world.create(model="toy")
    toy, world.engines.default = world.engine, "large"
    assert listed(world) == {going: "large", staying: "toy"}
    assert (world.get(going).n_ctx, world.get(staying).n_ctx) == (4096, 1024)
    world.turn(going, "Hi", "Hello")
    world.infer(staying)
    assert (len(large.submitted), len(toy.submitted)) == (1, 1)
    assert [record.model for record in world.records] == ["large"]


def test_unknown_model_name_is_refused(world: SessionHarness, large: FakeEngine) -> None:
    """The error lists the available names."""
    error = refused(ErrorCode.MODEL_NOT_FOUND, world.create, model="gpt")
    assert (error.field, error.hint) == ("model", "There are large, toy.")
    refused(ErrorCode.MODEL_NOT_FOUND, world.create, model="")
    assert large.submitted == []


def test_sessions_of_a_removed_model_stay_readable(world: SessionHarness, large: FakeEngine) -> None:
    """They can be read and closed; a turn or a fork is refused with the name."""
    session_id = world.create(model="large")
    world.turn_on(large, session_id, "Hi", "Hello")
    before = world.get(session_id)
    del world.engines.engines["large"]
    assert world.get(session_id) == before
    refused(ErrorCode.MODEL_NOT_FOUND, world.infer, session_id)
    refused(ErrorCode.MODEL_NOT_FOUND, world.fork, session_id)
    world.close(session_id)


def test_all_engines_release_a_session(world: SessionHarness, large: FakeEngine) -> None:
    """Each engine that served it may hold KV."""
    session_id = world.create()
    world.close(session_id)
    assert world.engines.released == world.engine.released == large.released == [session_id]


def test_waits_are_estimated_per_model(world: SessionHarness, large: FakeEngine) -> None:
    """Turns of one model do not affect the estimate of another."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.engine.position = large.position = 1
    world.infer(session_id)
    assert world.sink.last.eta_ms is not None
    world.infer(world.create(model="large"))
    assert (world.sink.last.position, world.sink.last.eta_ms) == (1, None)


# Its parameters.


def test_parameter_levels_of_a_model(world: SessionHarness) -> None:
    """The client's override the common configuration's, which override the model's own and its file's."""
    recommended = b'{"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.1}'
    large = world.add_model("large", sampling_defaults_json=recommended)
    world.engines.own_params["large"] = {"top_k": 2, "top_p": 0.2, "min_p": 0.2}
    world.config_params = Params(top_p=0.3, min_p=0.3)
    world.reopen()
    session_id = world.create(model="large", params={"min_p": 0.4})
    world.infer(session_id)
    assert sampling(large) == {"temperature": 0.1, "top_k": 2, "top_p": 0.3, "min_p": 0.4}


def test_another_default_applies_its_own_parameters(world: SessionHarness) -> None:
    """Only the client's own parameters are kept; switching back restores all."""
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


def test_conflict_with_another_models_parameters_is_reported(world: SessionHarness) -> None:
    """The turn is refused, and the session stays open."""
    world.add_model("large", sampling_defaults_json=b'{"mirostat": 2}')
    session_id = world.create(params={"adaptive_target": 0.5})
    world.engines.default = "large"
    refused(ErrorCode.INVALID_REQUEST, world.infer, session_id)
    world.engines.default = "toy"
    world.infer(session_id)


# A model that is not loaded.


@pytest.mark.parametrize("state", [EngineState.STOPPED, EngineState.STARTING, EngineState.ASLEEP])
def test_first_use_loads_a_model(world: SessionHarness, state: EngineState) -> None:
    """Until then no session can be opened, forked or used; the error contains a retry delay."""
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


def test_turn_loads_an_offloaded_model(world: SessionHarness) -> None:
    """A turn loads it without an earlier request."""
    large = world.add_model("large")
    large.status = EngineStatus(EngineState.ASLEEP, model=make_model(name="large"))
    world.infer(world.create(model="large"))
    assert world.engines.wanted == []
    assert len(large.turns) == 1


def test_failed_load_gives_its_reason(world: SessionHarness) -> None:
    """The error of the request contains the reason."""
    world.add_model("large", loaded=False)
    world.engines.unloadable["large"] = InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "no tensors in it")
    assert refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large").message == "no tensors in it"


def test_file_error_is_reported_as_engine_unavailable(world: SessionHarness) -> None:
    """Its code is internal; clients receive the message."""
    world.add_model("large", loaded=False)
    reason = InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, "no GGUF file", hint="Pull it again.")
    world.engines.unloadable["large"] = reason
    error = refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large")
    assert (error.message, error.hint) == ("large cannot be loaded: no GGUF file", "Pull it again.")


def test_engine_lost_before_its_first_load_is_unavailable(world: SessionHarness) -> None:
    """The error says that it failed and may be retried."""
    large = world.add_model("large", loaded=False)
    large.status = EngineStatus(EngineState.BACKOFF, detail="it died")
    assert refused(ErrorCode.ENGINE_UNAVAILABLE, world.create, model="large").message == "it died"


def test_forbidden_model_is_not_loaded(world: SessionHarness) -> None:
    """Opening, forking and using a session on it are refused first."""
    large = world.add_model("large")
    session_id = world.create(model="large")
    large.status = EngineStatus(EngineState.ASLEEP)
    world.limits = AccessLimits(models=("toy",))
    refused(ErrorCode.FORBIDDEN, world.create, model="large")
    refused(ErrorCode.FORBIDDEN, world.fork, session_id)
    refused(ErrorCode.FORBIDDEN, world.infer, session_id)
    assert world.engines.wanted == []


# The cache of served models.


def test_one_served_model_per_engine() -> None:
    """Templates are compiled once per engine."""
    engines = FakeEngines()
    models = ModelRouter(engines, config_params=Params(), renderers=InlineTemplates())
    first = models.resolve(None)
    assert models.resolve("toy") is first
    assert first.loaded().renderer("chat") is first.loaded().renderer("chat")
    engines.engines = one_model(SessionHarness().engine).engines
    assert models.resolve(None) is not first
    assert repr(first) == "ServedModel('toy', ready)"


class RecordingTemplates(InlineTemplates):
    """Counts the renderers that are asked for."""

    def __init__(self) -> None:
        self.n_prepared = 0

    def of(self, model: ModelInfo) -> InlineRenderer:
        """Return the renderer of a model's template."""
        self.n_prepared += 1
        return super().of(model)


def test_template_of_a_loaded_model_is_prepared() -> None:
    """The first turn of a restored session does not wait for it; it is prepared once."""
    world = SessionHarness(renderers=(templates := RecordingTemplates()))
    world.sessions.engine_changed("toy", EngineStatus(EngineState.STARTING))
    assert templates.n_prepared == 0
    world.sessions.engine_changed("toy", EngineStatus(EngineState.READY))
    world.sessions.engine_changed("toy", EngineStatus(EngineState.READY))
    assert templates.n_prepared == 1
    world.infer(world.create())
    assert templates.n_prepared == 1


def test_model_without_a_usable_template_is_loaded_all_the_same() -> None:
    """Embedding models have no template; one that does not compile is reported to the sessions that use it."""
    world = SessionHarness(renderers=(templates := RecordingTemplates()))
    world.engines.kinds = {"toy": "embedding"}
    world.sessions.engine_changed("toy", EngineStatus(EngineState.READY))
    assert templates.n_prepared == 0
    world.engines.kinds = {}
    world.engine.status = EngineStatus(EngineState.READY, model=make_model(chat_template="{% broken"))
    world.sessions.engine_changed("toy", world.engine.status)
    assert templates.n_prepared == 1
    refused(ErrorCode.INTERNAL, world.create)
