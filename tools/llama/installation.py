"""The environment that llama.cpp is installed into, and its contents."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.llama.build import BINDINGS, PIP, BuildError
from tools.llama.packing import DISTRIBUTION, PACKAGE

if TYPE_CHECKING:
    from tools.llama.progress import Progress
    from tools.llama.recipe import Recipe

MARK: Final = ".llama"
"""File in the environment with the name of the installed build."""

# pip's message for an unreachable index, without the memory address of the connection.
_UNREACHABLE: Final = re.compile(r"connection broken by '?(?:\w+\([\"'](?:<[^>]*>: )?)?(.+?)[\"')]*: /", re.IGNORECASE)


class Installation:
    """The environment of this Python, into which pip installs; a file in it has the name of the installed build."""

    def __init__(self, environment: Path, version: str) -> None:
        self._mark = environment / MARK
        self._version = version

    @property
    def kind(self) -> str:
        """The kind of the installed libraries, which an update keeps."""
        return self._name().partition("-")[2].partition("-")[0].partition(".")[0]

    def has(self, recipe: Recipe) -> bool:
        """Return whether exactly this build and its bindings are installed."""
        place = Path(sysconfig.get_path("purelib"), PACKAGE, "lib", "libllama.so")
        return self._name() == recipe.name and place.exists() and _bindings() == self._version

    def came_from_index(self, kind: str) -> bool:
        """Return whether wheels of a package index are installed, of the right version and kind."""
        return self._name() == self._from_index(kind) and _bindings() == self._version

    def install(self, bindings: Path, libraries: Path | None = None, *, name: str = "") -> None:
        """Install the wheels of these cache entries, and store the name of the build."""
        wheels = [str(wheel) for entry in (bindings, libraries) if entry is not None for wheel in entry.glob("*.whl")]
        _pip("install", "--no-index", "--no-deps", "--force-reinstall", *wheels, check=True)
        if libraries is not None:
            self._mark.write_text(f"{name}\n", encoding="utf-8")

    def install_from(self, index: str, kind: str, *, progress: Progress) -> bool:
        """Install wheels of exactly this version and kind from a package index; return whether it has them.

        These are either the two wheels that ``make wheels`` builds, preferably portable, or a wheel of the bindings
        that contains the libraries.
        """
        progress.begin(f"llama.cpp: looking for wheels of {BINDINGS} {self._version} in LLAMA_WHEELS")
        bindings = f"{BINDINGS}=={self._version}"
        libraries = [f"{DISTRIBUTION}=={self._version}+{label}" for label in (f"{kind}.portable", kind)]
        wanted = {"libllama.so"} if kind == "cpu" else {"libllama.so", f"libggml-{kind}.so"}
        with tempfile.TemporaryDirectory() as folder:
            for names in (*([bindings, each] for each in libraries), [bindings]):
                options = ("--index-url", index, "--retries", "1", "--only-binary", ":all:", "--no-deps", "--no-input")
                done = _pip("download", *options, "-d", folder, *names)
                wheels = [str(wheel) for wheel in Path(folder).glob("*.whl")]
                if done.returncode == 0 and wanted <= _files(wheels):
                    _pip("uninstall", "--yes", DISTRIBUTION)
                    _pip("install", "--no-index", "--no-deps", "--force-reinstall", *wheels, check=True)
                    self._mark.write_text(f"{self._from_index(kind)}\n", encoding="utf-8")
                    return True
                if unreachable := _UNREACHABLE.search(done.stderr):
                    break
        failure = done.stderr.strip().splitlines() if done.returncode != 0 else []
        if unreachable:
            reason = f"cannot be reached: {unreachable[1]}"
        else:
            why = failure[-1] if failure else f"its wheel of {BINDINGS} lacks {' or '.join(sorted(wanted))}"
            reason = f"has no libraries for it ({why})"
        progress.print_line(f"llama.cpp is compiled: LLAMA_WHEELS {reason}")
        return False

    def _from_index(self, kind: str) -> str:
        return f"{self._version}-{kind}-index"

    def _name(self) -> str:
        try:
            return self._mark.read_text(encoding="utf-8").strip()
        except OSError:
            return ""


def _bindings() -> str:
    try:
        return metadata.version(BINDINGS)
    except metadata.PackageNotFoundError:
        return ""


def _files(wheels: list[str]) -> set[str]:
    """Return the names of the files in wheels, without their folders."""
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            found |= {name.rpartition("/")[2] for name in opened.namelist()}
    return found


def _pip(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip.

    Raises:
        BuildError: It failed, and ``check`` is set.
    """
    done = subprocess.run(  # noqa: S603 - this Python's pip
        [*PIP, *arguments], capture_output=True, text=True, check=False
    )
    if check and done.returncode != 0:
        raise BuildError(f"pip {arguments[0]} failed: {done.stderr.strip()}")
    return done
