"""The engine process: ``python -m inferencecenter.engine --fd N``, N being its end of a socketpair."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.engine.echo import EchoBackend, EchoEmbedder
from inferencecenter.engine.embedding import EmbeddingLoop
from inferencecenter.engine.inbox import Inbox, KvFetched, watch
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.kv_cache.store import KvStore, TierOptions
from inferencecenter.engine.loop import EngineLoop
from inferencecenter.ipc.engine_child import die_with_parent, receive_descriptors
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.framing import BlockingChannel
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import Configure, LoadFailed, Loading, LogLine, Ready

if TYPE_CHECKING:
    from inferencecenter.engine.backend import Backend, Embedder

_OOM_SCORE_ADJ = 500


def main() -> int:
    """Run the engine until the front disconnects; return the exit status."""
    parser = argparse.ArgumentParser(prog="inferencecenter.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the front")
    connection = socket.socket(fileno=parser.parse_args().fd)
    # Ctrl-C and a stop of the process group reach the engine too; the front drains first and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    _prefer_for_oom_kill()
    try:
        heartbeat_fd, *_ = receive_descriptors(
            connection, on_import=_import_llama
        )  # the others stay open for the front
    except ConnectionError:
        return os.EX_OK
    pipe = BlockingChannel(connection)
    configure = pipe.read()
    if not isinstance(configure, Configure):
        return os.EX_PROTOCOL
    try:
        options = EngineOptions.model_validate_json(configure.options_json)
        if os.getppid() != options.parent_pid:  # the parent died before prctl took effect
            return os.EX_UNAVAILABLE
        return _serve(pipe, options, Heartbeat.attach(heartbeat_fd))
    except ValidationError as error:
        return _refuse(pipe, ErrorCode.INVALID_CONFIG, str(error))
    except ConnectionError:
        return os.EX_OK


def _serve(pipe: BlockingChannel, options: EngineOptions, heartbeat: Heartbeat) -> int:
    inbox = Inbox()
    watch(pipe, inbox)
    try:
        loaded = _load(pipe, options, heartbeat)
    except InferenceCenterError as error:
        return _refuse(pipe, error.code, error.message, hint=error.hint or "")
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - a border: what is in a model file must not look like a crash
        traceback.print_exc()
        message = f"{options.model_path or options.backend} cannot be loaded: {error!r}"
        return _refuse(pipe, ErrorCode.INVALID_MODEL_FILE, message)
    with ExitStack() as held:
        held.callback(loaded.close)
        loop: EngineLoop | EmbeddingLoop
        if options.kind == "chat":
            loop = _text_loop(cast("Backend", loaded), pipe, options, heartbeat, inbox, held)
        else:
            loop = EmbeddingLoop(
                cast("Embedder", loaded),
                options,
                inbox=inbox,
                heartbeat=heartbeat,
                send=pipe.send,
                clock=time.monotonic,
            )
        pipe.send(Ready(loaded.model))
        loop.run()
    return os.EX_OK


def _text_loop(  # noqa: PLR0913, PLR0917 - called by ``_serve`` alone, with what it has made
    backend: Backend,
    pipe: BlockingChannel,
    options: EngineOptions,
    heartbeat: Heartbeat,
    inbox: Inbox,
    held: ExitStack,
) -> EngineLoop:
    disk_worker = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="kv"))
    kv = KvStore(
        fingerprint=backend.fingerprint,
        bytes_per_token=backend.kv_bytes_per_token,
        ram=TierOptions(options.kv.ram_dir, options.kv.ram_bytes),
        disk=TierOptions(options.kv.disk_dir, options.kv.disk_bytes),
        client_share=options.kv.client_share,
        adopt=RecoveryMode(options.kv_adopt),
        can_truncate=backend.can_truncate,
        worker=disk_worker,
        on_fetched=lambda: inbox.put(KvFetched()),
        on_log=lambda level, text: pipe.send(LogLine(level, text, "engine")),
    )
    held.callback(kv.close)
    return EngineLoop(backend, options, kv=kv, inbox=inbox, heartbeat=heartbeat, send=pipe.send, clock=time.monotonic)


def _refuse(pipe: BlockingChannel, code: ErrorCode, message: str, *, hint: str = "") -> int:
    """Send why the model cannot be loaded, and return the exit status."""
    pipe.send(LoadFailed(code.value, message, hint))
    return ERRORS[code].exit_code


def _load(pipe: BlockingChannel, options: EngineOptions, heartbeat: Heartbeat) -> Backend | Embedder:
    pipe.send(Loading(0.0))
    if options.kind != "chat" and options.backend != "llama":
        return EchoEmbedder(options)
    if options.backend == "echo":
        return EchoBackend(options)
    if options.backend == "script":
        from inferencecenter.engine.script import ScriptBackend  # noqa: PLC0415 - its vocabulary takes memory

        return ScriptBackend(options)
    # llama.cpp's crash handler would attach a debugger to the process, which takes longer than a restart.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    from inferencecenter.engine.llama.library import load_library  # noqa: PLC0415 - the others need none

    def logged(level: str, line: str) -> None:
        pipe.send(LogLine(level, line, "llama.cpp"))

    load_library(on_log=logged)
    from inferencecenter.engine.llama.backend import LlamaBackend  # noqa: PLC0415 - needs it loaded
    from inferencecenter.engine.llama.devices import offloads  # noqa: PLC0415
    from inferencecenter.engine.llama.embedder import LlamaEmbedder  # noqa: PLC0415

    sent = None

    def progressed(fraction: float) -> None:
        # For each percent, not each tensor: an engine that was launched ahead would fill its socket.
        nonlocal sent
        heartbeat.tick()
        percent, is_offloading = int(fraction * 100), offloads()
        if (percent, is_offloading) != sent:
            sent = percent, is_offloading
            pipe.send(Loading(fraction, is_offloading))

    if options.kind == "chat":
        return LlamaBackend.load(options, on_progress=progressed, on_log=logged)
    return LlamaEmbedder.load(options, on_progress=progressed, on_log=logged, on_tick=heartbeat.tick)


def _import_llama() -> None:
    """Import the llama backend ahead of its options. What fails now fails again, and is reported, when it is loaded.

    No device is touched, so the daemon plans with the memory that is free without this process.
    """
    with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
        importlib.import_module("inferencecenter.engine.llama.backend")


def _prefer_for_oom_kill() -> None:
    """Make the OOM killer prefer this process, which holds no only copy of anything, to the front."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))


if __name__ == "__main__":
    sys.exit(main())
