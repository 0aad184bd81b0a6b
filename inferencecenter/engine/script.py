"""A backend without a model that answers by the rules of a file: see ``models.script``.

The sampler recovers the conversation from the prompt's tokens, which is unambiguous: its template puts a control token
at the start of each message, and text of users and models never becomes one. It generates the reply in the format of
this template, so the front parses reasoning and calls as usual. Invariant: a reply whose calls are offered and match
their schemas is accepted by the grammar of those tools, which requires the keys of objects in the order of the schema.

A token is up to three lower-case letters with a preceding space, or a byte. Texts have about twice as many tokens as
with a real vocabulary, and no vocabulary file is needed.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from itertools import product
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Sampled
from inferencecenter.engine.token_slots import TokenSlots, simulated_model, with_control_tokens
from inferencecenter.ipc.messages import SampledLogprobs, TokenLogprob
from inferencecenter.models.script import Conversation, read_script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import PromptSegment
    from inferencecenter.models.script import Reply, Script, ScriptedCall
    from inferencecenter.protocol.params import Params

_CONTROL: Final = {
    name: 256 + number
    for number, name in enumerate(
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    )
}
_START, _END, _THINK, _THOUGHT, _CALL, _CALLED = _CONTROL.values()
_NAMES: Final = {token: name for name, token in _CONTROL.items()}
_WORDS: Final = [
    space + "".join(letters)
    for n_letters in (1, 2, 3)
    for letters in product(ascii_lowercase, repeat=n_letters)
    for space in ("", " ")
    if space or n_letters > 1
]
_FIRST_WORD: Final = 256 + len(_CONTROL)
_IDS: Final = {bytes((byte,)): byte for byte in range(256)} | {
    word.encode(): token for token, word in enumerate(_WORDS, _FIRST_WORD)
}
_BYTES: Final = {token: word for word, token in _IDS.items()}
_TOKEN: Final = re.compile(rb" ?[a-z]{1,3}|.", re.DOTALL)
_DEFAULT_CONTEXT_TOKENS: Final = 262_144

_TEMPLATE: Final = (
    "{%- if tools -%}<|im_start|>tools{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}"
    "{{- '\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '\n' if message.content or not loop.first -}}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}\n</tool_call>'
    "{%- endfor -%}"
    "<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{%- endif -%}"
)


class ScriptBackend(TokenSlots):
    """Slots of tokens, and the rules of ``options.script``.

    Args:
        options: Uses ``script``, ``slots``, ``n_ctx`` and ``model_name``.
        clock: Monotonic seconds.

    Raises:
        InferenceCenterError: See ``read_script``.
    """

    def __init__(self, options: EngineOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert options.script is not None
        super().__init__(
            simulated_model(
                options,
                architecture="script",
                description="answers by the rules of a file",
                n_vocab=_FIRST_WORD + len(_WORDS),
                default_n_ctx=_DEFAULT_CONTEXT_TOKENS,
                chat_template=_TEMPLATE,
                control=_CONTROL,
                end=_NAMES[_END],
            )
        )
        self._script: Script = read_script(options.script)
        self._clock = clock

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Return the tokens of ``pieces``, with control tokens parsed in special ones."""
        tokens: list[int] = []
        for piece in pieces:
            tokens += with_control_tokens(piece.text, _CONTROL if piece.special else {}, _tokens)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for control tokens."""
        return _BYTES.get(token, b"")

    def token_text(self, token: int) -> str:
        """Return a token's text, or a control token's name."""
        return _NAMES.get(token) or _BYTES[token].decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a message."""
        return token == _END

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> ScriptSampler:
        """Return the sampler that spells the rest of the reply to ``prompt`` after ``answer``.

        Raises:
            InferenceCenterError: ``invalid_request``: no rule applies, the reply calls a tool that is not offered, or
                it does not fit the ``constraint``.
        """
        messages = _messages(prompt)
        tools = _offered(messages)
        number, reply = self._script.find(_conversation(messages, tools))
        # A prompt that ends with closed reasoning disables it.
        thinks = not messages[-1][1].rstrip().endswith(_NAMES[_THOUGHT])
        tokens = _written(reply, tools, rule=number, thinks=thinks)
        if constraint is not None and reply.error is None and not constraint.fits([*tokens[len(answer) :], _END]):
            raise _refused(
                f"the reply of rule {number} violates the request: {_constraints(tools)}",
                "Compare the reply with the request's tools, tool_choice and response format.",
            )
        return ScriptSampler(self, reply, tokens, len(answer), params=params, clock=self._clock)


class ScriptSampler:
    """Spells one reply from its token ``at`` on, at its speed."""

    def __init__(  # noqa: PLR0913 - what it works on, and how
        self,
        backend: ScriptBackend,
        reply: Reply,
        tokens: Sequence[int],
        at: int,
        *,
        params: Params,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._error = reply.error
        self._tokens = tokens
        self._at = self._begun_at = at
        self._n_probs = params.n_probs
        self._repeats = params.ignore_eos and bool(tokens)
        self._clock = clock
        self._begun_s = clock() + (reply.delay_s if not at else 0.0)
        self._token_s = 1 / reply.tokens_per_s if reply.tokens_per_s else 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until the next token is due; not above 0 if it is."""
        return self._begun_s + (self._at - self._begun_at) * self._token_s - self._clock()

    def sample(self, row: int) -> Sampled:
        """Return the next token of the reply, repeating it with ``ignore_eos``; ``row`` has no effect.

        Raises:
            InferenceCenterError: The error that ends the reply.
        """
        if self._at >= len(self._tokens) and self._error is not None:
            raise InferenceCenterError(self._error.code, self._error.message)
        ends = self._at >= len(self._tokens) and not self._repeats
        token = _END if ends else self._tokens[self._at % len(self._tokens)]
        self._at += 1
        if not self._n_probs:
            return Sampled(token)
        certain = TokenLogprob(self._backend.token_text(token), token, 0.0)
        return Sampled(token, SampledLogprobs(certain, (certain,)))

    def close(self) -> None:
        """Do nothing: there is no chain to free."""


def _tokens(text: str) -> list[int]:
    return [_IDS[found] for found in _TOKEN.findall(text.encode())]


def _messages(prompt: Sequence[int]) -> list[tuple[str, str]]:
    """Return head and text of each message, the one to be generated included; a raw prompt is a user message."""
    starts = [at for at, token in enumerate(prompt) if token == _START]
    if not starts:
        return [("user", _text(prompt))]
    texts = (_text(prompt[start + 1 : end]) for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True))
    return [(head, text) for head, _, text in (text.partition("\n") for text in texts)]


def _text(tokens: Sequence[int]) -> str:
    parts = (_BYTES.get(token) or _NAMES[token].encode() for token in tokens if token not in {_START, _END})
    return b"".join(parts).decode(errors="replace")


def _offered(messages: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the schemas of the arguments of the tools that are offered, by name."""
    lines = messages[0][1].split("\n") if messages[0][0] == "tools" else ()
    functions = (json.loads(line)["function"] for line in lines if line)
    return {function["name"]: function["parameters"] for function in functions}


def _conversation(messages: Sequence[tuple[str, str]], tools: Mapping[str, Any]) -> Conversation:
    answers = [at for at, (head, _) in enumerate(messages) if head == "assistant"]
    generated = bool(answers) and answers[-1] == len(messages) - 1
    earlier = answers[:-1] if generated else answers
    new = messages[earlier[-1] + 1 :] if earlier else messages
    results = [(head.removeprefix("tool").strip(), text.strip()) for head, text in new if head.split(" ")[0] == "tool"]
    return Conversation(
        system="\n".join(text for head, text in messages if head in {"system", "developer"}),
        user=next((text.strip() for head, text in reversed(messages) if head == "user"), ""),
        turn=len(earlier) + 1,
        results=tuple(text for _, text in results),
        called=tuple(name for name, _ in results),
        offers=frozenset(tools),
    )


def _written(reply: Reply, tools: Mapping[str, Any], *, rule: int, thinks: bool) -> list[int]:
    """Return the reply as a model of the template writes it."""
    if reply.raw is not None:
        return with_control_tokens(reply.raw, _CONTROL, _tokens)
    tokens: list[int] = []
    if reply.reasoning and thinks:
        tokens += (_THINK, *_tokens(f"\n{reply.reasoning}\n"), _THOUGHT, *_tokens("\n\n"))
    tokens += _tokens(reply.text)
    for number, call in enumerate(reply.tool_calls):
        if call.name not in tools:
            offered = f"it offers {', '.join(sorted(tools))}" if tools else "it offers none"
            raise _refused(
                f"rule {rule} calls the tool {call.name}, which the request does not offer: {offered}",
                "A rule with the condition `offers` applies only where the tool is there.",
            )
        tokens += _tokens("\n") if number or reply.text else []
        tokens += (_CALL, *_tokens(f"\n{_call(call, tools[call.name])}\n"), _CALLED)
    return tokens


def _call(call: ScriptedCall, schema: Any) -> str:
    arguments = _ordered(call.arguments, schema, schema)
    return f'{{"name": {json.dumps(call.name)}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'


def _ordered(value: Any, schema: Any, root: Any) -> Any:
    """Return a JSON value with the keys of its objects in the order of their schema."""
    if isinstance(value, list):
        schemas = _flattened(schema, root)
        items: Any = next((each["items"] for each in schemas if "items" in each), {})
        return [_ordered(item, items, root) for item in value]
    if not isinstance(value, dict):
        return value
    properties: dict[str, Any] = {}
    for each in _flattened(schema, root):
        properties |= each.get("properties", {})
    keys = [key for key in properties if key in value] + [key for key in value if key not in properties]
    return {key: _ordered(value[key], properties.get(key, {}), root) for key in keys}


def _flattened(schema: Any, root: Any) -> list[dict[str, Any]]:
    """Return a schema and all schemas that it combines or references, each once."""
    found: dict[int, dict[str, Any]] = {}
    pending = deque([schema])
    while pending:
        each = pending.popleft()
        if not isinstance(each, dict) or id(each) in found:
            continue
        found[id(each)] = each
        for name in ("anyOf", "oneOf", "allOf"):
            pending += each.get(name, ())
        if isinstance(ref := each.get("$ref"), str) and ref.startswith("#/"):
            pending.append(_target(root, ref))
    return [*found.values()]


def _target(root: Any, ref: str) -> Any:
    for key in ref.removeprefix("#/").split("/"):
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _constraints(tools: Mapping[str, Any]) -> str:
    return f"its tools are {', '.join(sorted(tools))}" if tools else "its response format, and no tools"


def _refused(message: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, hint=hint)
