"""Process that runs one chat template: ``python -m inferencecenter.sessions.prompt.template_worker``.

It reads the template, then one conversation at a time, and writes each outcome. The kernel kills it at the CPU limit;
at the memory limit an allocation fails or the process ends. It exits at the end of its input.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.process_limits import limit_cpu, limit_memory, resident_bytes
from inferencecenter.sessions.prompt.renderer import render_prompt
from inferencecenter.sessions.prompt.template import ChatTemplate
from inferencecenter.sessions.prompt.template_frames import (
    LENGTH_BYTES,
    LoadTemplate,
    RenderRefusal,
    WorkerReply,
    encode,
    input_of,
    loaded,
    rendered,
    request_decoder,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from inferencecenter.sessions.prompt.template_frames import (
        RenderReply,
        RenderRequest,
        TemplateLoaded,
        TemplateSource,
    )

# A process that has grown by this much exits to return its memory.
_GROWN_BYTES: Final = 64 * 1024 * 1024
_MAX_MESSAGE_CHARS: Final = 1000
MAX_CUTS: Final = 65_536
"""Most cuts of a rendering, at contents that spell special tokens."""


def main() -> int:
    """Serve requests until the end of input."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to the whole process group; the daemon ends this process
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    load = cast("LoadTemplate | None", _read(requests))
    if load is None:
        return os.EX_OK
    limit_memory(load.memory_bytes)
    at_first_bytes = resident_bytes()
    limit_cpu(load.cpu_s)
    compiled: list[ChatTemplate] = []
    _reply(replies, partial(_compile, load.source, compiled))
    while compiled and (request := _read(requests)) is not None:
        limit_cpu(load.cpu_s)
        _reply(replies, partial(_render, compiled[0], cast("RenderRequest", request)), at_first_bytes=at_first_bytes)
    return os.EX_OK


def _compile(source: TemplateSource, compiled: list[ChatTemplate]) -> TemplateLoaded:
    compiled.append(ChatTemplate(source))
    return loaded(compiled[0].capabilities)


def _render(template: ChatTemplate, request: RenderRequest) -> RenderReply:
    reply = rendered(render_prompt(template, input_of(request)))
    if len(reply.cuts) > MAX_CUTS:
        raise InferenceCenterError(
            ErrorCode.PROMPT_TOO_LONG,
            f"the conversation spells special tokens of the model at {len(reply.cuts)} places; {MAX_CUTS} are allowed",
        )
    return reply


def _reply(
    replies: BinaryIO, work: Callable[[], TemplateLoaded | RenderReply], *, at_first_bytes: int | None = None
) -> None:
    try:
        outcome = work()
        last = at_first_bytes is not None and resident_bytes() - at_first_bytes > _GROWN_BYTES
        frame = encode(WorkerReply(outcome, last))
    except Exception as error:  # noqa: BLE001 - boundary to untrusted code
        frame = encode(WorkerReply(_refusal(error)))
    replies.write(frame)
    replies.flush()


def _refusal(error: Exception) -> RenderRefusal:
    if isinstance(error, InferenceCenterError):
        # A template may quote whole messages, with their marks, in its error message.
        message = error.message.encode("utf-8", "ignore").decode()[:_MAX_MESSAGE_CHARS]
        return RenderRefusal(error.code.value, message, error.hint, error.field)
    message = f"the model's chat template cannot be run: {type(error).__name__}"
    return RenderRefusal(ErrorCode.INTERNAL.value, message, None, None)


def _read(requests: BinaryIO) -> LoadTemplate | RenderRequest | None:
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    request: LoadTemplate | RenderRequest = request_decoder.decode(requests.read(int.from_bytes(length, "little")))
    return request


if __name__ == "__main__":
    sys.exit(main())
