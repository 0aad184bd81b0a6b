"""Runs chat templates in separate processes with CPU, memory and wall-clock limits.

A template can loop forever or exhaust memory in ways that no in-process sandbox detects. Each model's template
therefore runs in its own process (``template_worker``), started when the model is loaded, which renders one
conversation at a time and serves clients round-robin. The kernel enforces the CPU and memory limits; the daemon kills a
process that exceeds the wall-clock limit. Invariant: such a failure fails exactly one request, and the next request
gets a new process.

A cancelled rendering would block the queue up to those limits. It may continue for about as long as a process takes to
start, which is the cost of killing it; then it is killed and a replacement is started at once. At most a few processes
are kept; the least recently used idle ones are ended first.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairQueue
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.sessions.prompt.template_frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    LoadTemplate,
    RenderRefusal,
    RenderReply,
    TemplateLoaded,
    TemplateSource,
    WorkerReply,
    capabilities_of,
    encode,
    prompt_of,
    reply_decoder,
    request_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.renderer import RenderInput, RenderResult

MODULE: Final = "inferencecenter.sessions.prompt.template_worker"
MAX_PROCESSES: Final = 4
"""Most template processes that are kept."""
COMPILE_RETRY_S: Final = 60.0
"""Seconds until a template that exceeded a limit during compilation is tried again; the host may have been busy."""
_READ_BYTES: Final = 1024 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one rendering: CPU seconds, rounded up to whole ones, memory, and wall-clock seconds.

    ``wall_s`` covers a stopped or starved process, so it is far longer; ``cancelled_s`` applies to a cancelled
    rendering.
    """

    cpu_s: float = 2.0
    memory_bytes: int = 512 * 1024 * 1024
    wall_s: float = 60.0
    cancelled_s: float = 0.3


class WorkerLostError(Exception):
    """The template process has ended or sent an invalid reply."""


class TemplateProcess:
    """A running template process; one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, *, wall_s: float) -> None:
        self._process = process
        self._wall_s = wall_s

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
        return self._process.returncode is None

    @classmethod
    async def spawn(cls, *, wall_s: float) -> TemplateProcess:
        """Start a process.

        Raises:
            OSError: It cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_READ_BYTES,
        )
        return cls(process, wall_s=wall_s)

    async def request(self, frame: bytes) -> WorkerReply:
        """Send a request and return the reply.

        Raises:
            WorkerLostError: There is no valid reply; the process must be ended.
        """
        try:
            async with asyncio.timeout(self._wall_s):
                return await self._exchange(frame)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise WorkerLostError(type(error).__name__) from error

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _exchange(self, frame: bytes) -> WorkerReply:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(frame)
        await requests.drain()
        size = int.from_bytes(await replies.readexactly(LENGTH_BYTES), "little")
        if size > MAX_FRAME_BYTES:
            raise WorkerLostError(f"a reply of {size} bytes")
        return reply_decoder.decode(await replies.readexactly(size))


@dataclass(slots=True, eq=False)
class RenderJob:
    """A queued rendering; ``done`` receives the outcome and is ``None`` once the job is cancelled.

    ``timeout`` is set while the job runs; cancellation reschedules it to ``deadline``.
    """

    client_id: str
    conversation: RenderInput
    done: Callable[[RenderResult], None] | None
    timeout: asyncio.Timeout | None = None
    deadline: float = 0.0

    def cancel(self) -> None:
        """Cancel the job: discard its result and limit its remaining time."""
        self.done = None
        if self.timeout is not None:
            self.timeout.reschedule(self.deadline)


class ProcessRenderer:
    """Renders with one model's template in a process. Implements ``renderer.PromptRenderer``.

    Args:
        model: The model.
        limits: Limits of each rendering.
        owner: The pool, which bounds the number of processes and owns the worker task.
    """

    def __init__(self, model: ModelInfo, *, limits: RenderLimits, owner: TemplateProcessPool) -> None:
        self.implied_bos = model.bos_token if model.add_bos else ""
        self._name = model.name
        self._load = LoadTemplate(TemplateSource.of(model), limits.cpu_s, limits.memory_bytes)
        self._limits = limits
        self._owner = owner
        self._queue: FairQueue[RenderJob] = FairQueue()
        self._warming = False
        self._working = False
        self._process: TemplateProcess | None = None
        self._capabilities: TemplateCapabilities | None = None
        self._refusal: InferenceCenterError | None = None
        self._refused_until = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, waiting={len(self._queue)}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def busy(self) -> bool:
        return self._working

    @property
    def refusal(self) -> InferenceCenterError | None:
        """Why rendering is refused now: the template does not compile, or exceeded a limit while compiling."""
        return self._refusal if self._owner.monotonic() < self._refused_until else None

    def warm(self) -> None:
        """Start the process and compile the template, unless that has happened."""
        if self._process is None and self.refusal is None:
            self._warming = True
            self._work()

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Queue a conversation; see ``PromptRenderer``."""
        job = RenderJob(client_id, conversation, done)
        self._queue.add(client_id, job)
        self._work()
        return partial(self._cancel, job)

    async def end(self) -> None:
        """End the process; the next request starts another."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    def _cancel(self, job: RenderJob) -> None:
        job.cancel()
        self._queue.withdraw(job.client_id, job)

    def _work(self) -> None:
        if not self._working:
            self._working = True
            self._owner.tasks.spawn(self._render_all(), name=f"render-{self._name}")

    async def _render_all(self) -> None:
        try:
            while True:
                job = self._queue.take()
                if job is None and not self._warming:
                    return
                self._warming = False
                result = await self._result(job)
                if job is not None and job.done is not None and result is not None:
                    _deliver(job.done, result)
        finally:
            self._working = False

    async def _result(self, job: RenderJob | None) -> RenderResult | None:
        """Return the outcome of a job; ``None`` if only a warm process was wanted."""
        try:
            process, capabilities = await self._ready()
            if job is None or job.done is None:
                return None
            return await self._rendered(process, capabilities, job)
        except InferenceCenterError as error:
            return error
        except WorkerLostError as error:
            return await self._on_lost(str(error))
        except OSError as error:
            _log.error("template_process_not_started", model=self._name, reason=str(error))
            return InferenceCenterError(ErrorCode.INTERNAL, "The process that runs chat templates cannot be started.")
        # Boundary to a process that runs untrusted code: any fault fails this request only.
        except Exception:  # noqa: BLE001
            _log.exception("template_process_failed", model=self._name)
            await self.end()
            return InferenceCenterError(ErrorCode.INTERNAL)

    async def _rendered(
        self, process: TemplateProcess, capabilities: TemplateCapabilities, job: RenderJob
    ) -> RenderResult | None:
        """Return the outcome of a conversation; ``None`` if it was cancelled and timed out.

        Raises:
            WorkerLostError: There is no valid reply; the process must be ended.
        """
        frame = encode(request_of(job.conversation))
        job.deadline = asyncio.get_running_loop().time() + self._limits.cancelled_s
        try:
            async with asyncio.timeout(None) as job.timeout:
                reply = await process.request(frame)
        except TimeoutError:
            _log.debug("rendering_abandoned", model=self._name, pid=process.pid)
            self._warming = True
            await self.end()
            return None
        finally:
            job.timeout = None
        if reply.last:
            await self.end()
        return _result_of(reply, capabilities, model=self._name)

    async def _ready(self) -> tuple[TemplateProcess, TemplateCapabilities]:
        """Return the process, started if there is none, and the model's capabilities.

        Raises:
            InferenceCenterError: ``internal`` for a template that does not compile within the limits.
            OSError: The process cannot be started.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        await self._owner.touch(self)
        if self._process is None or self._capabilities is None or not self._process.alive:
            await self.end()
            self._process = await self._owner.process()
            self._capabilities = await self._compile(self._process)
        return self._process, self._capabilities

    async def _compile(self, process: TemplateProcess) -> TemplateCapabilities:
        try:
            outcome = (await process.request(encode(self._load))).outcome
        except WorkerLostError as error:
            raise self._refuse(await self._on_lost(str(error)), for_s=COMPILE_RETRY_S) from error
        if isinstance(outcome, TemplateLoaded):
            return capabilities_of(outcome)
        await self.end()
        if isinstance(outcome, RenderRefusal):
            raise self._refuse(_error_of(outcome, model=self._name), for_s=math.inf)
        raise WorkerLostError(type(outcome).__name__)

    def _refuse(self, refusal: InferenceCenterError, *, for_s: float) -> InferenceCenterError:
        self._refusal, self._refused_until = refusal, self._owner.monotonic() + for_s
        return refusal

    async def _on_lost(self, reason: str) -> InferenceCenterError:
        await self.end()
        limits = self._limits
        _log.warning("template_process_lost", model=self._name, reason=reason)
        return InferenceCenterError(
            ErrorCode.INTERNAL,
            f"the chat template of {self._name} takes more than {limits.cpu_s:g} s of processor time, or "
            f"{limits.memory_bytes // 2**20} MiB, to render this conversation",
            hint='Sessions with mode "raw" use no template.',
        )


class TemplateProcessPool:
    """The template processes of all models. Implements ``renderer.PromptRenderers``.

    Args:
        limits: Limits of each rendering.
        max_processes: Most processes that are kept, not counting busy ones beyond it.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        limits: RenderLimits | None = None,
        max_processes: int = MAX_PROCESSES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.monotonic = monotonic
        self.tasks = TaskGroup("templates")
        self._limits = limits or RenderLimits()
        self._max_processes = max_processes
        self._renderers: WeakValueDictionary[TemplateSource, ProcessRenderer] = WeakValueDictionary()
        self._started: OrderedDict[ProcessRenderer, None] = OrderedDict()
        self._spare: TemplateProcess | None = None

    def start_spare(self) -> None:
        """Start a process for the first template before that is known, while the engine loads the model.

        A process takes about 0.2 s to start, which the first turn after a restart would wait.
        """
        self.tasks.spawn(self._start_spare(), name="spare")

    async def process(self) -> TemplateProcess:
        """Return a process that has no template yet: the spare one, or a new one.

        Raises:
            OSError: It cannot be started.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.alive:
            return spare
        return await TemplateProcess.spawn(wall_s=self._limits.wall_s)

    def of(self, model: ModelInfo) -> ProcessRenderer:
        """Return the renderer of a model's template; see ``PromptRenderers``."""
        source = TemplateSource.of(model)
        renderer = self._renderers.get(source)
        if renderer is None:
            if not model.chat_template:
                _log.warning("chat_template_missing", model=model.name, used="chatml")
            renderer = self._renderers[source] = ProcessRenderer(model, limits=self._limits, owner=self)
        if (refusal := renderer.refusal) is not None:
            raise refusal
        renderer.warm()
        return renderer

    async def touch(self, renderer: ProcessRenderer) -> None:
        """Mark a renderer as most recently used and end surplus idle processes."""
        self._started[renderer] = None
        self._started.move_to_end(renderer)
        idle = [each for each in self._started if not each.busy]
        for each in idle[: max(0, len(self._started) - self._max_processes)]:
            del self._started[each]
            await each.end()

    async def aclose(self) -> None:
        """End all processes and drop waiting jobs."""
        await self.tasks.cancel()
        for renderer in self._started:
            await renderer.end()
        self._started.clear()
        if self._spare is not None:
            await self._spare.end()

    async def _start_spare(self) -> None:
        with suppress(OSError):  # the first rendering reports it
            self._spare = await TemplateProcess.spawn(wall_s=self._limits.wall_s)


def _result_of(reply: WorkerReply, capabilities: TemplateCapabilities, *, model: str) -> RenderResult:
    match reply.outcome:
        case RenderReply() as outcome:
            return prompt_of(outcome, capabilities)
        case RenderRefusal() as outcome:
            return _error_of(outcome, model=model)
        case _:
            raise WorkerLostError(type(reply.outcome).__name__)


def _error_of(refusal: RenderRefusal, *, model: str) -> InferenceCenterError:
    code, message = ErrorCode(refusal.code), refusal.message
    if code is ErrorCode.INTERNAL:
        message = f"{message} (model {model})"
    return InferenceCenterError(code, message, hint=refusal.hint, field=refusal.field)


def _deliver(done: Callable[[RenderResult], None], result: RenderResult) -> None:
    try:
        done(result)
    # Boundary between turns: a fault in one callback must not affect other turns.
    except Exception:  # noqa: BLE001
        _log.exception("rendered_prompt_not_taken")
