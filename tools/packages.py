"""The virtual environment: ``python -m tools.packages create FOLDER``, and in it ``install server,dev``.

Creating it unpacks the pip that Python brings, as its own installation would take seconds. uv then installs this
package with its extras in seconds where pip takes most of a minute: it resolves, unpacks and compiles on all cores, and
links files from its cache. It does not read pip's configuration, which selects private indexes and certificates, so
that is passed on. pip installs if uv lacks one of these options, cannot be installed, or fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ensurepip
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Run: TypeAlias = "Callable[[Sequence[str], Mapping[str, str]], bool]"
"""Runs a command, with variables added to its environment; returns whether it succeeded."""

ROOT: Final = Path(__file__).parents[1]
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_UV: Final = "uv>=0.13,<0.14"  # its options change between minor releases
_CACHED: Final = f"uv-0.13-{sysconfig.get_platform()}"
# The resolver of the pip that Python 3.11 brings (23.2) reports conflicts where there is a solution.
_PIP: Final = "pip>=25.1"

_REPEATED: Final = {
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
"""Options with several values, and uv's option for each value."""
_SINGLE: Final = {"index-url": "--default-index", "keyring-provider": "--keyring-provider"}
_FLAGS: Final = {"no-index": "--no-index", "pre": "--prerelease=allow", "no-cache-dir": "--no-cache"}
_VARIABLES: Final = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
"""Options that uv takes from the environment."""
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("break-system-packages", "cache-dir", "color", "compile", "disable-pip-version-check", "exists-action"),
        *("log", "no-color", "no-compile", "no-input", "no-python-version-warning", "no-warn-conflicts"),
        *("no-warn-script-location", "prefer-binary", "progress-bar", "quiet", "require-virtualenv"),
        *("root-user-action", "use-feature", "verbose"),
    )
)
"""Options that do not change what is installed, or from where."""


class UnknownOptionError(Exception):
    """An option of pip that uv does not have."""


def bundled_pip() -> Path | None:
    """Return the wheel of pip that belongs to this Python; ``None`` if it is not found."""
    folders = (sysconfig.get_config_var("WHEEL_PKG_DIR"), Path(ensurepip.__file__).parent / "_bundled")
    return next((wheel for folder in folders if folder for wheel in Path(folder).glob("pip-*.whl")), None)


def create(folder: Path) -> None:
    """Create the environment, with pip as a module."""
    wheel = bundled_pip()
    venv.create(folder, symlinks=True, with_pip=wheel is None)
    if wheel is not None:
        variables = {"base": str(folder), "platbase": str(folder)}
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(sysconfig.get_path("purelib", scheme="venv", vars=variables))


def parse_options(listed: str) -> dict[str, str]:
    """Return the options in effect for ``pip install`` from the output of ``pip config list``."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def uv_options(options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Translate pip's options to arguments of uv and variables of its environment.

    Of several indexes pip takes the best version, and it trusts the system's authorities.

    Raises:
        UnknownOptionError: uv has no such option.
    """
    arguments = ["--index-strategy", "unsafe-best-match"]
    variables = {"UV_SYSTEM_CERTS": "1"}
    for name, value in options.items():
        if name in _REPEATED:
            arguments += [f"{_REPEATED[name]}={each}" for each in value.split()]
        elif name in _SINGLE:
            arguments.append(f"{_SINGLE[name]}={value}")
        elif name in _FLAGS:
            arguments += [_FLAGS[name]] if value.lower() in {"1", "true", "yes", "y", "on", "t"} else []
        elif name in _VARIABLES:
            variables |= dict.fromkeys(_VARIABLES[name], value)
        elif name not in _WITHOUT_EFFECT:
            raise UnknownOptionError(name)
    return arguments, variables


def find_uv(cache: Path, run: Run) -> Path | None:
    """Return uv's program in ``cache``, into which pip installs it first; ``None`` if it cannot."""
    program = cache / _CACHED / "bin" / "uv"
    if program.exists():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        new = Path(folder) / "new"
        options = ("--retries", "1", "--no-deps", "--only-binary", ":all:", "--target", str(new))
        if not run([*PIP, "install", *options, _UV], {}):
            return None
        with contextlib.suppress(OSError):  # another installation was faster
            new.rename(program.parents[1])
    return program if program.exists() else None


def install(extras: str, *, cache: Path, options: Mapping[str, str], run: Run, report: Callable[[str], None]) -> bool:
    """Install by uv, else by pip; return whether that succeeded.

    Args:
        extras: Names, separated by commas.
        cache: The folder for uv.
        options: pip's options.
        run: Runs pip and uv.
        report: Called with a line that says why uv does not install.
    """
    package = ["--editable", f".[{extras}]"]
    try:
        arguments, variables = uv_options(options)
    except UnknownOptionError as error:
        report(f"pip installs: its configuration has the option {error}, which is not passed on to uv")
    else:
        if (uv := find_uv(cache, run)) is None:
            report(f"pip installs: {_UV} cannot be installed")
        elif run(
            [str(uv), "pip", "install", "--python", sys.executable, *arguments, "--compile-bytecode", _PIP, *package],
            variables,
        ):
            return True
        else:
            report("pip installs: uv failed")
    if (wheel := bundled_pip()) is not None and not Path(sys.prefix, "bin", "pip").exists():
        run([*PIP, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel)], {})  # with its commands
    if "dev" in extras.split(",") and not run([*PIP, "install", "--upgrade", _PIP], {}):
        return False
    return run([*PIP, "install", *package], {})


def main() -> int:
    """Run a command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.packages", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("create", help="create an environment").add_argument("folder", type=Path)
    commands.add_parser("install", help="install into this environment").add_argument("extras")
    arguments = parser.parse_args()
    if arguments.command == "create":
        create(arguments.folder)
        return 0

    def run(command: Sequence[str], variables: Mapping[str, str]) -> bool:
        report(f"== {shlex.join(command)}")
        environment = {**os.environ, **variables}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0  # noqa: S603

    def report(line: str) -> None:
        print(line, flush=True)

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "inferencecenter"
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)  # noqa: S603
    options = parse_options(listed.stdout)
    return int(not install(arguments.extras, cache=cache, options=options, run=run, report=report))


if __name__ == "__main__":
    sys.exit(main())
