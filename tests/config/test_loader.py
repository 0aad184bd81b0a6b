"""Sources of settings and the errors of invalid ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferencecenter.config import loader
from inferencecenter.config.loader import InvalidSettingsError, find_config, load_settings, read_layers
from inferencecenter.config.settings import Settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove this machine's variables and files."""
    for name in list(os.environ):
        if name.startswith("INFERENCECENTER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(loader, "SYSTEM_CONFIG", tmp_path / "etc" / "inferencecenter.toml")


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "test.toml"
    path.write_text(text)
    return path


def _refused(path: Path | None = None, **overrides: object) -> InferenceCenterError:
    with pytest.raises(InferenceCenterError) as caught:
        load_settings(path, overrides)
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    return caught.value


def test_source_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line overrides the environment, which overrides the file, which overrides the default."""
    path = _file(tmp_path, '[server]\nhost = "a"\nport = 1\nbase_path = "/x"\n')
    monkeypatch.setenv("INFERENCECENTER_SERVER__HOST", "b")
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "2")
    layers = read_layers(path, {"server.port": 3})
    server = layers.settings().server
    assert (server.host, server.port, server.base_path, server.max_connections) == ("b", 3, "/x", 10_000)
    assert layers.origin("server.port") == "command line"
    assert layers.origin("server.host") == "INFERENCECENTER_SERVER__HOST"
    assert layers.origin("server.base_path") == str(path)
    assert layers.origin("server.max_connections") == "default"


def test_top_level_settings_can_be_overridden(tmp_path: Path) -> None:
    """Settings outside any table can be set by variables and options."""
    assert load_settings(None, {"state_dir": tmp_path}).state_dir == tmp_path


def test_lists_and_parameters_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are JSON; a parameter is JSON where it parses, else text."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__TRUSTED_PROXIES", '["10.0.0.0/8", "::1"]')
    monkeypatch.setenv("INFERENCECENTER_PARAMS__TEMPERATURE", "0.5")
    monkeypatch.setenv("INFERENCECENTER_PARAMS__STOP", '["\\n"]')
    settings = load_settings()
    assert settings.server.trusted_proxies == ("10.0.0.0/8", "::1")
    assert settings.params == {"temperature": 0.5, "stop": ["\n"]}


def test_malformed_list_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the variable, the setting and the value."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__TRUSTED_PROXIES", "10.0.0.0/8")
    error = _refused()
    assert "INFERENCECENTER_SERVER__TRUSTED_PROXIES" in error.message
    assert '"10.0.0.0/8"' in error.message
    assert error.field == "server.trusted_proxies"


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("[server]\nprot = 1\n", "server.prot", "server.port"),
        ("port = 1\n", "port", "server.port"),
        ("[sever]\nport = 1\n", "sever", "docs/configuration.md"),
        ("[engine]\nslot = 1\n", "engine.slot", "engine.slots"),
        ("[log]\nxyzzy = 1\n", "log.xyzzy", "docs/configuration.md"),
    ],
)
def test_unknown_setting_suggests_the_nearest(tmp_path: Path, text: str, field: str, hint: str) -> None:
    """The error names the file and the likely key."""
    path = _file(tmp_path, text)
    error = _refused(path)
    assert error.message == f"{path}: unknown setting {field}"
    assert hint in str(error.hint)


def test_invalid_value_names_source_setting_and_range(tmp_path: Path) -> None:
    """One message has all that is needed to correct it."""
    path = _file(tmp_path, "[server]\nport = 70000\n")
    error = _refused(path)
    assert error.message == f"{path}: server.port is 70000: input should be less than or equal to 65535"
    assert error.field == "server.port"


def test_invalid_option_names_the_command_line() -> None:
    """Its source is the command line, not the file."""
    assert _refused(None, **{"engine.slots": -1}).message.startswith("command line: engine.slots is -1:")


def test_invalid_list_item_is_named(tmp_path: Path) -> None:
    """The error names only the invalid item."""
    error = _refused(_file(tmp_path, '[server]\ntrusted_proxies = ["10.0.0.0/8", "nowhere"]\n'))
    assert "server.trusted_proxies[1]" in error.message
    assert "nowhere" in error.message


@pytest.mark.parametrize(("name", "value"), [("listen", "0.0.0.0"), ("listen", "::"), ("address", "0.0.0.0:6380")])
def test_other_machines_are_not_told_to_connect_to_every_address(tmp_path: Path, name: str, value: str) -> None:
    """They would connect to themselves."""
    error = _refused(_file(tmp_path, f'[cluster]\n{name} = "{value}"\n'))
    assert error.field == f"cluster.{name}"
    assert "other machines reach this one" in error.message


def test_cluster_addresses_may_have_any_form(tmp_path: Path) -> None:
    """Names, IPv4 and IPv6 addresses."""
    for listen in ("box1.lan", "192.168.1.7", "fd00::1"):
        path = _file(tmp_path, f'[cluster]\naddress = "head:6380"\nlisten = "{listen}"\n')
        assert load_settings(path).cluster.listen == listen


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """``problems`` has one error for each invalid value."""
    error = _refused(_file(tmp_path, '[server]\nport = -1\nhosst = "a"\n[log]\nlevel = "loud"\n'))
    assert isinstance(error, InvalidSettingsError)
    assert [problem.field for problem in error.problems] == ["server.port", "server.hosst", "log.level"]


def test_section_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    """The error names the section."""
    assert _refused(_file(tmp_path, "server = 3\n")).field == "server"


def test_malformed_toml_names_line_and_column(tmp_path: Path) -> None:
    """The message has the position."""
    path = _file(tmp_path, "[server]\nport = = 3\n")
    error = _refused(path)
    assert str(path) in error.message
    assert "line 2" in error.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [(f"a = {'9' * 5000}", "ValueError"), (f"a = {'[' * 5000}", "RecursionError")],
    ids=["digits", "nesting"],
)
def test_toml_parser_failures_name_the_file(tmp_path: Path, text: str, reason: str) -> None:
    """Whatever the parser raises, the message is short."""
    path = _file(tmp_path, text)
    error = _refused(path)
    assert f"{path}: cannot be parsed: {reason}" in error.message
    assert len(error.message) < 500


def test_deeply_nested_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested JSON is refused in settings and in parameters."""
    for name in ("INFERENCECENTER_GPU__DEVICES", "INFERENCECENTER_PARAMS__STOP"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "[" * 100_000)
            assert "RecursionError" in _refused().message


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a directory and a file that is not UTF-8 are refused."""
    assert "No such file" in _refused(tmp_path / "none.toml").message
    assert "directory" in _refused(tmp_path).message
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    assert "not UTF-8 at byte 5" in _refused(binary).message


def test_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped variable would have no effect."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__PROT", "1")
    error = _refused()
    assert "INFERENCECENTER_SERVER__PROT" in error.message
    assert "INFERENCECENTER_SERVER__PORT" in str(error.hint)


@pytest.mark.parametrize("name", loader.OTHER_ENVIRONMENT)
def test_documented_non_setting_variables_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that other components read are not unknown settings."""
    if name != loader.ENV_CONFIG:
        monkeypatch.setenv(name, "value")
    load_settings()


def test_file_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option precedes the variable, the user's file and the system's; without any there is no file."""
    assert find_config(None) is None
    system, user = loader.SYSTEM_CONFIG, tmp_path / "xdg" / "inferencecenter" / "inferencecenter.toml"
    for path in (system, user):
        path.parent.mkdir(parents=True)
        path.touch()
        assert find_config(None) == path
    monkeypatch.setenv("INFERENCECENTER_CONFIG", "/named.toml")
    assert find_config(None) == Path("/named.toml")
    assert find_config(Path("/given.toml")) == Path("/given.toml")


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ('[server]\nport = "3000"\n', "server.port", 'server.port is "3000": input should be a valid integer'),
        ("[server]\nport = 3000.0\n", "server.port", "valid integer"),
        ("[engine]\nslots = true\n", "engine.slots", "valid integer"),
        ("[server]\nweb = 1\n", "server.web", "valid boolean"),
        ('[server]\nweb = "yes"\n', "server.web", "valid boolean"),
        ('[server]\nauth_timeout_s = "5"\n', "server.auth_timeout_s", "valid number"),
        ('[gpu]\nmain_gpu = "0"\n', "gpu.main_gpu", "valid integer"),
        ('[models.phi]\nslots = "2"\n', "models.phi.slots", "valid integer"),
        ('[model]\nlora = [{path = "/a", scale = "1"}]\n', "model.lora[0].scale", "valid number"),
    ],
)
def test_file_values_have_strict_types(tmp_path: Path, text: str, name: str, words: str) -> None:
    """TOML distinguishes text from numbers, so neither is converted."""
    path = _file(tmp_path, text)
    error = _refused(path)
    assert (error.field, isinstance(error, InvalidSettingsError) and len(error.problems)) == (name, 1)
    assert str(path) in error.message
    assert words in error.message


def test_types_missing_in_toml_are_converted(tmp_path: Path) -> None:
    """Integers to floats, lists to tuples, text to paths; a table in the file hides no other problem."""
    text = 'state_dir = "/a"\n[server]\nauth_timeout_s = 5\ntrusted_proxies = ["10.0.0.0/8"]\n'
    settings = load_settings(_file(tmp_path, text))
    assert (settings.server.auth_timeout_s, settings.server.trusted_proxies) == (5.0, ("10.0.0.0/8",))
    assert settings.state_dir == Path("/a")
    error = _refused(_file(tmp_path, '[server]\nport = "1"\nprot = 1\n'))
    assert isinstance(error, InvalidSettingsError)
    assert [problem.field for problem in error.problems] == ["server.port", "server.prot"]


def test_variables_and_options_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and options are text, which is converted to the setting's type."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "3001")
    assert load_settings(None, {"server.web": "false"}).server == Settings(server={"port": 3001, "web": False}).server


def test_inaccessible_home_has_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to another user; the system's file is still read."""
    looked: list[str] = []

    def refuse(path: str | os.PathLike[str]) -> os.stat_result:
        looked.append(os.fspath(path))
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    assert find_config(None) is None
    assert looked[-1] == str(loader.SYSTEM_CONFIG)
