"""Custom tools, whose input is any text, as functions with one argument. Pure.

The model is offered a function with the argument ``input``. The client receives the text of ``input`` from the JSON
arguments, unescaped as it is generated.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

from inferencecenter.api.lark_patterns import pattern_of
from inferencecenter.protocol.values import Tool

MAX_DESCRIPTION_CHARS: Final = 16_384
MAX_DEFINITION_CHARS: Final = 65_536

LARK_IS_TOLD: Final = "the model is told of the grammar, which is not enforced: no regular expression was found for it"

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
