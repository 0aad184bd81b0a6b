"""What the daemon does at signals."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

_log = structlog.get_logger(__name__)


def heed_signals(*, stop: Callable[[], None], read_again: Callable[[], object]) -> None:
    """Stop at the first SIGINT or SIGTERM, and give the second one back its usual effect; read again at SIGHUP.

    With a terminal SIGHUP says that it has gone, and stops the daemon; where it is ignored, as under nohup, it stays
    ignored. To be called on the event loop.
    """
    loop = asyncio.get_running_loop()
    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        if _has_terminal():
            ends.append(signal.SIGHUP)
        else:
            loop.add_signal_handler(signal.SIGHUP, read_again)

    def end(received: signal.Signals) -> None:
        _log.info("stopping", signal=received.name)
        for each in ends:
            loop.remove_signal_handler(each)
        stop()

    for each in ends:
        loop.add_signal_handler(each, end, each)


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
