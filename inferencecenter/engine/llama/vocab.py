"""Tokenization and detokenization by llama.cpp."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Final

from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.images import is_row
from inferencecenter.ipc.messages import InfillTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.ipc.messages import PromptSegment

_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_PARSED_AS_SPECIAL = _CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_FENCE = "\n"
_ANY_STACK_BYTES: Final = 8 * 1024
"""Bytes of text for which every thread's stack is large enough."""
_STACK_PER_BYTE: Final = 512
_MAX_WORD_BYTES: Final = 512 * 1024
"""Longest run of characters without white space, or of white space: its tokenization takes about 220 MB of stack."""
_RUNS: Final = bytes(ord(" ") if bytes((code,)).isspace() else ord("x") for code in range(256))
_stack_size = threading.Lock()


class Vocabulary:
    """The vocabulary of a loaded model; all methods may be called from any thread.

    SentencePiece vocabularies insert a space before the first word of a text and after each special token, and
    llama.cpp does so at the start of each call. A piece in the middle of a text is therefore tokenized after a line
    feed (the fence) whose tokens are dropped again. Where the vocabulary merges the fence into the text, which can only
    happen where the text starts with white space, the piece keeps its extra space.

    Many vocabularies split a text into words by an expression that llama.cpp passes to ``std::regex``, which takes
    about 400 bytes of stack per character of a word: 8 MiB are too little for 40,000 letters without a space, and the
    process would crash. Texts cannot be split here without changing their tokens. So a long one is tokenized on a
    temporary thread whose stack is as large as the text may need.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.n_tokens: int = lib.llama_vocab_n_tokens(handle)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(handle)
        self.bos: int = lib.llama_vocab_bos(handle)
        self.eos: int = lib.llama_vocab_eos(handle)
        self._attributes: list[int] = list(self._of_each_token(lib.llama_vocab_get_attr))
        ends: Iterator[bool] = self._of_each_token(lib.llama_vocab_is_eog)
        self.end_tokens = frozenset(compress(range(self.n_tokens), ends))
        self._bytes: list[bytes | None] = [None] * self.n_tokens
        self._fence_tokens = self._fence()

    @property
    def handle(self) -> int:
        """The ``llama_vocab`` pointer; valid as long as the model is."""
        return self._handle

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of control and unknown tokens, which must never be parsed in user text."""
        texts = (self.token_text(token) for token, bits in enumerate(self._attributes) if bits & _CONTROL)
        return tuple(text for text in texts if text)

    @property
    def infill(self) -> InfillTokens | None:
        """Return the tokens that frame a prompt whose middle is missing; ``None`` if it lacks one of the three."""
        handle = self._handle
        prefix, suffix, middle, repository, file = (
            self._special_text(token)
            for token in (
                lib.llama_vocab_fim_pre(handle),
                lib.llama_vocab_fim_suf(handle),
                lib.llama_vocab_fim_mid(handle),
                lib.llama_vocab_fim_rep(handle),
                lib.llama_vocab_fim_sep(handle),
            )
        )
        return InfillTokens(prefix, suffix, middle, repository, file) if prefix and suffix and middle else None

    @property
    def max_token_bytes(self) -> int:
        """Return an upper bound of a token's text in bytes; 0 where unknown text of any length may be one token.

        The file's texts are never shorter than the bytes they spell: each byte is a character, or ``<0x0A>``.
        """
        if lib.llama_vocab_type(self._handle) not in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE):
            return 0
        return max(map(len, self._of_each_token(lib.llama_vocab_get_text)))

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Return the token ids of ``pieces``, including BOS if the model uses one and ``first`` is set.

        Template text that spells BOS itself does not get a second one. ``after`` are the tokens of the text's pieces
        before these.

        Raises:
            InferenceCenterError: ``invalid_request`` for text that is not Unicode (lone surrogates), and for a word of
                more than 512 KiB.
        """
        bos = [self.bos] if first and self._wants_bos else []
        tokens = [*(after or bos)]
        for piece in pieces:
            if not piece.text:
                continue
            follows_special = self._is_special(tokens[-1]) if tokens else first
            new = self._tokenize_piece(piece.text, special=piece.special, fenced=not follows_special)
            if tokens == bos == new[:1]:
                new = new[1:]
            tokens += new
        return tokens[len(after) :]

    def sequence(self, text: str) -> list[int]:
        """Return the token ids of a complete text, with the vocabulary's tokens for its beginning and end.

        Raises:
            InferenceCenterError: See ``tokenize``.
        """
        return self._raw(text, special=False, whole=True)

    def pair(self, query: str, document: str) -> list[int]:
        """Return the token ids of a query and a document, separated as the vocabulary does it.

        Raises:
            InferenceCenterError: See ``tokenize``.
        """
        handle = self._handle
        end = (
            [self.eos if self.eos >= 0 else lib.llama_vocab_sep(handle)] if lib.llama_vocab_get_add_eos(handle) else []
        )
        separator = [lib.llama_vocab_sep(handle)] if lib.llama_vocab_get_add_sep(handle) else []
        begin = [self.bos] if self._wants_bos else []
        return [
            *begin,
            *self._raw(query, special=False),
            *end,
            *separator,
            *self._raw(document, special=False),
            *end,
        ]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; empty for control tokens."""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._piece(token, special=False)
        return known

    def token_text(self, token: int) -> str:
        """Return a token's text in the template, control tokens included; empty for no token."""
        if not 0 <= token < self.n_tokens:
            return ""
        return self._piece(token, special=True).decode("utf-8", errors="replace")

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation."""
        return token in self.end_tokens

    def difference(self, other: Vocabulary) -> str:
        """Return how the vocabulary differs from another, in words; empty if a token means the same in both."""
        if self.n_tokens != other.n_tokens:
            return f"{self.n_tokens} tokens instead of {other.n_tokens}"
        for token in range(self.n_tokens):
            if self._entry(token) != other._entry(token):
                return f"token {token} is {self.token_text(token)!r} instead of {other.token_text(token)!r}"
        if (self.bos, self.eos, self.end_tokens) != (other.bos, other.eos, other.end_tokens):
            return "other tokens begin or end a text"
        return ""

    def _of_each_token(self, function: Any) -> Iterator[Any]:
        """Call a function of the library, which takes a vocabulary and a token, for each token.

        It is called with the GIL and without conversion of arguments, in a third of the time: a vocabulary has up to
        some hundred thousand tokens, and this is part of loading a model.
        """
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None, "the bindings have loaded it"
        call = ctypes.PYFUNCTYPE(function.restype)(address)
        return map(call, repeat(ctypes.c_void_p(self._handle)), range(self.n_tokens))

    def _is_special(self, token: int) -> bool:
        """Return whether text after a token begins anew: it is not merged with it, nor with rows of an image."""
        return is_row(token) or bool(self._attributes[token] & _PARSED_AS_SPECIAL)

    def _special_text(self, token: int) -> str:
        """Return the text that special pieces spell a token with; empty if there is none."""
        text = self.token_text(token)
        return text if text and self._raw(text, special=True) == [token] else ""

    def _entry(self, token: int) -> tuple[bytes, int]:
        return lib.llama_vocab_get_text(self._handle, token), self._attributes[token]

    @property
    def _wants_bos(self) -> bool:
        return self.add_bos and self.bos >= 0

    def _fence(self) -> list[int]:
        """Return the tokens of the fence if the vocabulary inserts spaces before words, else none."""
        if lib.llama_vocab_type(self._handle) != lib.LLAMA_VOCAB_TYPE_SPM:
            return []
        spaced = self._text_bytes(self._raw("a", special=False)).startswith(b" ")
        return self._raw(_FENCE, special=False) if spaced else []

    def _tokenize_piece(self, text: str, *, special: bool, fenced: bool) -> list[int]:
        fence = self._fence_tokens
        if fenced and fence:
            tokens = self._raw(_FENCE + text, special=special)
            if tokens[: len(fence)] == fence:
                return tokens[len(fence) :]
        return self._raw(text, special=special)

    def _raw(self, text: str, *, special: bool, whole: bool = False) -> list[int]:
        data = _encode(text)
        _check_words(data)
        # A text has at most as many tokens as bytes, except for an inserted space and the two around a whole text.
        capacity = len(data) + 4
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            count = _with_stack_for(
                data, partial(lib.llama_tokenize, self._handle, data, len(data), buffer, capacity, whole, special)
            )
            if count >= 0:
                return buffer[:count]
            capacity = -count

    def _text_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(32)
        count = lib.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = lib.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        return buffer.raw[:count]


def _with_stack_for(data: bytes, work: Callable[[], int]) -> int:
    """Return the result of ``work``, run on a thread with enough stack for a text."""
    if len(data) <= _ANY_STACK_BYTES:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as thread:
        # The size applies to all threads started meanwhile, which is harmless: only used stack takes memory.
        with _stack_size:
            before = threading.stack_size(_STACK_PER_BYTE * len(data) + 8 * 2**20)
            try:
                done = thread.submit(work)
            finally:
                threading.stack_size(before)
        return done.result()


def _check_words(data: bytes) -> None:
    if len(data) <= _MAX_WORD_BYTES:
        return
    runs = data.translate(_RUNS)
    for kind, sign in (("a word", b"x"), ("white space", b" ")):
        if sign * (_MAX_WORD_BYTES + 1) in runs:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"The text contains {kind} of more than {_MAX_WORD_BYTES} bytes without a break.",
                hint="Break it into lines; do not send encoded binary data in a prompt.",
                field="prompt",
            )


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"The text holds a lone surrogate, {text[error.start]!a}, at character {error.start}.",
            hint="Send whole Unicode characters: a surrogate pair stands for one character.",
            field="prompt",
        ) from None
