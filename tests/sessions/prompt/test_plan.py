"""Prompt planning: what a turn submits and the history that it leaves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.ipc.messages import Finished, unpack_tokens
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import History, HistoryView
from inferencecenter.sessions.prompt.plan import GeneratedAnswer, Prompt, PromptPlan, after_turn, n_kept, prompt_of
from inferencecenter.sessions.prompt.renderer import RawText, RenderInput, render_prompt
from inferencecenter.sessions.prompt.template import ChatTemplate, ConversationRenderer
from tests.sessions.conftest import make_model, packed

NOW = datetime(2026, 2, 3, tzinfo=UTC)
LINES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
ASK = "{{ '<|im_start|>assistant\\n' }}"
CHATML = ChatTemplate(make_model(chat_template=LINES.replace("CONTENT", "m.content") + ASK))
NO_THOUGHT = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
THINKING = ChatTemplate(make_model(chat_template=LINES.replace("CONTENT", "m.content") + ASK + NO_THOUGHT))
KEEPING = ChatTemplate(
    make_model(
        chat_template=LINES.replace("\n{{", "\n{% if m.role == 'assistant' %}" + NO_THOUGHT + "{% endif %}{{").replace(
            "CONTENT", "m.content"
        )
        + ASK
        + NO_THOUGHT
    )
)
STRIPPING = ChatTemplate(make_model(chat_template=LINES.replace("CONTENT", "m.content|trim") + ASK))


def say(text: str) -> tuple[ChatMessage, ...]:
    """One user message."""
    return (ChatMessage(role="user", content=text),)


def finished(kept: int, kept_chars: int, end_text: str = "", **changes: Any) -> Finished:
    """The engine's final event of a turn."""
    config: dict[str, Any] = {
        "turn_id": "t",
        "reason": "stop",
        "stop": None,
        "kept_tokens": kept,
        "kept_chars": kept_chars,
        "end_text": end_text,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "generated_tokens": kept,
        "queue_ms": 0,
        "ttft_ms": 0,
        "total_ms": 0,
        "tokens_per_s": 0,
    }
    return Finished(**(config | changes))


def text_of(prompt: Prompt) -> str:
    """The new text of a prompt."""
    return "".join(piece.text for piece in prompt.pieces)


def asked(history: History, new: tuple[ChatMessage, ...], renderer: ConversationRenderer, *, n_keep: int = 0) -> Prompt:
    """The prompt of a turn with the messages ``new``."""
    messages = history.messages + new
    view = HistoryView(n_kept(messages, n_keep), history.view.resumes_at)
    thinking = False if renderer.capabilities.chooses_thinking else None
    rendered = render_prompt(renderer, RenderInput(view.of(messages), NOW, thinking=thinking))
    return prompt_of(history, PromptPlan(messages, view), rendered, implied_bos=renderer.implied_bos)


def run(
    history: History, question: str, answer: str, *, renderer: ConversationRenderer = CHATML, end: str = "<|im_end|>"
) -> tuple[Prompt, History]:
    """One turn whose whole output is kept; the end token is token 0."""
    prompt = asked(history, say(question), renderer)
    said = GeneratedAnswer(
        turn_id=f"t{len(history.turns) + 1}",
        text=answer,
        tokens=packed(answer + ("\0" if end else "")),
        prompt_tokens=prompt.tokens + packed(text_of(prompt)),
    )
    end_of_turn = finished(len(answer) + bool(end), len(answer), end)
    return prompt, after_turn(
        history, prompt, answer=said, end=end_of_turn, keeps_end=isinstance(renderer, ChatTemplate)
    )


@given(turns=st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=4))
def test_tokens_always_spell_the_rendering(turns: list[tuple[str, str]]) -> None:
    """Cached tokens and new pieces together are the whole rendering, and no cached token is submitted again."""
    history = History()
    for question, answer in turns:
        prompt, history = run(history, question, answer)
        spelled = "".join("<|im_end|>" if token == 0 else chr(token) for token in unpack_tokens(prompt.tokens))
        whole = CHATML.render(RenderInput(prompt.messages, now=NOW)).text
        if "\0" not in whole:
            assert spelled + text_of(prompt) == whole
        assert history.tokens.startswith(prompt.tokens)
    assert [message.content for message in history.messages] == [text for turn in turns for text in turn]


def test_turn_tokenizes_only_new_text() -> None:
    """After an answer only the rest of its line and the next question are tokenized."""
    _, history = run(History(), "Hi", "Hello!")
    prompt, _ = run(history, "Bye", "Ciao")
    assert prompt.tokens == history.tokens
    assert text_of(prompt) == "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("renderer", [THINKING, KEEPING])
def test_answer_after_empty_reasoning_is_not_read_again(renderer: ChatTemplate) -> None:
    """The template may omit the empty tags from earlier answers; the tokens keep them."""
    history = History()
    for number in range(3):
        prompt, history = run(history, f"Question {number}", "Hello!", renderer=renderer)
        assert prompt.text.endswith("<think>\n\n</think>\n\n")
        assert text_of(prompt).count("Question") == 1
        assert "Hello!" not in text_of(prompt)
    spelled = "".join(map(chr, unpack_tokens(history.tokens)))
    assert spelled.count("<think>\n\n</think>\n\nHello!") == 3
    again, _ = run(history.until("t2"), "Another", "", renderer=renderer)
    assert again.tokens == history.until("t2").tokens
    assert text_of(again).startswith("\n<|im_start|>user\nAnother<|im_end|>\n<|im_start|>assistant\n<think>")


def test_markers_of_the_new_part_are_kept() -> None:
    """A special token spelled in the new part is broken, whatever the cached part contains."""
    _, history = run(History(), "<|im_end|>", "<|im_start|>")
    prompt, _ = run(history, "a<|im_end|>b", "")
    assert [piece.text for piece in prompt.pieces] == [
        "\n<|im_start|>user\na<",
        "|im_end|>b<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_aborted_answer_is_closed_by_the_template() -> None:
    """After an abort the end token is missing, so the next turn submits the template's own."""
    _, history = run(History(), "Hi", "Hel", end="")
    prompt, _ = run(history, "Bye", "")
    assert text_of(prompt).startswith("<|im_end|>\n<|im_start|>user\nBye")


def test_text_that_no_kept_token_spells_is_sent_again() -> None:
    """Characters sent beyond the kept tokens are tokenized with the next turn."""
    prompt = asked(History(), say("Hi"), CHATML)
    said = GeneratedAnswer(turn_id="t", text="Hello", tokens=packed("Hello"), prompt_tokens=packed(prompt.text))
    history = after_turn(History(), prompt, answer=said, end=finished(3, 3), keeps_end=True)
    assert text_of(asked(history, say("Bye"), CHATML)).startswith("lo<|im_end|>\n")
    assert unpack_tokens(history.tokens)[-3:] == [ord(character) for character in "Hel"]


def test_template_that_rewrites_earlier_messages_reuses_no_tokens() -> None:
    """If the rendering no longer starts with the covered text, no token is reused."""
    _, history = run(History(), "Hi", "  Hello  ", renderer=STRIPPING)
    prompt, _ = run(history, "Bye", "", renderer=STRIPPING)
    assert prompt.tokens == b""
    assert text_of(prompt) == prompt.text


def test_turn_aborted_in_the_queue_keeps_earlier_tokens() -> None:
    """Its question joins the history; its tokens follow with the next turn."""
    _, before = run(History(), "Hi", "Hello")
    prompt = asked(before, say("Wait"), CHATML)
    answer = GeneratedAnswer(turn_id="t", text="", tokens=b"", prompt_tokens=None)
    history = after_turn(before, prompt, answer=answer, end=finished(0, 0, reason="aborted"), keeps_end=True)
    assert (history.tokens, history.covered) == (before.tokens, before.covered)
    assert [message.content for message in history.messages] == ["Hi", "Hello", "Wait", ""]


def test_bos_is_added_by_the_engine() -> None:
    """If the engine prepends BOS, the template's own is not submitted but counts as covered."""
    renderer = ChatTemplate(
        make_model(
            chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
            bos_token="<s>",
            add_bos=True,
            special_tokens=("<s>",),
        )
    )
    first, history = run(History(), "Hi", "Hello", renderer=renderer, end="")
    assert (first.text, text_of(first)) == ("<s>Hi", "Hi")
    second, _ = run(history, "Bye", "", renderer=renderer)
    assert (second.tokens, text_of(second)) == (history.tokens, "Bye")


def test_raw_text_grows_without_end_tokens() -> None:
    """In raw mode the end token is dropped, and the next prompt follows the answer directly."""
    _, history = run(History(), "Once", " upon", renderer=RawText())
    prompt, _ = run(history, " a time", "", renderer=RawText())
    assert unpack_tokens(prompt.tokens) == [ord(character) for character in "Once upon"]
    assert [(piece.text, piece.special) for piece in prompt.pieces] == [(" a time", False)]


SYSTEM = (ChatMessage(role="system", content="Be kind."),)
HEAD = "<|im_start|>system\nBe kind.<|im_end|>\n"


def shared(prompt: Prompt) -> str:
    """The text of the pieces that are marked as the system prompt."""
    return "".join(piece.text for piece in prompt.pieces[: prompt.shared_pieces])


def template(source: str, **config: Any) -> ChatTemplate:
    """A chat template with this source."""
    return ChatTemplate(make_model(chat_template=source, **config))


def test_system_prompt_is_marked_at_the_beginning() -> None:
    """The cut is at the next message's special token, and the pieces spell the same text."""
    prompt = asked(History(SYSTEM), say("Hi"), template(""))
    assert (shared(prompt), prompt.shared_pieces) == (HEAD, 1)
    assert text_of(prompt) == prompt.text


def test_marks_in_a_system_prompt_are_counted_as_pieces() -> None:
    """A system prompt that spells a special token consists of several pieces, all of them shared."""
    system = (ChatMessage(role="system", content="Never say <|im_end|>."),)
    prompt = asked(History(system), say("<|im_start|>"), template(""))
    assert shared(prompt) == "<|im_start|>system\nNever say <|im_end|>.<|im_end|>\n"
    assert prompt.shared_pieces == 2


def test_nothing_is_marked_after_reused_tokens() -> None:
    """Only a prompt that is submitted from its beginning has a shared system prompt."""
    prompt, history = run(History(SYSTEM), "Hi", "Hello")
    assert prompt.shared_pieces == 0, "this template always asks, so that its system prompt alone is no prefix"
    first = asked(History(SYSTEM), say("Hi"), template(""))
    said = GeneratedAnswer(turn_id="t", text="Hello", tokens=packed("Hello"), prompt_tokens=packed(first.text))
    history = after_turn(History(SYSTEM), first, answer=said, end=finished(5, 5), keeps_end=True)
    second = asked(history, say("Bye"), template(""))
    assert (bool(second.tokens), second.shared_pieces) == (True, 0)


def test_bos_token_is_not_part_of_the_marked_pieces() -> None:
    """The engine prepends it."""
    source = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    renderer = template(source, bos_token="<s>", add_bos=True, special_tokens=("<s>", "<|im_start|>"))
    prompt = asked(History(SYSTEM), say("Hi"), renderer)
    assert (shared(prompt), text_of(prompt)) == ("<|im_start|>Be kind.", "<|im_start|>Be kind.<|im_start|>Hi")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% if messages|length < 2 %}{{ raise_exception('no') }}{% endif %}<|im_start|>{{ messages[1].content }}",
        "{{ messages[1].content }}<|im_start|>{{ messages[0].content }}",
        "<|im_start|>{{ messages[0].content }}\n{{ messages[1].content if messages[1] }}<|im_end|>",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["no special token behind it", "refuses it alone", "not first", "joined to the question", "bare"],
)
def test_ambiguous_system_prompt_is_not_marked(source: str) -> None:
    """No cut is made where it could change a token or the system prompt does not render alone."""
    for question in ("Hi", "<|im_start|>Hi"):
        prompt = asked(History(SYSTEM), say(question), template(source))
        assert prompt.shared_pieces == 0
        assert text_of(prompt) == prompt.text


def test_only_a_system_prompt_is_marked() -> None:
    """A user's first message is not shared, and raw text is not cut."""
    for history in (History(), History(say("Hello"))):
        assert asked(history, say("Hi"), template("")).shared_pieces == 0
    assert asked(History(SYSTEM), say("Hi"), RawText()).shared_pieces == 0


@given(system=st.text(max_size=20), question=st.text(max_size=20))
def test_marked_pieces_hold_the_system_prompt_alone(system: str, question: str) -> None:
    """The shared pieces are the same for every question."""
    history = History((ChatMessage(role="system", content=system),))
    renderer = template("")
    prompts = [asked(history, say(text), renderer) for text in (question, "other")]
    heads = [prompt.pieces[: prompt.shared_pieces] for prompt in prompts]
    assert heads[0] == heads[1]
    assert shared(prompts[0]) == f"<|im_start|>system\n{system}<|im_end|>\n"
    assert text_of(prompts[0]) == prompts[0].text
