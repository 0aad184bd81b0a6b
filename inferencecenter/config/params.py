"""Parameters of the configuration: those of all models, and those of single models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import Params, parse_params

if TYPE_CHECKING:
    from inferencecenter.config.settings import Settings


def parse_config_params(settings: Settings) -> Params:
    """Validate all parameters of the configuration and return those that apply to all models.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    try:
        for name, entry in settings.models.items():
            parse_params(entry.params, path=f"models.{name}.params")
        return parse_params(settings.params)
    except InferenceCenterError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, error.message, hint=error.hint, field=error.field
        ) from error
