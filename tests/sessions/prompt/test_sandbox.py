"""The sandbox of chat templates, which are untrusted code."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from inferencecenter.sessions.prompt.template import TemplateLimitError, TemplateRefusalError, TemplateSandbox

NOW = datetime(2026, 2, 3, tzinfo=UTC)


def run(source: str, **values: object) -> str:
    """The output of a template."""
    sandbox = TemplateSandbox()
    return sandbox.run(sandbox.from_string(source), values, now=NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{% set n = namespace(t='abcdefgh') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{{ 9 ** 999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{% for i in range(90000) %}{{ text }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_huge_template_output_is_refused(source: str) -> None:
    """Endless loops, recursion and generated text of any length fail quickly."""
    with pytest.raises((TemplateLimitError, RecursionError)):
        run(source, text="x" * 2000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__self__.__class__.__subclasses__() }}",
    ],
)
def test_sandbox_isolates_templates(source: str) -> None:
    """Python internals and the caller's values are out of reach."""
    with pytest.raises(SecurityError):
        run(source, messages=[])


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{{ 'a'|center(999999999) }}", "{{ '%9d'|format(1) }}"])
def test_no_files_and_no_unbounded_filters(source: str) -> None:
    """Other files do not exist for a template, nor do filters with unbounded output."""
    with pytest.raises((TemplateError, TypeError)):
        run(source)


def test_template_environment_is_complete() -> None:
    """Loop controls, white space control, JSON, the date and generation blocks work."""
    assert run("{% for i in [1, 2, 3] %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}{% endfor %}") == "1"
    assert run("{{ value|tojson }}", value={"a": "<é>"}) == '{"a": "<é>"}'
    assert run("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"
    assert run("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c") == "ab2c"
    assert run("[{{ missing }}]") == "[]"


def test_marks_survive_json() -> None:
    """The lone surrogates that mark special tokens are never escaped."""
    value = {"a\udfff": "\udffe<é😀>\n"}
    assert run("{{ value|tojson }}", value=value) == '{"a\udfff": "\udffe<é😀>\\n"}'
    assert (
        run("{{ value|tojson(ensure_ascii=True) }}", value=value) == '{"a\udfff": "\udffe<\\u00e9\\ud83d\\ude00>\\n"}'
    )


def test_template_can_raise_an_error() -> None:
    """The message of ``raise_exception`` reaches the caller."""
    with pytest.raises(TemplateRefusalError, match="roles must alternate"):
        run("{{ raise_exception('roles must alternate') }}")


def test_each_run_has_its_own_budget() -> None:
    """The operations of one run do not count against the next."""
    sandbox = TemplateSandbox()
    template = sandbox.from_string("{% for a in range(90000) %}{% endfor %}")
    for _ in range(30):
        assert sandbox.run(template, {}, now=NOW) == ""
