"""The demo model's tokenizer: byte-level BPE that cuts text as GPT-2 does."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import corpus
from tools.demo_model.chatml import IM_END, IM_START, SPECIAL_TOKENS, Message, render

VOCABULARY_TOKENS = 1536
_CHARACTERS_PER_TOKEN = 3
_SAMPLE_CONVERSATIONS = 6000


def _texts(seed: int) -> Iterator[str]:
    def measure(message: Message) -> int:
        return len(message.content) // _CHARACTERS_PER_TOKEN + 5

    for conversation in islice(
        corpus.conversations(f"tokenizer:{seed}", 256, measure, corpus.EVEN), _SAMPLE_CONVERSATIONS
    ):
        yield render(conversation.messages)
    # Numbers up to 100 become one token each, so that counting and adding need no spelling.
    yield from ["".join(f" {n} {n},({n}" for n in range(101))] * 2000


def train_tokenizer(seed: int) -> Tokenizer:
    """Returns a tokenizer trained on the corpus: all 256 bytes, merges, the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer saved at `path`."""
    return Tokenizer.from_file(str(path))


class Encoder:
    """Turns messages into token ids and marks the ones the assistant writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def message(self, message: Message) -> tuple[list[int], list[bool]]:
        """Returns the ids of a message in its ChatML frame, and which of them are learned."""
        if message.role != "assistant":
            ids = self._ids(f"{IM_START}{message.role}\n{message.content}{IM_END}\n")
            return ids, [False] * len(ids)
        head = self._ids(f"{IM_START}assistant\n")
        body = self._ids(f"{message.content}{IM_END}")
        tail = self._ids("\n")
        learned = [False] * len(head) + [True] * len(body) + [False] * len(tail)
        return head + body + tail, learned

    def length(self, message: Message) -> int:
        """Returns the tokens a message takes, its frame included."""
        return len(self.message(message)[0])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Returns the merges of a tokenizer, the most frequent first."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]
