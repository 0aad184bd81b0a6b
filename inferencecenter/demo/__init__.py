"""The bundled demo model: a few million parameters that chat, count and remember."""

from importlib.resources import files
from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """Returns the path of the GGUF file that ships with the package."""
    return Path(str(files(__name__).joinpath("demo.gguf")))
