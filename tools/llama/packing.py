"""Packs the libraries as a wheel: the distribution ``inferencecenter-llama``, a package that only contains files."""

from __future__ import annotations

import base64
import hashlib
import platform
import sysconfig
import zipfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

DISTRIBUTION: Final = "inferencecenter-llama"
PACKAGE: Final = "inferencecenter_llama"
VERSION_FILE: Final = "llama-cpp-python.version"
"""File beside the libraries with the version of llama-cpp-python they were built from, which the engine checks."""

_INIT: Final = '"""Libraries of llama.cpp, in ``lib``, for the engine of InferenceCenter."""\n'
_METADATA: Final = """\
Metadata-Version: 2.4
Name: {distribution}
Version: {version}
Summary: Libraries of llama.cpp for the engine of InferenceCenter
License-Expression: MIT
License-File: LICENSE
"""
_WHEEL: Final = """\
Wheel-Version: 1.0
Generator: tools.llama
Root-Is-Purelib: false
Tag: {tag}
"""


def pack(built: Path, folder: Path, *, version: str, label: str, license_file: Path) -> Path:
    """Write a wheel of the shared libraries in ``built`` into a folder, and return its path.

    Its version is that of the bindings with the kind of the build as its local part.
    """
    whole = f"{version}+{label}"
    tag = f"py3-none-{_platform()}"
    path = folder / f"{PACKAGE}-{whole}-{tag}.whl"
    info = f"{PACKAGE}-{whole}.dist-info"
    texts = {
        f"{PACKAGE}/__init__.py": _INIT,
        f"{PACKAGE}/lib/{VERSION_FILE}": f"{version}\n",
        f"{info}/licenses/LICENSE": license_file.read_text(encoding="utf-8"),
        f"{info}/METADATA": _METADATA.format(distribution=DISTRIBUTION, version=whole),
        f"{info}/WHEEL": _WHEEL.format(tag=tag),
    }
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for library in sorted(built.glob("lib*.so")):
            name = f"{PACKAGE}/lib/{library.name}"
            wheel.write(library, name)
            record.append(_recorded(name, library.read_bytes()))
        for name, text in texts.items():
            wheel.writestr(name, text)
            record.append(_recorded(name, text.encode()))
        wheel.writestr(f"{info}/RECORD", "".join((*record, f"{info}/RECORD,,\n")))
    return path


def unpack_libraries(wheel: Path, folder: Path) -> None:
    """Write the libraries of a wheel, and their version, into a folder.

    Programs that have loaded the folder's old libraries keep them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            if name.startswith(f"{PACKAGE}/lib/"):
                place = folder / name.rpartition("/")[2]
                place.unlink(missing_ok=True)
                place.write_bytes(opened.read(name))


def _platform() -> str:
    """Return the platform tag: the libraries need a C library that is at least as new as this one."""
    libc, version = platform.libc_ver()
    name = f"manylinux-{version}-{platform.machine()}" if libc == "glibc" else sysconfig.get_platform()
    return name.replace("-", "_").replace(".", "_")


def _recorded(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"
