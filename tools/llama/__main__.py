"""llama.cpp and its bindings, for this Python's environment or as wheels.

``python -m tools.llama install``, ``wheels FOLDER``, or ``unpack FOLDER`` for the libraries alone, as ``LLAMA`` and
``LLAMA_CPP_LIB_PATH`` name them. docs/building.md documents the variables that select the build. It runs before
anything is installed and needs only Python with pip and, without a cached build, a C++ compiler. The output of its
commands is in ``<environment>/llama.log``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.llama.build import Builder, BuildError
from tools.llama.cache import Cache, cache_root
from tools.llama.installation import Installation
from tools.llama.packing import unpack_libraries
from tools.llama.progress import Progress
from tools.llama.recipe import COMPILED, Recipe, toolkit_hints

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[2]
LOG_NAME: Final = "llama.log"


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.llama", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install the bindings and the libraries into this environment")
    for name, purpose in (("wheels", "write both as wheels"), ("unpack", "write the libraries into a folder")):
        commands.add_parser(name, help=purpose).add_argument("folder", type=Path)
    arguments = parser.parse_args()
    environment = Path(sys.prefix)
    try:
        with Progress.to(sys.stdout) as progress, (environment / LOG_NAME).open("w", encoding="utf-8") as log:
            cache = Cache(cache_root(os.environ), progress)
            version = wanted_version(ROOT / "pyproject.toml")
            with Builder(version, progress=progress, log=log) as builder:
                if arguments.command == "install":
                    _install(Installation(environment, version), cache, builder, os.environ)
                    return 0
                libraries = cache.libraries(Recipe.from_environment(version, os.environ), builder)
                if arguments.command == "unpack":
                    unpack_libraries(next(libraries.glob("*.whl")), arguments.folder)
                else:
                    cache.copy(cache.bindings(builder), arguments.folder)
                    cache.copy(libraries, arguments.folder)
    except BuildError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


def wanted_version(pyproject: Path) -> str:
    """Return the version of llama-cpp-python that the daemon requires."""
    server = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["optional-dependencies"]["server"]
    return str(next(each.partition("==")[2] for each in server if each.startswith("llama-cpp-python==")))


def _install(installation: Installation, cache: Cache, builder: Builder, environment: Mapping[str, str]) -> None:
    if environment.get("LLAMA"):
        installation.install(cache.bindings(builder))
        return
    recipe = Recipe.from_environment(builder.version, environment, before=installation.kind)
    if installation.came_from_index(recipe.kind) and not any(map(environment.get, COMPILED)):
        return
    index = environment.get("LLAMA_WHEELS")
    if index and installation.install_from(index, recipe.kind, progress=builder.progress):
        return
    if installation.has(recipe):
        return
    installation.install(cache.bindings(builder), cache.libraries(recipe, builder), name=recipe.name)
    if recipe.kind == "cpu":
        for hint in toolkit_hints():
            builder.progress.print_line(hint)


if __name__ == "__main__":
    sys.exit(main())
