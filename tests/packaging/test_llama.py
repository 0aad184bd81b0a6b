"""Installation of llama.cpp: selecting, building, caching and packing it, and the messages about that."""

from __future__ import annotations

import io
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import tarfile
import threading
import tomllib
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

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


def test_cache_entry_is_built_once(cache: Cache) -> None:
    """The second call builds nothing."""
    place = cache.entry("one", write)
    assert (place / "a.whl").read_text() == "whole"
    assert cache.entry("one", fail) == place


@pytest.mark.parametrize("damage", ["a.whl", SUMS])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_cache_entry_is_rebuilt(cache: Cache, damage: str, how: str) -> None:
    """A missing or truncated file is reported."""
    place = cache.entry("one", write)
    (place / damage).unlink()
    if how == "cut":
        (place / damage).write_text("w")
    assert not is_whole(place)
    assert is_whole(cache.entry("one", write))


def test_failed_build_leaves_no_entry(cache: Cache, tmp_path: Path) -> None:
    """The next caller builds again."""
    with pytest.raises(BuildError):
        cache.entry("one", fail)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".one.lock"]
    assert is_whole(cache.entry("one", write))


def test_leftovers_of_a_killed_build_are_removed(cache: Cache, tmp_path: Path) -> None:
    """The lock is free, so no running build owns them."""
    left = tmp_path / "cache" / ".one.abc.building"
    left.mkdir(parents=True)
    cache.entry("one", write)
    assert not left.exists()


def test_concurrent_callers_build_once(cache: Cache) -> None:
    """The second waits, and uses the result of the first."""
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


def test_variable_selects_the_cache_directory() -> None:
    """Without it the cache is in the home directory."""
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/inferencecenter/llama")
    assert cache_root({}) == Path.home() / ".cache/inferencecenter/llama"


@pytest.mark.parametrize(
    "other",
    [{"CUDA": "1"}, {"VULKAN": "1"}, {"PORTABLE": "1"}, {"CMAKE_ARGS": "-DGGML_LLAMAFILE=OFF"}, {"CXX": "clang++"}],
    ids=lambda other: next(iter(other)),
)
def test_cache_key_covers_the_build_options(other: dict[str, str]) -> None:
    """The same variables have the same key."""
    plain = Recipe.from_environment(VERSION, {})
    assert plain.name.startswith(f"{VERSION}-cpu-")
    assert Recipe.from_environment(VERSION, {}).name == plain.name
    assert Recipe.from_environment(VERSION, other).name != plain.name


def test_cache_key_covers_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portable build does not depend on it."""
    native, portable = Recipe.from_environment(VERSION, {}), Recipe.from_environment(VERSION, {"PORTABLE": "1"})
    monkeypatch.setattr(recipe, "_processor", lambda: "flags: other")
    assert Recipe.from_environment(VERSION, {}).name != native.name
    assert Recipe.from_environment(VERSION, {"PORTABLE": "1"}).name == portable.name


@pytest.mark.parametrize(
    ("variables", "base"),
    [
        ({"VULKAN": "1"}, {}),
        ({"CMAKE_ARGS": "-DGGML_RPC=ON"}, {}),
        ({"VULKAN": "1", "PORTABLE": "1"}, {"PORTABLE": "1"}),
        ({"VULKAN": "1", "CMAKE_ARGS": "-DVulkan_INCLUDE_DIR=/x -DGGML_LTO=ON"}, {"CMAKE_ARGS": "-DGGML_LTO=ON"}),
        ({"CUDA": "1", "CMAKE_ARGS": "-DGGML_RPC=ON"}, {"CUDA": "1"}),
    ],
    ids=["Vulkan", "RPC", "portable", "other arguments", "CUDA"],
)
def test_added_backends_are_built_upon_the_build_without_them(variables: dict[str, str], base: dict[str, str]) -> None:
    """A build that adds none has no base."""
    found = Recipe.from_environment(VERSION, variables).base
    assert found is not None
    assert found.name == Recipe.from_environment(VERSION, base).name
    assert found.base is None


def test_update_keeps_the_kind_of_build(tmp_path: Path) -> None:
    """A GPU build is replaced by a GPU build; a variable overrides it."""
    (tmp_path / MARK).write_text(f"0.9-{Recipe.from_environment(VERSION, {'CUDA': '1', 'PORTABLE': '1'}).label}-abc\n")
    before = Installation(tmp_path, VERSION).kind
    assert Recipe.from_environment(VERSION, {}, before=before).kind == "cuda"
    assert Recipe.from_environment(VERSION, {"VULKAN": "1"}, before=before).kind == "vulkan"
    (tmp_path / MARK).write_text("0.9-vulkan-index\n")
    assert Installation(tmp_path, VERSION).kind == "vulkan"
    assert Recipe.from_environment(VERSION, {}, before="").kind == "cpu"


def test_version_is_the_required_one() -> None:
    """The version that ``tools/llama`` installs is exactly the one that the package requires."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    assert f"llama-cpp-python=={command.wanted_version(ROOT / 'pyproject.toml')}" in needed


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        """Return what it shows."""
        return self.now


def test_terminal_shows_progress_on_one_line() -> None:
    """Lasting messages have their own line."""
    out = io.StringIO()
    with Progress(out, terminal=True) as progress:
        progress.begin("llama.cpp")
        progress.update("1 of 2 compiled")
        progress.print_line("done")
    assert out.getvalue() == "\r\033[Kllama.cpp\r\033[Kllama.cpp: 1 of 2 compiled\r\033[Kdone\n\r\033[K"


def test_log_file_gets_progress_every_15_seconds() -> None:
    """A step is logged at once when it begins."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, terminal=False, clock=clock)
    progress.begin("llama.cpp")
    for clock.now in range(1, 32):
        progress.update(f"second {clock.now:.0f}")
    assert out.getvalue().splitlines() == ["llama.cpp", "llama.cpp: second 15", "llama.cpp: second 30"]


OBJECTS = [f"llama.cpp/src/llama.dir/{at}.cpp.o" for at in range(1, 5)]
TARGETS = [
    *(f"{path}: CXX_COMPILER__llama_Release" for path in OBJECTS),
    "bin/libllama.so: CXX_SHARED_LIBRARY_LINKER__llama_Release",
    "llama: phony",
]
BUILT = [
    *(f"[{at}/5] Building CXX object {path}" for at, path in enumerate(OBJECTS, 1)),
    "[5/5] Linking CXX shared library bin/libllama.so",
]


def test_remaining_compile_time_is_estimated() -> None:
    """It is derived from the completed work; links and messages do not count."""
    clock = Clock()
    compilation = Compilation(TARGETS, clock=clock)
    assert str(compilation) == "0 of 4 compiled"
    clock.now = 30.0
    for line in ["ninja: Entering directory", *BUILT[:1]]:
        compilation.read(line)
    assert str(compilation) == "1 of 4 compiled, about 1:30 left"
    for line in BUILT:
        compilation.read(line)
    assert str(compilation) == "4 of 4 compiled, about 0:00 left"


def test_nothing_is_estimated_where_no_target_is_known() -> None:
    """If ninja does not list its targets, the build continues."""
    assert str(Compilation([])) == "0 of 0 compiled"


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
    """Pip installs it; it contains the libraries' version."""
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


@pytest.mark.parametrize(
    ("libc", "tag"), [(("glibc", "2.36"), f"manylinux_2_36_{platform.machine()}"), (("", ""), "linux_")]
)
def test_wheel_tag_excludes_older_systems(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], tag: str
) -> None:
    """The tag has the C library it was built with, so pip skips it on older ones."""
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    wheel = packing.pack(built, tmp_path, version=VERSION, label="cpu", license_file=tmp_path / "LICENSE")
    assert wheel.stem.split("-")[-1].startswith(tag)


@pytest.mark.parametrize("has_filter", [True, False], ids=["filter", "Python 3.11.2"])
def test_only_needed_sources_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_filter: bool) -> None:
    """This works on a Python whose ``extractall`` has no filter, such as Debian 12's."""
    names = ("llama_cpp/llama.py", "vendor/llama.cpp/src/llama.cpp", "vendor/llama.cpp/models/big.gguf")
    with tarfile.open(tmp_path / "sources.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"llama_cpp_python-1/{name}"))
    if not has_filter:
        extract = tarfile.TarFile.extract
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(
            tarfile.TarFile, "extractall", lambda tar, path, members: [extract(tar, each, path) for each in members]
        )
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(lambda member, _path: member), False)
    build.unpack(tmp_path / "sources.tar.gz", tmp_path / "out")
    unpacked = [path for path in (tmp_path / "out/llama_cpp_python-1").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "out/llama_cpp_python-1")) for path in unpacked) == list(names[:2])


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


def test_bindings_are_packed_without_a_compiler(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option has a form that pip 23.0, Debian 12's, accepts."""
    monkeypatch.setattr(build, "PIP", ("sh", "-c", f'echo "$@" >{tmp_path}/asked', "pip"))
    builder.bindings(tmp_path)
    assert "--config-settings wheel.cmake=false" in (tmp_path / "asked").read_text()


def test_build_variables_become_cmake_options(builder: Builder, tmp_path: Path) -> None:
    """The libraries come as a wheel."""
    asked = Recipe.from_environment(VERSION, {"PORTABLE": "1", "CMAKE_ARGS": "-DA=1 '-DB=2 3'"})
    builder.libraries(asked, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert "inferencecenter_llama/lib/libllama.so" in zipfile.ZipFile(wheel).namelist()
    words = (tmp_path / "asked").read_text()
    assert "-DPORTABLE=ON -DA=1 -DB=2 3" in words
    assert f"-DLLAMA_SOURCES={tmp_path}/sources/vendor/llama.cpp" in words


def test_added_backend_is_packed_with_the_libraries_of_its_base(builder: Builder, cache: Cache, tmp_path: Path) -> None:
    """Only ggml and the backend are compiled again; both builds stay in the cache."""
    recipe = Recipe.from_environment(VERSION, {"CMAKE_ARGS": "-DGGML_RPC=ON"})
    base = cache.libraries(Recipe.from_environment(VERSION, {}), builder)
    ninja = f'echo "$@" >{tmp_path}/asked_of_ninja\nmkdir -p "$2/bin" && echo backend >"$2/bin/libggml-rpc.so"'
    program(tmp_path / "tools/bin", "ninja", ninja)
    unpacked = tmp_path / "unpacked"
    packing.unpack_libraries(next(cache.libraries(recipe, builder).glob("*.whl")), unpacked)
    assert sorted(path.name for path in unpacked.iterdir()) == ["libggml-rpc.so", "libllama.so", VERSION_FILE]
    assert (unpacked / "libllama.so").read_text() == "library\n"
    assert "-DBASE=" in (tmp_path / "asked").read_text()
    assert (tmp_path / "asked_of_ninja").read_text().split()[-1] == "ggml"
    assert is_whole(base)


@pytest.mark.parametrize("makes", [False, True])
def test_build_disables_amx(builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, makes: bool) -> None:
    """It does so where the compiler would use it."""
    compiler = tmp_path / "compilers"
    program(compiler, "cc", f"echo '#define {'__AMX_TILE__' if makes else '__AVX2__'} 1'")
    monkeypatch.setenv("PATH", f"{compiler}:{os.environ['PATH']}")
    builder.libraries(Recipe.from_environment(VERSION, {}), tmp_path)
    assert ("-mno-amx-tile" in (tmp_path / "asked").read_text()) == makes


def test_failed_build_shows_the_end_of_its_log(builder: Builder, tmp_path: Path) -> None:
    """The message has the path of the whole log."""
    (tmp_path / "broken").touch()
    with pytest.raises(BuildError, match=r"(?s)ninja failed with 2.*/log:\n.*error: broken"):
        builder.libraries(Recipe.from_environment(VERSION, {}), tmp_path)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "there is no C++ compiler"),
        ({"CUDA": "1"}, "CUDA=1 needs nvcc"),
        ({"VULKAN": "1"}, "VULKAN=1 needs glslc"),
    ],
    ids=["C++", "CUDA", "Vulkan"],
)
def test_missing_compiler_is_named(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    """Each kind of build needs its own."""
    there = {"c++"} if variables else set()
    monkeypatch.setattr(build, "find_program", lambda name: name if name in there else None)
    with pytest.raises(BuildError) as caught:
        builder.libraries(Recipe.from_environment(VERSION, variables), tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("programs", "hints"), [((), 0), (("nvcc",), 1), (("nvcc", "glslc"), 2)], ids=["none", "CUDA", "both"]
)
def test_gpu_compilers_are_mentioned(monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...], hints: int) -> None:
    """A CPU build says which variable would use them."""
    monkeypatch.setattr(recipe, "find_program", lambda name: name if name in programs else None)
    assert len(recipe.toolkit_hints()) == hints


def wheel_with(folder: Path, name: str, *libraries: str) -> None:
    """Write a wheel with libraries, or without."""
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        for library in libraries:
            wheel.writestr(f"{name}/lib/{library}.so", "")


Index: TypeAlias = dict[str, tuple[str, ...]]


class Pip:
    """Stands in for pip: downloads what an index has of the requirements it is given, each with a wheel's content."""

    def __init__(self, has: Index) -> None:
        self.has = has
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Keep the arguments, and write the wheels that there are."""
        self.calls.append(arguments)
        wanted = [each for each in arguments if "==" in each]
        if not all(each in self.has for each in wanted):
            return subprocess.CompletedProcess(arguments, 1, "", "ERROR: No matching distribution found\n")
        if arguments[0] == "download":
            for each in wanted:
                wheel_with(Path(arguments[arguments.index("-d") + 1]), *self.has[each])
        return subprocess.CompletedProcess(arguments, 0, "", "WARNING: an index is ignored\n")


BARE: Index = {"llama-cpp-python==1.2.3": ("bindings",)}
WHOLE: Index = {"llama-cpp-python==1.2.3": ("whole", "libllama")}
CPU: Index = {"inferencecenter-llama==1.2.3+cpu.portable": ("cpu", "libllama")}
NATIVE: Index = {"inferencecenter-llama==1.2.3+cpu": ("native", "libllama")}
CUDA: Index = {"inferencecenter-llama==1.2.3+cuda.portable": ("cuda", "libllama", "libggml-cuda")}


@pytest.mark.parametrize(
    ("has", "kind", "installed"),
    [
        pytest.param(WHOLE, "cpu", ["whole.whl"], id="one wheel"),
        pytest.param(BARE | CPU | CUDA, "cpu", ["bindings.whl", "cpu.whl"], id="our wheels"),
        pytest.param(BARE | CPU | CUDA, "cuda", ["bindings.whl", "cuda.whl"], id="of the kind that is asked for"),
        pytest.param(BARE | NATIVE, "cpu", ["bindings.whl", "native.whl"], id="not portable"),
        pytest.param(BARE | NATIVE | CPU, "cpu", ["bindings.whl", "cpu.whl"], id="rather portable"),
    ],
)
def test_wheels_of_an_index_are_used_if_they_have_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: Index, kind: str, installed: list[str]
) -> None:
    """Only wheels are downloaded, of exactly the required version, and the kind is recorded."""
    pip = Pip(has)
    monkeypatch.setattr(installation, "_pip", pip)
    assert Installation(tmp_path, VERSION).install_from("https://example.com/simple", kind, progress=Silent())
    for call in pip.calls:
        if call[0] == "download":
            assert {"--only-binary", ":all:"} < set(call)
            assert f"llama-cpp-python=={VERSION}" in call
    assert sorted(Path(each).name for each in pip.calls[-1] if each.endswith(".whl")) == installed
    assert (tmp_path / MARK).read_text() == f"{VERSION}-{kind}-index\n"


@pytest.mark.parametrize(
    ("has", "kind", "why"),
    [
        pytest.param({}, "cpu", "ERROR: No matching distribution found", id="nothing"),
        pytest.param(BARE, "cpu", "lacks libllama.so", id="bindings alone"),
        pytest.param(WHOLE, "vulkan", "lacks libggml-vulkan.so or libllama.so", id="one wheel of another kind"),
        pytest.param(BARE | CPU, "cuda", "lacks libggml-cuda.so or libllama.so", id="our wheels of another kind"),
    ],
)
def test_index_without_the_libraries_is_logged_before_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: Index, kind: str, why: str
) -> None:
    """The log has one line, and nothing is installed."""
    progress = Silent()
    monkeypatch.setattr(installation, "_pip", Pip(has))
    assert not Installation(tmp_path, VERSION).install_from("https://example.com/simple", kind, progress=progress)
    said = progress.out.getvalue().splitlines()[-1]
    assert said.startswith("llama.cpp is compiled: LLAMA_WHEELS has no libraries for it (")
    assert why in said
    assert not (tmp_path / MARK).exists()


def test_unreachable_index_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed line contains pip's warning."""
    pip, progress = installation._pip, Silent()
    calls = []

    def counted(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        calls.append(arguments)
        return pip(*arguments, check=check)

    monkeypatch.setattr(installation, "_pip", counted)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
    assert not Installation(tmp_path, VERSION).install_from(index, "cpu", progress=progress)
    said = progress.out.getvalue().splitlines()[-1]
    assert said.startswith("llama.cpp is compiled: LLAMA_WHEELS cannot be reached: ")
    assert "Failed to establish a new connection" in said
    assert said.endswith("Connection refused")
    assert len(calls) == 1


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
    wanted = Recipe.from_environment(VERSION, environment)
    cache.entry(wanted.name, partial(write, name=wanted.kind))
    pip.calls.clear()
    with (folder / "log").open("w") as log, Builder(VERSION, progress=Silent(), log=log) as builder:
        command._install(Installation(folder, VERSION), cache, builder, environment)
    return [[Path(each).name for each in call if each.endswith(".whl")] for call in pip.calls]


def test_missing_libraries_are_installed_once(tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same build is not installed twice, and another one replaces it."""
    site = tmp_path / "site"
    (site / packing.PACKAGE / "lib").mkdir(parents=True)
    (site / packing.PACKAGE / "lib/libllama.so").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(site))
    assert install(tmp_path, pip) == [["bindings.whl", "cpu.whl"]]
    assert install(tmp_path, pip) == []
    assert install(tmp_path, pip, VULKAN="1") == [["bindings.whl", "vulkan.whl"]]


def test_users_own_libraries_are_not_built(tmp_path: Path, pip: Pip) -> None:
    """With ``LLAMA`` only the bindings are installed."""
    assert install(tmp_path, pip, LLAMA="/somewhere") == [["bindings.whl"]]
    assert not (tmp_path / MARK).exists()


def test_libraries_from_an_index_are_kept(tmp_path: Path, pip: Pip) -> None:
    """They are kept until a variable requests a build."""
    (tmp_path / MARK).write_text(f"{VERSION}-cuda-index\n")
    assert install(tmp_path, pip) == []
    assert install(tmp_path, pip, CUDA="1") == []
    assert install(tmp_path, pip, VULKAN="1") == [["bindings.whl", "vulkan.whl"]]
    (tmp_path / MARK).write_text(f"{VERSION}-cpu-index\n")
    assert install(tmp_path, pip, PORTABLE="1") == [["bindings.whl", "cpu.whl"]]


def test_wheels_of_an_index_precede_a_build(tmp_path: Path, pip: Pip) -> None:
    """Their kind is the one that the variables select."""
    pip.has = BARE | CUDA | CPU
    (wheels,) = (each for each in install(tmp_path, pip, CUDA="1", LLAMA_WHEELS="https://example.com/simple") if each)
    assert sorted(wheels) == ["bindings.whl", "cuda.whl"]
