"""Frames between the front and the engine: msgspec structs, length-prefixed MessagePack on a socketpair.

Token ids travel as little-endian int32 bytes (``pack_tokens``), text as UTF-8. Every message is a tagged, immutable
struct; ``ToEngine`` and ``FromEngine`` are the two closed unions. All that one decode step produced travels in one
``StepOutput`` frame.
"""

from __future__ import annotations

from array import array
from sys import getsizeof
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes, four a token."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids in bytes made by ``pack_tokens``."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens.tolist()


class PromptSegment(msgspec.Struct, frozen=True, array_like=True):
    """A run of prompt text; special tokens are recognised in it only when ``special`` (template text)."""

    text: str
    special: bool = False

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return getsizeof(self.text)


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The form of an answer; ``text`` is of the kind ``json_schema``, ``regex``, ``lark`` or ``gbnf``.

    A turn that goes on has its earlier answer in this form too.

    Text is matched as it is shown, however it is cut into tokens. A control token is no text, also where it is shown:
    it comes only where the grammar names it, which is written ``<[its text]>`` in Lark, as in ``<[<tool_call>]>``, and
    understood for those of the turn's ``markers``. What ends a generation may come wherever the grammar may end, and
    needs no name. JSON of a ``json_schema`` is written on one line as Python writes it, with a space after each comma
    and colon; within Lark, ``%json`` does so if its schema says so in ``x-guidance``.

    What may stand before a ``gbnf`` is said by a ``frame`` in Lark, which has a rule ``answer`` that is the GBNF.
    """

    kind: str
    text: str
    frame: str = ""


# --- front to engine


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run one turn: continue ``tokens`` with the tokenized ``pieces``, then generate.

    ``tokens`` is everything the session already holds (packed ids), so that the engine owes nobody any memory.
    ``params_json`` is an effective ``protocol.params.Params`` with no level left to merge. ``priority`` is 0 for
    interactive, 1 for normal, 2 for batch: lower goes first.

    The first ``shared_pieces`` pieces are a system prompt, whose KV other sessions of the client may use, and with
    ``public`` everybody's. ``answer`` is what this turn generated before, when it goes on after its prompt was made
    shorter or its engine was lost; the first ``shown_chars`` characters of its text have been told. With ``may_shift``
    a turn whose context is full hears ``ContextFull`` instead of its end. Without ``durable`` nothing of it may be
    written to a disk. Where its time goes is taken down if it is ``traced``.

    One that is ``accepted`` was kept by the front while no engine could take it; neither it nor one with an ``answer``
    is refused for lack of room.

    Its answer has the form of ``grammar``, if there is one. The ``markers`` are control tokens that are shown as text
    when they are generated, as those around a call of a tool; all others show nothing.
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

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        packed = len(self.tokens) + len(self.answer) + len(self.params_json)
        form = 0 if self.grammar is None else getsizeof(self.grammar.text) + getsizeof(self.grammar.frame)
        return packed + form + sum(piece.size_bytes for piece in self.pieces)


class AbortTurn(msgspec.Struct, frozen=True, tag=True):
    """End a turn now; its ``Finished`` says ``aborted``. Unknown turns are ignored: they have just ended."""

    turn_id: str


class ReleaseSession(msgspec.Struct, frozen=True, tag=True):
    """Forget the KV of a session that is closed."""

    session_id: str


class RetainSessions(msgspec.Struct, frozen=True, tag=True):
    """Forget the parked KV of all sessions but these; the first frame after ``Ready``."""

    session_ids: tuple[str, ...]


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Stop all turns without a word, bring the KV of durable sessions to disk, and answer ``Suspended``.

    With ``park_all`` what may not be on a disk is parked in memory, for another engine of this daemon.
    """

    park_all: bool = False


class TokenizeRequest(msgspec.Struct, frozen=True, tag=True):
    """Turn text into tokens; ``Tokenized`` answers. With ``first`` they begin a sequence, with its BOS token.

    The workers are shared fairly between the clients of questions and turns.
    """

    ask_id: int
    pieces: tuple[PromptSegment, ...]
    first: bool
    client_id: str = ""

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes, at least 1."""
        return 1 + sum(piece.size_bytes for piece in self.pieces)


class DetokenizeRequest(msgspec.Struct, frozen=True, tag=True):
    """Turn packed tokens into text, control tokens by their names; ``Detokenized`` answers."""

    ask_id: int
    tokens: bytes
    client_id: str = ""

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes, at least 1."""
        return getsizeof(self.tokens)


class CancelLookup(msgspec.Struct, frozen=True, tag=True):
    """Leave a ``TokenizeRequest`` or ``DetokenizeRequest`` unanswered; an unknown one has just been answered."""

    ask_id: int


class EngineLimits(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Do less than you could, until another ``EngineLimits`` comes.

    At most ``active_slots`` turns have a slot at once, of the classes down to ``lowest_class`` (see ``Submit``); steps
    read only ``prefill_share`` of the prompt tokens that they could, and after each step is a pause of ``pause_ms``.
    """

    active_slots: int
    prefill_share: float
    lowest_class: int
    pause_ms: int


class KvRamLimit(msgspec.Struct, frozen=True, tag=True):
    """Let parked KV take no more than ``ram_bytes`` of memory, and give up at once what is more.

    It holds until another ``KvRamLimit`` comes; ``None`` is as much as the options say.
    """

    ram_bytes: int | None


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter on top of a model: its GGUF file, and how strongly it counts; with a scale of 0 not at all."""

    path: str
    scale: float = 1.0


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is told at its start.

    ``backend`` is ``llama`` or ``echo``. ``parent_pid`` is the process that must be alive for the engine to go on.
    ``lora`` are adapters on top of the model. ``n_ctx`` is tokens per slot, 0 the model's own; ``n_gpu_layers`` -1 is
    all of them; a thread count of 0 is one a physical core. ``prefill_grid_tokens`` is the distance of the positions at
    which prompts are cut, ``target_step_ms`` how long a step with prefill should take. ``echo_delay_ms`` is how long
    the echo backend takes for each decode. With ``speculative`` of ``lookup`` instead of ``off`` a turn guesses up to
    ``draft_tokens`` tokens a step.

    ``quantum_tokens`` is what a turn may generate before another that waits gets its slot, 0 to choose by what parking
    costs; a waiting turn rises a class every ``ageing_s``, and fails after ``queue_timeout_s`` (0 is never). KV is
    parked in the directories ``kv_ram_dir`` and ``kv_disk_dir``, at most so many bytes in each, and of these at most
    ``kv_client_share`` for one client; a directory without bytes is not used. Files of an earlier engine are taken over
    with ``kv_adopt``: ``all``, those that may be on a disk with ``durable``; the others are deleted.

    ``pulse_fd`` is an inherited descriptor of the page in which the engine tells what it is doing (``ipc.heartbeat``),
    -1 for none.
    """

    backend: str
    parent_pid: int
    model_path: str = ""
    model_name: str = ""
    lora: tuple[Adapter, ...] = ()
    slots: int = 8
    n_ctx: int = 0
    n_gpu_layers: int = -1
    n_threads: int = 0
    n_threads_batch: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: str = "auto"
    use_mmap: bool = True
    use_mlock: bool = False
    prefill_grid_tokens: int = 64
    target_step_ms: int = 150
    worker_threads: int = 2
    echo_delay_ms: int = 0
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    cpu_tensors: tuple[str, ...] = ()
    gpu_optional: bool = False
    speculative: str = "off"
    draft_tokens: int = 8
    quantum_tokens: int = 0
    ageing_s: float = 30.0
    queue_timeout_s: float = 0.0
    kv_ram_dir: str = ""
    kv_ram_bytes: int = 0
    kv_disk_dir: str = ""
    kv_disk_bytes: int = 0
    kv_client_share: float = 0.5
    kv_adopt: str = "none"
    pulse_fd: int = -1


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a new engine process: what to load and how."""

    options: EngineOptions


ToEngine: TypeAlias = (
    Configure
    | Submit
    | AbortTurn
    | ReleaseSession
    | RetainSessions
    | TokenizeRequest
    | DetokenizeRequest
    | CancelLookup
    | EngineLimits
    | KvRamLimit
    | Suspend
)


# --- engine to front: the life of the process


class BufferUse(msgspec.Struct, frozen=True, kw_only=True):
    """What llama.cpp took of one kind of memory, in bytes; ``name`` is its own, as ``CUDA0`` or ``CPU``."""

    name: str
    weight_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of a loaded model; it never opens the file itself.

    ``n_ctx`` is tokens per slot. ``special_tokens`` are the texts of control tokens, which must never be recognised in
    what a user or a model wrote. ``sampling_defaults_json`` is an object of parameters that the file recommends.
    ``add_bos`` says that a sequence starts with ``bos_token``. ``memory`` is what loading it took; ``lora`` are the
    adapters on top of it. No token spells more than ``max_token_bytes``; 0 where one may stand for any text.
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


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is being loaded; ``fraction`` runs from 0 to 1. ``offloads``: there is a GPU that takes layers."""

    fraction: float
    offloads: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warm; turns may be submitted."""

    model: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded; the process ends after this. ``code`` is an ``errors.ErrorCode`` value."""

    code: str
    message: str
    hint: str


class Suspended(msgspec.Struct, frozen=True, tag=True):
    """All turns have stopped and what was to be kept is on disk; the process may be ended. ``sessions`` are there."""

    sessions: int


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The packed tokens of a ``TokenizeRequest``, and the text bytes of each; of control tokens their names."""

    ask_id: int
    tokens: bytes
    spelled: tuple[bytes, ...]


class Detokenized(msgspec.Struct, frozen=True, tag=True):
    """The text of a ``DetokenizeRequest``, or which token is none of the model's."""

    ask_id: int
    text: str
    unknown: int | None = None


class LookupFailed(msgspec.Struct, frozen=True, tag=True):
    """A ``TokenizeRequest`` or ``DetokenizeRequest`` has no answer. ``code`` is an ``errors.ErrorCode`` value."""

    ask_id: int
    code: str
    message: str


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line of the engine's or llama.cpp's log, to be written by the front with everything else."""

    level: str
    event: str
    source: str


# --- engine to front: what a step produced


class QueuePosition(msgspec.Struct, frozen=True, tag=True):
    """A waiting turn's place in the queue changed; 0 is running."""

    turn_id: str
    position: int


class TraceStage(msgspec.Struct, frozen=True, array_like=True):
    """Where a traced turn spent its time from one second of the machine's monotonic clock to another.

    ``name`` is ``queue``, ``prefill`` or ``decode``, of which one follows the other, or ``park``, ``restore`` or
    ``copy`` on the way from the one to the other. ``tokens`` were read, generated or moved.
    """

    name: str
    began_s: float
    ended_s: float
    tokens: int = 0


class Started(msgspec.Struct, frozen=True, tag=True):
    """A turn got a slot. ``tokens`` is its whole prompt; ``cached_tokens`` of them were still in KV.

    ``stages`` are those of a traced turn up to now.
    """

    turn_id: str
    tokens: bytes
    cached_tokens: int
    stages: tuple[TraceStage, ...] = ()


class PrefillProgress(msgspec.Struct, frozen=True, tag=True):
    """``done`` of ``total`` prompt tokens have been read; sent only while a prompt takes several steps."""

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
    """Newly sampled tokens of a turn and the text that may now be shown (whole UTF-8, possibly empty)."""

    turn_id: str
    tokens: bytes
    text: str
    logprobs: tuple[SampledLogprobs, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn ended. Exactly one ``Finished`` or ``Failed`` per turn.

    Of the generated tokens the first ``kept_tokens`` stay in the session's history: those whose text was shown whole,
    plus the end token if there was one. They spell the first ``kept_chars`` characters of the shown text, followed by
    ``end_text`` (the end token's own text, empty when the turn ended another way). ``reason`` is a wire
    ``finish_reason``; ``stop`` the stop string or pattern that matched. Times are milliseconds: waiting for a slot,
    first token since submission, whole turn since submission. ``preempted`` counts how often others had its slot.
    ``stages`` are those of a traced turn that have not been told.
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
    """A turn that may shift does not fit its context any more, and has left the engine.

    It goes on when it is submitted again with a shorter prompt and all its tokens so far as ``answer``; the text that
    was held back is told then. ``n_tokens`` are its prompt and answer. If it cannot be made shorter, it is over: as
    ``end`` says, after the last of its text; without ``end`` it never began, and its prompt is too long.
    """

    turn_id: str
    n_tokens: int
    text: str = ""
    end: Finished | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn could not run or go on. ``code`` is an ``errors.ErrorCode`` value, ``stages`` are as in ``Finished``."""

    turn_id: str
    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    stages: tuple[TraceStage, ...] = ()


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """A turn that no engine had was aborted: it is over, and its session knows what was said. Made in the front."""

    turn_id: str


TurnEvent: TypeAlias = (
    QueuePosition | Started | PrefillProgress | TokenDelta | ContextFull | Finished | Failed | Cancelled
)


class MoveTime(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of KV was moved: ``kind`` is ``park``, ``restore`` or ``copy``."""

    kind: str
    took_s: float


class TokenSources(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of turns that began, by where their KV came from.

    That is the slot of their session, one of another session of the client, what was parked of a session, a system
    prompt that is shared, or nowhere: those are computed.
    """

    slot: int = 0
    neighbour: int = 0
    parked: int = 0
    prefix: int = 0
    computed: int = 0


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """What a step of the engine did, for those who measure it.

    It took ``step_s``. Of these ``decode_s`` were for generating, in ``rows`` turns at once, and ``prefill_s`` for
    reading ``prefill_tokens``. ``fetches`` parked sequences were asked of the disk. Of ``drafted`` tokens that were
    guessed the ``accepted`` ones were right.
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


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Everything one step of the engine produced, in order, and the engine's gauges after it.

    Of ``parked_bytes``, which both tiers take, ``parked_ram_bytes`` are in memory. Without ``work`` nothing was run.
    """

    events: tuple[TurnEvent, ...]
    running: int
    waiting: int
    rss_bytes: int
    parked_sessions: int = 0
    parked_bytes: int = 0
    parked_ram_bytes: int = 0
    work: StepStats | None = None


FromEngine: TypeAlias = (
    Loading | Ready | LoadFailed | Suspended | Tokenized | Detokenized | LookupFailed | LogLine | StepOutput
)
