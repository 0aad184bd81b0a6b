"""Lark grammars as regular expressions, by which the input of a custom tool is enforced. Pure.

A call is JSON, which escapes the text that a grammar describes. A regular expression can be escaped with it, and is one
terminal; the terminals of a grammar could not be told apart within JSON, since many may begin with a backslash. So a
grammar is enforced if no rule refers to itself, as that of patches, and if it keeps to the subset that is read here.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHARS: Final = 8_192
"""Largest grammar, and largest expression."""
_MAX_DEPTH: Final = 100

_TOKEN: Final = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<number>[0-9]+)
    |(?P<mark>%[a-z]+|->|\.\.|[|*+?!~()\[\]{},:.])""",
    re.VERBOSE,
)
_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$&~-]")
_ANCHORS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([$^])", re.DOTALL)
_CONTROLS: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f"}
_COMMON: Final = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals that a grammar may import."""

_Token = tuple[str, str]


class _UnreadableError(Exception):
    """The grammar is not regular, or not in the subset."""


@lru_cache(maxsize=256)
def pattern_of(grammar: str) -> str | None:
    """Return a regular expression of the texts that a Lark grammar describes; ``None`` if none is found."""
    if len(grammar) > MAX_CHARS:
        return None
    try:
        pattern = _Rules(grammar).pattern("start")
        re.compile(pattern)
    except (_UnreadableError, re.error, RecursionError, OverflowError):
        return None
    return pattern


class _Rules:
    """The rules of a grammar, each of which becomes an expression when it is first referred to."""

    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._patterns: dict[str, str] = {}
        self._open: set[str] = set()
        for line in _statements(list(_tokens(grammar))):
            self._add(line)

    def pattern(self, name: str) -> str:
        """Return the expression of a rule."""
        if name not in self._patterns:
            if name in self._open or name not in self._bodies or len(self._open) > _MAX_DEPTH:
                raise _UnreadableError
            self._open.add(name)
            body = _Body(self._bodies[name], self)
            self._patterns[name] = body.choice()
            body.end()
            self._open.remove(name)
        return self._patterns[name]

    def _add(self, statement: list[_Token]) -> None:
        texts = [text for _, text in statement]
        if texts[0] == "%import":
            self._import(texts[1:])
            return
        while texts[0] in ("?", "!"):
            texts, statement = texts[1:], statement[1:]
        if len(statement) < 2 or statement[0][0] != "name" or texts[1] != ":" or texts[0] in self._bodies:
            raise _UnreadableError
        self._bodies[texts[0]] = [token for token in statement[2:] if token[0] != "line"]

    def _import(self, texts: list[str]) -> None:
        texts = [text for text in texts if text != "\n"]
        if texts[:2] == ["common", "("] and texts[-1] == ")":
            names = {name: name for name in texts[2:-1] if name != ","}
        elif len(texts) in (3, 5) and texts[:2] == ["common", "."] and texts[3:4] in ([], ["->"]):
            names = {texts[-1]: texts[2]}
        else:
            raise _UnreadableError
        if not set(names.values()) <= _COMMON.keys():
            raise _UnreadableError
        self._patterns |= {alias: _COMMON[name] for alias, name in names.items()}


class _Body:
    """Reads the body of a rule by recursive descent."""

    def __init__(self, tokens: list[_Token], rules: _Rules) -> None:
        self._tokens = tokens
        self._rules = rules
        self._place = 0
        self._depth = 0

    def end(self) -> None:
        """Check that everything was read."""
        if self._place < len(self._tokens):
            raise _UnreadableError

    def choice(self) -> str:
        """Read alternatives."""
        self._depth += 1
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        self._depth -= 1
        return _bounded("|".join(options))

    def _sequence(self) -> str:
        parts: list[str] = []
        while (atom := self._atom()) is not None:
            parts.append(atom + self._quantifier())
        if self._accept("->"):
            self._take("name")
        return _bounded("".join(parts))

    def _atom(self) -> str | None:
        kind, text = self._next()
        if kind not in ("name", "string", "regex") and text not in ("(", "["):
            return None
        if self._depth > _MAX_DEPTH:
            raise _UnreadableError
        self._place += 1
        if text in ("(", "["):
            inner = self.choice()
            if not self._accept(")" if text == "(" else "]"):
                raise _UnreadableError
            return f"(?:{inner})" if text == "(" else f"(?:{inner})?"
        if kind == "name":
            return f"(?:{self._rules.pattern(text)})"
        if kind == "regex":
            return _of_regex(text)
        if self._accept(".."):
            return _of_range(text, self._take("string"))
        return _of_string(text)

    def _quantifier(self) -> str:
        for text in ("*", "+", "?"):
            if self._accept(text):
                return text
        if self._accept("~"):
            least = self._take("number")
            return f"{{{least},{self._take('number')}}}" if self._accept("..") else f"{{{least}}}"
        return ""

    def _next(self) -> _Token:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")

    def _accept(self, text: str) -> bool:
        found = self._next() == ("mark", text)
        self._place += found
        return found

    def _take(self, kind: str) -> str:
        found, text = self._next()
        if found != kind:
            raise _UnreadableError
        self._place += 1
        return text


def _tokens(grammar: str) -> Iterator[_Token]:
    place = 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None or found.lastgroup is None:
            raise _UnreadableError
        place = found.end()
        if found.lastgroup != "skip":
            yield found.lastgroup, found[0]


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield rules and directives, each of which begins on a line of its own."""
    starts = [0, *(place + 1 for place, (kind, _) in enumerate(tokens) if kind == "line")]
    begins = [start for start in starts if _begins(tokens[start : start + 4])]
    if not begins or any(kind != "line" for kind, _ in tokens[: begins[0]]):
        raise _UnreadableError
    for start, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        yield tokens[start:end]


def _begins(tokens: list[_Token]) -> bool:
    """Return whether a line begins with a directive or the name of a rule."""
    while tokens and tokens[0] in (("mark", "?"), ("mark", "!")):
        tokens = tokens[1:]
    if tokens and tokens[0][1].startswith("%"):
        return True
    return len(tokens) > 1 and tokens[0][0] == "name" and tokens[1] == ("mark", ":")


def _text_of(string: str) -> str:
    try:
        text = json.loads(string)
    except ValueError:
        raise _UnreadableError from None
    return str(text)


def _escaped(text: str) -> str:
    return "".join(_CONTROLS.get(char, char) for char in _META.sub(r"\\\g<0>", text))


def _of_string(string: str) -> str:
    flags = "i" if string.endswith("i") else ""
    return f"(?{flags}:{_escaped(_text_of(string.removesuffix('i')))})"


def _of_range(first: str, last: str) -> str:
    low, high = _text_of(first), _text_of(last)
    if len(low) != 1 or len(high) != 1:
        raise _UnreadableError
    return f"[{_escaped(low)}-{_escaped(high)}]"


def _of_regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    if not set(flags) <= set("isu") or any(anchor[1] for anchor in _ANCHORS.finditer(pattern)):
        raise _UnreadableError
    return f"(?{flags.replace('u', '')}:{pattern.replace(chr(92) + '/', '/')})"


def _bounded(pattern: str) -> str:
    if len(pattern) > MAX_CHARS:
        raise _UnreadableError
    return pattern
