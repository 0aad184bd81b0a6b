"""What settings are made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

Priority = Literal["interactive", "normal", "batch"]


def expand(path: Path) -> Path:
    """Return ``path`` absolute, with ``~`` and environment variables replaced."""
    return Path(os.path.expandvars(path)).expanduser().absolute()


ExpandedPath = Annotated[Path, AfterValidator(expand)]


class Section(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
