"""Fields that need the model's tokenizer before a request can be mapped: biases of words, and prompts of tokens."""

from __future__ import annotations

from dataclasses import replace
from sys import getsizeof
from typing import TYPE_CHECKING, Final

from inferencecenter.api.plain.tokens import detokenized, tokenized
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import unpack_tokens

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Call
    from inferencecenter.api.openai.completions import CompletionRequest
    from inferencecenter.api.openai.sampling import Sampling

MOST_WORDS: Final = 64
MAX_WORD_CHARS: Final = 256


async def with_token_biases(call: Call) -> Call:
    """Return a call whose ``logit_bias`` has only tokens: a word's bias applies to each of its tokens.

    Raises:
        InferenceCenterError: ``invalid_request`` for too many words, or too long ones; see also ``tokenized``.
    """
    request: Sampling = call.body
    biases = request.logit_bias or {}
    words = [name for name in biases if not (name.isascii() and name.isdigit())]
    if not words:
        return call
    if len(words) > MOST_WORDS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"logit_bias has {len(words)} words; {MOST_WORDS} are allowed",
            field="logit_bias",
            hint="Give token ids, see /tokenize.",
        )
    if any(len(word) > MAX_WORD_CHARS for word in words):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"logit_bias has a word of more than {MAX_WORD_CHARS} characters",
            field="logit_bias",
        )
    of_tokens = {name: bias for name, bias in biases.items() if name not in words}
    for word in words:
        found = await tokenized(call, request.model, word)
        of_tokens |= {str(token): biases[word] for token in unpack_tokens(found.tokens)}
    return replace(call, body=request.model_copy(update={"logit_bias": of_tokens}))


async def with_text_prompts(call: Call) -> Call:
    """Return a call whose prompts are texts; those of tokens are converted, and count beside the body as they come.

    Raises:
        InferenceCenterError: ``invalid_request`` for an unknown token, or ``queue_full``; see also ``detokenized``.
    """
    request: CompletionRequest = call.body
    if all(isinstance(prompt, str) for prompt in request.prompt):
        return call
    texts = []
    for index, prompt in enumerate(request.prompt):
        text = prompt
        if not isinstance(text, str):
            text = await detokenized(call, request.model, text, field=f"prompt.{index}")
            call.hold_result(getsizeof(text))
        texts.append(text)
    if call.report is not None:
        call.report.add("prompt", "prompt has no tokens: they are converted to text and tokenized again")
    return replace(call, body=request.model_copy(update={"prompt": texts}))
