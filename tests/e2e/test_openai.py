"""OpenAI's own client against a daemon on the demo model: answers, streams, repeated histories, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from inferencecenter.auth.accounts import Accounts
from inferencecenter.config.limits import AccessLimits
from tests.e2e.harness import REPLY_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

GREEDY: Any = {"temperature": 0, "max_tokens": 24}
ENDLESS: Any = {"temperature": 0, "extra_body": {"params": {"ignore_eos": True}}}


def url(daemon: Daemon) -> str:
    """Return the base URL for OpenAI's clients."""
    return f"http://127.0.0.1:{daemon.port}/v1"


@pytest.fixture
def openai_client(daemon: Daemon) -> Iterator[OpenAI]:
    """The blocking client, with the token of the first start."""
    with OpenAI(base_url=url(daemon), api_key=daemon.admin_token, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_openai_client(daemon: Daemon) -> AsyncIterator[AsyncOpenAI]:
    """The asynchronous client."""
    async with AsyncOpenAI(base_url=url(daemon), api_key=daemon.admin_token, max_retries=0) as client:
        yield client


def model_name(client: OpenAI) -> str:
    """Return the name of the only model."""
    (model,) = client.models.list().data
    return model.id


def user_message(text: str) -> dict[str, str]:
    """Return a user message."""
    return {"role": "user", "content": text}


def ask_with_usage(client: OpenAI, messages: list[Any], **more: Any) -> tuple[str, int, int]:
    """Return an answer and its prompt tokens: all, and those that were prefilled."""
    answer = client.chat.completions.create(model=model_name(client), messages=messages, **{**GREEDY, **more})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    content = answer.choices[0].message.content
    assert content is not None
    return content, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def test_growing_completion_prompt_is_prefilled_incrementally(openai_client: OpenAI) -> None:
    """A completion prompt that extends the last one is prefilled from the point of change."""
    text = "One two three four five six seven eight nine ten. " * 12
    first = openai_client.completions.create(model=model_name(openai_client), prompt=text, max_tokens=8, temperature=0)
    again = openai_client.completions.create(
        model=model_name(openai_client), prompt=text + first.choices[0].text + " And", max_tokens=8, temperature=0
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 80


def test_stream_equals_plain_answer(openai_client: OpenAI) -> None:
    """Both forms return the same text and usage."""
    messages: Any = [user_message("What is the capital of France?")]
    whole, prompt_tokens, _ = ask_with_usage(openai_client, messages)
    stream = openai_client.chat.completions.create(
        model=model_name(openai_client),
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == prompt_tokens
    assert chunks[-1].usage.completion_tokens <= 24


def test_resent_history_is_not_prefilled_again(openai_client: OpenAI) -> None:
    """Of a resent conversation only new messages are prefilled, streamed or not, and after a branch."""
    messages: list[Any] = [{"role": "system", "content": "You are helpful. " * 20}]
    for question in ("Name a color.", "Name a fruit.", "Name a city."):
        messages.append(user_message(question))
        before = sum(len(message["content"]) for message in messages[:-1])
        answer, prompt, cached = ask_with_usage(openai_client, messages)
        messages.append({"role": "assistant", "content": answer})
    assert before > 300
    assert prompt - cached < 40
    assert cached > prompt / 2


def test_repeated_question_reuses_the_prefix(openai_client: OpenAI) -> None:
    """Repeating the last question prefills next to nothing, and greedily gives the same answer."""
    messages: list[Any] = [user_message("Name a color, please, and say why you like it.")]
    first, _, _ = ask_with_usage(openai_client, messages)
    messages += [{"role": "assistant", "content": first}, user_message("And a fruit?")]
    answer, prompt, cached = ask_with_usage(openai_client, messages)
    again, prompt_again, cached_again = ask_with_usage(openai_client, messages)
    assert (again, prompt_again) == (answer, prompt)
    assert prompt - cached_again <= prompt - cached + 1


def test_edited_early_message_forks_the_history(openai_client: OpenAI) -> None:
    """An edited conversation is answered as a fresh one; its original still reuses the prefix."""
    first: list[Any] = [user_message("Remember the number seven. What is two plus two? " + "Think of it. " * 30)]
    said, _, _ = ask_with_usage(openai_client, first)
    later = [*first, {"role": "assistant", "content": said}, user_message("Name a fruit.")]
    ask_with_usage(openai_client, later)
    edited = [user_message("Remember the number nine. What is two plus two? " + "Think of it. " * 30), *later[1:]]
    fresh, prompt, _ = ask_with_usage(openai_client, edited, user="another")
    again, prompt_again, cached = ask_with_usage(openai_client, edited)
    assert (again, prompt_again) == (fresh, prompt)
    assert cached > prompt - 70


def test_prefix_reuse_is_limited_to_one_client(daemon: Daemon, openai_client: OpenAI) -> None:
    """The same messages of another client are prefilled again, so timing leaks nothing."""
    accounts = Accounts.open(daemon.state_dir / "accounts.sqlite3", clock=time.time)
    accounts.ensure_client("eve", max_sessions=4, priority="normal")
    token = accounts.create_token("eve").token
    accounts.close()
    messages: list[Any] = [user_message("A secret between us: the password is swordfish. Do you understand?")]
    answer, _, _ = ask_with_usage(openai_client, messages)
    messages += [{"role": "assistant", "content": answer}, user_message("What is it?")]
    with OpenAI(base_url=url(daemon), api_key=token, max_retries=0) as eve:
        _, _, cached = ask_with_usage(eve, messages)
    assert cached == 0


def test_several_choices_with_one_seed(openai_client: OpenAI) -> None:
    """Two choices with one seed differ from each other, and are reproducible."""
    ask: Any = {
        "model": model_name(openai_client),
        "messages": [user_message("Tell me something.")],
        "n": 2,
        "seed": 3,
        "temperature": 3,
        "top_p": 1,
        "max_tokens": 16,
        "extra_body": {"params": {"min_p": 0, "top_k": 0}},
    }
    first, second = (
        [choice.message.content for choice in openai_client.chat.completions.create(**ask).choices] for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]


def test_logprobs_spell_the_answer(openai_client: OpenAI) -> None:
    """Each token comes with its likeliest alternatives, of which the greedy one is the first."""
    answer = openai_client.chat.completions.create(
        model=model_name(openai_client),
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob <= 0


def test_completion_echoes_and_stops(openai_client: OpenAI) -> None:
    """A completion echoes its prompt on request, and ends at a stop string."""
    answer = openai_client.completions.create(
        model=model_name(openai_client), prompt="The sky is", max_tokens=8, temperature=0, echo=True
    )
    assert answer.choices[0].text.startswith("The sky is")
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_failures_raise_the_client_s_exceptions(openai_client: OpenAI) -> None:
    """Each failure raises the exception class of OpenAI's client."""
    model = model_name(openai_client)
    stranger = openai_client.with_options(api_key="ic_wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="gpt-99", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], n=99)
    assert caught.value.param == "n"
    with pytest.raises(openai.APIStatusError) as too_long:
        openai_client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
    assert too_long.value.code == "context_length_exceeded"


def test_rate_limit_has_retry_after(daemon: Daemon) -> None:
    """A token over its limit gets a 429 with the time to wait."""
    accounts = Accounts.open(daemon.state_dir / "accounts.sqlite3", clock=time.time)
    accounts.ensure_client("bob", max_sessions=4, priority="normal")
    token = accounts.create_token("bob", limits=AccessLimits(requests_per_minute=1)).token
    accounts.close()
    with OpenAI(base_url=url(daemon), api_key=token, max_retries=0) as bob:
        ask_with_usage(bob, [user_message("Hi")])
        with pytest.raises(openai.RateLimitError) as caught:
            ask_with_usage(bob, [user_message("Hi")])
    assert int(caught.value.response.headers["retry-after"]) > 30


def wait_idle(daemon: Daemon) -> None:
    """Wait until no turn runs."""
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while daemon.metric("running_turns"):
        assert time.monotonic() < deadline, "a turn still runs"


def count_aborted(daemon: Daemon) -> float:
    """Return how many turns have been aborted; before the first there is no such sample."""
    samples = daemon.metrics()
    with contextlib.suppress(AssertionError):
        return samples.value("turns_total", finish="aborted")
    return 0.0


async def test_disconnect_ends_the_turn(daemon: Daemon, async_openai_client: AsyncOpenAI) -> None:
    """A closed stream and an abandoned request end their turns."""
    before = count_aborted(daemon)
    ask: Any = {
        "model": (await async_openai_client.models.list()).data[0].id,
        "messages": [user_message("Count.")],
        **ENDLESS,
    }
    stream = await async_openai_client.chat.completions.create(stream=True, **ask)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    wait_idle(daemon)
    asking = asyncio.get_running_loop().create_task(async_openai_client.chat.completions.create(**ask))
    while not await asyncio.to_thread(daemon.metric, "running_turns"):
        pass
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    wait_idle(daemon)
    assert count_aborted(daemon) - before == 2
