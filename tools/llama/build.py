"""Builds the bindings' wheel and the libraries' wheel from one source distribution of llama-cpp-python.

The bindings are pure Python. ``CMakeLists.txt`` beside this file builds the parts of llama.cpp that they load.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Self, TextIO

from tools.llama.packing import pack, unpack_libraries
from tools.llama.progress import Compilation, Progress, shown
from tools.llama.recipe import CMAKE_PROJECT, Recipe, find_program, search_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

BINDINGS: Final = "llama-cpp-python"
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_LEAST_CMAKE: Final = (3, 21)
_SHOWN_LINES: Final = 40
_TICK_S: Final = 1.0
# The parts of the sources, which have 180 MB, that are unpacked.
_NEEDED: Final = ("llama_cpp", "pyproject.toml", "README.md", "LICENSE.md", "CMakeLists.txt")
_NEEDED_OF_LLAMA: Final = (
    *("CMakeLists.txt", "LICENSE", "licenses", "cmake", "ggml", "include", "src", "vendor", "tools/mtmd"),
)
# GCC compiles llama.cpp's kernels for AMX to code that crashes: the tile configuration is optimized away.
_NO_AMX: Final = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class BuildError(Exception):
    """A missing requirement or a failed build step."""


class Builder:
    """Builds in a temporary folder, removed by ``with``; the sources are downloaded on first use."""

    def __init__(self, version: str, *, progress: Progress, log: TextIO) -> None:
        self.version = version
        self.progress = progress
        self._log = log
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def bindings(self, folder: Path) -> None:
        """Write the wheel of the bindings, which contains no libraries, into a folder."""
        sources = self._sources
        self.progress.begin(f"{BINDINGS}: packing")
        # Debian 12's pip does not know the short -C.
        options = ["--no-deps", "--no-build-isolation", "--config-settings", "wheel.cmake=false", "-w", folder]
        self._run([*PIP, "wheel", *options, sources], self._with_tools(os.environ))

    def libraries(self, recipe: Recipe, folder: Path, *, base: Path | None = None) -> None:
        """Compile the libraries and write their wheel into a folder.

        With the entry of the recipe's base only the added backends are compiled, and what registers them.
        """
        environment = self._compilers(recipe)
        sources = self._sources
        began = time.monotonic()
        self.progress.begin("llama.cpp: configuring")
        built = self._scratch / f"build-{recipe.name}"
        llama = sources / "vendor/llama.cpp"
        command: list[str | Path] = [
            "cmake",
            "-S",
            CMAKE_PROJECT,
            "-B",
            built,
            "-G",
            "Ninja",
            f"-DLLAMA_SOURCES={llama}",
        ]
        shared = self._scratch / f"base-{recipe.name}"
        if base is not None:
            unpack_libraries(next(base.glob("*.whl")), shared)
            command.append(f"-DBASE={shared}")
        self._run([*command, *recipe.arguments], environment)
        self.progress.begin("llama.cpp" if base is None else "llama.cpp: backends")
        ninja = ["ninja", "-C", str(built)]
        if jobs := environment.get("CMAKE_BUILD_PARALLEL_LEVEL"):
            ninja += ["-j", jobs]
        # A dry run would only show that CMake runs again, because its files glob for shaders.
        targets = subprocess.run(  # noqa: S603 - ninja, as above
            [*ninja, "-t", "targets", "all"], env=environment, capture_output=True, text=True, check=False
        )
        objects = "" if base is None else "llama.cpp/ggml/"
        compilation = Compilation([line for line in targets.stdout.splitlines() if line.startswith(objects)])

        def on_line(line: str) -> None:
            compilation.read(line)
            self.progress.update(str(compilation))

        if recipe.kind == "vulkan":
            environment.setdefault("CMAKE_TOOLCHAIN_FILE", str(CMAKE_PROJECT / "shaders.cmake"))
        self._run([*ninja, *([] if base is None else ["ggml"])], environment, on_line=on_line)
        if base is not None:
            for library in shared.glob("lib*.so"):
                if not (place := built / "bin" / library.name).exists():
                    shutil.copy(library, place)
        pack(built / "bin", folder, version=self.version, label=recipe.label, license_file=llama / "LICENSE")
        self.progress.print_line(f"llama.cpp: compiled in {shown(time.monotonic() - began)}")

    def _compilers(self, recipe: Recipe) -> dict[str, str]:
        """Return the environment of the build.

        Raises:
            BuildError: A compiler is missing.
        """
        environment = dict(os.environ) | {"PATH": search_path(), "NINJA_STATUS": "[%f/%t] "}
        if not any(map(find_program, [*shlex.split(environment.get("CXX", ""))[:1], "c++", "g++"])):
            raise BuildError("there is no C++ compiler (Debian: apt install g++)")
        if recipe.kind == "cuda" and not find_program("nvcc"):
            raise BuildError("CUDA=1 needs nvcc; install the CUDA toolkit or add its bin folder to PATH")
        if recipe.kind == "vulkan" and not find_program("glslc"):
            raise BuildError("VULKAN=1 needs glslc and headers (Debian: apt install libvulkan-dev glslc spirv-headers)")
        if not recipe.portable and _makes_amx(environment):
            for name in ("CFLAGS", "CXXFLAGS"):
                environment[name] = f"{environment.get(name, '')} {_NO_AMX}"
        return self._with_tools(environment)

    @cached_property
    def _scratch(self) -> Path:
        return Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="inferencecenter-llama-")))

    @cached_property
    def _sources(self) -> Path:
        """The unpacked source distribution."""
        environment = self._with_tools(os.environ)
        self.progress.begin(f"llama.cpp: fetching the sources of {BINDINGS} {self.version}")
        wanted = f"{BINDINGS}=={self.version}"
        fetched = self._scratch / "fetched"
        download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", BINDINGS, "-d", fetched, wanted]
        self._run([*PIP, *download], environment)
        (archive,) = fetched.glob("*.tar.gz")
        unpack(archive, self._scratch)
        archive.unlink()
        (place,) = self._scratch.glob("llama_cpp_python-*")
        return place

    @cached_property
    def _tools(self) -> Path:
        """A folder of Python packages: the build backend, and CMake and ninja if the system lacks them."""
        missing = [name for name, there in (("cmake", _has_cmake()), ("ninja", shutil.which("ninja"))) if not there]
        self.progress.begin("llama.cpp: fetching the tools of its build")
        folder = self._scratch / "tools"
        wanted = ["scikit-build-core[pyproject]", *missing]
        self._run([*PIP, "install", "--quiet", "--target", folder, *wanted], os.environ)
        return folder

    def _with_tools(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {
            **environment,
            "PATH": os.pathsep.join([str(self._tools / "bin"), environment["PATH"]]),
            "PYTHONPATH": str(self._tools),
        }

    def _run(
        self,
        command: Sequence[object],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Run a command and log its output; ``on_line`` gets each line, or an empty one after a second without output.

        Raises:
            BuildError: It failed; the message has the end of its output.
        """
        words = [str(each) for each in command]
        self._log.write(f"\n== {' '.join(words)}\n")
        self._log.flush()
        written: list[str] = []
        with subprocess.Popen(  # noqa: S603 - commands of this module
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in _lines(process.stdout.fileno()):
                if line:
                    self._log.write(line)
                    self._log.flush()
                    written.append(line)
                if on_line is not None:
                    on_line(line)
        if process.returncode != 0:
            end = "".join(written[-_SHOWN_LINES:])
            raise BuildError(f"{words[0]} failed with {process.returncode}; the end of {self._log.name}:\n{end}")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the needed parts of a source distribution."""
    with tarfile.open(archive) as tar:
        # Debian 12's Python has no filters; later ones have them, and warn where none is named.
        if (data_filter := getattr(tarfile, "data_filter", None)) is not None:
            tar.extraction_filter = data_filter
        tar.extractall(folder, [each for each in tar if _is_needed(each.name)])  # noqa: S202 - filtered above


def _lines(descriptor: int) -> Iterator[str]:
    """Yield the lines read from a pipe, and an empty line for each second without one."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        pending = b""
        while True:
            if not selector.select(_TICK_S):
                yield ""
                continue
            if not (read := os.read(descriptor, 65536)):
                break
            *whole, pending = (pending + read).split(b"\n")
            yield from (f"{line.decode(errors='replace')}\n" for line in whole)
        if pending:
            yield f"{pending.decode(errors='replace')}\n"


def _is_needed(name: str) -> bool:
    """Return whether the bindings or the libraries need a file of the source distribution."""
    inside = PurePosixPath(*PurePosixPath(name).parts[1:])
    llama = PurePosixPath("vendor/llama.cpp")
    return any(inside.is_relative_to(each) for each in _NEEDED) or any(
        inside.is_relative_to(llama / each) for each in _NEEDED_OF_LLAMA
    )


def _has_cmake() -> bool:
    try:
        done = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True)
        version = tuple(int(each) for each in done.stdout.split()[2].split(".")[:2])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return False
    return version >= _LEAST_CMAKE


def _makes_amx(environment: Mapping[str, str]) -> bool:
    """Return whether the compiler generates AMX code for this CPU."""
    command = [*shlex.split(environment.get("CC", "cc")), "-march=native", "-dM", "-E", "-"]
    done = subprocess.run(  # noqa: S603 - the compiler that builds
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return "__AMX_TILE__" in done.stdout
