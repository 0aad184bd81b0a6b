"""Logging: configures structlog, and writes the lines of the standard library's loggers in the same format."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from itertools import islice
from logging.handlers import RotatingFileHandler
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

import orjson

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.hidden_modules import hidden_modules

with hidden_modules("rich", "colorama", "better_exceptions", "greenlet"):
    import structlog  # it imports these if installed: for its own tracebacks, which are plain here, and for Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger
    from typing_extensions import Buffer

    from inferencecenter.config.sections import LogSettings


class LogFile(RotatingFileHandler):
    """A log file as a stream of lines, for structlog and the standard library's handlers.

    Only its owner may read it and its rotated files. A line that cannot be written is dropped: no turn fails because of
    a log line. Thread-safe.

    Args:
        path: The file.
        max_bytes: Size at which it is rotated; 0 disables rotation.
        backups: Number of rotated files to keep.

    Raises:
        InferenceCenterError: ``invalid_config`` if it cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int, backups: int) -> None:
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8")
        except OSError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"{path} cannot be written: {error.strerror}",
                hint="Its directory must exist and be writable for the daemon.",
                field="log.file",
            ) from error

    def write(self, text: str) -> None:
        if line := text.rstrip("\n"):
            self.handle(logging.makeLogRecord({"msg": line}))

    def isatty(self) -> bool:
        return False

    def doRollover(self) -> None:  # noqa: N802 - the base class names it so
        """Rotate the file; if it cannot be renamed, writing continues in it."""
        with contextlib.suppress(OSError):
            super().doRollover()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop a line that could not be written."""

    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Unbuffered: no data waits in a buffer when the disk is full.
        return io.TextIOWrapper(_WholeLines(descriptor, "a"), encoding=self.encoding, write_through=True)


class _WholeLines(io.FileIO):
    """Writes each line completely, or not at all."""

    def write(self, data: Buffer) -> int:
        """Write; a partial write on a full disk is undone.

        Raises:
            OSError: It could not be written.
        """
        n_bytes, size = super().write(data), memoryview(data).nbytes
        if n_bytes < size:
            self.truncate(self.tell() - n_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return n_bytes


LogFormat = Literal["auto", "pretty", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

REDACTED: Final = "***"
_SECRET_KEYS: Final = frozenset({"token", "admin_token", "api_key", "authorization", "cookie", "password", "secret"})
_TOKEN: Final = re.compile(r"\bic_([A-Za-z0-9]+)_[A-Za-z0-9_-]{8,}")
_PRIORITIES: Final[Mapping[str, int]] = MappingProxyType(
    {"critical": 2, "error": 3, "exception": 3, "warning": 4, "info": 6, "debug": 7}
)
"""Syslog priorities by level."""
_THIRD_PARTY_LOGGERS: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "websockets", "asyncio")


def configure(*, level: LogLevel = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send every log line of this process to ``stream``, by default standard error.

    ``auto`` writes text for people on a terminal, and one JSON object a line elsewhere. Lines for systemd's journal get
    their priority. May be called again.
    """
    output = stream or sys.stderr
    pretty = log_format == "pretty" or (log_format == "auto" and output.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not pretty),
    ]
    rendering = _pretty(colors=output.isatty()) if pretty else _json()
    if is_journal(output):
        rendering[-1] = _prioritized(rendering[-1])
    structlog.configure(
        processors=[*common, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _LossyStream(output))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(threshold)
    for name in _THIRD_PARTY_LOGGERS:
        logger = logging.getLogger(name)
        # uvicorn logs each request with the whole URL, whose query may contain secrets.
        logger.handlers, logger.propagate = [], name != "uvicorn.access"
        logger.setLevel(logging.WARNING if name.startswith("uvicorn") else logging.NOTSET)
    logging.captureWarnings(capture=True)


def apply(settings: LogSettings) -> None:
    """Apply log settings; a file is reopened, as it may have been renamed.

    Raises:
        InferenceCenterError: ``invalid_config`` if it cannot be opened; then nothing has changed.
    """
    stream: TextIO = getattr(sys, settings.output)
    if settings.file is not None:
        file = LogFile(settings.file, max_bytes=settings.max_mib * 2**20, backups=settings.backups)
        stream = cast("TextIO", file)
    before = [handler.stream for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    configure(level=settings.level, log_format=settings.format, stream=stream)
    for each in before:
        if isinstance(each, LogFile):
            each.close()


def is_journal(stream: TextIO) -> bool:
    """Return whether ``stream`` is connected to systemd's journal, according to ``JOURNAL_STREAM``."""
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # not a file, or closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def with_priority(text: str, level: str) -> str:
    """Return the text with the journal's prefix for ``level`` on each line (sd-daemon(3))."""
    prefix = f"<{_PRIORITIES.get(level, _PRIORITIES['info'])}>"
    return "\n".join(prefix + line for line in text.split("\n"))


def _prioritized(render: Processor) -> Processor:
    def rendered(logger: WrappedLogger, method: str, event: EventDict) -> str:
        level = str(event.get("level", method))
        return with_priority(str(render(logger, method, event)), level)

    return rendered


class _LossyStream:
    """A stream that drops what cannot be written, because its terminal is gone or its disk full.

    A daemon whose terminal was closed must still stop on request, and no turn may fail because of a log line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Redact secrets: values of sensitive keys, and anything shaped like a token."""
    for key, value in event.items():
        if isinstance(value, str):
            if key.lower() in _SECRET_KEYS:
                event[key] = REDACTED
            elif "ic_" in value:
                event[key] = _TOKEN.sub(rf"ic_\1_{REDACTED}", value)
    return event


class RecentLine(NamedTuple):
    """A recent line: its number from 1 on, Unix seconds, level and text."""

    number: int
    at: float
    level: str
    text: str


class LogRing:
    """The last lines of this process's log, redacted and truncated; thread-safe."""

    def __init__(self, *, max_lines: int = 1000, max_chars: int = 1000) -> None:
        self._lines: deque[RecentLine] = deque(maxlen=max_lines)
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._number = 0

    def __call__(self, _logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Keep a line, as a processor of structlog after ``redact``."""
        others = (f"{name}={value}" for name, value in event.items() if name not in ("timestamp", "level", "event"))
        text = _TOKEN.sub(rf"ic_\1_{REDACTED}", " ".join((str(event.get("event", "")), *others)))
        with self._lock:
            self._number += 1
            level = str(event.get("level", method))
            self._lines.append(RecentLine(self._number, time.time(), level, text[: self._max_chars]))
        return event

    def after(self, number: int, *, limit: int) -> tuple[list[RecentLine], int]:
        """Return the last ``limit`` lines after the one with this number, and how many were left out before them."""
        with self._lock:
            n_new = self._number - number
            n_shown = max(0, min(n_new, limit, len(self._lines)))
            start = len(self._lines) - n_shown
            return list(islice(self._lines, start, None)), max(0, n_new - n_shown)


RECENT: Final = LogRing()
"""Of this process: there is one log."""
_SAFE: Final[tuple[Processor, ...]] = (structlog.processors.format_exc_info, redact, RECENT)


def _pretty(*, colors: bool) -> list[Processor]:
    # Tracebacks with the values of locals, the renderer's default, would show secrets and prompts.
    plain = structlog.dev.plain_traceback
    return [*_SAFE, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]


def _json() -> list[Processor]:
    return [*_SAFE, _in_order, structlog.processors.JSONRenderer(_dumps)]


def _in_order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Put the fields that every line has first, for readability."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return {**first, **event}


def _dumps(value: object, **_options: object) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


# Rate limit for log lines caused by clients: one per interval, with the number of suppressed lines.

INTERVAL_S: Final = 60.0


class LogLimit:
    """Admits the first line and then one per interval.

    Args:
        interval_s: Minimum seconds between two lines.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, interval_s: float = INTERVAL_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")
        self._n_held_back = 0

    def admit(self) -> int | None:
        """Return how many lines were suppressed since the last one, or ``None`` if this one is suppressed too."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._n_held_back += 1
            return None
        self._next_s = now_s + self._interval_s
        n_held_back, self._n_held_back = self._n_held_back, 0
        return n_held_back
