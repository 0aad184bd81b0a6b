"""The configuration that a guest gives as JSON: every known key, its values, and what it does here.

Guests of other runtimes bring keys of llama.cpp, flat or in groups, with underscores or hyphens. Parameters of a turn
apply as in the protocol. Keys that only the operator of the daemon can set are checked and named in a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.params import PARAM_DOCS, encode, merge, parse_params
from inferencecenter.protocol.params_model import Params
from inferencecenter.wasm.errors import NnErrorKind, WasiNnError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_CONFIG_BYTES: Final = 65_536
MAX_CONTEXTS: Final = 64
_MAX_SHOWN_CHARS: Final = 64
_MAX_WARNINGS: Final = 64

Kind = Literal["integer", "boolean", "string", "object or string", "any"]
Use = Literal["parameter", "session", "guest", "no effect"]


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the configuration.

    Attributes:
        path: Its name, after its group and a dot if it has one.
        kind: JSON type of its value.
        use: What it sets: a parameter of turns, the session of a context, the run of the guest, or nothing.
        meaning: What it does, or why it has no effect.
        bounds: Lowest and highest integer.
        options: Allowed strings; empty for any.
    """

    path: str
    kind: Kind
    use: Use
    meaning: str
    bounds: tuple[int, int] = (0, 2**31 - 1)
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """Completes the sentence "must be"."""
        match self.kind:
            case "integer":
                return f"an integer from {self.bounds[0]} to {self.bounds[1]}"
            case "boolean":
                return "true or false"
            case "string":
                return f"one of {', '.join(self.options)}" if self.options else "a string"
            case "object or string":
                return "an object, or a string of JSON"
            case "any":
                return "any value"

    def accepts(self, value: object) -> bool:
        """Whether the value has the type and is in the range."""
        match self.kind:
            case "integer":
                return type(value) is int and self.bounds[0] <= value <= self.bounds[1]
            case "boolean":
                return isinstance(value, bool)
            case "string":
                return isinstance(value, str) and (not self.options or value in self.options)
            case "object or string":
                return isinstance(value, dict | str)
            case "any":
                return True


_OPERATOR: Final = "The operator of the daemon sets it, by `{}`."
_AUTOMATIC: Final = "The daemon manages the KV cache of all its clients itself."
_INT_RANGE: Final = (-1, 2**31 - 1)


def _operator(path: str, setting: str, *, kind: Kind = "integer", bounds: tuple[int, int] = _INT_RANGE) -> ConfigKey:
    return ConfigKey(path, kind, "no effect", _OPERATOR.format(setting), bounds)


def _ignored(group: str, names: str, meaning: str, *, kind: Kind = "any") -> tuple[ConfigKey, ...]:
    prefix = f"{group}." if group else ""
    return tuple(ConfigKey(prefix + name, kind, "no effect", meaning) for name in names.split())


_MEMORY: Final = tuple(
    key
    for group in ("memory", "memory_policy")
    for key in (
        ConfigKey(
            f"{group}.context_shifting",
            "boolean",
            "session",
            "Whether the oldest turns are dropped when the context is full (`on_full`).",
        ),
        *_ignored(group, "cache_prompt", _AUTOMATIC, kind="boolean"),
        ConfigKey(f"{group}.cache_strategy", "string", "no effect", _AUTOMATIC),
        ConfigKey(f"{group}.max_cache_tokens", "integer", "no effect", _AUTOMATIC),
        *_ignored(
            group,
            "n_keep_tokens n_discard_tokens memory_pressure_threshold enable_partial_cache_deletion"
            " enable_token_cache_reuse cache_deletion_strategy max_memory_mb",
            _AUTOMATIC,
        ),
    )
)
_BACKEND: Final = (
    ConfigKey(
        "backend.max_sessions",
        "integer",
        "guest",
        f"Maximum number of open contexts of the graph, within the guest's {MAX_CONTEXTS}.",
        (1, 2**31 - 1),
    ),
    ConfigKey(
        "backend.idle_timeout_ms",
        "integer",
        "session",
        "Idle time after which the session of a context expires (`ttl_s`).",
        (1000, 2**31 - 1),
    ),
    ConfigKey(
        "backend.auto_cleanup",
        "boolean",
        "guest",
        "Whether a context beyond the maximum closes the least recently used one instead of failing.",
    ),
    ConfigKey(
        "backend.max_concurrent",
        "integer",
        "guest",
        "Maximum number of contexts of the graph that stream at once.",
        (1, 2**31 - 1),
    ),
    _operator("backend.queue_size", "engine.max_queue", bounds=(0, 2**31 - 1)),
)
_MODEL: Final = (
    _operator("n_gpu_layers", "engine.n_gpu_layers"),
    _operator("ctx_size", "engine.n_ctx", bounds=(0, 2**31 - 1)),
    _operator("batch_size", "engine.n_batch", bounds=(0, 2**31 - 1)),
    _operator("threads", "engine.n_threads"),
)
_OWN: Final = (
    ConfigKey("system", "string", "session", "System prompt."),
    ConfigKey(
        "mode",
        "string",
        "session",
        "`chat` applies the model's chat template to the prompt, `raw` continues it as it is.",
        options=("chat", "raw"),
    ),
    ConfigKey("thinking", "boolean", "parameter", "Whether the model reasons before it answers."),
    ConfigKey("json_schema", "object or string", "parameter", "JSON schema that the answer conforms to."),
    ConfigKey("grammar", "string", "parameter", "GBNF grammar that the answer conforms to."),
    ConfigKey("regex", "string", "parameter", "Regular expression that matches the whole answer."),
)
_LOGGING: Final = (
    ConfigKey(
        "logging.level",
        "string",
        "guest",
        "`debug` traces calls as `--trace` does, `error` and `none` hide warnings about keys.",
        options=("debug", "info", "warn", "warning", "error", "none"),
    ),
    ConfigKey("logging.enable_debug", "boolean", "guest", "Traces calls as `--trace` does."),
    ConfigKey("logging.file", "string", "no effect", "The log is standard error."),
    *_ignored("logging", "timestamps colors", "The log is standard error.", kind="boolean"),
    ConfigKey("enable_debug_log", "boolean", "guest", "Traces calls as `--trace` does."),
    *_ignored("", "enable_log", "The daemon logs turns itself.", kind="boolean"),
)
_OTHERS: Final = (
    *_ignored("", "cache_policy", _AUTOMATIC),
    ConfigKey("ctx_shift", "boolean", "session", "As `context_shifting`."),
    ConfigKey("stream_stdout", "boolean", "guest", "Also writes the text of `compute` to standard output as it comes."),
    *_ignored("", "embedding", "Guests compute text only; embeddings have an API of their own.", kind="boolean"),
    *_ignored("", "image mmproj", "Guests send text only.", kind="string"),
    *_ignored("", "n_keep", "It counts tokens, and the daemon keeps whole messages.", kind="integer"),
    *_ignored("performance", "batch_processing", "The daemon batches the turns of all its clients.", kind="boolean"),
    _operator("performance.batch_size", "engine.n_batch", bounds=(0, 2**31 - 1)),
)
KEYS: Final[Mapping[str, ConfigKey]] = {
    key.path: key for key in (*_MODEL, *_OWN, *_MEMORY, *_BACKEND, *_LOGGING, *_OTHERS)
}
"""Every key but the parameters of a turn."""

GROUPS: Final = ("model", "sampling", "stopping", "memory", "memory_policy", "backend", "logging", "performance")
"""Objects that hold keys; the keys of ``model`` and ``backend`` may also be given without it."""

ALIASES: Final[Mapping[str, str]] = {
    "n_ctx": "ctx_size",
    "n_batch": "batch_size",
    "typ_p": "typical_p",
    "last_n_penalty": "repeat_last_n",
    "reverse_prompt": "stop",
    "stop_sequences": "stop",
    "dry_multipier": "dry_multiplier",
    "auto_cleanup_sessions": "auto_cleanup",
}
"""Other spellings, of later versions and of WasmEdge (one of which is misspelled there)."""

PARAMETERS: Final[Mapping[str, str]] = {
    spelling: doc.name for doc in PARAM_DOCS if doc.name != "n_keep" for spelling in (doc.name, *doc.aliases)
}
"""Spellings of the parameters of a turn, which may be given at the top and in each of ``PARAMETER_GROUPS``."""
PARAMETER_GROUPS: Final = ("", "model", "sampling", "stopping")


@dataclass(frozen=True, slots=True)
class GuestConfig:
    """The part of a configuration that has an effect.

    Attributes:
        params: Parameters of turns.
        constraints: Options of a turn: ``thinking``, ``json_schema``, ``grammar`` and ``regex``.
        session: Fields of the context's session: ``system``, ``mode``, ``on_full`` and ``ttl_s``.
        max_contexts: Maximum number of open contexts of the graph.
        recycle: Whether the least recently used context is closed for a new one.
        max_streams: Maximum number of contexts that stream at once.
        stream_stdout: Whether the text of ``compute`` is written to standard output as well.
        trace: Whether calls are traced.
        quiet: Whether warnings about keys are hidden.
        warnings: Names of keys without effect, with the reason.
    """

    params: Params = field(default_factory=Params)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)
    max_contexts: int = MAX_CONTEXTS
    recycle: bool = False
    max_streams: int = MAX_CONTEXTS
    stream_stdout: bool = False
    trace: bool = False
    quiet: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def raw_params(self) -> dict[str, Any] | None:
        """The given parameters as JSON; ``None`` if there are none."""
        given: dict[str, Any] = orjson.loads(encode(self.params))
        return given or None


def parse_config(raw: bytes, *, base: GuestConfig | None = None) -> GuestConfig:
    """Return the configuration of a graph, or with ``base`` that of one context's turns.

    Raises:
        WasiNnError: It is too large, not JSON, or a value is wrong; the message names the key and the allowed values.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise WasiNnError(NnErrorKind.TOO_LARGE, f"the configuration has more than {MAX_CONFIG_BYTES} bytes")
    try:
        document = orjson.loads(raw.rstrip(b"\0"))
    except ValueError as error:
        raise WasiNnError(NnErrorKind.INVALID_ENCODING, f"the configuration is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, "the configuration must be a JSON object")
    return _ConfigReader(base).read(document)


class _ConfigReader:
    """Reads one document into a configuration.

    Args:
        base: The graph's configuration, if only the parameters of turns may change.
    """

    def __init__(self, base: GuestConfig | None) -> None:
        self._is_turn = base is not None
        self._base = base or GuestConfig()
        self._warnings: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._overlays: list[Params] = []

    def read(self, document: Mapping[str, Any]) -> GuestConfig:
        for group, entries in _grouped(document):
            self._read_group(group, entries)
        values, base = self._values, self._base
        session: dict[str, Any] = {name: values[name] for name in _SESSION_FIELDS if name in values}
        constraints: dict[str, Any] = {name: values[name] for name in _CONSTRAINTS if name in values}
        return replace(
            base,
            params=merge(base.params, *self._overlays),
            constraints={**base.constraints, **constraints},
            session={**base.session, **session},
            max_contexts=min(values.get("max_sessions", base.max_contexts), MAX_CONTEXTS),
            recycle=values.get("auto_cleanup", base.recycle),
            max_streams=values.get("max_concurrent", base.max_streams),
            stream_stdout=values.get("stream_stdout", base.stream_stdout),
            trace=values.get("trace", base.trace),
            quiet=values.get("quiet", base.quiet),
            warnings=tuple(f"{path} has no effect: {why}" for path, why in self._warnings.items()),
        )

    def _read_group(self, group: str, entries: Mapping[str, Any]) -> None:
        params: dict[str, Any] = {}
        for given, value in entries.items():
            name = _canonical(given)
            path = f"{group}.{name}" if group else name
            if value is None:
                continue
            if group in PARAMETER_GROUPS and name in PARAMETERS:
                params[name] = value
            elif (key := _find(group, name)) is not None:
                self._apply(key, path, value)
            else:
                self._warn(path, "It is not known.")
        if params:
            self._overlays.append(_parse_params(params, group))

    def _apply(self, key: ConfigKey, path: str, value: Any) -> None:
        if not key.accepts(value):
            raise WasiNnError(
                NnErrorKind.INVALID_ARGUMENT, f"{path} must be {key.allowed}, not {_shown(value)}. {key.meaning}"
            )
        if key.use == "no effect":
            self._warn(path, key.meaning)
        elif self._is_turn and key.use != "parameter":
            self._warn(path, "The graph is loaded with it; a context's metadata changes parameters only.")
        else:
            self._values.update(_EFFECTS.get(key.name, _as_it_is(key.name))(value))

    def _warn(self, path: str, why: str) -> None:
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.setdefault(path[:_MAX_SHOWN_CHARS], why)


_SESSION_FIELDS: Final = ("system", "mode", "on_full", "ttl_s")
_CONSTRAINTS: Final = ("thinking", "json_schema", "grammar", "regex")


def _as_it_is(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


def _schema(value: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"json_schema is not JSON: {error}") from None
    return {"json_schema": value}


def _logging_level(level: str) -> dict[str, Any]:
    return {"trace": level == "debug", "quiet": level in {"error", "none"}}


_EFFECTS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "context_shifting": lambda shifts: {"on_full": "shift" if shifts else "stop"},
    "ctx_shift": lambda shifts: {"on_full": "shift" if shifts else "stop"},
    "idle_timeout_ms": lambda idle_ms: {"ttl_s": idle_ms / 1000},
    "enable_debug": lambda enabled: {"trace": enabled},
    "enable_debug_log": lambda enabled: {"trace": enabled},
    "level": _logging_level,
    "json_schema": _schema,
}
"""What a key sets, where that is not a value of its own name."""


def _grouped(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the keys at the top, then those of each group, which take precedence."""
    groups = {name: document[given] for given in document if (name := _canonical(given)) in GROUPS}
    yield "", {given: value for given, value in document.items() if _canonical(given) not in GROUPS}
    for name, entries in groups.items():
        if not isinstance(entries, dict):
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"{name} must be an object, not {_shown(entries)}")
        yield name, entries


def _canonical(given: str) -> str:
    name = given.replace("-", "_")
    return ALIASES.get(name, name)


def _find(group: str, name: str) -> ConfigKey | None:
    if group == "model":
        return KEYS.get(name)
    return KEYS.get(f"{group}.{name}" if group else name) or (KEYS.get(f"backend.{name}") if not group else None)


def _parse_params(params: Mapping[str, Any], group: str) -> Params:
    try:
        return parse_params(params, path=group or "config")
    except InferenceCenterError as error:
        raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, error.message) from None


def _shown(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
