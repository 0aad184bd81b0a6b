"""Builds grammars in llguidance's Lark syntax, rule by rule."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Collection

# Small models get stuck in optional white space. Templates render arguments with this spacing too, so that the next
# prompt repeats the tokens of this answer.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Escapes of a regular expression between slashes.
_MARKS: Final = {"/": r"\/", "\n": r"\n"}
_IN_PATTERN: Final = re.compile(r"\\.|[/\n]", re.DOTALL)


class GrammarBuilder:
    """Collects the rules of a grammar.

    Args:
        control: Texts that are control tokens of the model; all others are matched as text.
        max_chars: Largest grammar in characters; the rule that exceeds it raises.
    """

    def __init__(self, control: Collection[str], *, max_chars: int | None = None) -> None:
        self._control = control
        self._max_chars = max_chars
        self._rules: list[str] = []
        self._n_chars = 0

    @property
    def text(self) -> str:
        return "\n".join(self._rules) + "\n"

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name.

        Raises:
            InferenceCenterError: ``invalid_grammar`` if the grammar becomes too long.
        """
        rule = f"{name}: {body}"
        self._n_chars += len(rule) + 1
        if self._max_chars is not None and self._n_chars > self._max_chars:
            raise InferenceCenterError(
                ErrorCode.INVALID_GRAMMAR,
                f"the grammar of the tools exceeds {self._max_chars} characters",
                field="tools",
                hint="Offer fewer tools, or schemas that refer to fewer definitions.",
            )
        self._rules.append(rule)
        return name

    def is_control(self, text: str) -> bool:
        return text in self._control

    def literal(self, *texts: str) -> str:
        """Return the expression of a sequence of texts, each a control token or literal text."""
        expressions: list[str] = []
        plain = ""
        for text in texts:
            if text in self._control:
                expressions += [_literal(plain) if plain else "", f"<[{text}]>"]
                plain = ""
            else:
                plain += text
        return joined(*expressions, _literal(plain) if plain else "")

    def schema(self, name: str, schema: Any) -> str:
        """Add a rule for JSON that a JSON Schema accepts and return its name."""
        accepts = {**schema, "x-guidance": _SPACING} if isinstance(schema, dict) else schema
        return self.rule(name, f"%json {_literal(accepts)}")


def joined(*expressions: str) -> str:
    """Return the sequence of expressions; empty ones are skipped."""
    return " ".join(expression for expression in expressions if expression)


def either(*expressions: str) -> str:
    return f"({' | '.join(expressions)})"


def repeated(expression: str) -> str:
    """Return zero or more repetitions of an expression."""
    return f"({expression})*"


def optional(expression: str) -> str:
    return f"({expression})?"


def escaped(text: str) -> str:
    """Return a regular expression, for use between slashes, that matches a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def between_slashes(pattern: str) -> str:
    """Return a regular expression as it is written between slashes."""
    return _IN_PATTERN.sub(lambda match: _MARKS.get(match[0], match[0]), pattern)


def rule_name(prefix: str, name: str) -> str:
    """Return a rule name that identifies a tool in errors about the grammar."""
    return f"{prefix}_{re.sub(r'[^a-z0-9_-]', '_', name.lower())}"


def _literal(value: Any) -> str:
    """Return a value as JSON without ``<[``, which the engine would parse as a control token's name."""
    return json.dumps(value, ensure_ascii=False).replace("<[", r"\u003c[")
