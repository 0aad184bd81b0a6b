"""OpenAI's own client against a daemon on the demo model: answers, streams, histories that are sent again, leaving."""

from __future__ import annotations

import asyncio
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
    """Return where OpenAI's clients find the daemon."""
    return f"http://127.0.0.1:{daemon.port}/v1"


@pytest.fixture
def ada(daemon: Daemon) -> Iterator[OpenAI]:
    """The blocking client, with the token of the first run."""
    with OpenAI(base_url=url(daemon), api_key=daemon.admin_token, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_ada(daemon: Daemon) -> AsyncIterator[AsyncOpenAI]:
    """The asynchronous one."""
    async with AsyncOpenAI(base_url=url(daemon), api_key=daemon.admin_token, max_retries=0) as client:
        yield client


def model_of(client: OpenAI) -> str:
    """Return the one model's name."""
    (model,) = client.models.list().data
    return model.id


def user(text: str) -> dict[str, str]:
    """Return a question."""
    return {"role": "user", "content": text}


def answered(client: OpenAI, messages: list[Any], **more: Any) -> tuple[str, int, int]:
    """Return an answer, and the tokens of its prompt: all, and those that were not read again."""
    answer = client.chat.completions.create(model=model_of(client), messages=messages, **{**GREEDY, **more})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    content = answer.choices[0].message.content
    assert content is not None
    return content, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def test_a_text_that_grows_is_read_on_from_where_it_grew(ada: OpenAI) -> None:
    """What programs that complete texts send again is not read again, but for less than a step of reading."""
    text = "One two three four five six seven eight nine ten. " * 12
    first = ada.completions.create(model=model_of(ada), prompt=text, max_tokens=8, temperature=0)
    again = ada.completions.create(
        model=model_of(ada), prompt=text + first.choices[0].text + " And", max_tokens=8, temperature=0
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 80


def test_a_stream_says_what_the_answer_says(ada: OpenAI) -> None:
    """The same question, asked both ways, has the same words, and usage that agrees with them."""
    messages: Any = [user("What is the capital of France?")]
    whole, prompt_tokens, _ = answered(ada, messages)
    stream = ada.chat.completions.create(
        model=model_of(ada), messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == prompt_tokens
    assert chunks[-1].usage.completion_tokens <= 24


def test_a_history_that_is_sent_again_is_not_read_again(ada: OpenAI) -> None:
    """Of a conversation that comes back whole only what is new is read: also as a stream, and after a detour."""
    messages: list[Any] = [{"role": "system", "content": "You are helpful. " * 20}]
    for question in ("Name a colour.", "Name a fruit.", "Name a city."):
        messages.append(user(question))
        before = sum(len(message["content"]) for message in messages[:-1])
        answer, prompt, cached = answered(ada, messages)
        messages.append({"role": "assistant", "content": answer})
    assert before > 300
    assert prompt - cached < 40
    assert cached > prompt / 2


def test_an_answer_is_made_again(ada: OpenAI) -> None:
    """Asking the last question again reads next to nothing, and greedily says the same."""
    messages: list[Any] = [user("Name a colour, please, and say why you like it.")]
    first, _, _ = answered(ada, messages)
    messages += [{"role": "assistant", "content": first}, user("And a fruit?")]
    answer, prompt, cached = answered(ada, messages)
    again, prompt_again, cached_again = answered(ada, messages)
    assert (again, prompt_again) == (answer, prompt)
    assert prompt - cached_again <= prompt - cached + 1


def test_an_early_message_is_put_otherwise(ada: OpenAI) -> None:
    """An edited conversation is answered as one that was never another; asked again its beginning is known."""
    first: list[Any] = [user("Remember the number seven. What is two plus two? " + "Think of it. " * 30)]
    said, _, _ = answered(ada, first)
    later = [*first, {"role": "assistant", "content": said}, user("Name a fruit.")]
    answered(ada, later)
    edited = [user("Remember the number nine. What is two plus two? " + "Think of it. " * 30), *later[1:]]
    fresh, prompt, _ = answered(ada, edited, user="somebody")
    again, prompt_again, cached = answered(ada, edited)
    assert (again, prompt_again) == (fresh, prompt)
    assert cached > prompt - 70


def test_nobody_is_answered_from_another_client_s_conversation(daemon: Daemon, ada: OpenAI) -> None:
    """The same words of another client are read anew: how fast an answer begins tells nothing about others."""
    accounts = Accounts.open(daemon.state_dir / "accounts.sqlite3", clock=time.time)
    accounts.ensure_client("eve", max_sessions=4, priority="normal")
    token = accounts.create_token("eve").token
    accounts.close()
    messages: list[Any] = [user("A secret between us: the password is swordfish. Do you understand?")]
    answer, _, _ = answered(ada, messages)
    messages += [{"role": "assistant", "content": answer}, user("What is it?")]
    with OpenAI(base_url=url(daemon), api_key=token, max_retries=0) as eve:
        _, _, cached = answered(eve, messages)
    assert cached == 0


def test_several_answers(ada: OpenAI) -> None:
    """Two answers with one seed differ from each other, and are the same when asked for again."""
    ask: Any = {
        "model": model_of(ada),
        "messages": [user("Tell me something.")],
        "n": 2,
        "seed": 3,
        "temperature": 3,
        "top_p": 1,
        "max_tokens": 16,
        "extra_body": {"params": {"min_p": 0, "top_k": 0}},
    }
    first, second = (
        [choice.message.content for choice in ada.chat.completions.create(**ask).choices] for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]


def test_probabilities_spell_the_answer(ada: OpenAI) -> None:
    """Each token is told with the likeliest at its place, of which the greedy one is the first."""
    answer = ada.chat.completions.create(
        model=model_of(ada), messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob <= 0


def test_plain_text_is_gone_on_with(ada: OpenAI) -> None:
    """A completion echoes its prompt where that is wanted, and stops where it is told to."""
    answer = ada.completions.create(model=model_of(ada), prompt="The sky is", max_tokens=8, temperature=0, echo=True)
    assert answer.choices[0].text.startswith("The sky is")
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_failures_are_the_package_s_own(ada: OpenAI) -> None:
    """What goes wrong is an exception of the right class."""
    model = model_of(ada)
    stranger = ada.with_options(api_key="ic_wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        ada.chat.completions.create(model="gpt-99", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError) as caught:
        ada.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], verbosity="low")
    assert caught.value.param == "verbosity"
    with pytest.raises(openai.APIStatusError) as too_long:
        ada.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
    assert too_long.value.code == "context_length_exceeded"


def test_limits_say_when_to_come_again(daemon: Daemon) -> None:
    """A token with a limit gets a 429 that names the time."""
    accounts = Accounts.open(daemon.state_dir / "accounts.sqlite3", clock=time.time)
    accounts.ensure_client("bob", max_sessions=4, priority="normal")
    token = accounts.create_token("bob", limits=AccessLimits(requests_per_minute=1)).token
    accounts.close()
    with OpenAI(base_url=url(daemon), api_key=token, max_retries=0) as bob:
        answered(bob, [user("Hi")])
        with pytest.raises(openai.RateLimitError) as caught:
            answered(bob, [user("Hi")])
    assert int(caught.value.response.headers["retry-after"]) > 30


def wait_idle(daemon: Daemon) -> None:
    """Wait until no turn runs."""
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while daemon.figure("running_turns"):
        assert time.monotonic() < deadline, "a turn still runs"


async def test_leaving_ends_the_turn(daemon: Daemon, async_ada: AsyncOpenAI) -> None:
    """A stream that is closed, and an answer that nobody waits for any more, run no further."""
    ask: Any = {"model": (await async_ada.models.list()).data[0].id, "messages": [user("Count.")], **ENDLESS}
    stream = await async_ada.chat.completions.create(stream=True, **ask)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    wait_idle(daemon)
    asking = asyncio.get_running_loop().create_task(async_ada.chat.completions.create(**ask))
    while not await asyncio.to_thread(daemon.figure, "running_turns"):
        pass
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    wait_idle(daemon)
    assert daemon.figure("turns_total", finish="aborted") == 2
