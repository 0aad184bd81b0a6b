"""Sandbox for chat templates, which are untrusted code from model files.

A template cannot reach anything but the conversation. Its output and its work are bounded; work is counted in
operations instead of seconds, so the limits are deterministic. Loops over long texts without calls or lookups are not
counted; the process limits of ``template_process`` cover them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_OPERATIONS: Final = 2_000_000
MAX_CHARS: Final = 32 * 1024 * 1024
_MAX_NUMBER: Final = 10_000_000
_MAX_EXPONENT: Final = 64
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f\ud800-\udfff]")
_WIDE_FORMAT: Final = re.compile(r"\d{5}|\*")  # a format width produces arbitrarily long text


class TemplateRefusalError(TemplateError):
    """The template itself rejects the conversation (``raise_exception``)."""


class TemplateLimitError(TemplateError):
    """The template exceeds a limit on work or output."""


class GenerationBlock(Extension):
    """``{% generation %}``, which marks the model's own output for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A bounded jinja2 environment with the extensions that model files expect. Not thread-safe."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            keep_trailing_newline=False,
        )
        self._operations_left = MAX_OPERATIONS
        self.filters["tojson"] = _tojson
        for name in ("center", "format"):  # they produce text of any length, unseen by the limits
            del self.filters[name]
        self.globals["raise_exception"] = _refuse

    def run(
        self,
        template: Template,
        values: Mapping[str, object],
        *,
        now: datetime,
        max_operations: int = MAX_OPERATIONS,
    ) -> str:
        """Return the output of ``template``, limited to ``max_operations``.

        Raises:
            TemplateError: The template rejects the conversation, exceeds a limit, or fails.
        """
        self._operations_left = max_operations
        parts: list[str] = []
        chars_left = MAX_CHARS
        for part in template.generate(**values, strftime_now=now.strftime):
            self._spend(1)
            chars_left -= len(part)
            if chars_left < 0:
                raise TemplateLimitError(f"the chat template writes more than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Call ``__obj`` for the template and count it."""
        __self._spend(1)
        if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in (*args, *kwargs.values())):
            raise TemplateLimitError(f"the chat template calls something with a number above {_MAX_NUMBER}")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            __self._spend(len(result))
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._spend(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._spend(1)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator for the template; refuse results that would be huge."""
        self._spend(1)
        if _is_huge(operator, left, right):
            raise TemplateLimitError(f"the chat template calculates something huge with {operator}")
        return super().call_binop(context, operator, left, right)

    def _spend(self, operations: int) -> None:
        self._operations_left -= operations
        if self._operations_left < 0:
            raise TemplateLimitError("the chat template exceeds its limit of operations")


def _is_huge(operator: str, left: Any, right: Any) -> bool:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if operator == "%":
        return isinstance(left, str) and _WIDE_FORMAT.search(left) is not None
    if operator == "**":
        return not numbers or bool(abs(left) > _MAX_NUMBER or abs(right) > _MAX_EXPONENT)
    if numbers:
        return bool(max(abs(left), abs(right)) > _MAX_NUMBER**2)
    size: float = _size(left) * _size(right) if operator == "*" else _size(left) + _size(right)
    return size > MAX_CHARS


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else len(value) if hasattr(value, "__len__") else 1


def _refuse(message: str) -> None:
    raise TemplateRefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as model files expect it: without the HTML escaping of jinja2's own filter.

    Lone surrogates are kept: they are the marks of ``special_tokens``.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
