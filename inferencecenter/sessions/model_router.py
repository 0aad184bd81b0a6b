"""Resolves the model that serves a session, with its default parameters and its prompt renderer."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.model_fingerprint import fingerprint
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.params import Params, merge, parse_params
from inferencecenter.sessions.prompt.renderer import InlineRenderer, RawText

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.ipc.port import EnginePort, EngineStatus, ModelsPort
    from inferencecenter.protocol.values import Mode
    from inferencecenter.sessions.context import SessionConfig
    from inferencecenter.sessions.prompt.renderer import PromptRenderer, PromptRenderers

_RETRY_MS: Final = 1000
_LOST: Final = (EngineState.BACKOFF, EngineState.FAILED)

_log = structlog.get_logger(__name__)


class LoadedModel:
    """A model as an engine loaded it. Derived values are computed at first use and cached.

    Args:
        info: The model.
        renderers: Render conversations with the model's chat template.
    """

    def __init__(self, info: ModelInfo, renderers: PromptRenderers) -> None:
        self.info = info
        self._renderers = renderers

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the model's tokens; see ``fingerprint``."""
        return fingerprint(self.info)

    @cached_property
    def recommended(self) -> Params:
        """The parameters recommended by the model file."""
        return recommended_params(self.info)

    def renderer(self, mode: Mode) -> PromptRenderer:
        """Return the renderer for sessions of this mode.

        Raises:
            InferenceCenterError: ``internal`` if the model's template does not compile.
        """
        return self._raw if mode == "raw" else self._template

    @cached_property
    def _raw(self) -> PromptRenderer:
        return InlineRenderer(RawText(self.info.infill))

    @cached_property
    def _template(self) -> PromptRenderer:
        return self._renderers.of(self.info)


class ServedModel:
    """A model by its name, and its engine.

    An answer that has begun stays with its model even if the name is reassigned to another.

    Args:
        name: The model's name for clients.
        engine: The engine, loaded or not.
        ensure_loaded: Requests the load for a client; raises if the model cannot be loaded.
        renderers: Render conversations with the model's chat template.
    """

    def __init__(
        self, name: str, engine: EnginePort, *, ensure_loaded: Callable[[str], None], renderers: PromptRenderers
    ) -> None:
        self.name = name
        self.engine = engine
        self._ensure_loaded = ensure_loaded
        self._renderers = renderers
        self._loaded: LoadedModel | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.engine.status.state.value})"

    @property
    def last_loaded(self) -> LoadedModel | None:
        """The model as it was loaded last; ``None`` before the first load."""
        info = self.engine.model
        if info is None:
            return None
        if self._loaded is None or self._loaded.info is not info:
            self._loaded = LoadedModel(info, self._renderers)
        return self._loaded

    def loaded(self, client_id: str = "") -> LoadedModel:
        """Return the model; if it was never loaded, request its load for ``client_id``.

        Raises:
            InferenceCenterError: ``model_loading``, or ``engine_unavailable`` with the reason.
        """
        if (loaded := self.last_loaded) is not None:
            return loaded
        try:
            self._ensure_loaded(client_id)
        except InferenceCenterError as error:
            raise load_refusal(self.name, error) from error
        raise _not_loaded(self.name, self.engine.status)


class ModelRouter:
    """All models by name; a session without a chosen model uses the current default.

    Args:
        port: The models and their engines.
        config_params: The parameters of the configuration level, which apply to all models.
        renderers: Render conversations with chat templates.
    """

    def __init__(self, port: ModelsPort, *, config_params: Params, renderers: PromptRenderers) -> None:
        self._port = port
        self._renderers = renderers
        self._config_params = config_params
        self._served: dict[str, ServedModel] = {}

    def name(self, chosen: str | None) -> str:
        """Return the name of the model that serves now, whether it exists or not."""
        return self._port.default if chosen is None else self._port.aliases.get(chosen, chosen)

    def resolve(self, chosen: str | None) -> ServedModel:
        """Return the model that serves now.

        Raises:
            InferenceCenterError: ``model_not_found``, or ``invalid_request`` for one that generates no text.
        """
        name = self.name(chosen)
        engine = self._port.engine(name)
        serving = self._served.get(name)
        if serving is None or serving.engine is not engine:
            # A model of another kind has another engine.
            if (kind := self._port.kind_of(name)) != "chat":
                raise _generates_nothing(name, kind)
            serving = self._served[name] = ServedModel(
                name, engine, ensure_loaded=partial(self._port.ensure_loaded, name), renderers=self._renderers
            )
        return serving

    def prepare_template(self, name: str, status: EngineStatus) -> None:
        """Start the process of a model's chat template when the model is loaded.

        A session that was restored from disk would otherwise start it with its first turn, which takes 0.2 s longer.
        """
        if status.state is EngineState.READY and self._port.kind_of(name) == "chat":
            with suppress(InferenceCenterError):  # does not compile: reported to those who use it
                self.resolve(name).loaded().renderer("chat")

    def n_ctx(self, config: SessionConfig) -> int:
        """Return the current context size of a session in tokens; the initial one while it is unknown."""
        known = self._known(config.chosen_model)
        return known.info.n_ctx if known else config.n_ctx

    def base_params(self, serving: ServedModel) -> Params:
        """Return the default parameters of a model's sessions.

        Raises:
            InferenceCenterError: See ``ServedModel.loaded``.
        """
        own = parse_params(dict(self._port.params_of(serving.name)), path=f"models.{serving.name}.params")
        return merge(Params(), serving.loaded().recommended, own, self._config_params)

    def current_params(self, config: SessionConfig) -> Params:
        """Return a session's effective parameters."""
        return self.params(config, self.name(config.chosen_model))

    def params(self, config: SessionConfig, name: str) -> Params:
        """Return a session's effective parameters with the model ``name``.

        With its first model they are unchanged, also while the other model is unknown.
        """
        if name == config.model or self._known(name) is None:
            return config.params
        chosen = {parameter: getattr(config.params, parameter) for parameter in config.chosen}
        return self.base_params(self.resolve(name)).model_copy(update=chosen)

    def seeing(self) -> tuple[str, ...]:
        """Return the names of the models that take images."""
        return tuple(name for name in self._port.names if self._port.sees(name))

    def release(self, session_id: str) -> None:
        self._port.release(session_id)

    def _known(self, chosen: str | None) -> LoadedModel | None:
        try:
            return self.resolve(chosen).last_loaded
        except InferenceCenterError:
            return None


def load_refusal(name: str, error: InferenceCenterError) -> InferenceCenterError:
    """Return why a model cannot be loaded, for clients: the code of a defect in its file is for the operator."""
    if error.spec.on_wire:
        return error
    message = f"{name} cannot be loaded: {error.message}"
    return InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, message, hint=error.hint)


def recommended_params(model: ModelInfo) -> Params:
    """Return the parameters that the model file recommends; an invalid recommendation is ignored."""
    try:
        return parse_params(orjson.loads(model.sampling_defaults_json or b"{}"), path="general.sampling")
    except (InferenceCenterError, orjson.JSONDecodeError) as error:
        _log.warning("model_recommendation_ignored", model=model.name, reason=str(error))
        return Params()


def _generates_nothing(name: str, kind: str) -> InferenceCenterError:
    does, path = ("makes embeddings", "embeddings") if kind == "embedding" else ("ranks documents", "rerank")
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{name} {does} and generates no text",
        field="model",
        hint=f"Choose a chat model, or send the texts to /v1/{path}.",
    )


def _not_loaded(name: str, engine: EngineStatus) -> InferenceCenterError:
    if engine.state in _LOST:
        return InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, engine.detail, retry_after_ms=_RETRY_MS)
    return InferenceCenterError(
        ErrorCode.MODEL_LOADING, f"{name} is loading: {engine.load_fraction:.0%}", retry_after_ms=_RETRY_MS
    )
