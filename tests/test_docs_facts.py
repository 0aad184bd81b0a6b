"""Everything that pages name exists: commands, options, settings, variables, files, addresses and frames."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import pytest
import typer

from inferencecenter.auth.clients_file import load_clients
from inferencecenter.cli.app import app
from inferencecenter.config.loader import OTHER_ENVIRONMENT, load_settings
from inferencecenter.config.sections import AuthSettings
from inferencecenter.config.settings import environment_name, setting_fields
from inferencecenter.models.script import read_script
from inferencecenter.protocol.codec import read_frame
from inferencecenter.sessions.context import parse_config_params
from tests.documentation import GENERATED, ROOT, Block, Page, all_pages, commands_in, read_page

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

PAGES = all_pages()
WRITTEN = [page for page in PAGES if page.path not in GENERATED]
SETTINGS = frozenset(name for name, _ in setting_fields())
SECTIONS = frozenset(name.partition(".")[0] for name in SETTINGS if "." in name)
VARIABLES = frozenset(map(environment_name, SETTINGS)) | OTHER_ENVIRONMENT.keys()
FOREIGN_FILES = frozenset({"convert_lora_to_gguf.py"})
FRAMES_IN = {"json": lambda text: [text], "jsonl": str.splitlines}
USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[1])


def blocks_of(*languages: str) -> list[Block]:
    """Return all blocks in these languages."""
    return [block for page in PAGES for block in page.blocks if block.language in languages]


def test_block_languages_are_known() -> None:
    """Each kind of block is executed, checked here, or a drawing."""
    known = {"", "sh", "python", "toml", "json", "jsonl", "js", "html", "mermaid", "nginx", "c"}
    assert [str(block) for page in PAGES for block in page.blocks if block.language not in known] == []


@cache
def command_of(*path: str) -> Any:
    """Return the command at a path, ``None`` if there is none."""
    return command_of(*path[:-1]).get_command(None, path[-1]) if path else typer.main.get_command(app)


@cache
def generated(name: str) -> Any:
    """Return a generated file of the documentation."""
    return json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))


def complaint(words: list[str]) -> str | None:
    """Return the command line's error for a command; ``None`` if it would run."""
    command = command_of()
    path, rest = [words[0]], words[1:]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        path.append(rest.pop(0))
        command = command_of(*path[1:])
        if command is None:
            return f"there is no {' '.join(path)}"
    try:
        if not hasattr(command, "get_command"):
            command.make_context(path[-1], rest)
    except USAGE_ERROR as error:
        return str(error)
    return None


def is_ours(words: list[str]) -> bool:
    """Return whether a command is the program's, whatever its path."""
    return words[0].rpartition("/")[2] == "inferencecenter" and len(words) > 1


def commands_shown(page: Page) -> list[list[str]]:
    """Return the program's commands in blocks and sentences."""
    texts = [block.text for block in page.blocks if block.language in ("", "sh")]
    texts += [span for span in page.spans if re.match(r"(\S+=\S+ )*(sudo .*)?(\S*/)?(inferencecenter|make)( |$)", span)]
    return [words for text in texts for words in commands_in(text)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_are_valid(page: Page) -> None:
    """Each has an existing name, options and values."""
    wrong = []
    for words in filter(is_ours, commands_shown(page)):
        said = complaint(words)
        if said is not None and not said.startswith("Missing "):  # a sentence may omit required arguments
            wrong.append(f"{' '.join(words)}: {said}")
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("inferencecenter sevre", "there is no inferencecenter sevre"),
        ("inferencecenter token mak ada", "there is no inferencecenter token mak"),
        ("inferencecenter serve --prot 3000", "--prot"),
        ("inferencecenter serve --port many", "valid integer"),
        ("inferencecenter backup a b", "b"),
    ],
)
def test_invalid_commands_are_detected(command: str, said: str) -> None:
    """The check itself finds unknown names."""
    assert said in (complaint(command.split()) or "")


def command_names(command: Any, *path: str) -> list[str]:
    """Return the names of a command's subcommands."""
    if not hasattr(command, "list_commands"):
        return [] if command.hidden else [" ".join(path)]
    return [
        each
        for name in command.list_commands(None)
        for each in command_names(command.get_command(None, name), *path, name)
    ]


def test_every_command_is_documented() -> None:
    """Any page may do it."""
    shown = [" ".join(words[1:]) for page in PAGES for words in filter(is_ours, commands_shown(page))]
    names = command_names(command_of())
    assert "session export" in names
    assert [name for name in names if not any(f"{each} ".startswith(f"{name} ") for each in shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_make_targets_exist(page: Page) -> None:
    """So do their variables."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands_shown(page):
        for word in words[1:] if words[0] == "make" else ():
            name = word.partition("=")[0]
            assert re.search(rf"^{re.escape(name)}( \??:?=|:)|\$\(?{re.escape(name)}\b", makefile, re.MULTILINE), word


@pytest.mark.parametrize("page", WRITTEN, ids=str)
def test_settings_exist(page: Page) -> None:
    """A name with the dot of a section is a setting, and the value beside it is valid."""
    for span in page.spans:
        found = re.fullmatch(r"([a-z_]+)\.([a-z_]+)(?: = (.+))?", span)
        if found is None or found[1] not in SECTIONS:
            continue
        assert f"{found[1]}.{found[2]}" in SETTINGS, span
        if found[3] is not None:
            load_settings(None, {f"{found[1]}.{found[2]}": tomllib.loads(f"value = {found[3]}")["value"]})


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_environment_variables_exist(page: Page) -> None:
    """The daemon or the command line reads each."""
    named = set(re.findall(r"\bINFERENCECENTER_[A-Z_]*[A-Z]\b(?!_?\*)", page.source))
    assert named - VARIABLES == set()


@pytest.mark.parametrize("block", blocks_of("toml"), ids=str)
def test_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    """Each block is accepted as a configuration file, as ``clients.toml``, or as rules of scripted answers."""
    config = tmp_path / "example.toml"
    config.write_text(block.text, encoding="utf-8")
    if block.text.startswith("[[client]]"):
        assert load_clients(AuthSettings(clients_file=config))
        return
    if "[[rules]]" in block.text:
        assert read_script(config).rules
        return
    parse_config_params(load_settings(config, {"models_dir": tmp_path}))


@pytest.mark.parametrize("block", blocks_of("json", "jsonl"), ids=str)
def test_frames_match_the_protocol(block: Block) -> None:
    """A block with an op is a request or event; other blocks are JSON."""
    schema = generated("protocol.schema.json")
    for text in FRAMES_IN[block.language](block.text):
        frame = json.loads(text)
        if "op" not in frame:
            continue
        events = [fields for fields in events_of(schema) if fields["op"]["const"] == frame["op"]]
        if not any(frame.keys() <= fields.keys() for fields in events):
            read_frame(text).parse()


def events_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each event in the schema."""
    return [
        each["properties"]
        for each in schema["events"]["$defs"].values()
        if "const" in each.get("properties", {}).get("op", {})
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_exist(page: Page) -> None:
    """Paths in the repository or the package resolve."""
    for span in page.spans:
        is_path = re.fullmatch(r"(docs|config|tools|tests|systemd|examples|inferencecenter)/[\w./-]+", span)
        if (is_path or re.fullmatch(r"[\w/-]+\.py", span)) and span not in FOREIGN_FILES:
            assert (ROOT / span).exists() or any((ROOT / "inferencecenter").rglob(span)), span


@pytest.mark.parametrize("page", WRITTEN, ids=str)
def test_addresses_exist(page: Page) -> None:
    """Every HTTP address is served."""
    described = generated("openapi.json")["paths"]
    plain = {"/", "/metrics", "/healthz", "/readyz", "/health", "/v1/health", "/openapi.json"}
    for span in page.spans:
        if found := re.fullmatch(r"(GET|POST|DELETE) (/[^\s?]*)", span):
            path = re.sub(r"\{\w+\}", "{}", found[2])
            methods = {re.sub(r"\{\w+\}", "{}", each): kinds for each, kinds in described.items()}
            assert (found[1] == "GET" and path in plain) or found[1].lower() in methods.get(path, {}), span


def methods_of(classes: Collection[str]) -> dict[str, set[str]]:
    """Return the names that these classes of the package define; files without them are not parsed."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "inferencecenter").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not set(re.findall(r"^ *class (\w+)", source, re.MULTILINE)) & set(classes):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                names = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                found.setdefault(node.name, set()).update(names)
    return found


def test_methods_exist() -> None:
    """The architecture page names existing methods."""
    named = [
        found for span in read_page("docs/architecture.md").spans if (found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", span))
    ]
    methods = methods_of({found[1] for found in named})
    assert len(named) > 10
    assert [found[0] for found in named if found[2] not in methods.get(found[1], ())] == []
