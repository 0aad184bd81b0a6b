"""Structured output: computes which tokens may come next, by llguidance.

A grammar constrains the emitted text: a token fits where its bytes do, however the text is split into tokens, and the
model chooses among all that fit. (llguidance would allow only the tokens into which its tokenizer splits a text that is
certain; the model's own choice is as good and needs no second tokenizer that agrees with the first.) A control token
fits only where the grammar names it, and end tokens wherever the text may end.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from inferencecenter.engine.backend import Backend
    from inferencecenter.ipc.messages import Grammar

MOST_DIGITS: Final = 17
"""Digits that distinguish any two 64-bit floating point numbers."""

_QUOTE: Final = ord('"')
_ESCAPE: Final = ord("\\")
_DIGITS: Final = frozenset(b"0123456789")
# Small models produce endless white space where the grammar allows it. This is Python's JSON style, the most common
# one-line style in training data. A schema's own ``x-guidance`` takes precedence.
_JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Appended to the grammar, where it shifts no line numbers and takes precedence.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
# A large grammar needs tens of milliseconds for a few of its first tokens, and microseconds later.
_SPARE_S: Final = 1.0
_TOKEN_S: Final = 0.01
_UNSATISFIABLE: Final = "no text matches this grammar"
_MAX_REASON_CHARS: Final = 600
_GBNF_OPTIONS: Final = "%llguidance {}\n"


def begins_with_digit(n_tokens: int, token_bytes: Callable[[int], bytes]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a vocabulary begin with a digit."""
    return np.array([token_bytes(token)[:1].isdigit() for token in range(n_tokens)], dtype=np.bool_)


class NumberLimiter:
    """Tracks JSON as it is generated and ends numbers that have enough digits and may end.

    Args:
        more: Which tokens begin with a digit.
        token_bytes: Returns the bytes of a token.
    """

    def __init__(self, more: npt.NDArray[np.bool_], token_bytes: Callable[[int], bytes]) -> None:
        self._more = more
        self._token_bytes = token_bytes
        self._in_string = False
        self._escaped = False
        self._n_digits = 0

    def take(self, token: int) -> None:
        """Consume the next token."""
        for byte in self._token_bytes(token):
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = not self._escaped and byte == _ESCAPE
            else:
                self._in_string = byte == _QUOTE
                self._n_digits = self._n_digits + 1 if byte in _DIGITS else 0

    def narrow(self, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which of the ``allowed`` tokens may come next."""
        if self._n_digits < MOST_DIGITS:
            return allowed
        others = allowed & ~self._more[: len(allowed)]
        return others if others.any() else allowed


# llguidance's own limits, except that its learned state of a grammar takes at most 200 MB.
_LIMITS: Final = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)

_NO_LINES: Final = re.compile(r"(\n +\d+ \| *)+$")
_PLACE: Final = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_SCHEMA_ERROR: Final = re.compile(
    r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<why>[^\n]*)\n"
    r"(?:.*\n)?? +(?P=line) \| (?:arguments_\d+_(?P<tool>[\w-]+)|answer): ",
)
"""A refused schema in the grammar of an answer, whose rules the output parser has named."""
_GBNF_ESCAPE: Final = re.compile(r"\\(\\|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")


@dataclass(frozen=True, slots=True)
class VocabularyNames:
    """Names that grammars can use of a vocabulary of ``n_vocab`` tokens: the ``special`` tokens, which are not text.

    Those in ``ends`` end a generation.
    """

    n_vocab: int
    special: Mapping[int, str]
    ends: tuple[int, ...]


class _Tokens(TokenizerWrapper):
    """A vocabulary in the form llguidance expects."""

    def __init__(
        self, names: VocabularyNames, token_bytes: Callable[[int], bytes], tokenize: Callable[[str], list[int]]
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = names.ends[0]
        self.special_token_ids = sorted(names.special)
        self.tokens = [
            names.special[token].encode() if token in names.special else token_bytes(token)
            for token in range(names.n_vocab)
        ]
        self._tokenize = tokenize

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text; called only for parts of a grammar that request it by an option."""
        return self._tokenize(text.decode(errors="replace") if isinstance(text, bytes) else text)


def names_of(backend: Backend) -> VocabularyNames:
    """Return the names that grammars can use of a backend's vocabulary.

    Raises:
        InferenceCenterError: ``invalid_grammar`` if no token ends a generation, so no structured output could end.
    """
    tokens = range(backend.model.n_vocab)
    ends = tuple(token for token in tokens if backend.is_end(token))
    if not ends:
        raise _refused("this model has no end token, so it cannot generate structured output")
    special = {*ends, *(token for token in tokens if not backend.token_bytes(token))}
    return VocabularyNames(len(tokens), {token: backend.token_text(token) for token in sorted(special)}, ends)


def tokenizer_of(
    names: VocabularyNames, token_bytes: Callable[[int], bytes], *, tokenize: Callable[[str], list[int]]
) -> LLTokenizer:
    """Return llguidance's form of a vocabulary; takes a second and 60 MB for 152,000 tokens.

    Args:
        names: The tokens that are not text.
        token_bytes: Returns the bytes of the others.
        tokenize: Returns the tokens of a text.
    """
    return LLTokenizer(_Tokens(names, token_bytes, tokenize), eos_token=list(names.ends))


def lark_of(grammar: Grammar, markers: Mapping[str, int]) -> str:
    """Return a grammar of any kind in llguidance's Lark; ``markers`` maps the control tokens it may name to their ids.

    Raises:
        InferenceCenterError: ``invalid_grammar``.
    """
    match grammar.kind:
        case "json_schema":
            return f"start: %json {json.dumps(_styled(grammar.text), ensure_ascii=False)}{_OPTIONS}"
        case "regex":
            return f"start: /{regex_to_lark(grammar.text)}/{_OPTIONS}"
        case "lark":
            return _naming(grammar.text, markers) + _OPTIONS
        case "gbnf" if grammar.frame:
            answer = _lark_of_gbnf(grammar.text).removeprefix(_GBNF_OPTIONS)
            return f"{_naming(grammar.frame, markers)}answer: %lark {{\n{answer}\n}}\n{_OPTIONS}"
        case "gbnf":
            return _lark_of_gbnf(grammar.text) + _OPTIONS
    raise _refused(f"unknown kind of grammar: {grammar.kind!r}")


def compiled(tokenizer: LLTokenizer, grammar: Grammar, markers: Mapping[str, int]) -> LLMatcher:
    """Return a matcher at the start of a grammar, which each turn copies.

    Time, memory and stack are not bounded here: see ``engine.grammar_sandbox``.

    Raises:
        InferenceCenterError: ``invalid_grammar`` for one that is malformed, unsupported by llguidance, or
            unsatisfiable.
    """
    with _border():
        matcher = LLMatcher(tokenizer, lark_of(grammar, markers), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refused(_reason(matcher.get_error(), grammar.kind))
        if warnings := matcher.get_grammar_warnings():
            raise _refused("; ".join(warnings))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_stopped() and not first.is_accepting():
            error = first.get_error()
            unsatisfiable = not error or error.startswith("NoExtension")
            raise _refused(_UNSATISFIABLE if unsatisfiable else _reason(error, grammar.kind))
        return matcher


@contextmanager
def _border() -> Iterator[None]:
    """Turn any llguidance error into ``invalid_grammar``; a panic of its Rust code is no ``Exception``."""
    try:
        yield
    except InferenceCenterError:
        raise
    except BaseException as error:
        raise _refused(f"this grammar cannot be used: {type(error).__name__}") from error


class Constraint:
    """Restricts the next tokens of one turn's answer; used by one thread at a time.

    Args:
        matcher: The turn's own copy.
        n_words: Length of a mask, in words of 32 tokens.
        clock: Monotonic seconds.
        digits: Limits the digits of numbers if the answer is JSON.
        on_failed: Called once if the matcher reaches a limit and cannot continue.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        n_words: int,
        clock: Callable[[], float],
        digits: NumberLimiter | None = None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._matcher = matcher
        self._clock = clock
        self._digits = digits
        self._on_failed = on_failed
        self._mask = np.zeros(n_words, dtype=np.uint32)
        self._spare_s = _SPARE_S

    def allowed(self, n_tokens: int) -> npt.NDArray[np.bool_]:
        """Return which of the first ``n_tokens`` tokens may come next; at least one of them may.

        Raises:
            InferenceCenterError: ``invalid_grammar`` for a grammar that proves too complex, or that no token matches.
        """
        began_s = self._clock()
        with _border():
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._spend(began_s)
        if self._matcher.is_error():
            self._fail(_reason(self._matcher.get_error(), "lark"))
        allowed = np.unpackbits(self._mask.view(np.uint8), count=n_tokens, bitorder="little").view(np.bool_)
        if not allowed.any():
            self._fail("no token of this model can continue the answer")
        return allowed if self._digits is None else self._digits.narrow(allowed)

    def accept(self, token: int) -> None:
        """Consume the next token.

        Raises:
            InferenceCenterError: ``invalid_grammar`` for a grammar that proves too complex; a token that was not
                allowed raises the same.
        """
        began_s = self._clock()
        with _border():
            fits = self._matcher.consume_token(token)
        if not fits:
            self._fail(_reason(self._matcher.get_error(), "lark"))
        if self._digits is not None:
            self._digits.take(token)
        self._spend(began_s)

    def fits(self, tokens: Sequence[int]) -> bool:
        """Return whether all tokens may come next, one after the other."""
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    def replay(self, answer: Sequence[int]) -> None:
        """Consume the turn's earlier answer.

        Raises:
            ValueError: It does not fit the grammar.
        """
        if answer and not self._matcher.consume_tokens(list(answer)):
            raise ValueError(f"an earlier answer does not fit its grammar: {self._matcher.get_error()[:200]}")
        if self._digits is not None:
            for token in answer:
                self._digits.take(token)

    def _spend(self, began_s: float) -> None:
        """Charge the time of a token to the turn's budget, since all turns of its step have waited for it."""
        self._spare_s += _TOKEN_S / 2 - (self._clock() - began_s)
        if self._spare_s < 0:
            self._fail("computing the next tokens takes too long")

    def _fail(self, reason: str) -> None:
        self._on_failed()
        raise _refused(f"this grammar proves too complex: {reason}")


def _styled(text: str) -> dict[str, Any]:
    """Return a schema with the JSON style applied."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the JSON Schema is not valid JSON: {error}") from None
    if schema is False:
        raise _refused(_UNSATISFIABLE)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused("a JSON Schema is an object or a boolean")
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**_JSON_STYLE, **own} if isinstance(own, dict) else own}


def _naming(lark: str, markers: Mapping[str, int]) -> str:
    """Return a grammar with markers replaced by their token ids."""
    for name, token in markers.items():
        lark = lark.replace(f"<[{name}]>", f"<[{token}]>")
    return lark


def _lark_of_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))
    # The converter raises plain exceptions, and IndexError at some ends of a text.
    except Exception as error:  # noqa: BLE001
        raise _refused(f"in GBNF: {error}"[:_MAX_REASON_CHARS]) from None


def _unescaped(match: re.Match[str]) -> str:
    """Return an escaped character in a form the converter handles; it breaks escapes of four and eight digits."""
    escape = match[1]
    if escape == "\\":
        return match[0]
    code = int(escape[1:], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    surrogate = 0xD800 <= code < 0xE000
    return match[0] if surrogate or code > 0x10FFFF else chr(code)


def _reason(message: str, kind: str) -> str:
    """Return llguidance's message, without parts the client did not write."""
    if found := _SCHEMA_ERROR.match(message):
        schema = "json_schema" if found["tool"] is None else f"the schema of the tool {found['tool']}"
        message = f"{schema} cannot be enforced: {found['why']}"
    reason = _NO_LINES.sub("", message.replace("\n<non-verbose/>", "").replace(_OPTIONS.strip(), "").rstrip())
    if kind in {"json_schema", "regex"}:
        reason = _PLACE.sub("", _EXCERPT.sub("", reason)).removeprefix("failed to compile JSON schema: ")
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "…"


def _refused(reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_GRAMMAR, reason)
