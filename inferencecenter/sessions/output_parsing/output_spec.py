"""How an answer is constrained and parsed: grammars of tool calls by their schemas, and of structured output.

An answer with tools is free text up to the trigger of a call, and then nothing but calls. A trigger that is a control
token is matched as that token, so the text before it may be anything; one of ordinary characters ends a lazy rule,
which matches no further than its first occurrence; in a format without a trigger (``initial_trigger``) only the start
of the answer decides. Reasoning, where the model has it, precedes all this and ends with its closing tag. Invariant: a
call that a grammar accepts is parsed (``parser``) as a call of an offered tool.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Grammar
from inferencecenter.protocol.requests import MAX_GRAMMAR_CHARS
from inferencecenter.protocol.values import NamedTool
from inferencecenter.sessions.output_parsing.grammar_builder import (
    GrammarBuilder,
    between_slashes,
    either,
    escaped,
    joined,
    optional,
    repeated,
)
from inferencecenter.sessions.output_parsing.parser import PlainTextParser, StructuredOutputParser
from inferencecenter.sessions.output_parsing.schema_support import Unenforced, enforceable
from inferencecenter.sessions.output_parsing.template_values import check_depth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities, ToolCallFormat
    from inferencecenter.sessions.output_parsing.parts import OutputParser

MAX_CALLS_CHARS: Final = 1_048_576
"""Largest grammar for the tools of a turn, in characters."""

MAX_SCHEMA_VALUES: Final = 40_000
"""Maximum number of values in the schemas of a turn, which are searched on the event loop: for 1.5 µs each."""
MAX_CACHED_BYTES: Final = 1_048_576
"""Maximum size of the cached schemas as JSON, which take about ten times as much in memory."""

_SHOWN_KEYWORDS: Final = 8
_ANYTHING: Final = r"/(.|\n)*/"
_BLANK: Final = r"/\s{0,2}/"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """How the engine constrains an answer, and how the answer is parsed.

    ``markers`` are control tokens that the engine must emit as text. ``begun`` is the start of the answer that the
    prompt already contains; without ``thinking`` and ``call_format`` the answer is plain text.
    """

    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()
    begun: str = ""
    thinking: ReasoningTags | None = None
    call_format: ToolCallFormat | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the whole answer is text."""
        return self.thinking is None and self.call_format is None

    def new_parser(self) -> OutputParser:
        if self.plain:
            return PlainTextParser()
        return StructuredOutputParser(
            self.begun, thinking=self.thinking, call_format=self.call_format, tools=self.tools
        )


@dataclass(frozen=True, slots=True)
class EnforceableSchemas:
    """The schemas of a turn, as far as a grammar can enforce them: of its ``tools``, and of its ``form``.

    There is one of the ``warnings`` for each schema with keywords that are left to the model.
    """

    tools: tuple[Tool, ...]
    form: Any
    warnings: tuple[str, ...]


class SchemaCache:
    """What a grammar can enforce of the schemas used last, since agents send the same tools with each request."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[bytes, bool], tuple[Any, list[Unenforced]]] = OrderedDict()
        self._n_bytes = 0

    def enforceable(self, schema: Any, *, strict: bool) -> tuple[Any, list[Unenforced]]:
        """Return what ``enforceable`` returns; it must not be changed."""
        try:
            key = (orjson.dumps(schema), strict)
        except TypeError:  # an integer of more than 64 bits
            return enforceable(schema, strict=strict)
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        found = self._found[key] = enforceable(schema, strict=strict)
        self._n_bytes += len(key[0])
        while self._n_bytes > MAX_CACHED_BYTES:
            (oldest, _), _ = self._found.popitem(last=False)
            self._n_bytes -= len(oldest)
        return found


def enforceable_schemas(request: Infer, cache: SchemaCache | None = None) -> EnforceableSchemas:
    """Return what a grammar can enforce of the schemas of a request.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for the first keyword of a strict schema that cannot be enforced,
            ``invalid_request`` for schemas that are nested too deep or have too many values.
    """
    cache = cache or SchemaCache()
    tools, warnings = [], []
    n_values = 0
    for index, tool in enumerate(request.tools or ()):
        n_values += check_depth(tool.parameters, field="tools", max_values=MAX_SCHEMA_VALUES - n_values)
        parameters, left = cache.enforceable(tool.parameters, strict=tool.strict)
        if left and tool.strict:
            raise _unenforceable(left[0], f"the schema of the tool {tool.name}", f"tools.{index}.parameters")
        if left:
            warnings.append(_left_to_model(left, f"the schema of the tool {tool.name}"))
        tools.append(tool.model_copy(update={"parameters": parameters}))
    form, left = None, []
    if request.json_schema is not None:
        check_depth(request.json_schema, field="json_schema", max_values=MAX_SCHEMA_VALUES - n_values)
        form, left = cache.enforceable(request.json_schema, strict=request.strict_schema)
    if left and request.strict_schema:
        raise _unenforceable(left[0], "json_schema", "json_schema")
    if left:
        warnings.append(_left_to_model(left, "json_schema"))
    return EnforceableSchemas(tuple(tools), form, tuple(warnings))


def output_spec(
    request: Infer, *, schemas: EnforceableSchemas, capabilities: TemplateCapabilities, prompt: str
) -> OutputSpec:
    """Return how the answer to ``request`` is constrained and parsed.

    Args:
        request: The request.
        schemas: Its schemas, from ``enforceable_schemas``.
        capabilities: The model's capabilities.
        prompt: The rendered prompt; its end, before the prefix, shows whether the reasoning is already open.

    Raises:
        InferenceCenterError: ``invalid_request`` for tools if the model does not support them, and see
            ``calls_grammar``; ``invalid_grammar`` for a form that is too long.
    """
    call_format = capabilities.call_format
    if request.tools and call_format is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "this session's model does not support tools", field="tools"
        )
    rendered = prompt.removesuffix(request.prefix or "")
    is_begun = call_format is not None and call_format.text_prefix and rendered.endswith(call_format.trigger)
    begun = call_format.trigger if call_format is not None and is_begun and not request.prefix else ""
    state = _reasoning_state(request, capabilities, prompt=rendered)
    if request.prefix and state == "perhaps":
        state = "not"  # the answer has begun with other text
    start = AnswerStart(
        control=capabilities.control,
        thinking=None if state == "not" else capabilities.thinking,
        in_thinking=state == "already",
        in_call=bool(begun),
        text_prefix=call_format.text_prefix if call_format is not None and begun else "",
    )
    opened = capabilities.thinking.opens if capabilities.thinking is not None and start.in_thinking else ""
    calls = bool(request.tools) and request.tool_choice != "none"
    parsed_format = call_format if calls or start.text_prefix else None
    marks = (capabilities.thinking.opens, capabilities.thinking.closes) if capabilities.thinking is not None else ()
    return OutputSpec(
        grammar=_calls(request, schemas, capabilities, start)
        if calls
        else _without_calls(request, schemas, call_format, start),
        markers=tuple(
            mark for mark in (*marks, *(parsed_format.markers if parsed_format else ())) if mark in capabilities.control
        ),
        begun=begun or opened,
        thinking=capabilities.thinking,
        call_format=parsed_format,
        tools={tool.name: tool for tool in request.tools or ()} if calls else {},
    )


def _calls(
    request: Infer, schemas: EnforceableSchemas, capabilities: TemplateCapabilities, start: AnswerStart
) -> Grammar:
    call_format, tools, choice = capabilities.call_format, schemas.tools, request.tool_choice
    assert call_format is not None, "checked by output_spec"
    assert tools, "there are calls"
    named = isinstance(choice, NamedTool)
    return calls_grammar(
        call_format,
        [tool for tool in tools if tool.name == choice.name] if isinstance(choice, NamedTool) else tools,
        start=start,
        required=named or choice == "required",
        parallel_calls=request.parallel_tool_calls and capabilities.parallel_calls and not named,
        form=_form(request, schemas),
    )


def _without_calls(
    request: Infer, schemas: EnforceableSchemas, call_format: ToolCallFormat | None, start: AnswerStart
) -> Grammar | None:
    grammar = form_grammar(_form(request, schemas), start)
    if grammar is None and request.tools and call_format is not None:
        return no_calls_grammar(call_format, start=start)
    return grammar


def _reasoning_state(
    request: Infer, capabilities: TemplateCapabilities, *, prompt: str
) -> Literal["already", "perhaps", "not"]:
    """Return whether the model reasons, by the end of the prompt."""
    thinking = capabilities.thinking
    if thinking is None or request.thinking is False:
        return "not"
    if prompt.rstrip().endswith(thinking.opens):
        return "already"
    return "not" if prompt.rstrip().endswith(thinking.closes) else "perhaps"


def form_grammar(form: Grammar | None, start: AnswerStart) -> Grammar | None:
    """Return the grammar of an answer with a form, if there is one."""
    if form is None or (start.thinking is None and not start.text_prefix):
        return form
    lark = GrammarBuilder(start.control)
    answer = joined(lark.literal(start.text_prefix), _form_rule(lark, form))
    _add_start_rule(lark, start, after=joined(_BLANK, answer), plain=answer)
    return _framed(form, lark)


def _form_rule(lark: GrammarBuilder, form: Grammar) -> str:
    """Add the rule of a form and return its name."""
    if form.kind == "json_schema":
        return lark.schema("answer", json.loads(form.text))
    # The engine converts GBNF to Lark and adds the rule.
    return "answer" if form.kind == "gbnf" else lark.rule("answer", _expression(form))


def _framed(form: Grammar, lark: GrammarBuilder) -> Grammar:
    """Return the grammar whose rules refer to the rule of a form."""
    return Grammar("gbnf", form.text, frame=lark.text) if form.kind == "gbnf" else Grammar("lark", lark.text)


def calls_grammar(  # noqa: PLR0913 - keyword-only
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    *,
    start: AnswerStart,
    required: bool,
    parallel_calls: bool,
    form: Grammar | None = None,
) -> Grammar:
    """Return the grammar of an answer that may call tools, or must if ``required``.

    Nothing follows the calls. Without ``parallel_calls`` there is at most one. An answer that is no call has the
    ``form``, if there is one; without, text may precede the calls.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for tools that are too long, and see ``ToolCallFormat.rules``.
    """
    lark = GrammarBuilder(start.control, max_chars=MAX_CALLS_CHARS)
    rules = call_format.rules(tools, lark)
    calls = lark.rule("calls", joined(rules.first, repeated(rules.next) if parallel_calls else "", rules.end))
    if required:
        called = joined("" if start.in_call else _trigger(lark, call_format), calls)
        _add_start_rule(lark, start, after=joined(_BLANK, called), plain=called)
    elif form is not None:
        called = calls if start.in_call else joined(_trigger(lark, call_format), calls)
        form_or_calls = either(joined(lark.literal(start.text_prefix), _form_rule(lark, form)), called)
        _add_start_rule(lark, start, after=joined(_BLANK, form_or_calls), plain=form_or_calls)
        return _framed(form, lark)
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


def _form(request: Infer, schemas: EnforceableSchemas) -> Grammar | None:
    """Return the requested form.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for a form that is too long.
    """
    form = None
    if request.json_schema is not None:
        form = Grammar("json_schema", json.dumps(schemas.form, ensure_ascii=False))
    elif request.regex is not None:
        form = Grammar("regex", request.regex)
    elif request.grammar is not None:
        form = Grammar("gbnf" if "::=" in request.grammar else "lark", request.grammar)
    if form is not None and len(form.text) > MAX_GRAMMAR_CHARS:
        raise InferenceCenterError(
            ErrorCode.INVALID_GRAMMAR,
            f"the schema, expression or grammar has {len(form.text)} characters; {MAX_GRAMMAR_CHARS} are allowed",
            field="json_schema" if request.json_schema is not None else None,
        )
    return form


def _unenforceable(keyword: Unenforced, schema: str, field: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_GRAMMAR,
        f"{schema} has {keyword}, which cannot be enforced",
        field=field,
        hint="Leave the keyword out, or let it be left to the model: without strict.",
    )


def _left_to_model(left: Sequence[Unenforced], schema: str) -> str:
    shown = ", ".join(map(str, left[:_SHOWN_KEYWORDS]))
    more = f" and {len(left) - _SHOWN_KEYWORDS} more" if len(left) > _SHOWN_KEYWORDS else ""
    return f"{schema} is enforced without {shown}{more}: this is left to the model"


def _expression(form: Grammar) -> str:
    """Return a regular expression or a grammar as a nested expression."""
    if form.kind == "regex":
        return f"/{between_slashes(form.text)}/"
    return f"%lark {{\n{form.text}\n}}"
