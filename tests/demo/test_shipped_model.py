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
    with GreedyModel(demo_model_path(), threads=1) as loaded:
        yield loaded


def ask(model: GreedyModel, *contents: str) -> str:
    """Return the answer to alternating user and assistant messages."""
    roles = ("user", "assistant")
    return model.answer([Message(roles[i % 2], text) for i, text in enumerate(contents)])


def test_model_file_is_packaged() -> None:
    """It is package data of bounded size."""
    path = demo_model_path()
    assert isinstance(path, Path)
    assert path.stat().st_size <= 8 * MEBIBYTE


def test_metadata_matches_the_model_card(metadata: dict[str, Any]) -> None:
    """The file names its architecture, license and context length."""
    assert metadata["general.architecture"] == "llama"
    assert metadata["general.license"] == "Apache-2.0"
    assert metadata["llama.context_length"] == 1024


def test_template_in_the_file_equals_the_code(metadata: dict[str, Any]) -> None:
    """Both are generated from one source."""
    assert metadata["tokenizer.chat_template"] == CHAT_TEMPLATE


def test_default_sampling_is_in_the_file(metadata: dict[str, Any]) -> None:
    """Servers that read sampling defaults from the file find a low temperature."""
    assert 0 < metadata["general.sampling.temp"] < 0.5
    assert metadata["general.sampling.top_k"] == 20


def test_special_tokens_are_control_tokens(metadata: dict[str, Any]) -> None:
    """ChatML marks are control tokens, and the end of a message ends generation."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    assert control == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert not metadata["tokenizer.ggml.add_bos_token"]


@pytest.mark.parametrize("text", ["Hello, Ada!", "Grüße, 你好 \U0001f600\n\n\ttabs  and spaces", "x = 1 + 100  "])
def test_any_text_round_trips_through_the_tokenizer(model: GreedyModel, text: str) -> None:
    """All 256 bytes are tokens."""
    assert model.text(model.tokens(text)) == text


def test_special_tokens_are_single_tokens(model: GreedyModel) -> None:
    """A ChatML mark in a rendered prompt is one token."""
    assert len(model.tokens("<|im_start|><|im_end|>")) == 2


def test_model_counts(model: GreedyModel) -> None:
    """Counting reaches its end and stops."""
    assert ask(model, "Count to 5.") == "1, 2, 3, 4, 5."


def test_model_knows_a_capital(model: GreedyModel) -> None:
    """It names a country's capital."""
    assert "Paris" in ask(model, "What is the capital of France?")


@pytest.mark.parametrize("name", ["Ada", "Quorbel"])
def test_model_recalls_a_name(model: GreedyModel, name: str) -> None:
    """The name stated in this conversation is repeated."""
    answer = ask(
        model,
        f"My name is {name}.",
        f"Nice to meet you, {name}!",
        "Count to 3.",
        "1, 2, 3.",
        "What is my name?",
    )
    assert answer == f"Your name is {name}."


def test_model_calls_an_offered_tool(model: GreedyModel) -> None:
    """The call has the Hermes form."""
    system = Message("system", tools_prompt([WEATHER]))
    answer = model.answer([system, Message("user", "What is the weather in Paris?")])
    assert called(answer) == {"name": "get_weather", "arguments": {"city": "Paris"}}


@pytest.mark.slow
def test_model_meets_its_release_criteria(model: GreedyModel) -> None:
    """Counting, capitals and recall over the whole context reach 95 % on unseen prompts."""
    assert meets_criteria(evaluate(model, 40))
