"""`make nn`, the sample, and the parsers under mutated input."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.c_library.conftest import LIBRARY, ROOT, compiled

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

CASES = 20_000
FUZZER_RUNTIMES = sorted(Path("/usr/lib").glob("llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a"))
SEEDS = (
    b'0{"op":"token","content":"caf\\u00e9 \\ud83d\\ude00","usage":{"n":[1,-2.5e-3,true,null]}}',
    b'1{"sampling":{"temp":0.5,"stop":["a"]},"logging":{"level":"debug"},"json_schema":"{}","idle-timeout-ms":1500}',
    b"2\x01\x03hel\x89\x00\x80\x02lo\x81\x7e\x00\x08" + b"01234567\x88\x02\x03\xe8",
    b"3\x81\x7f\x00\x00\x00\x00\x00\x00\x00\x05hello\x8a\x00\x81\x02{}",
)
"""Cases that the fuzzer begins with: a message, a configuration, and frames between and during calls."""


def declared() -> set[str]:
    """The functions of the header."""
    header = (LIBRARY / "include" / "inferencecenter_nn.h").read_text()
    return set(re.findall(r"^INFERENCECENTER_NN_API [^;(]*?(\w+)\(", header, re.MULTILINE))


def test_parsers_survive_mutated_input(tmp_path: Path) -> None:
    """JSON texts and WebSocket frames; nested, long and cut ones."""
    program = compiled(tmp_path / "fuzz", Path(__file__).with_name("fuzz.c"))
    subprocess.run([program, str(CASES)], check=True, timeout=120)


@pytest.mark.skipif(not FUZZER_RUNTIMES, reason="clang's libFuzzer is not installed")
def test_fuzzer_finds_nothing(tmp_path: Path) -> None:
    """In as many cases, which libFuzzer chooses by their coverage."""
    program, corpus = tmp_path / "fuzz", tmp_path / "corpus"
    corpus.mkdir()
    for number, case in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(case)
    sources = [*sorted((LIBRARY / "src").glob("*.c")), Path(__file__).with_name("fuzz.c")]
    options = ["-g", "-O1", "-DLIBFUZZER", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    include = [f"-I{LIBRARY / folder}" for folder in ("include", "src")]
    subprocess.run(["clang", *options, *include, *sources, "-pthread", "-o", program], check=True)
    limits = [f"-runs={10 * CASES}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=1024", "-seed=1"]
    done = subprocess.run([program, *limits, corpus], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the library and the sample."""
    out = tmp_path_factory.mktemp("build")
    if shutil.which("gcc") is None or shutil.which("make") is None:
        pytest.skip("gcc or make is not installed")
    subprocess.run(["make", "-C", LIBRARY, f"OUT={out}"], check=True, capture_output=True)
    subprocess.run(["make", "-C", ROOT / "examples" / "c", f"OUT={out}", out / "chat"], check=True, capture_output=True)
    return out


def test_only_declared_functions_are_exported(built: Path) -> None:
    """And all of them."""
    library = built / "libinferencecenter_nn.so"
    symbols = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    assert {line.split()[-1] for line in symbols.splitlines()} == declared()


def test_library_needs_libc_only(built: Path) -> None:
    """No other shared library."""
    dynamic = subprocess.check_output(["readelf", "-d", built / "libinferencecenter_nn.so"], text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert {name for name in needed if not name.startswith(("libc.so", "ld-linux"))} == set()  # libc and its loader


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_header_is_valid_cpp(tmp_path: Path) -> None:
    """With both sets of tensor types."""
    source = tmp_path / "a.cpp"
    source.write_text("#include <inferencecenter_nn.h>\nint main() { return fp16; }\n")
    for option in ("-DWASM_ENABLE_WASI_EPHEMERAL_NN=0", "-DWASM_ENABLE_WASI_EPHEMERAL_NN=1"):
        subprocess.run(
            ["g++", "-Wall", "-Werror", option, f"-I{LIBRARY / 'include'}", "-fsyntax-only", source], check=True
        )


def test_functions_are_documented() -> None:
    """Each on the page."""
    page = (ROOT / "docs" / "c-library.md").read_text()
    assert {name for name in declared() if f"`{name}" not in page} == set()


def test_documented_program_compiles(tmp_path: Path) -> None:
    """The block of the page, inside a function."""
    page = (ROOT / "docs" / "c-library.md").read_text()
    (block,) = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    source = tmp_path / "a.c"
    source.write_text(f"#include <inferencecenter_nn.h>\n#include <stdio.h>\nint main(void) {{\n{block}return 0; }}\n")
    compiled(tmp_path / "program", source)


def test_sample_chats(built: Path, echo: Daemon, echo_socket: Path) -> None:
    """It streams answers, and says what is wrong without a daemon."""
    environment = {"INFERENCECENTER_SOCKET": str(echo_socket)}
    chat = built / "chat"
    done = subprocess.run(
        [chat], check=False, input="good morning\n\nand good night\n", env=environment, capture_output=True, text=True
    )
    assert (done.returncode, "good morning" in done.stdout, "and good night" in done.stdout) == (0, True, True), done
    assert done.stderr.count('"finish_reason":"stop"') == 2
    environment["INFERENCECENTER_SOCKET"] = "/nonexistent"
    done = subprocess.run([chat], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "no daemon" in done.stderr) == (1, True)
