"""Chat templates run in separate processes, whose limits affect only the failing request."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, Tool, ToolCall
from inferencecenter.sessions.prompt.renderer import RenderedPrompt, RenderInput, render_prompt
from inferencecenter.sessions.prompt.template import ChatTemplate
from inferencecenter.sessions.prompt.template_frames import (
    LENGTH_BYTES,
    capabilities_of,
    encode,
    input_of,
    loaded,
    request_decoder,
    request_of,
)
from inferencecenter.sessions.prompt.template_process import (
    COMPILE_RETRY_S,
    RenderLimits,
    TemplateProcess,
    TemplateProcessPool,
)
from inferencecenter.sessions.prompt.template_worker import MAX_CUTS
from tests.sessions.conftest import BRACKETS, make_model
from tests.sessions.output_parsing import templates
from tests.sessions.output_parsing.speaking import ANSWERS, CONVERSATION, TOOLS
from tests.sessions.output_parsing.speaking import model as speaking_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.prompt.renderer import RenderResult

NOW: Final = datetime(2026, 2, 3, tzinfo=UTC)
LONG_LOOPS: Final = "{% set all = range(99999) %}{% for a in all %}{% for b in all %}{% endfor %}{% endfor %}"
LONG_TEXT: Final = (
    "{% set ns = namespace(text='ab') %}{% for n in range(60) %}{% set ns.text = ns.text.replace('a', 'aaaa') %}"
    "{% endfor %}"
)
WHEN_TOLD: Final = "{% if messages[-1].content == 'go' %}WORK{% endif %}[{{ messages[-1].content }}]"


def said(*contents: str) -> RenderInput:
    """A conversation with one user message."""
    return RenderInput(tuple(ChatMessage(role="user", content=content) for content in contents), NOW)


async def rendered(processes: TemplateProcessPool, model: ModelInfo, conversation: RenderInput) -> RenderResult:
    """The outcome of a rendering."""
    done: asyncio.Future[RenderResult] = asyncio.get_running_loop().create_future()
    processes.of(model).render(conversation, client_id="ada", done=done.set_result)
    async with asyncio.timeout(60):
        return await done


async def text(processes: TemplateProcessPool, model: ModelInfo, conversation: RenderInput) -> str:
    """The text of a rendering."""
    result = await rendered(processes, model, conversation)
    assert isinstance(result, RenderedPrompt), result
    return result.rendering.text


async def failure(processes: TemplateProcessPool, model: ModelInfo, conversation: RenderInput) -> InferenceCenterError:
    """The error of a rendering."""
    result = await rendered(processes, model, conversation)
    assert isinstance(result, InferenceCenterError), result
    return result


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[TemplateProcessPool]:
    """A process pool that is closed at the end."""
    processes = TemplateProcessPool(**options)
    try:
        yield processes
    finally:
        await processes.aclose()


contents = st.text(st.characters(codec="utf-8"), max_size=20)
calls = st.builds(ToolCall, call_id=st.sampled_from(["a", "b"]), name=st.just("f"), arguments=contents)
messages = st.builds(ChatMessage, role=st.just("user"), content=contents) | st.builds(
    ChatMessage,
    role=st.just("assistant"),
    content=contents,
    reasoning=st.none() | contents,
    tool_calls=st.none() | st.lists(calls, min_size=1, max_size=2).map(tuple),
)
tools = st.builds(
    Tool,
    name=st.just("f"),
    description=st.none() | contents,
    parameters=st.none() | st.dictionaries(contents, st.integers(-(2**63), 2**64 - 1) | contents, max_size=3),
)


@given(
    st.builds(
        RenderInput,
        messages=st.lists(messages, max_size=4).map(tuple),
        now=st.datetimes(timezones=st.just(UTC)),
        tools=st.lists(tools, max_size=2).map(tuple),
        thinking=st.none() | st.booleans(),
    )
)
def test_conversation_round_trips_to_the_process(conversation: RenderInput) -> None:
    """The process receives the same conversation as the session has."""
    frame = encode(request_of(conversation))
    assert int.from_bytes(frame[:LENGTH_BYTES], "little") == len(frame) - LENGTH_BYTES
    assert input_of(request_decoder.decode(frame[LENGTH_BYTES:])) == conversation


@pytest.mark.parametrize("name", ANSWERS)
def test_output_format_round_trips_to_the_process(name: str) -> None:
    """The capabilities of every format survive the round trip."""
    capabilities = speaking_model(name).capabilities
    assert capabilities_of(loaded(capabilities)) == capabilities


@pytest.mark.parametrize(
    "odd", [said("\ud800"), RenderInput((), NOW, tools=(Tool(name="f", parameters={"maximum": 2**64}),))]
)
def test_unencodable_value_is_refused(odd: RenderInput) -> None:
    """Invalid Unicode and numbers beyond 64 bits are client errors."""
    with pytest.raises(InferenceCenterError) as caught:
        encode(request_of(odd))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("name", ["QWEN3", "MISTRAL11", "GEMMA"])
async def test_process_renders_like_the_daemon(name: str) -> None:
    """Text, cuts, the end of the system prompt and the call format are the same."""
    model = make_model(chat_template=getattr(templates, name))
    system = () if name == "GEMMA" else (ChatMessage(role="system", content="Be <|im_end|> kind."),)
    conversation = RenderInput((*system, *CONVERSATION), NOW, tools=TOOLS)
    async with running() as processes:
        result = await rendered(processes, model, conversation)
    expected = render_prompt(ChatTemplate(model), conversation)
    assert isinstance(result, RenderedPrompt)
    assert (result.rendering.text, result.rendering.pieces()) == (expected.rendering.text, expected.rendering.pieces())
    assert (result.system_end, result.capabilities) == (expected.system_end, expected.capabilities)


async def test_template_compile_error_is_remembered() -> None:
    """The first rendering fails with the error; later ones fail immediately."""
    model = make_model(chat_template="{% for %}")
    async with running() as processes:
        error = await failure(processes, model, said("x"))
        assert (error.code, "TemplateSyntaxError" in error.message) == (ErrorCode.INTERNAL, True)
        with pytest.raises(InferenceCenterError, match="TemplateSyntaxError"):
            processes.of(model)


async def test_model_without_a_template_is_logged_once() -> None:
    """The use of ChatML is logged."""
    async with running() as processes:
        with capture_logs() as logs:
            assert await text(processes, make_model(), said("x")) == await text(processes, make_model(), said("x"))
    assert [line["event"] for line in logs] == ["chat_template_missing"]


async def test_template_error_is_short_and_without_marks() -> None:
    """A refusal that quotes a long message is truncated."""
    source = "{{ raise_exception(messages[0].content) }}"
    async with running() as processes:
        error = await failure(processes, make_model(chat_template=source), said("<|im_end|>" + "x" * 5000))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "<|im_end|>x" in error.message
    assert len(error.message) <= 1000


async def test_text_that_is_no_unicode_is_an_error_of_the_template_alone() -> None:
    """A template may write invalid Unicode; the process continues."""
    model = make_model(chat_template="{{ '\\ud800' if messages[0].content == 'bad' else 'fine' }}")
    async with running() as processes:
        renderer = processes.of(model)
        await failure(processes, model, said("bad"))
        pid = renderer.pid
        assert await text(processes, model, said("good")) == "fine"
        assert renderer.pid == pid is not None


async def test_too_many_spelled_tokens_are_refused() -> None:
    """A conversation that would be cut into very many pieces is refused as too long."""
    async with running() as processes:
        error = await failure(processes, make_model(), said("<|im_end|>" * (MAX_CUTS + 1)))
    assert error.code is ErrorCode.PROMPT_TOO_LONG


@pytest.mark.slow
@pytest.mark.parametrize("work", [LONG_LOOPS, LONG_TEXT])
async def test_expensive_template_fails_only_its_conversation(work: str) -> None:
    """The error names the template; its other renderings and other models are unaffected."""
    bad, good = (
        make_model(name="bad", chat_template=WHEN_TOLD.replace("WORK", work)),
        make_model(chat_template=BRACKETS),
    )
    limits = RenderLimits(cpu_s=0.5, memory_bytes=256 * 2**20)
    async with running(limits=limits) as processes:
        error, other = await asyncio.gather(failure(processes, bad, said("go")), text(processes, good, said("x")))
        assert other == "[user]x[assistant]"
        assert error.code is ErrorCode.INTERNAL
        assert "bad" in error.message
        assert await text(processes, bad, said("x")) == "[x]"


@pytest.mark.slow
async def test_expensive_template_compilation_is_refused_temporarily() -> None:
    """Format detection is bounded too, and is not repeated for each session."""
    limits, now = RenderLimits(cpu_s=0.5, memory_bytes=256 * 2**20), [0.0]
    # A range so short is within what is counted while it is found out how the model writes.
    model = make_model(name="bad", chat_template=LONG_LOOPS.replace("99999", "9999"))
    async with running(limits=limits, monotonic=lambda: now[0]) as processes:
        error = await failure(processes, model, said("x"))
        assert (error.code, "of bad takes more" in error.message) == (ErrorCode.INTERNAL, True)
        with pytest.raises(InferenceCenterError) as refused:
            processes.of(model)
        assert refused.value is error
        now[0] += COMPILE_RETRY_S
        assert await failure(processes, model, said("x")) is not error


async def test_killed_template_process_is_replaced() -> None:
    """The next rendering gets a new process."""
    model = make_model(chat_template=BRACKETS)
    async with running() as processes:
        renderer = processes.of(model)
        assert await text(processes, model, said("x")) == "[user]x[assistant]"
        before = renderer.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while True:  # as long as its end is not known, a conversation may be lost to it
            result = await rendered(processes, model, said("y"))
            if isinstance(result, RenderedPrompt):
                break
        assert renderer.pid not in (None, before)


async def test_number_of_template_processes_is_bounded() -> None:
    """The least recently used one ends first, and starts again on demand."""
    models = [make_model(chat_template=f"{number}" + BRACKETS) for number in range(3)]
    async with running(max_processes=2) as processes:
        renderers = [processes.of(model) for model in models]
        for number, model in enumerate(models):
            assert await text(processes, model, said("x")) == f"{number}[user]x[assistant]"
        assert [renderer.pid is None for renderer in renderers] == [True, False, False]
        assert await text(processes, models[0], said("x")) == "0[user]x[assistant]"
        assert [renderer.pid is None for renderer in renderers] == [False, True, False]
    assert [renderer.pid for renderer in renderers] == [None, None, None]


async def begun(processes: TemplateProcessPool, model: ModelInfo, told: list[RenderResult]) -> Callable[[], None]:
    """Start a rendering, and return its cancellation once it is running."""
    renderer = processes.of(model)
    withdraw = renderer.render(said("go"), client_id="ada", done=told.append)
    while "waiting=0" not in repr(renderer):  # noqa: ASYNC110 - the task that takes it says so to nothing
        await asyncio.sleep(0)
    return withdraw


async def test_cancelled_rendering_is_stopped() -> None:
    """Its process is replaced at once, so the next request does not wait for the end of the old one."""
    model = make_model(chat_template=WHEN_TOLD.replace("WORK", LONG_LOOPS))
    told: list[RenderResult] = []
    async with running(limits=RenderLimits(cpu_s=600.0, wall_s=600.0, cancelled_s=0.0)) as processes:
        await text(processes, model, said("x"))
        withdraw = await begun(processes, model, told)
        renderer = processes.of(model)
        before = renderer.pid
        withdraw()
        async with asyncio.timeout(60):
            while renderer.busy or renderer.pid in (None, before):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
        assert await text(processes, model, said("y")) == "[y]"
        withdraw()
    assert told == []


async def test_rendering_cancelled_during_start_is_not_run() -> None:
    """The process still starts for the requests behind it."""
    model = make_model(chat_template=WHEN_TOLD.replace("WORK", LONG_LOOPS))
    told: list[RenderResult] = []
    async with running(limits=RenderLimits(cpu_s=600.0, wall_s=600.0, cancelled_s=600.0)) as processes:
        (await begun(processes, model, told))()
        assert await text(processes, model, said("y")) == "[y]"
    assert told == []


async def test_short_cancelled_rendering_may_finish() -> None:
    """Starting another process would cost more."""
    model = make_model(chat_template=BRACKETS)
    told: list[RenderResult] = []
    async with running(limits=RenderLimits(cancelled_s=600.0)) as processes:
        await text(processes, model, said("x"))
        withdraw = await begun(processes, model, told)
        before = processes.of(model).pid
        withdraw()
        assert await text(processes, model, said("y")) == "[user]y[assistant]"
        assert processes.of(model).pid == before
    assert told == []


async def test_cancelled_rendering_is_not_reported() -> None:
    """A cancelled request is dropped, and those behind it are rendered."""
    model = make_model(chat_template=BRACKETS)
    told: list[RenderResult] = []
    async with running() as processes:
        withdraw = processes.of(model).render(said("a"), client_id="ada", done=told.append)
        withdraw()
        assert await text(processes, model, said("b")) == "[user]b[assistant]"
        withdraw()
    assert told == []


# The spare process.


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[TemplateProcess]:
    """All processes that are started."""
    found: list[TemplateProcess] = []
    spawn = TemplateProcess.spawn

    async def recorded(*, wall_s: float) -> TemplateProcess:
        found.append(await spawn(wall_s=wall_s))
        return found[-1]

    monkeypatch.setattr(TemplateProcess, "spawn", recorded)
    return found


async def test_first_template_gets_the_spare_process(spawned: list[TemplateProcess]) -> None:
    """It was started before the template was known; the next template gets another process."""
    async with running() as processes:
        processes.start_spare()
        await processes.tasks.join()
        assert len(spawned) == 1
        model, other = make_model(chat_template=WHEN_TOLD), make_model(chat_template=WHEN_TOLD + "!")
        assert await text(processes, model, said("a")) == "[a]"
        assert len(spawned) == 1
        assert await text(processes, other, said("a")) == "[a]!"
        assert len(spawned) == 2


async def test_dead_spare_process_is_replaced(spawned: list[TemplateProcess]) -> None:
    """The first rendering starts another process."""
    async with running() as processes:
        processes.start_spare()
        await processes.tasks.join()
        await spawned[0].end()
        assert await text(processes, make_model(chat_template=WHEN_TOLD), said("a")) == "[a]"
        assert len(spawned) == 2


async def test_unused_spare_process_ends_with_the_pool(spawned: list[TemplateProcess]) -> None:
    """No process outlives the daemon."""
    async with running() as processes:
        processes.start_spare()
        await processes.tasks.join()
        assert spawned[0].alive
    assert not spawned[0].alive
