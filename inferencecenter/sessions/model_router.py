"""Resolves which model serves a session, with its default parameters and its prompt renderer."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.params import Params, merge, parse_params
from inferencecenter.sessions.prompt.renderer import InlineRenderer
from inferencecenter.sessions.prompt.template import RawText

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.ipc.port import EnginePort, EngineStatus, ModelsPort
    from inferencecenter.protocol.values import Mode
    from inferencecenter.sessions.prompt.renderer import PromptRenderer, PromptRenderers
    from inferencecenter.sessions.session_config import SessionConfig

_FINGERPRINT_CHARS: Final = 32
_RETRY_MS: Final = 1000
_RAW: Final = InlineRenderer(RawText())
_LOST: Final = (EngineState.BACKOFF, EngineState.FAILED)

_log = structlog.get_logger(__name__)


class ServedModel:
    """A model and its engine, and what renders its conversations.

    A turn that has begun stays with the one that it has, also when another serves under the same name.

    Args:
        name: What clients call it.
        engine: What runs it, loaded or not.
        want: Has it loaded for a client; raises if it cannot be.
        renderers: What renders conversations with its chat template.
    """

    def __init__(
        self, name: str, engine: EnginePort, *, want: Callable[[str], None], renderers: PromptRenderers
    ) -> None:
        self.name = name
        self.engine = engine
        self._want = want
        self._renderers = renderers
        self._renderer: tuple[str, PromptRenderer] | None = None
        self._named: tuple[ModelInfo, str] | None = None
        self._recommended: tuple[ModelInfo, Params] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.engine.status.state.value})"

    @property
    def known(self) -> ModelInfo | None:
        """The model as it was loaded last; none before it first is."""
        return self.engine.status.model

    def model(self, client_id: str = "") -> ModelInfo:
        """Return the model; one that was never loaded is loaded from now on, for this client where one is named.

        Raises:
            InferenceCenterError: ``model_loading``, or ``engine_unavailable`` with the reason.
        """
        if (model := self.known) is not None:
            return model
        try:
            self._want(client_id)
        except InferenceCenterError as error:
            if error.spec.on_wire:
                raise
            # What is wrong with a file is the operator's to know by its code; others are told in words.
            message = f"{self.name} cannot be loaded: {error.message}"
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, message, hint=error.hint) from error
        raise _not_loaded(self.name, self.engine.status)

    def fingerprint(self) -> str:
        """Return the name under which the model's tokens are kept: see ``fingerprint``.

        Raises:
            InferenceCenterError: See ``model``.
        """
        model = self.model()
        if self._named is None or self._named[0] is not model:
            self._named = (model, fingerprint(model))
        return self._named[1]

    def recommended(self) -> Params:
        """Return what the model's file recommends.

        Raises:
            InferenceCenterError: See ``model``.
        """
        model = self.model()
        if self._recommended is None or self._recommended[0] is not model:
            self._recommended = (model, recommended_params(model))
        return self._recommended[1]

    def renderer(self, mode: Mode) -> PromptRenderer:
        """Return what renders sessions of this mode.

        Raises:
            InferenceCenterError: ``internal`` when the model's template is known not to compile, and see ``model``.
        """
        if mode == "raw":
            return _RAW
        model_fingerprint = self.fingerprint()
        if self._renderer is None or self._renderer[0] != model_fingerprint:
            self._renderer = (model_fingerprint, self._renderers.of(self.model()))
        return self._renderer[1]


class ModelRouter:
    """All models, by the name that a session has chosen; one that has chosen none has the default of the moment.

    Args:
        port: What runs them.
        config_params: The configuration's level of parameters, which is the same for all.
        renderers: What renders conversations with chat templates.
    """

    def __init__(self, port: ModelsPort, *, config_params: Params, renderers: PromptRenderers) -> None:
        self._port = port
        self._renderers = renderers
        self._config_params = config_params
        self._servings: dict[str, ServedModel] = {}

    def name(self, chosen: str | None) -> str:
        """Return the name of the model that answers now, whether there is one of that name or not."""
        return self._port.default if chosen is None else chosen

    def resolve(self, chosen: str | None) -> ServedModel:
        """Return the model that answers now.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        name = self.name(chosen)
        engine = self._port.engine(name)
        serving = self._servings.get(name)
        if serving is None or serving.engine is not engine:
            serving = self._servings[name] = ServedModel(
                name, engine, want=partial(self._port.ensure_loaded, name), renderers=self._renderers
            )
        return serving

    def n_ctx(self, config: SessionConfig) -> int:
        """Return how many tokens a session's context holds now; as in its beginning while that is not known."""
        known = self._known(config.chosen_model)
        return known.n_ctx if known else config.n_ctx

    def base_params(self, serving: ServedModel) -> Params:
        """Return what holds for sessions of a model that set nothing themselves.

        Raises:
            InferenceCenterError: See ``ServedModel.model``.
        """
        own = parse_params(dict(self._port.params_of(serving.name)), path=f"models.{serving.name}.params")
        return merge(Params(), serving.recommended(), own, self._config_params)

    def current_params(self, config: SessionConfig) -> Params:
        """Return a session's effective parameters."""
        return self.params(config, self.name(config.chosen_model))

    def params(self, config: SessionConfig, name: str) -> Params:
        """Return a session's effective parameters while the model ``name`` answers.

        With the model of its beginning they are what they were. They are that, too, while nothing is known of another.
        """
        if name == config.model or self._known(name) is None:
            return config.params
        chosen = {parameter: getattr(config.params, parameter) for parameter in config.chosen}
        return self.base_params(self.resolve(name)).model_copy(update=chosen)

    def release(self, session_id: str) -> None:
        """Let all engines forget a session."""
        self._port.release(session_id)

    def _known(self, chosen: str | None) -> ModelInfo | None:
        try:
            return self.resolve(chosen).known
        except InferenceCenterError:
            return None


def recommended_params(model: ModelInfo) -> Params:
    """Return what the model file recommends; a file in error recommends nothing."""
    try:
        return parse_params(orjson.loads(model.sampling_defaults_json or b"{}"), path="general.sampling")
    except (InferenceCenterError, orjson.JSONDecodeError) as error:
        _log.warning("model_recommendation_ignored", model=model.name, reason=str(error))
        return Params()


def fingerprint(model: ModelInfo) -> str:
    """Return a digest of what gives token ids their meaning and a conversation its form, as far as the front knows it.

    The names are part of it, since two vocabularies of one size can differ.
    """
    meaning = (
        model.name,
        model.architecture,
        model.n_params,
        model.n_vocab,
        model.chat_template,
        model.bos_token,
        model.eos_token,
        model.add_bos,
        model.special_tokens,
    )
    return hashlib.sha256(orjson.dumps(meaning)).hexdigest()[:_FINGERPRINT_CHARS]


def _not_loaded(name: str, engine: EngineStatus) -> InferenceCenterError:
    """Return why a model that was never loaded cannot answer yet."""
    if engine.state in _LOST:
        return InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, engine.detail, retry_after_ms=_RETRY_MS)
    return InferenceCenterError(
        ErrorCode.MODEL_LOADING, f"{name} is loading: {engine.load_fraction:.0%}", retry_after_ms=_RETRY_MS
    )
