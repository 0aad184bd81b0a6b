"""Reads and merges the sources of settings: a TOML file, ``INFERENCECENTER_*`` variables and the command line.

The command line overrides variables, which override the file. An unknown name is an error in any source. In the name
of a variable ``__`` separates section and setting; lists and tables are written as JSON.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import platformdirs
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import EnvSettingsSource

from inferencecenter.config.sections import expand
from inferencecenter.config.settings import APP_NAME, ENV_PREFIX, Settings, environment_name, sections, setting_fields
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

ENV_CONFIG: Final = "INFERENCECENTER_CONFIG"
OTHER_ENVIRONMENT: Final[Mapping[str, str]] = {
    ENV_CONFIG: "The configuration file, when `--config` is not given.",
    "INFERENCECENTER_URL": "URL of the daemon that `inferencecenter chat` and `stats` connect to.",
    "INFERENCECENTER_TOKEN": "Token that `inferencecenter chat` and `stats` authenticate with.",
    "INFERENCECENTER_SOCKET": "Unix socket of the daemon that programs on the C library connect to.",
    "INFERENCECENTER_TEST_MODEL": "Model file for the tests, instead of the bundled one.",
    "INFERENCECENTER_TEST_NEWEST_CLIENTS": "With any value the tests install the newest version of each client.",
    "INFERENCECENTER_TEST_LARGE_CLIENTS": "With any value the tests also install clients of several GB: Open WebUI.",
    "INFERENCECENTER_TEST_BROWSER": "Chromium for the tests of the web page; with it none is skipped.",
    "INFERENCECENTER_TEST_RPC_LIBS": "Folder with llama.cpp's libraries, built with RPC, for tests with a server.",
    "INFERENCECENTER_TEST_VULKAN_LIBS": "Folder with llama.cpp's libraries, built with Vulkan, for tests in software.",
}
_TYPE_ERRORS: Final = frozenset({"bool_type", "float_type", "int_type", "string_type"})
_SHOWN_CHARS: Final = 200
SYSTEM_CONFIG: Final = Path("/etc/inferencecenter/inferencecenter.toml")


class InvalidSettingsError(InferenceCenterError):
    """The first error of ``problems``, which has one for each invalid value."""

    def __init__(self, problems: tuple[InferenceCenterError, ...]) -> None:
        first = problems[0]
        super().__init__(first.code, first.message, hint=first.hint, field=first.field)
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Layers:
    """Values of each source as nested tables, lowest precedence first.

    Attributes:
        path: The configuration file; ``None`` if there is none.
        file: Its values.
        environment: Values of the environment variables.
        command_line: Values of the command line.
    """

    path: Path | None
    file: Mapping[str, Any]
    environment: Mapping[str, Any]
    command_line: Mapping[str, Any]

    def settings(self) -> Settings:
        """Merge the layers and validate the result.

        Raises:
            InvalidSettingsError: It lists every invalid value with its source.
        """
        with foreign_input(lambda reason: InvalidSettingsError((_invalid(f"settings cannot be used: {reason}"),))):
            return self._validated()

    def _validated(self) -> Settings:
        problems = {problem.field: problem for problem in self._wrong_types()}
        settings = None
        try:
            # With a table for each section, whose own validators need not be built then.
            tables: dict[str, Any] = {name: {} for name in sections()}
            settings = Settings(**_merge(tables, _merge(_merge(self.file, self.environment), self.command_line)))
        except ValidationError as error:
            for number, detail in enumerate(error.errors(include_url=False)):
                problem = self._problem(dict(detail))
                problems.setdefault(problem.field or str(number), problem)
        if settings is None or problems:
            raise InvalidSettingsError(tuple(problems.values()))
        return settings

    def _wrong_types(self) -> Iterator[InferenceCenterError]:
        """Yield an error for each value in the file of another type than the setting, such as text for a number.

        TOML is typed, so the file is validated strictly; variables and options are text, which validation converts.
        """
        for name, field in Settings.model_fields.items():
            if name not in self.file:
                continue
            adapter = TypeAdapter[Any](cast("Any", field.annotation))
            try:
                # As JSON, because TOML has lists and text where Python has tuples and paths.
                adapter.validate_json(json.dumps(self.file[name], default=str), strict=True)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    # Defaults are validated too, and are Python values.
                    if detail["type"] in _TYPE_ERRORS and not isinstance(detail["input"], Path):
                        yield self._problem({**detail, "loc": (name, *detail["loc"])}, origin=str(self.path))

    def origin(self, name: str) -> str:
        """Return the source of the value of a setting: the file, the variable, ``command line`` or ``default``."""
        if _contains(self.command_line, name):
            return "command line"
        if _contains(self.environment, name):
            return environment_name(name)
        return str(self.path) if _contains(self.file, name) else "default"

    def _problem(self, detail: Mapping[str, Any], origin: str | None = None) -> InferenceCenterError:
        name = _setting_at(detail["loc"])
        origin = origin or self.origin(name)
        if detail["type"] == "extra_forbidden":
            return _invalid(f"{origin}: unknown setting {name}", name=name, hint=_nearest(name))
        reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
        value = "***" if _may_hold_secrets(name) else _cut(json.dumps(detail["input"], default=str))
        return _invalid(f"{origin}: {name} is {value}: {reason[0].lower()}{reason[1:]}", name=name)


def find_config(config: Path | None) -> Path | None:
    """Return the configuration file: the given one, ``$INFERENCECENTER_CONFIG``, the user's, or the system's.

    ``None`` if none is given and neither default file exists.
    """
    if config is not None:
        return config
    if named := os.environ.get(ENV_CONFIG):
        return Path(named)
    places = (platformdirs.user_config_path(APP_NAME) / "inferencecenter.toml", SYSTEM_CONFIG)
    # Unlike Path.exists, os.path.exists returns False in a directory that this user may not enter.
    return next((place for place in places if os.path.exists(place)), None)  # noqa: PTH110 - Path.exists raises


def read_layers(config: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Layers:
    """Read the file and the environment.

    Args:
        config: The file; by default that of ``find_config``.
        overrides: Values of the command line by dotted name.

    Raises:
        InferenceCenterError: ``invalid_config`` if the file cannot be read or is not TOML, or a variable is unknown.
    """
    path = find_config(config)
    command_line: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        section, _, key = name.rpartition(".")
        (command_line.setdefault(section, {}) if section else command_line)[key] = value
    return Layers(
        path=path,
        file={} if path is None else _read_toml(expand(path)),
        environment=_environment(),
        command_line=command_line,
    )


def load_settings(config: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read and validate the effective settings.

    Raises:
        InferenceCenterError: ``invalid_config``; the message names source, setting, value and the allowed values.
    """
    return read_layers(config, overrides).settings()


def _read_toml(path: Path) -> dict[str, Any]:
    with foreign_input(lambda reason: _invalid(f"{path}: cannot be parsed: {reason}")):
        return _parse_toml(path)


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid(
            f"{path}: cannot be read: {error.strerror}",
            hint="Name a readable file with --config or INFERENCECENTER_CONFIG.",
        ) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"{path}: is not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise _invalid(f"{path}: is not TOML: {error}") from None


class _Environment(EnvSettingsSource):
    """Environment variables as nested tables; a text that is not JSON stays text, which validation reports."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parse the JSON of a list or table; return other text unchanged."""
        with contextlib.suppress(ValueError):
            return super().decode_complex_value(field_name, field, value)
        return value


@foreign_input(lambda reason: _invalid(f"environment: cannot be parsed: {reason}"))
def _environment() -> dict[str, Any]:
    known = {environment_name(name) for name, _ in setting_fields()} | set(OTHER_ENVIRONMENT)
    params = environment_name("params.")
    for name in sorted(name.upper() for name in os.environ):
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(params):
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean {close[0]}?" if close else "docs/configuration.md lists the names."
            raise _invalid(f"environment: unknown variable {name}", hint=hint)
    values = _Environment(Settings)()
    if isinstance(texts := values.get("params"), dict):
        values["params"] = {name: _decoded(value) for name, value in texts.items()}
    return values


def _decoded(value: Any) -> Any:
    """Decode a parameter, whose type is unknown here: valid JSON as JSON, anything else as text."""
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _invalid(message: str, *, name: str | None = None, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field=name, hint=hint)


def _setting_at(location: tuple[str | int, ...]) -> str:
    """Return the dotted name at the location of a validation error, with the indices of lists."""
    return _cut("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip("."))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _may_hold_secrets(name: str) -> bool:
    """Return whether a setting is a secret, contains one, or is part of one."""
    return any(f"{name}.".startswith(f"{secret}.") or secret.startswith(f"{name}.") for secret in _secret_settings())


@cache
def _secret_settings() -> frozenset[str]:
    return frozenset(name for name, field in setting_fields() if "SecretStr" in repr(field.annotation))


def _nearest(name: str) -> str:
    """Suggest a setting with a similar name: first in the same section, then in any other."""
    names = [known for known, _ in setting_fields()]
    section, _, key = name.rpartition(".")
    siblings = [known for known in names if known.rpartition(".")[0] == section]
    keys = {known.rpartition(".")[2]: known for known in reversed(names)}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7) or [
        keys[near] for near in difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    ]
    return f"Did you mean {close[0]}?" if close else "docs/configuration.md lists the settings."


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _contains(table: Mapping[str, Any], name: str) -> bool:
    here: Any = table
    for part in name.split("[", maxsplit=1)[0].split("."):
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    return True
