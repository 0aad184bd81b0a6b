"""Custom tools, whose input is any text, as functions with one argument. Pure.

The model is offered a function with the argument ``input``. The client receives the text of ``input`` from the JSON
arguments, unescaped as it is generated.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from inferencecenter.protocol.values import Tool

if TYPE_CHECKING:
    from collections.abc import Iterator


# Lark grammars as regular expressions, by which the input of a custom tool is enforced. Pure.
#
# A call is JSON, which escapes the text that a grammar describes. llguidance escapes a regular expression with it, as a
# ``pattern`` of a schema, and has nothing of the kind for a grammar: each of its terminals would have to be rewritten,
# which needs a reader of all of its regular expressions. So a grammar is enforced if no rule refers to itself, as that
# of patches, and if it keeps to the subset that is read here. What ``%ignore`` names may stand around each terminal.

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
        rules = _Rules(grammar)
        pattern = _bounded(rules.gap() + rules.pattern("start"))
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
        self._ignored: list[list[_Token]] = []
        self._gap: str | None = None
        for line in _statements(list(_tokens(grammar))):
            self._add(line)

    def pattern(self, name: str) -> str:
        """Return the expression of a rule."""
        if name not in self._patterns:
            if name in self._open or name not in self._bodies or len(self._open) > _MAX_DEPTH:
                raise _UnreadableError
            self._open.add(name)
            body = _Body(self._bodies[name], self, gap="" if _is_terminal(name) else self.gap())
            self._patterns[name] = body.choice()
            body.end()
            self._open.remove(name)
        return self._patterns[name]

    def gap(self) -> str:
        """Return the expression of what may stand between terminals, possibly empty."""
        if self._gap is None:
            options = []
            for tokens in self._ignored:
                body = _Body(tokens, self, gap="")
                options.append(body.choice())
                body.end()
            self._gap = f"(?:{'|'.join(options)})*" if options else ""
        return self._gap

    def _add(self, statement: list[_Token]) -> None:
        texts = [text for _, text in statement]
        if texts[0] == "%import":
            self._import(texts[1:])
            return
        if texts[0] == "%ignore":
            self._ignored.append([token for token in statement[1:] if token[0] != "line"])
            if not self._ignored[-1]:
                raise _UnreadableError
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
    """Reads the body of a rule by recursive descent; ``gap`` may follow each terminal in it."""

    def __init__(self, tokens: list[_Token], rules: _Rules, *, gap: str) -> None:
        self._tokens = tokens
        self._rules = rules
        self._gap = gap
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
        if kind == "name" and not _is_terminal(text):
            return f"(?:{self._rules.pattern(text)})"
        terminal = self._terminal(kind, text)
        return f"(?:{terminal}{self._gap})" if self._gap else terminal

    def _terminal(self, kind: str, text: str) -> str:
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


def _is_terminal(name: str) -> bool:
    return name == name.upper()


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


MAX_DESCRIPTION_CHARS: Final = 16_384
MAX_DEFINITION_CHARS: Final = 65_536

LARK_NOT_ENFORCED: Final = "the grammar is in the tool's description, but not enforced: no regular expression equals it"

Syntax = Literal["lark", "regex"]

_ARGUMENT: Final = "input"
_SYNTAXES: Final[dict[Syntax, str]] = {"lark": "Lark grammar", "regex": "regular expression"}

_OPENING: Final = f'{{"{_ARGUMENT}":"'
_GAPS: Final = (0, 1, _OPENING.index(":"), _OPENING.index(":") + 1)
"""Places in the opening before which white space may stand."""
_UNIT: Final = re.compile(
    r"""(?P<text>[^"\\]+)
    |\\u(?P<hex>[0-9a-fA-F]{4})
    |\\(?P<escape>[^u]|u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))
    |(?P<end>")""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def function_of(name: str, description: str | None, *, syntax: Syntax | None, definition: str) -> Tool:
    """Return the function that represents a custom tool; without a ``syntax`` its input is any text.

    A regular expression is enforced as far as the daemon can, and a Lark grammar if one is found for it.
    """
    form = "The input is plain text."
    text = {"type": "string"}
    if syntax is not None:
        form = f"The input is text that matches this {_SYNTAXES[syntax]}:\n\n{definition}"
    pattern = definition if syntax == "regex" else pattern_of(definition) if syntax == "lark" else None
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    return Tool(
        name=name,
        description=f"{description}\n\n{form}" if description else form,
        parameters={
            "type": "object",
            "properties": {_ARGUMENT: text},
            "required": [_ARGUMENT],
            "additionalProperties": False,
        },
        strict=False,
    )


def is_left_to_model(form: object) -> bool:
    """Return whether a format of a request has a Lark grammar that is not enforced."""
    if not isinstance(form, dict) or form.get("syntax") != "lark":
        return False
    definition = form.get("definition")
    return isinstance(definition, str) and pattern_of(definition) is None


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a call, which may be incomplete."""
    return InputReader().feed(arguments)


class InputReader:
    """Reads the input of one call from its arguments, as they are generated.

    Arguments of another form are the input as they are. A character is returned once it is complete: an escape
    sequence, or both of two surrogates; a surrogate alone becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._opening: list[str] = []
        self._n_opened = 0  # characters of the opening, without white space
        self._held = ""
        self._state: Literal["before", "within", "after", "other"] = "before"

    def feed(self, piece: str) -> str:
        """Return the text of the input that a piece of the arguments completes."""
        match self._state:
            case "before":
                return self._open(piece)
            case "within":
                return self._read(self._held + piece)
            case "after":
                return ""
            case "other":
                return piece

    def _open(self, piece: str) -> str:
        """Read a piece of what precedes the text; each character is looked at once, however much white space it is."""
        self._opening.append(piece)
        for place, char in enumerate(piece, start=1):
            if char == _OPENING[self._n_opened]:
                self._n_opened += 1
                if self._n_opened == len(_OPENING):
                    self._state = "within"
                    self._opening.clear()
                    return self._read(piece[place:])
            elif self._n_opened not in _GAPS or not char.isspace():
                self._state = "other"
                arguments = "".join(self._opening)
                self._opening.clear()
                return arguments
        return ""

    def _read(self, escaped: str) -> str:
        """Return the text at the start of a JSON string without its opening quote, and hold what is incomplete."""
        text: list[str] = []
        end = held = 0
        while unit := _UNIT.match(escaped, end):
            start, end = end, unit.end()
            if unit["end"]:
                self._state, held = "after", end
                break
            if unit["hex"]:
                text.append(chr(int(unit["hex"], 16)))
                held = start if "\ud800" <= text[-1] <= "\udbff" else end
            else:
                text.append(unit["text"] or _ESCAPES.get(unit["escape"], unit.group()))
                held = end
        if held < end:
            text.pop()
        self._held = escaped[held:]
        return "".join(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
