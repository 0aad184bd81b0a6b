"""Frames between the front and the engine: msgspec structs, length-prefixed MessagePack on a socketpair.

Token ids travel as little-endian int32 bytes (``pack_tokens``), text as UTF-8. Every message is a tagged, immutable
struct; ``ToEngine`` and ``FromEngine`` are the two closed unions. All that one decode step produced travels in one
``StepOutput`` frame.
"""

from __future__ import annotations

from array import array
from sys import getsizeof
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from inferencecenter.ipc.images import ImageRef

if TYPE_CHECKING:
    from collections.abc import Sequence


LOWEST_CLASS: Final = 2
"""Priority classes are 0 (interactive), 1 (normal) and 2 (batch); lower goes first."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes, four per token."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens.tolist()


class PromptSegment(msgspec.Struct, frozen=True, array_like=True):
    """A run of prompt text; special tokens are recognized in it only when ``special`` (template text).

    A segment with an ``image`` stands for it, and its text is empty.
    """

    text: str
    special: bool = False
    image: ImageRef | None = None

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return getsizeof(self.text)


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Grammar of an answer; ``text`` is of the kind ``json_schema``, ``regex``, ``lark`` or ``gbnf``.

    The earlier answer of a resumed turn matches it too.

    The grammar constrains the emitted text, however it is split into tokens. A control token is not text, even where it
    is emitted: it is allowed only where the grammar names it, written ``<[its text]>`` in Lark, as in
    ``<[<tool_call>]>``, and only if it is one of the turn's ``markers``. End tokens are allowed wherever the grammar
    may end and need no name. JSON of a ``json_schema`` is written on one line as Python writes it, with a space after
    each comma and colon; within Lark, ``%json`` does so if its schema says so in ``x-guidance``.

    ``frame`` is Lark around a ``gbnf``: it defines what may precede it and refers to the GBNF as rule ``answer``.
    """

    kind: str
    text: str
    frame: str = ""


# --- front to engine


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run one turn: continue ``tokens`` with the tokenized ``pieces``, then generate.

    ``tokens`` is everything the session already holds (packed ids), so the engine needs no session state.
    ``params_json`` is an effective ``protocol.params.Params`` with no level left to merge. ``priority`` is 0 for
    interactive, 1 for normal, 2 for batch: lower goes first.

    The first ``shared_pieces`` pieces are a system prompt whose KV other sessions of the client may reuse, and with
    ``public`` other clients too. ``answer`` is what this turn generated before its prompt was shortened or its engine
    was lost; the first ``shown_chars`` characters of its text were already emitted. With ``may_shift`` a turn whose
    context is full receives ``ContextFull`` instead of its end. Without ``durable`` nothing of it may be written to
    disk. A ``traced`` turn records its stages.

    An ``accepted`` turn was queued by the front while no engine was ready; neither it nor one with an ``answer`` is
    rejected for lack of room.

    ``images`` are those in ``tokens``. ``grammar`` constrains the answer. ``markers`` are control tokens emitted as
    text when they are generated, such as those around a tool call; all others produce no text.
    """

    turn_id: str
    session_id: str
    client_id: str
    priority: int
    tokens: bytes
    pieces: tuple[PromptSegment, ...]
    params_json: bytes
    shared_pieces: int = 0
    public: bool = False
    answer: bytes = b""
    shown_chars: int = 0
    may_shift: bool = False
    durable: bool = True
    traced: bool = False
    accepted: bool = False
    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()
    images: tuple[ImageRef, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        packed = len(self.tokens) + len(self.answer) + len(self.params_json)
        form = 0 if self.grammar is None else getsizeof(self.grammar.text) + getsizeof(self.grammar.frame)
        return packed + form + sum(piece.size_bytes for piece in self.pieces)


class EmbeddingInput(msgspec.Struct, frozen=True, array_like=True):
    """A text to embed, or its packed tokens where it has no ``text``."""

    text: str = ""
    tokens: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return getsizeof(self.text) + getsizeof(self.tokens)


class Embed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute one vector for each of ``inputs``. Only for engines of embedding models.

    The vectors arrive in order, in any number of ``EmbeddingDelta``; then ``EmbeddingDone``. With ``query`` the inputs
    are documents, and a vector is the score of one of them: only for engines of reranking models. ``dimensions``
    shortens the vectors, which is refused unless they are ``matryoshka``; 0 leaves them whole. ``truncate`` cuts a text
    that is too long, which is refused otherwise.

    ``done`` inputs of the request precede these: an earlier engine computed them. ``priority`` and ``accepted`` are as
    in ``Submit``.
    """

    turn_id: str
    client_id: str
    priority: int
    inputs: tuple[EmbeddingInput, ...]
    query: str | None = None
    dimensions: int = 0
    matryoshka: bool = False
    truncate: bool = False
    done: int = 0
    accepted: bool = False

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, at least 1."""
        # Each document is tokenized after its own copy of the query.
        return 1 + sum(each.size_bytes for each in self.inputs) + getsizeof(self.query) * len(self.inputs)


class AbortTurn(msgspec.Struct, frozen=True, tag=True):
    """End a turn now; its ``Finished`` has the reason ``aborted``. Unknown turns are ignored: they have just ended.

    An ``Embed`` ends with ``Cancelled``.
    """

    turn_id: str


class ReleaseSession(msgspec.Struct, frozen=True, tag=True):
    """Drop the KV of a closed session."""

    session_id: str


class RetainSessions(msgspec.Struct, frozen=True, tag=True):
    """Drop the parked KV of all other sessions; the first frame after ``Ready``."""

    session_ids: tuple[str, ...]


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Stop all turns without events, write the KV of durable sessions to disk, and reply ``Suspended``.

    With ``park_all`` sessions that must not be on disk are parked in memory, for another engine of this daemon.
    """

    park_all: bool = False


class Reattach(msgspec.Struct, frozen=True, tag=True):
    """Drop all turns and lookups without events, and reply ``Ready``: another connection to the front follows.

    What precedes this ``Ready`` belongs to the last connection. KV and limits stay as they are.
    """


class TokenizeRequest(msgspec.Struct, frozen=True, tag=True):
    """Tokenize text; the reply is ``Tokenized``, or ``TokensCounted`` with ``count_only``.

    With ``first`` the tokens begin a sequence, with its BOS token. The workers are shared fairly between clients,
    lookups and turns alike.
    """

    lookup_id: int
    pieces: tuple[PromptSegment, ...]
    first: bool
    client_id: str = ""
    count_only: bool = False

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, at least 1."""
        return 1 + sum(piece.size_bytes for piece in self.pieces)


class DetokenizeRequest(msgspec.Struct, frozen=True, tag=True):
    """Convert packed tokens to text, control tokens by name; the reply is ``Detokenized``."""

    lookup_id: int
    tokens: bytes
    client_id: str = ""

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, at least 1."""
        return getsizeof(self.tokens)


class CancelLookup(msgspec.Struct, frozen=True, tag=True):
    """Cancel a ``TokenizeRequest`` or ``DetokenizeRequest``; an unknown one has just been answered."""

    lookup_id: int


class ImageData(msgspec.Struct, frozen=True, tag=True):
    """The reply to ``ImageNeeded``: red, green and blue bytes, row by row from the top; ``None`` if it is gone."""

    digest: str
    pixels: bytes | None

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, at least 1."""
        return 1 + len(self.pixels or b"")


class EngineLimits(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Throttle the engine until the next ``EngineLimits``.

    At most ``active_slots`` turns hold a slot at once, and only turns of the classes down to ``lowest_class`` (see
    ``Submit``) get one, however long others wait; turns above these limits finish their quantum. Steps prefill only the
    fraction ``prefill_share`` of their token budget, and each step is followed by a pause of ``pause_ms``.
    """

    active_slots: int
    prefill_share: float = 1.0
    lowest_class: int = LOWEST_CLASS
    pause_ms: int = 0

    def __post_init__(self) -> None:
        if self.active_slots < 1:
            raise ValueError(f"active_slots must be at least 1, not {self.active_slots}")
        if not 0 < self.prefill_share <= 1:
            raise ValueError(f"prefill_share must be in (0, 1], not {self.prefill_share}")
        if self.lowest_class < 0:
            raise ValueError(f"lowest_class must not be negative: {self.lowest_class}")


class KvRamLimit(msgspec.Struct, frozen=True, tag=True):
    """Limit parked KV to ``ram_bytes`` of memory and free the excess at once.

    Valid until the next ``KvRamLimit``; ``None`` restores the configured limit.
    """

    ram_bytes: int | None


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its GGUF file and its scale; a scale of 0 disables it."""

    path: str
    scale: float = 1.0


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a new engine process: its ``EngineOptions`` as JSON."""

    options_json: bytes


ToEngine: TypeAlias = (
    Configure
    | Submit
    | Embed
    | AbortTurn
    | ReleaseSession
    | RetainSessions
    | TokenizeRequest
    | DetokenizeRequest
    | CancelLookup
    | ImageData
    | EngineLimits
    | KvRamLimit
    | Suspend
    | Reattach
)


# --- engine to front: process lifecycle


class BufferUse(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's use of one kind of memory, in bytes; ``name`` is llama.cpp's, such as ``CUDA0`` or ``CPU``."""

    name: str
    weight_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0


class InfillTokens(msgspec.Struct, frozen=True, array_like=True):
    """Texts of the special tokens around the parts of a prompt whose middle is missing; empty without that token."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model; the front never opens the file itself.

    ``n_ctx`` is tokens per slot. ``special_tokens`` are the texts of control tokens, which must never be parsed in text
    of a user or a model. ``sampling_defaults_json`` is an object of parameters recommended by the file. With
    ``add_bos`` a sequence starts with ``bos_token``. ``memory`` is what loading used; ``lora`` are the adapters. No
    token is longer than ``max_token_bytes``; 0 if a token may represent any text. A fill-in-the-middle model has
    ``infill``.

    ``projector`` is the file by which the model takes images, empty if it takes none. ``kind`` is a
    ``config.sections.ModelKind``. An embedding model's vectors have ``n_embd`` numbers, and ``n_ctx`` is the longest
    text.
    """

    name: str
    path: str
    description: str
    architecture: str
    backend: str
    n_params: int
    size_bytes: int
    n_vocab: int
    n_layers: int
    n_gpu_layers: int
    n_ctx_train: int
    n_ctx: int
    slots: int
    n_threads: int
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    special_tokens: tuple[str, ...]
    sampling_defaults_json: bytes
    library: str
    memory: tuple[BufferUse, ...] = ()
    lora: tuple[Adapter, ...] = ()
    max_token_bytes: int = 0
    kind: str = "chat"
    n_embd: int = 0
    infill: InfillTokens | None = None
    projector: str = ""

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return bool(self.projector)


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is being loaded; ``fraction`` runs from 0 to 1. ``offloads``: a GPU that takes layers is present.

    Before that, a host that lacks a file of the model reports how much of the file ``copying`` it has.
    """

    fraction: float
    offloads: bool = False
    copying: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warm; turns may be submitted."""

    model: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded; the process ends after this. ``code`` is an ``errors.ErrorCode`` value."""

    code: str
    message: str
    hint: str


class Suspended(msgspec.Struct, frozen=True, tag=True):
    """All turns have stopped and durable KV is on disk: ``sessions`` of them; the process may be terminated."""

    sessions: int


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The packed tokens of a ``TokenizeRequest``, and the text bytes of each; the names of control tokens."""

    lookup_id: int
    tokens: bytes
    spelled: tuple[bytes, ...]


class TokensCounted(msgspec.Struct, frozen=True, tag=True):
    """The number of tokens of a ``TokenizeRequest`` with ``count_only``."""

    lookup_id: int
    n_tokens: int


class Detokenized(msgspec.Struct, frozen=True, tag=True):
    """The text of a ``DetokenizeRequest``, or the first token that is not in the vocabulary."""

    lookup_id: int
    text: str
    unknown: int | None = None


class LookupFailed(msgspec.Struct, frozen=True, tag=True):
    """A ``TokenizeRequest`` or ``DetokenizeRequest`` failed. ``code`` is an ``errors.ErrorCode`` value."""

    lookup_id: int
    code: str
    message: str


LookupAnswer: TypeAlias = Tokenized | TokensCounted | Detokenized | LookupFailed
"""The reply to a ``TokenizeRequest`` or ``DetokenizeRequest``."""


class ImageNeeded(msgspec.Struct, frozen=True, tag=True):
    """Send the pixels of an image in ``ImageData``: a turn is to be prefilled past its rows."""

    digest: str


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line of the engine's or llama.cpp's log, to be written by the front."""

    level: str
    event: str
    source: str


# --- engine to front: results of a step


class QueuePosition(msgspec.Struct, frozen=True, tag=True):
    """A waiting turn's position in the queue changed; 0 is running."""

    turn_id: str
    position: int


class TraceStage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a traced turn, between two monotonic times in seconds.

    ``name`` is ``queue``, ``prefill`` or ``decode``, which follow one another, or ``park``, ``restore`` or ``copy``
    between two of them. ``tokens`` were prefilled, generated or moved.
    """

    name: str
    began_s: float
    ended_s: float
    tokens: int = 0


class Started(msgspec.Struct, frozen=True, tag=True):
    """A turn got a slot. ``tokens`` is its whole prompt, of which ``cached_tokens`` were in KV.

    ``stages`` are a traced turn's stages so far.
    """

    turn_id: str
    tokens: bytes
    cached_tokens: int
    stages: tuple[TraceStage, ...] = ()


class PrefillProgress(msgspec.Struct, frozen=True, tag=True):
    """``done`` of ``total`` prompt tokens are prefilled; sent only while a prompt takes several steps."""

    turn_id: str
    done: int
    total: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its natural-log probability under the model, before any sampler."""

    token: str
    token_id: int
    logprob: float


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The sampled token and the ``n_probs`` likeliest ones at its position."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


class TokenDelta(msgspec.Struct, frozen=True, tag=True):
    """Newly sampled tokens of a turn and the text released by them (whole UTF-8, possibly empty)."""

    turn_id: str
    tokens: bytes
    text: str
    logprobs: tuple[SampledLogprobs, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn ended. Each turn gets exactly one ``Finished`` or ``Failed``.

    The first ``kept_tokens`` generated tokens stay in the session's history: those whose text was emitted completely,
    plus the end token if there was one. They spell the first ``kept_chars`` characters of the emitted text, followed by
    ``end_text`` (the end token's own text, empty when the turn ended another way). ``reason`` is a wire
    ``finish_reason``; ``stop`` the stop string or pattern that matched. Times are milliseconds: waiting for a slot,
    first token since submission, whole turn since submission. ``preempted`` counts preemptions. ``stages`` are a traced
    turn's stages not reported yet.
    """

    turn_id: str
    reason: str
    stop: str | None
    kept_tokens: int
    kept_chars: int
    end_text: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_ms: float
    ttft_ms: float
    total_ms: float
    tokens_per_s: float
    preempted: int = 0
    warnings: tuple[str, ...] = ()
    stages: tuple[TraceStage, ...] = ()


class ContextFull(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn with ``may_shift`` no longer fits its context and has left the engine.

    It resumes when it is submitted again with a shorter prompt and all its tokens so far as ``answer``; text that was
    held back is emitted then. ``n_tokens`` counts prompt and answer. If it cannot be shortened, the turn is over:
    ``end`` is its end, after the rest of its text; without ``end`` it never began, and its prompt is too long.
    """

    turn_id: str
    n_tokens: int
    text: str = ""
    end: Finished | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn failed. ``code`` is an ``errors.ErrorCode`` value, ``stages`` are as in ``Finished``."""

    turn_id: str
    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    stages: tuple[TraceStage, ...] = ()


class EmbeddingDelta(msgspec.Struct, frozen=True, tag=True):
    """The vectors of the next inputs of an ``Embed``, as little-endian float32, and how many tokens these had.

    Vectors have length 1; scores of documents are the model's own numbers.
    """

    turn_id: str
    vectors: bytes
    n_inputs: int
    n_tokens: int


class EmbeddingDone(msgspec.Struct, frozen=True, tag=True):
    """All inputs of an ``Embed`` have been computed. Times are milliseconds: before the first batch, and in all."""

    turn_id: str
    queue_ms: float
    total_ms: float


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """An ``Embed``, or a turn that no engine had, was aborted."""

    turn_id: str


TurnEvent: TypeAlias = (
    QueuePosition
    | Started
    | PrefillProgress
    | TokenDelta
    | ContextFull
    | Finished
    | EmbeddingDelta
    | EmbeddingDone
    | Failed
    | Cancelled
)


class MoveTime(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of KV was moved: ``kind`` is ``park``, ``restore`` or ``copy``."""

    kind: str
    took_s: float


class TokenSources(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens of started turns, by the source of their KV.

    In the order of the fields: the session's own slot; another session's slot of the client; the session's parked KV; a
    shared system prompt; no source, so they are prefilled.
    """

    slot: int = 0
    neighbour: int = 0  # codespell:ignore neighbour
    parked: int = 0
    prefix: int = 0
    computed: int = 0


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one step.

    Of ``step_s`` seconds, ``decode_s`` went to decoding ``rows`` turns at once and ``prefill_s`` to prefilling
    ``prefill_tokens``. ``fetches`` loads from disk were started. Of ``drafted`` tokens ``accepted`` were accepted.

    A step of an embedding model computed ``texts`` with ``text_tokens``. Encoding an image took ``encode_s``.
    """

    step_s: float
    rows: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    fetches: int = 0
    sources: TokenSources | None = None
    moves: tuple[MoveTime, ...] = ()
    drafted: int = 0
    accepted: int = 0
    texts: int = 0
    text_tokens: int = 0
    encode_s: float = 0.0


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Everything one step produced, in order, and the engine's gauges after it.

    Of ``parked_bytes`` in both tiers, ``parked_ram_bytes`` are in memory. Without ``work`` nothing was run.
    """

    events: tuple[TurnEvent, ...]
    running: int
    waiting: int
    rss_bytes: int
    parked_sessions: int = 0
    parked_bytes: int = 0
    parked_ram_bytes: int = 0
    work: StepStats | None = None


FromEngine: TypeAlias = Loading | Ready | LoadFailed | Suspended | LookupAnswer | ImageNeeded | LogLine | StepOutput
