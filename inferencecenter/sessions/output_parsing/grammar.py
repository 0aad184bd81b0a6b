"""Grammars that constrain an answer: tool calls by their schemas, and structured output.

An answer with tools is free text up to the trigger of a call, and then nothing but calls. A trigger that is a control
token is matched as that token, so the text before it may be anything; one of ordinary characters ends a lazy rule,
which matches no further than its first occurrence; in a format without a trigger (``initial_trigger``) only the start
of the answer decides. Reasoning, where the model has it, precedes all this and ends with its closing tag. Invariant: a
call that a grammar accepts is parsed (``parser``) as a call of an offered tool.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Grammar
from inferencecenter.protocol.requests import MAX_GRAMMAR_CHARS
from inferencecenter.sessions.output_parsing.grammar_builder import (
    GrammarBuilder,
    either,
    escaped,
    joined,
    optional,
    repeated,
)
from inferencecenter.sessions.output_parsing.template_values import check_depth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, ToolCallFormat

MAX_CALLS_CHARS: Final = 1_048_576
"""Largest grammar for the tools of a turn, in characters."""

_ANYTHING: Final = r"/(.|\n)*/"
_BLANK: Final = r"/\s{0,2}/"
# Escapes of a regular expression between slashes.
_MARKS: Final = {"/": r"\/", "\n": r"\n"}
_IN_EXPRESSION: Final = re.compile(r"\\.|[/\n]", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """What may precede the constrained part of an answer.

    With ``thinking`` the model may reason first; ``in_thinking`` if the prompt already ends with the opening tag. With
    ``in_call`` the prompt ends with the call trigger, and plain text needs the ``text_prefix``. ``control`` tokens are
    matched as tokens, other delimiters as text.
    """

    control: frozenset[str] = frozenset()
    thinking: ReasoningTags | None = None
    in_thinking: bool = False
    in_call: bool = False
    text_prefix: str = ""


def form_grammar(request: Infer, start: AnswerStart) -> Grammar | None:
    """Return the grammar of the structured output that a request asks for, if any.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for a grammar that is too long.
    """
    form = _form(request)
    if form is not None and len(form.text) > MAX_GRAMMAR_CHARS:
        raise InferenceCenterError(
            ErrorCode.INVALID_GRAMMAR,
            f"the schema, expression or grammar has {len(form.text)} characters; {MAX_GRAMMAR_CHARS} are allowed",
            field="json_schema" if request.json_schema is not None else None,
        )
    if form is None or (start.thinking is None and not start.text_prefix):
        return form
    lark = GrammarBuilder(start.control)
    if request.json_schema is not None:
        lark.schema("answer", request.json_schema)
    elif form.kind != "gbnf":
        lark.rule("answer", _expression(form))
    answer = joined(lark.literal(start.text_prefix), "answer")
    _add_start_rule(lark, start, after=joined(_BLANK, answer), plain=answer)
    # The engine converts GBNF to Lark and adds the rule.
    return Grammar("gbnf", form.text, frame=lark.text) if form.kind == "gbnf" else Grammar("lark", lark.text)


def calls_grammar(
    call_format: ToolCallFormat, tools: Sequence[Tool], *, start: AnswerStart, required: bool, parallel_calls: bool
) -> Grammar:
    """Return the grammar of an answer that may call tools, or must if ``required``.

    Nothing follows the calls. Without ``parallel_calls`` there is at most one.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for tools that are too long, ``invalid_request`` for schemas that are
            nested too deep, and see ``ToolCallFormat.rules``.
    """
    for tool in tools:
        check_depth(tool.parameters, field="tools")
    lark = GrammarBuilder(start.control, max_chars=MAX_CALLS_CHARS)
    rules = call_format.rules(tools, lark)
    calls = lark.rule("calls", joined(rules.first, repeated(rules.next) if parallel_calls else "", rules.end))
    if required:
        called = joined("" if start.in_call else _trigger(lark, call_format), calls)
        _add_start_rule(lark, start, after=joined(_BLANK, called), plain=called)
    else:
        lark.rule("TEXT", _text(call_format))
        text_or_calls = _text_or_calls(lark, call_format, calls, text="TEXT", start=start)
        plain = text_or_calls
        if start.thinking is not None and start.thinking.opens not in start.control:
            lark.rule("FIRST", rf"TEXT & ~/(?s:\s*{escaped(start.thinking.opens)}.*)/")
            plain = _text_or_calls(lark, call_format, calls, text="FIRST", start=start)
        _add_start_rule(lark, start, after=text_or_calls, plain=plain)
    return Grammar("lark", lark.text)


def no_calls_grammar(call_format: ToolCallFormat, *, start: AnswerStart) -> Grammar:
    lark = GrammarBuilder(start.control)
    text = _text(call_format)
    if call_format.trigger not in start.control and not call_format.initial_trigger:
        text += f" & ~/(?s:.*{escaped(call_format.trigger)}.*)/"
    answer = joined(lark.literal(start.text_prefix), lark.rule("TEXT", text))
    _add_start_rule(lark, start, after=answer, plain=answer)
    return Grammar("lark", lark.text)


def _text(call_format: ToolCallFormat) -> str:
    """Return the expression of text that does not start like a call at the start of the answer."""
    return rf"/\s*([^\s{escaped(call_format.initial_trigger)}](.|\n)*)?/" if call_format.initial_trigger else _ANYTHING


def _trigger(lark: GrammarBuilder, call_format: ToolCallFormat) -> str:
    if call_format.initial_trigger:
        return optional(lark.literal(call_format.trigger)) if lark.is_control(call_format.trigger) else ""
    return lark.literal(call_format.trigger)


def _text_or_calls(
    lark: GrammarBuilder, call_format: ToolCallFormat, calls: str, *, text: str, start: AnswerStart
) -> str:
    """Return the expression of text optionally followed by calls; rule names derive from the terminal ``text``."""
    prefix = lark.literal(start.text_prefix)
    options = [joined(prefix, text)]
    if lark.is_control(call_format.trigger):
        options.append(joined(prefix, text, lark.literal(call_format.trigger), calls))
    elif not call_format.initial_trigger:
        head = f"head_{text.lower()}"
        lark.rule(f"{head}[lazy]", f"{text} {lark.literal(call_format.trigger)}")
        options.append(joined(prefix, head, calls))
    if start.in_call or call_format.initial_trigger:
        options.append(calls)
    return either(*options)


def _add_start_rule(lark: GrammarBuilder, start: AnswerStart, *, after: str, plain: str) -> None:
    """Add the start rule: ``plain``, or reasoning and ``after``."""
    thinking = start.thinking
    if thinking is None:
        lark.rule("start", plain)
        return
    if thinking.closes in start.control:
        lark.rule("thoughts", joined(_ANYTHING, lark.literal(thinking.closes)))
    else:
        lark.rule("thoughts[lazy]", rf"/(.|\n)*{escaped(thinking.closes)}/")
    thought = joined("thoughts", after)
    lark.rule("start", thought if start.in_thinking else either(joined(lark.literal(thinking.opens), thought), plain))


def _form(request: Infer) -> Grammar | None:
    if request.json_schema is not None:
        check_depth(request.json_schema, field="json_schema")
        return Grammar("json_schema", json.dumps(request.json_schema, ensure_ascii=False))
    if request.regex is not None:
        return Grammar("regex", request.regex)
    if request.grammar is not None:
        return Grammar("gbnf" if "::=" in request.grammar else "lark", request.grammar)
    return None


def _expression(form: Grammar) -> str:
    """Return a regular expression or a grammar as a nested expression."""
    if form.kind == "regex":
        return f"/{_IN_EXPRESSION.sub(_escaped_mark, form.text)}/"
    return f"%lark {{\n{form.text}\n}}"


def _escaped_mark(found: re.Match[str]) -> str:
    return _MARKS.get(found[0], found[0])
