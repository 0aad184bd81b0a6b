"""The generated documentation."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from inferencecenter.config.loader import load_settings
from inferencecenter.config.settings import Settings, setting_fields
from inferencecenter.core.errors import ErrorCode
from inferencecenter.models.registry import read_registry
from inferencecenter.protocol.events import AnyEvent
from inferencecenter.protocol.params import PARAM_DOCS
from inferencecenter.protocol.requests import AnyRequest
from inferencecenter.sessions.context import parse_config_params
from tools.reference.pages import DOCUMENTS, text_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_generated_files_are_current(name: str) -> None:
    """The files in the repository equal the generator's output; `make docs` writes them."""
    assert (ROOT / name).read_text(encoding="utf-8") == text_of(name)


def test_pages_are_independent_of_the_machine() -> None:
    """Defaults that depend on a machine or user are described in words."""
    for name in DOCUMENTS:
        text = text_of(name)
        assert str(ROOT) not in text, name
        assert str(Path.home()) not in text or str(Path.home()) == "/", name


def test_every_op_has_a_section() -> None:
    """Requests and events, marked † if the first protocol has them."""
    page = text_of("docs/protocol.md")
    for kind in (*get_args(AnyRequest), *get_args(AnyEvent)):
        op = get_args(kind.model_fields["op"].annotation)[0]
        assert f"### `{op}`{' †' if kind.first_protocol else ''}\n" in page


def test_every_parameter_and_alias_is_listed() -> None:
    """The table of parameters is complete."""
    page = text_of("docs/protocol.md")
    missing = [name for doc in PARAM_DOCS for name in (doc.name, *doc.aliases) if f"`{name}`" not in page]
    assert missing == []


def test_internal_references_resolve() -> None:
    """Each link within the protocol page has its heading."""
    page = text_of("docs/protocol.md")
    headings = {line.removeprefix("### ").lower() for line in page.splitlines() if line.startswith("### ")}
    links = set(re.findall(r"\]\(#(\w+)\)", page))
    assert links
    assert links <= headings


def test_schema_references_resolve() -> None:
    """Each ``$ref`` points into the document."""
    document = json.loads(text_of("docs/protocol.schema.json"))
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', text_of("docs/protocol.schema.json")))
    assert references
    for reference in references:
        place = document
        for part in reference.split("/"):
            place = place[part]


def test_multi_model_example_is_valid(tmp_path: Path) -> None:
    """The operations page's example loads without a warning and has the described models."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"## Several models\n\n```toml\n(.*?)```", page, flags=re.DOTALL)
    config = tmp_path / "example.toml"
    config.write_text(example, encoding="utf-8")
    settings = load_settings(config, {"models_dir": tmp_path})
    parse_config_params(settings)
    registry = read_registry(settings)
    assert (registry.default, sorted(registry.models)) == ("qwen", ["coder", "qwen", "support"])
    qwen, support = registry.get("qwen"), registry.get("support")
    assert (qwen.engine.slots, qwen.engine.n_ctx, qwen.engine.sleep_after_s) == (4, 8192, -1)
    assert (support.path, len(support.lora), support.engine) == (qwen.path, 1, settings.engine)
    assert registry.get("coder").params == {"temperature": 0.2}


def test_every_error_is_listed() -> None:
    """The table of errors is complete."""
    assert [code for code in ErrorCode if f"| `{code.value}` |" not in text_of("docs/errors.md")] == []


def test_every_setting_is_listed_with_its_variable() -> None:
    """It is on the settings page and in the annotated default file."""
    page, default = text_of("docs/configuration.md"), text_of("config/inferencecenter.toml")
    for name, _ in setting_fields():
        assert f"| `{name}` |" in page
        assert f"\n#{name.rpartition('.')[2]} = " in default


def test_default_file_gives_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so as it is, and with every value uncommented."""
    monkeypatch.delenv("INFERENCECENTER_TEST_MODEL", raising=False)
    text = text_of("config/inferencecenter.toml")
    uncommented = re.sub(r"^#(\w+ = (?!\.\.\.))", r"\1", text, flags=re.MULTILINE)
    assert len(tomllib.loads(uncommented)["server"]) > 10
    for version in (text, uncommented):
        path = tmp_path / "inferencecenter.toml"
        path.write_text(version)
        assert load_settings(path) == Settings()
