"""The loaded model as new sessions need it: which one it is, what it recommends, how its conversations are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.params import Params, parse_params
from inferencecenter.sessions.template import ChatTemplate, RawText

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.protocol.values import Mode
    from inferencecenter.sessions.template import Renderer

_log = structlog.get_logger(__name__)


def loaded_model(status: EngineStatus, wanted: str | None) -> ModelInfo:
    """Return the loaded model, which is the one that is ``wanted`` by its name.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable`` or ``model_not_found``.
    """
    if status.model is None:
        if status.state is EngineState.STARTING:
            raise InferenceCenterError(
                ErrorCode.MODEL_LOADING, f"the model is loading: {status.load_fraction:.0%}", retry_after_ms=1000
            )
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, status.detail, retry_after_ms=1000)
    if wanted not in (None, status.model.name):
        raise InferenceCenterError(
            ErrorCode.MODEL_NOT_FOUND,
            f"no model is named {wanted[:64]!r}" if wanted else "the model's name is empty",
            field="model",
            hint=f"The loaded model is {status.model.name}.",
        )
    return status.model


def recommended_params(model: ModelInfo) -> Params:
    """Return what the model file recommends; a file in error recommends nothing."""
    try:
        return parse_params(orjson.loads(model.sampling_defaults_json or b"{}"), path="general.sampling")
    except (InferenceCenterError, orjson.JSONDecodeError) as error:
        _log.warning("model_recommendation_ignored", model=model.name, reason=str(error))
        return Params()


class Renderers:
    """The ways to write conversations; a model's template is compiled once."""

    def __init__(self) -> None:
        self._template: tuple[ModelInfo, ChatTemplate] | None = None

    def of(self, model: ModelInfo, mode: Mode) -> Renderer:
        """Return how a session of this mode writes its conversation.

        Raises:
            InferenceCenterError: ``internal`` when the model's template does not compile.
        """
        if mode == "raw":
            return RawText()
        if self._template is None or self._template[0] != model:
            self._template = (model, ChatTemplate(model))
        return self._template[1]
