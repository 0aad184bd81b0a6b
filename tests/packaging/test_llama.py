"""How llama.cpp comes into an environment: what is built, where it is kept, how it is packed, what is said."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import threading
import tomllib
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.llama.library import VERSION_FILE
from inferencecenter.hardware.ggml import library_dir
from tools.llama import __main__ as command
from tools.llama import build, installation, packing, recipe
from tools.llama.build import Builder, BuildError
from tools.llama.cache import SUMS, Cache, cache_root, is_whole
from tools.llama.installation import MARK, Installation
from tools.llama.progress import Compilation, Progress
from tools.llama.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"


class Silent(Progress):
    """Progress that keeps the lines."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(self.out, terminal=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache in an empty folder."""
    return Cache(tmp_path / "cache", Silent())


def write(folder: Path, name: str = "a") -> None:
    """Make an entry of one wheel."""
    (folder / f"{name}.whl").write_text("whole")


def fail(_folder: Path) -> None:
    """Make an entry, unsuccessfully."""
    raise BuildError("no compiler")


def test_an_entry_is_built_once(cache: Cache) -> None:
    """The second time nothing is built."""
    place = cache.entry("one", write)
    assert (place / "a.whl").read_text() == "whole"
    assert cache.entry("one", fail) == place


@pytest.mark.parametrize("damage", ["a.whl", SUMS])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_entry_is_built_again(cache: Cache, damage: str, how: str) -> None:
    """Whether a file is gone or cut off, and that is said."""
    place = cache.entry("one", write)
    (place / damage).unlink()
    if how == "cut":
        (place / damage).write_text("w")
    assert not is_whole(place)
    assert is_whole(cache.entry("one", write))


def test_a_build_that_fails_leaves_nothing(cache: Cache, tmp_path: Path) -> None:
    """The next caller builds anew."""
    with pytest.raises(BuildError):
        cache.entry("one", fail)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".one.lock"]
    assert is_whole(cache.entry("one", write))


def test_what_a_killed_build_left_is_removed(cache: Cache, tmp_path: Path) -> None:
    """It belongs to no build that runs, since the lock is free."""
    left = tmp_path / "cache" / ".one.abc.building"
    left.mkdir(parents=True)
    cache.entry("one", write)
    assert not left.exists()


def test_of_two_callers_one_builds(cache: Cache) -> None:
    """The other waits, and takes what the first has made."""
    building, may_end = threading.Event(), threading.Event()
    built = []

    def slowly(folder: Path) -> None:
        built.append(folder)
        building.set()
        assert may_end.wait(60)
        write(folder)

    first = threading.Thread(target=cache.entry, args=("one", slowly))
    first.start()
    assert building.wait(60)
    second = threading.Thread(target=cache.entry, args=("one", slowly))
    second.start()
    may_end.set()
    first.join(60)
    second.join(60)
    assert len(built) == 1


def test_the_cache_is_where_the_variable_says() -> None:
    """And in the home directory without one."""
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/inferencecenter/llama")
    assert cache_root({}) == Path.home() / ".cache/inferencecenter/llama"


@pytest.mark.parametrize(
    "other",
    [{"CUDA": "1"}, {"VULKAN": "1"}, {"PORTABLE": "1"}, {"CMAKE_ARGS": "-DGGML_LLAMAFILE=OFF"}, {"CXX": "clang++"}],
    ids=lambda other: next(iter(other)),
)
def test_another_build_has_another_name(other: dict[str, str]) -> None:
    """The same variables have the same name."""
    plain = Recipe.asked(VERSION, {})
    assert plain.name.startswith(f"{VERSION}-cpu-")
    assert Recipe.asked(VERSION, {}).name == plain.name
    assert Recipe.asked(VERSION, other).name != plain.name


def test_another_processor_has_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is for any."""
    native, portable = Recipe.asked(VERSION, {}), Recipe.asked(VERSION, {"PORTABLE": "1"})
    monkeypatch.setattr(recipe, "_processor", lambda: "flags: other")
    assert Recipe.asked(VERSION, {}).name != native.name
    assert Recipe.asked(VERSION, {"PORTABLE": "1"}).name == portable.name


def test_an_update_stays_of_its_kind(tmp_path: Path) -> None:
    """What was installed for a GPU is built for it again; a variable decides otherwise."""
    (tmp_path / MARK).write_text(f"0.9-{Recipe.asked(VERSION, {'CUDA': '1', 'PORTABLE': '1'}).label}-abc\n")
    before = Installation(tmp_path, VERSION).kind
    assert Recipe.asked(VERSION, {}, before=before).kind == "cuda"
    assert Recipe.asked(VERSION, {"VULKAN": "1"}, before=before).kind == "vulkan"
    assert Recipe.asked(VERSION, {}, before="index").kind == "cpu"


def test_the_version_is_the_one_that_the_package_needs() -> None:
    """Exactly one, as libraries of another do not fit."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    assert f"llama-cpp-python=={command.wanted_version(ROOT / 'pyproject.toml')}" in needed


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        """Return what it shows."""
        return self.now


def test_a_terminal_sees_every_step_on_one_line() -> None:
    """What stays has a line of its own."""
    out = io.StringIO()
    with Progress(out, terminal=True) as progress:
        progress.begin("llama.cpp")
        progress.tell("1 of 2 compiled")
        progress.say("done")
    assert out.getvalue() == "\r\033[Kllama.cpp\r\033[Kllama.cpp: 1 of 2 compiled\r\033[Kdone\n\r\033[K"


def test_a_file_gets_a_line_now_and_then() -> None:
    """At once when a step begins, then every 15 seconds."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, terminal=False, clock=clock)
    progress.begin("llama.cpp")
    for clock.now in range(1, 32):
        progress.tell(f"second {clock.now:.0f}")
    assert out.getvalue().splitlines() == ["llama.cpp", "llama.cpp: second 15", "llama.cpp: second 30"]


PLANNED = [
    *(f"[{at}/5] Building CXX object llama.cpp/src/llama.dir/{at}.cpp.o" for at in range(1, 5)),
    "[5/5] Linking CXX shared library bin/libllama.so",
]


def test_the_rest_of_a_compilation_is_estimated() -> None:
    """By the work that is done, once there is some; links and messages do not count."""
    clock = Clock()
    compilation = Compilation(PLANNED, clock=clock)
    assert str(compilation) == "0 of 4 compiled"
    clock.now = 30.0
    for line in ["ninja: Entering directory", *PLANNED[:1]]:
        compilation.read(line)
    assert str(compilation) == "1 of 4 compiled, about 1:30 left"
    for line in PLANNED:
        compilation.read(line)
    assert str(compilation) == "4 of 4 compiled, about 0:00 left"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder with libraries as they are built, and other files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("libllama.so", "libggml-base.so", "tool"):
        (folder / name).write_text(name)
    (tmp_path / "LICENSE").write_text("MIT")
    return folder


def test_libraries_become_a_wheel_that_the_daemon_finds(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip installs it; beside the libraries is the version that they are for."""
    wheel = packing.pack(built, tmp_path, version=VERSION, label="cpu", license_file=tmp_path / "LICENSE")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    place = library_dir()
    assert place == site / packing.PACKAGE / "lib"
    assert sorted(path.name for path in place.iterdir()) == ["libggml-base.so", "libllama.so", VERSION_FILE]
    assert (place / VERSION_FILE).read_text().strip() == VERSION
    assert f"{VERSION}+cpu" in wheel.name


def program(folder: Path, name: str, text: str) -> None:
    """Write a program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Builder]:
    """A builder with sources at hand, and programs that say what they were asked and write libraries."""
    tools = tmp_path / "tools"
    program(tools / "bin", "cmake", f'echo "$@" CXXFLAGS=$CXXFLAGS >{tmp_path}/asked')
    ninja = f"""\
for last; do :; done
echo "[1/1] Building CXX object llama.dir/llama.cpp.o"
[ "$last" = -n ] && exit 0
[ -e {tmp_path}/broken ] && echo "llama.cpp:1: error: broken" && exit 2
mkdir -p "$2/bin" && echo library >"$2/bin/libllama.so"
"""
    program(tools / "bin", "ninja", ninja)
    sources = tmp_path / "sources"
    (sources / "vendor/llama.cpp").mkdir(parents=True)
    (sources / "vendor/llama.cpp/LICENSE").write_text("MIT")
    monkeypatch.setattr(Builder, "_tools", tools)
    monkeypatch.setattr(Builder, "_sources", sources)
    with (tmp_path / "log").open("w") as log, Builder(VERSION, progress=Silent(), log=log) as made:
        yield made


def test_what_is_asked_for_is_what_cmake_is_asked(builder: Builder, tmp_path: Path) -> None:
    """The libraries come as a wheel."""
    asked = Recipe.asked(VERSION, {"PORTABLE": "1", "CMAKE_ARGS": "-DA=1 '-DB=2 3'"})
    builder.libraries(asked, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert "inferencecenter_llama/lib/libllama.so" in zipfile.ZipFile(wheel).namelist()
    words = (tmp_path / "asked").read_text()
    assert "-DPORTABLE=ON -DA=1 -DB=2 3" in words
    assert f"-DLLAMA_SOURCES={tmp_path}/sources/vendor/llama.cpp" in words


@pytest.mark.parametrize("makes", [False, True])
def test_no_code_is_made_for_amx(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, makes: bool
) -> None:
    """Where the compiler would."""
    compiler = tmp_path / "compilers"
    program(compiler, "cc", f"echo '#define {'__AMX_TILE__' if makes else '__AVX2__'} 1'")
    monkeypatch.setenv("PATH", f"{compiler}:{os.environ['PATH']}")
    builder.libraries(Recipe.asked(VERSION, {}), tmp_path)
    assert ("-mno-amx-tile" in (tmp_path / "asked").read_text()) == makes


def test_a_build_that_breaks_tells_the_end_of_its_log(builder: Builder, tmp_path: Path) -> None:
    """And where the whole of it is."""
    (tmp_path / "broken").touch()
    with pytest.raises(BuildError, match=r"(?s)ninja failed with 2.*/log:\n.*error: broken"):
        builder.libraries(Recipe.asked(VERSION, {}), tmp_path)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "there is no C++ compiler"),
        ({"CUDA": "1"}, "CUDA=1 needs nvcc"),
        ({"VULKAN": "1"}, "VULKAN=1 needs glslc"),
    ],
    ids=["C++", "CUDA", "Vulkan"],
)
def test_a_compiler_that_is_missing_is_named(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    """Each build looks for its own."""
    there = {"c++"} if variables else set()
    monkeypatch.setattr(build, "find_program", lambda name: name if name in there else None)
    with pytest.raises(BuildError) as caught:
        builder.libraries(Recipe.asked(VERSION, variables), tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("programs", "hints"), [((), 0), (("nvcc",), 1), (("nvcc", "glslc"), 2)], ids=["none", "CUDA", "both"]
)
def test_compilers_for_gpus_are_noticed(monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...], hints: int) -> None:
    """A build for processors says with which variable they would be used."""
    monkeypatch.setattr(recipe, "find_program", lambda name: name if name in programs else None)
    assert len(recipe.toolkit_hints()) == hints


def needed_wheel(folder: Path, name: str) -> None:
    """Write a wheel with a library, or without."""
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
        wheel.writestr(f"{name}/lib/libllama.so" if name != "bindings" else "llama_cpp/__init__.py", "")


class Pip:
    """Stands in for pip: downloads what an index has of the names it is asked for."""

    def __init__(self, has: dict[str, str]) -> None:
        self.has = has
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Keep the arguments, and write the wheels that there are."""
        self.calls.append(arguments)
        names = [each.partition("==")[0] for each in arguments if "==" in each]
        if not all(name in self.has for name in names):
            return subprocess.CompletedProcess(arguments, 1, "", "ERROR: No matching distribution found\n")
        if arguments[0] == "download":
            for name in names:
                needed_wheel(Path(arguments[arguments.index("-d") + 1]), self.has[name])
        return subprocess.CompletedProcess(arguments, 0, "", "")


@pytest.mark.parametrize(
    ("has", "installed"),
    [
        ({"llama-cpp-python": "whole"}, ["whole.whl"]),
        ({"llama-cpp-python": "bindings", "inferencecenter-llama": "ours"}, ["bindings.whl", "ours.whl"]),
        ({"llama-cpp-python": "bindings"}, None),
        ({}, None),
    ],
    ids=["one wheel", "our wheels", "bindings alone", "nothing"],
)
def test_wheels_of_an_index_are_taken_if_they_have_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: dict[str, str], installed: list[str] | None
) -> None:
    """Only binaries, of exactly the version; else a line says why it is compiled."""
    pip, progress = Pip(has), Silent()
    monkeypatch.setattr(installation, "_pip", pip)
    took = Installation(tmp_path, VERSION).take_from("https://example.com/simple", progress=progress)
    assert took == (installed is not None)
    for call in pip.calls:
        if call[0] == "download":
            assert {"--only-binary", ":all:"} < set(call)
            assert f"llama-cpp-python=={VERSION}" in call
    if installed is None:
        assert "llama.cpp is compiled: LLAMA_WHEELS has no libraries for it" in progress.out.getvalue()
        assert not (tmp_path / MARK).exists()
    else:
        assert sorted(Path(each).name for each in pip.calls[-1] if each.endswith(".whl")) == installed
        assert (tmp_path / MARK).read_text() == f"{VERSION}-index\n"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A pip that installs nothing."""
    made = Pip({})
    monkeypatch.setattr(installation, "_pip", made)
    monkeypatch.setattr(installation, "_bindings", lambda: VERSION)
    return made


def install(folder: Path, pip: Pip, **environment: str) -> list[list[str]]:
    """Install into an environment from a cache that has everything; return the wheels that pip got."""
    cache = Cache(folder / "cache", Silent())
    cache.entry(f"{VERSION}-bindings", partial(write, name="bindings"))
    wanted = Recipe.asked(VERSION, environment)
    cache.entry(wanted.name, partial(write, name=wanted.kind))
    pip.calls.clear()
    with (folder / "log").open("w") as log, Builder(VERSION, progress=Silent(), log=log) as builder:
        command._install(Installation(folder, VERSION), cache, builder, environment)
    return [[Path(each).name for each in call if each.endswith(".whl")] for call in pip.calls]


def test_an_environment_is_given_what_it_lacks(tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the same build is not installed twice, and another replaces it."""
    site = tmp_path / "site"
    (site / packing.PACKAGE / "lib").mkdir(parents=True)
    (site / packing.PACKAGE / "lib/libllama.so").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(site))
    assert install(tmp_path, pip) == [["bindings.whl", "cpu.whl"]]
    assert install(tmp_path, pip) == []
    assert install(tmp_path, pip, VULKAN="1") == [["bindings.whl", "vulkan.whl"]]


def test_libraries_of_the_users_are_not_built(tmp_path: Path, pip: Pip) -> None:
    """With ``LLAMA`` the bindings are installed alone."""
    assert install(tmp_path, pip, LLAMA="/somewhere") == [["bindings.whl"]]
    assert not (tmp_path / MARK).exists()


def test_what_came_from_an_index_stays(tmp_path: Path, pip: Pip) -> None:
    """Until a variable asks for a build."""
    (tmp_path / MARK).write_text(f"{VERSION}-index\n")
    assert install(tmp_path, pip) == []
    assert install(tmp_path, pip, VULKAN="1") == [["bindings.whl", "vulkan.whl"]]
