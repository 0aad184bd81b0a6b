"""JSON documents with a few mutated values, names and bytes.

The text is assembled from pieces, because no encoder produces what is tried: huge numbers, lone surrogates, duplicate
names, invalid UTF-8, unclosed brackets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH: Final = 600
ODD: Final = (
    *(b"null", b"true", b"false", b"[]", b"{}", b"0", b"-0.0", b"-1", b"1.5", b"1e-9", b"1e9", b"1e400", b"-1e400"),
    *(b"NaN", b"Infinity", b"2147483648", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616"),
    *(b"9" * 400, b"9" * 5000, b"0." + b"3" * 400, b"01", b"0x10", b"1_000", b"+1", b".5", b"tru", b",", b"/**/1"),
    *(b'""', b'"0"', b'"null"', b'"a b"', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\udfff\\ud800"'),
    *(b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"a\nb"', b'"\\x"', b'"\\u12"', b'"half'),
    *(
        b'"../../../etc/passwd"',
        b'"%s%n{0}{{x}}"',
        b'"<script>"',
        b'"\\u202e\\ufeff\\u200d"',
        b'"%s"' % (b"x" * 70_000),
    ),
    *(b"[" * _DEPTH + b"]" * _DEPTH, b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH, b"[" * 100_000, b'{"a":' * 50_000),
    *(b'[{"type": "text", "text": "a"}]', b'{"type": "object"}', b'{"$ref": "#"}', b'["a", 1, null, {}, []]'),
    *(b"[%s1]" % (b"1," * 2000), b'[""]', b"[null]", b"[[]]", b'{"": null}', b'{"__proto__": 1}'),
)
"""Values as text, JSON or not."""
ODD_VALUES: Final = st.integers(0, len(ODD) - 1).map(ODD.__getitem__)
_ANY_NAME: Final = st.text(max_size=8)


@dataclass
class _Member:
    """A member of an object or an array: its name as text, none in an array, and its value as text or as members."""

    name: bytes
    value: bytes | _Members


@dataclass
class _Members:
    ends: bytes
    all: list[_Member]

    def __bytes__(self) -> bytes:
        """Return the text."""
        inner = (member.name + (b":" if member.name else b"") + bytes(member.value) for member in self.all)
        return self.ends[:1] + b",".join(inner) + self.ends[1:]


@st.composite
def changed(draw: st.DrawFn, documents: st.SearchStrategy[Any], *, names: st.SearchStrategy[str] = _ANY_NAME) -> bytes:
    """Draw a document with a few mutations; ``names`` are of members that may be added."""
    root = _Members(b"[]", [_Member(b"", _parts(draw(documents)))])
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        _change(draw, root, names)
    text = bytearray(bytes(root)[1:-1])
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3]))):
        place = draw(st.integers(0, len(text)))
        text[place : place + 1] = bytes([draw(st.integers(0, 255))])
    return bytes(text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 15)) == 0 else text)


def _change(draw: st.DrawFn, root: _Members, names: st.SearchStrategy[str]) -> None:
    """Replace, drop, duplicate, rename or add one member anywhere."""
    group = draw(st.sampled_from(list(_groups(root))))
    odd = draw(ODD_VALUES)
    name = json.dumps(draw(names)).encode() if group.ends == b"{}" else b""
    if not group.all or draw(st.integers(0, 3)) == 0:
        group.all.append(_Member(name, odd))
        return
    place = draw(st.integers(0, len(group.all) - 1))
    member = group.all[place]
    match draw(st.sampled_from(["replace", "replace", "replace", "drop", "twice", "rename"])):
        case "drop":
            del group.all[place]
        case "twice":
            group.all.append(_Member(member.name, odd))
        case "rename" if member.name:
            member.name = name
        case _:
            member.value = odd


def _groups(members: _Members) -> Iterator[_Members]:
    yield members
    for member in members.all:
        if isinstance(member.value, _Members):
            yield from _groups(member.value)


def _parts(document: Any) -> bytes | _Members:
    if isinstance(document, dict):
        named = [_Member(json.dumps(name).encode(), _parts(value)) for name, value in document.items()]
        return _Members(b"{}", named)
    if isinstance(document, list):
        return _Members(b"[]", [_Member(b"", _parts(item)) for item in document])
    return json.dumps(document).encode()
