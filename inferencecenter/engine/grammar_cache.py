"""Compiles each grammar once, after a test in the sandbox, and caches it for later turns."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import WeakValueDictionary

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.engine.sampling.constraint import (
    Constraint,
    NumberLimiter,
    begins_with_digit,
    compiled,
    names_of,
    tokenizer_of,
)
from inferencecenter.ipc.messages import PromptSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.sampling.constraint import VocabularyNames
    from inferencecenter.ipc.messages import Grammar

_MAX_BYTES: Final = 256 * 1024 * 1024
_MAX_GRAMMARS: Final = 256
# A larger one is kept only while a turn uses it: cached, it would evict those of others.
_MOST_KEPT_BYTES: Final = _MAX_BYTES // 4
# Minimum size of a compiled grammar, including its learned state.
_LEAST_BYTES: Final = 1024 * 1024

_Key: TypeAlias = tuple[str, bytes, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CompiledGrammar:
    """A grammar's matcher, or its error; it takes about ``size_bytes``, and ``client_id`` sent it first."""

    key: _Key
    matcher: LLMatcher | str
    size_bytes: int
    client_id: str


class GrammarCache:
    """Compiles grammars for one model; used from several threads.

    Errors are cached too. When the cache is full, the client with the largest share loses its least recently used
    grammar. A large grammar is kept only as long as a turn uses it.

    Args:
        backend: Provides the vocabulary, which is read with the first grammar.
        sandbox: Where each grammar is compiled first.
        clock: Monotonic seconds.
    """

    def __init__(
        self, backend: Backend, *, sandbox: GrammarSandbox | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._backend = backend
        self._sandbox = sandbox or GrammarSandbox()
        self._clock = clock
        self._tokenizer: LLTokenizer | None = None
        self._names: VocabularyNames | None = None
        self._control: dict[str, int] = {}
        self._more_digits: npt.NDArray[np.bool_] | None = None
        self._kept: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._large: WeakValueDictionary[_Key, CompiledGrammar] = WeakValueDictionary()
        self._looking = threading.Lock()
        self._compiling = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, grammar: Grammar, markers: Sequence[str] = ()) -> CompiledGrammar | None:
        """Return a grammar that is compiled already.

        Args:
            grammar: The grammar.
            markers: The control tokens that it may name.
        """
        return self._find(_key(grammar, markers))

    def compile(
        self,
        grammar: Grammar,
        markers: Sequence[str] = (),
        *,
        client_id: str = "",
        wanted: Callable[[], bool] = lambda: True,
    ) -> CompiledGrammar:
        """Return a compiled grammar, or one known to be invalid; a new one takes up to seconds.

        Args:
            grammar: The grammar.
            markers: The control tokens that it may name.
            client_id: The client that sent it.
            wanted: Whether the result is still needed; called again after each ``interrupt``.

        Raises:
            InferenceCenterError: It could not be tested, or this model supports no grammars.
            JobCancelledError: The result is no longer needed.
        """
        key = _key(grammar, markers)
        return self._find(key) or self._compile(key, grammar, client_id=client_id, wanted=wanted)

    def interrupt(self) -> None:
        """Have a running compilation check ``wanted`` again; from any thread."""
        self._sandbox.interrupt()

    def constraint(self, compiled: CompiledGrammar, answer: Sequence[int] = ()) -> Constraint:
        """Return the constraint of a turn whose answer begins with ``answer``.

        Raises:
            InferenceCenterError: ``invalid_grammar``.
            ValueError: The answer does not fit the grammar.
        """
        if isinstance(compiled.matcher, str):
            raise InferenceCenterError(ErrorCode.INVALID_GRAMMAR, compiled.matcher)
        assert self._tokenizer is not None, "something was compiled"
        kind, *_ = compiled.key
        constraint = Constraint(
            compiled.matcher.deep_copy(),
            n_words=(self._tokenizer.vocab_size + 31) // 32,
            clock=self._clock,
            digits=self._digits() if kind == "json_schema" else None,
            on_failed=lambda: self._forget(compiled),
        )
        constraint.replay(answer)
        return constraint

    def close(self) -> None:
        """Stop the sandbox."""
        with self._compiling:
            self._sandbox.close()

    def _digits(self) -> NumberLimiter:
        if self._more_digits is None:
            self._more_digits = begins_with_digit(self._backend.model.n_vocab, self._backend.token_bytes)
        return NumberLimiter(self._more_digits, self._backend.token_bytes)

    def _find(self, key: _Key) -> CompiledGrammar | None:
        with self._looking:
            kept = self._kept.get(key)
            if kept is None:
                return self._large.get(key)
            self._kept.move_to_end(key)
            return kept

    def _compile(self, key: _Key, grammar: Grammar, *, client_id: str, wanted: Callable[[], bool]) -> CompiledGrammar:
        with self._compiling:
            # Another thread may have compiled the same grammar meanwhile.
            if (kept := self._find(key)) is not None:
                return kept
            size_bytes = 0
            matcher: LLMatcher | str
            try:
                tokenizer, names = self._prepared()
                markers = {name: self._control[name] for name in key[-1] if name in self._control}
                size_bytes = self._sandbox.run(names, grammar, markers, wanted=wanted)
                matcher = compiled(tokenizer, grammar, markers)
            except InferenceCenterError as error:
                if error.code is not ErrorCode.INVALID_GRAMMAR:
                    raise
                matcher = error.message
            kept = CompiledGrammar(key, matcher, max(size_bytes, _LEAST_BYTES), client_id)
            self._keep(kept)
            return kept

    def _prepared(self) -> tuple[LLTokenizer, VocabularyNames]:
        if self._tokenizer is None or self._names is None:
            backend = self._backend
            self._names = names_of(backend)
            self._control = {text: token for token, text in self._names.special.items()}
            self._sandbox.start(self._names)  # starts while the tokenizer is built
            self._tokenizer = tokenizer_of(
                self._names,
                backend.token_bytes,
                tokenize=lambda text: backend.tokenize((PromptSegment(text),), first=False),
            )
        return self._tokenizer, self._names

    def _keep(self, new: CompiledGrammar) -> None:
        with self._looking:
            if new.size_bytes > _MOST_KEPT_BYTES:
                self._large[new.key] = new
                return
            self._kept[new.key] = new
            held_bytes = Counter[str]()
            for each in self._kept.values():
                held_bytes[each.client_id] += each.size_bytes
            while held_bytes.total() > _MAX_BYTES or len(self._kept) > _MAX_GRAMMARS:
                ((client_id, _),) = held_bytes.most_common(1)
                others = [each for each in self._kept.values() if each is not new]
                evicted = next((each for each in others if each.client_id == client_id), others[0])
                held_bytes[evicted.client_id] -= evicted.size_bytes
                del self._kept[evicted.key]

    def _forget(self, compiled: CompiledGrammar) -> None:
        """Drop a grammar so that it is compiled anew: its turns share its learned state, which has reached a limit."""
        with self._looking:
            self._kept.pop(compiled.key, None)
            self._large.pop(compiled.key, None)


def _key(grammar: Grammar, markers: Sequence[str]) -> _Key:
    # Markers are irrelevant where the grammar cannot name them.
    names = tuple(sorted(markers)) if grammar.kind == "lark" or grammar.frame else ()
    return grammar.kind, hashlib.sha256(grammar.text.encode()).digest(), grammar.frame, names
