"""The bundled demo model: a few million parameters that chat, count, remember and name simple pictures."""

from importlib.resources import files
from pathlib import Path

__all__ = ["demo_model_path", "demo_projector_path"]


def demo_model_path() -> Path:
    """Returns the path of the GGUF file that ships with the package."""
    return Path(str(files(__name__).joinpath("demo.gguf")))


def demo_projector_path() -> Path:
    """Returns the path of its projector, by which it takes images."""
    return Path(str(files(__name__).joinpath("mmproj-demo.gguf")))
