"""The loaded model as sessions need it: which one it is, what it recommends, how its conversations are written."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.params import Params, parse_params
from inferencecenter.sessions.template import ChatTemplate, RawText

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.ipc.port import EnginePort, EngineStatus
    from inferencecenter.protocol.values import Mode
    from inferencecenter.sessions.template import Renderer

_FINGERPRINT_CHARS: Final = 32

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


class Serving:
    """The model that serves now, and how it writes conversations; its template is compiled once.

    Args:
        engine: What knows the model.
    """

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._template: tuple[str, ChatTemplate] | None = None
        self._named: tuple[ModelInfo, str] | None = None

    @property
    def known(self) -> ModelInfo | None:
        """The model that was loaded last; none before the first one is."""
        return self._engine.status.model

    def model(self, wanted: str | None = None) -> ModelInfo:
        """Return the loaded model, which is the one that is ``wanted`` by its name.

        Raises:
            InferenceCenterError: See ``loaded_model``.
        """
        return loaded_model(self._engine.status, wanted)

    def made_by(self) -> str:
        """Return the name under which the model's tokens are kept: see ``fingerprint``.

        Raises:
            InferenceCenterError: See ``loaded_model``.
        """
        model = self.model()
        if self._named is None or self._named[0] is not model:
            self._named = (model, fingerprint(model))
        return self._named[1]

    def renderer(self, mode: Mode) -> Renderer:
        """Return how the model has a session of this mode written.

        Raises:
            InferenceCenterError: ``internal`` when its template does not compile, and see ``loaded_model``.
        """
        if mode == "raw":
            return RawText()
        made_by = self.made_by()
        if self._template is None or self._template[0] != made_by:
            self._template = (made_by, ChatTemplate(self.model()))
        return self._template[1]


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
