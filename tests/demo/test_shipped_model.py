"""The shipped file: its metadata, its tokenizer, and a few greedy answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from inferencecenter.demo import demo_model_path
from tools.demo_model.cases import called
from tools.demo_model.chatml import CHAT_TEMPLATE, Message, tools_prompt
from tools.demo_model.evaluate import GreedyModel, evaluate, meets_criteria

MEBIBYTE = 1 << 20
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """The key-value pairs of the shipped file."""
    reader = gguf.GGUFReader(demo_model_path())
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module")
def model() -> Iterator[GreedyModel]:
    """The shipped file, loaded."""
    with GreedyModel(demo_model_path(), threads=2) as loaded:
        yield loaded


def ask(model: GreedyModel, *contents: str) -> str:
    """Returns the answer after user and assistant messages in turn."""
    roles = ("user", "assistant")
    return model.answer([Message(roles[i % 2], text) for i, text in enumerate(contents)])


def test_the_file_ships_with_the_package() -> None:
    """The model is package data, small enough for that."""
    path = demo_model_path()
    assert isinstance(path, Path)
    assert path.stat().st_size <= 8 * MEBIBYTE


def test_metadata_says_what_the_model_is(metadata: dict[str, Any]) -> None:
    """Architecture, licence and context length are what the card says."""
    assert metadata["general.architecture"] == "llama"
    assert metadata["general.license"] == "Apache-2.0"
    assert metadata["llama.context_length"] == 1024


def test_the_template_in_the_file_is_the_one_in_the_code(metadata: dict[str, Any]) -> None:
    """File and code do not drift apart."""
    assert metadata["tokenizer.chat_template"] == CHAT_TEMPLATE


def test_default_sampling_is_in_the_file(metadata: dict[str, Any]) -> None:
    """Servers that read sampling defaults from the file find a cautious temperature."""
    assert 0 < metadata["general.sampling.temp"] < 0.5
    assert metadata["general.sampling.top_k"] == 20


def test_special_tokens_are_control_tokens(metadata: dict[str, Any]) -> None:
    """ChatML marks are control tokens and the end of a message ends generation."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    assert control == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert not metadata["tokenizer.ggml.add_bos_token"]


@pytest.mark.parametrize("text", ["Hello, Ada!", "Grüße, 你好 \U0001f600\n\n\ttabs  and spaces", "x = 1 + 100  "])
def test_any_text_survives_the_tokenizer(model: GreedyModel, text: str) -> None:
    """All 256 bytes are tokens, so every UTF-8 text comes back as it was."""
    assert model.text(model.tokens(text)) == text


def test_special_tokens_are_read_as_one_token(model: GreedyModel) -> None:
    """A ChatML mark in a rendered prompt is its token, not its letters."""
    assert len(model.tokens("<|im_start|><|im_end|>")) == 2


def test_it_counts(model: GreedyModel) -> None:
    """Counting reaches its end and stops there."""
    assert ask(model, "Count to 5.") == "1, 2, 3, 4, 5."


def test_it_knows_a_capital(model: GreedyModel) -> None:
    """A country's capital is named."""
    assert "Paris" in ask(model, "What is the capital of France?")


@pytest.mark.parametrize("name", ["Ada", "Quorbel"])
def test_it_remembers_a_name(model: GreedyModel, name: str) -> None:
    """The name told in this conversation comes back, not another one."""
    answer = ask(
        model,
        f"My name is {name}.",
        f"Nice to meet you, {name}!",
        "Count to 3.",
        "1, 2, 3.",
        "What is my name?",
    )
    assert answer == f"Your name is {name}."


def test_it_calls_an_offered_tool(model: GreedyModel) -> None:
    """A request that a tool answers becomes a call in the Hermes form."""
    system = Message("system", tools_prompt([WEATHER]))
    answer = model.answer([system, Message("user", "What is the weather in Paris?")])
    assert called(answer) == {"name": "get_weather", "arguments": {"city": "Paris"}}


@pytest.mark.slow
def test_it_meets_the_criteria_it_ships_with(model: GreedyModel) -> None:
    """Counting, capitals and recall over the whole context reach 95 % on unseen prompts."""
    assert meets_criteria(evaluate(model, 40))
