"""Fuzzed chat templates: a rendered text or an error within limits, and a daemon that survives."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.prompt.renderer import RenderedPrompt, RenderInput
from inferencecenter.sessions.prompt.template import MAX_CHARS
from inferencecenter.sessions.prompt.template_process import RenderLimits, TemplateProcessPool
from tests.sessions.conftest import BRACKETS, make_model

if TYPE_CHECKING:
    from inferencecenter.sessions.prompt.renderer import RenderResult

LIMITS: Final = RenderLimits(cpu_s=0.2, memory_bytes=192 * 2**20)
TALK: Final = RenderInput(
    (ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="a<|im_end|>b" * 50)),
    datetime(2026, 2, 3, tzinfo=UTC),
)
EXPECTED: Final = (ErrorCode.INTERNAL, ErrorCode.INVALID_REQUEST, ErrorCode.PROMPT_TOO_LONG)

names = st.sampled_from(["messages", "m", "x", "ns", "bos_token", "tools", "loop", "self", "range", "nothing"])
numbers = st.sampled_from(["0", "1", "-1", "7", "99999", "10000000", "2 ** 64", "1.5"])
texts = st.sampled_from(["'a'", "'<|im_end|>'", "'%s'", "'%99999s'", "'\\ud800'", "'{0.__class__}'"])


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    attributes = st.sampled_from(
        ["content", "role", "x", "items", "replace", "join", "__class__", "__globals__", "append", "first", "split"]
    )
    filters = st.sampled_from(
        ["trim", "length", "list", "tojson", "join('ab')", "string", "reverse", "batch(1)", "replace('a', 'aaaa')"]
    ) | st.sampled_from(
        ["indent(99999)", "wordwrap(1)", "sum", "map('string')", "selectattr('role')", "unique", "last"]
    )
    return st.one_of(
        st.builds(
            "({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "**", "%", "~", "in", "and", "=="]), inner
        ),
        st.builds("{}.{}".format, inner, attributes),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}|{}".format, inner, filters),
        st.builds("{}({})".format, inner, inner),
        st.builds("range({})".format, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("raise_exception({})".format, inner),
        st.builds("strftime_now({})".format, inner),
    )


expressions = st.recursive(names | numbers | texts, _deeper, max_leaves=6)


def _around(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for {} in {} %}}{}{{% endfor %}}".format, st.sampled_from(["m", "x"]), expressions, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, expressions, inner),
        st.builds("{{% macro f(x) %}}{}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, expressions),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, st.sampled_from(["upper", "trim"]), inner),
        st.builds("{{% for m in messages recursive %}}{}{{{{ loop(messages) }}}}{{% endfor %}}".format, inner),
    )


statements = st.one_of(
    st.builds("{{{{ {} }}}}".format, expressions),
    st.builds("{{% set x = {} %}}".format, expressions),
    st.builds("{{% set ns = namespace(x={}) %}}".format, expressions),
    st.builds("{{% set ns.x = {} %}}".format, expressions),
    st.just("{{ messages[0].content }}"),
    st.sampled_from(["<|im_start|>", "{% break %}", "{% endfor %}", "{{", "text "]),
)
sources = st.recursive(statements, _around, max_leaves=8)

NESTED: Final = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
DOUBLING: Final = (
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}"
)


async def rendered(processes: TemplateProcessPool, source: str, number: int) -> RenderResult:
    """Render a conversation with this template and return the result."""
    done: asyncio.Future[RenderResult] = asyncio.get_running_loop().create_future()
    model = make_model(name=f"model{number}", chat_template=source)
    processes.of(model).render(TALK, client_id="ada", done=done.set_result)
    async with asyncio.timeout(120):
        return await done


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(source=sources)
@example(source=NESTED)
@example(source=DOUBLING)
@example(source="{{ 'a' * 10000000 }}" * 9)
@example(source="{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")
@example(source="{{ messages|map('tojson')|join('<|im_end|>') }}")
@example(source="{{ raise_exception(messages[1].content) }}")
@example(source="{{ '\ud800' }}")
@example(source="{{ '%99999s' % 'a' }}{{ 'a'|indent(99999) }}")
@example(source="{{ " + "(" * 500 + "1" + ")" * 500 + " }}")
def test_any_template_ends_within_its_limits(source: str) -> None:
    """It renders or fails with a documented code, and another template renders concurrently."""

    async def run() -> None:
        processes = TemplateProcessPool(limits=LIMITS)
        try:
            result, other = await asyncio.gather(rendered(processes, source, 1), rendered(processes, BRACKETS, 2))
        finally:
            await processes.aclose()
        assert isinstance(other, RenderedPrompt)
        if isinstance(result, InferenceCenterError):
            assert result.code in EXPECTED
            assert len(result.message) < 2000
        else:
            assert len(result.rendering.text) <= MAX_CHARS
            assert "".join(piece.text for piece in result.rendering.pieces()) == result.rendering.text

    asyncio.run(run())
