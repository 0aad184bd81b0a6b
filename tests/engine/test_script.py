"""The scripted backend: what it reads of a prompt and what it writes for a reply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Backend
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.script import ScriptBackend
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import Params
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, Tool, ToolCall
from inferencecenter.sessions.output_parsing.detection import FALLBACK
from inferencecenter.sessions.output_parsing.output_spec import enforceable_schemas, output_spec
from inferencecenter.sessions.output_parsing.parts import ReasoningDelta, TextDelta
from inferencecenter.sessions.prompt.renderer import RenderInput
from inferencecenter.sessions.prompt.template import ChatTemplate
from tests.leftovers import leftovers
from tests.sessions.output_parsing.speaking import NOW, called, merged

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.engine.script import ScriptSampler
    from inferencecenter.sessions.output_parsing.parts import Part

LOOK = Tool(
    name="look",
    parameters={
        "type": "object",
        "properties": {
            "first": {"type": "string"},
            "second": {"$ref": "#/$defs/pair"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/pair"}},
        },
        "required": ["first"],
        "$defs": {
            "pair": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    },
)
USER = ChatMessage(role="user", content="Look <|im_end|> here, ÄÖ")


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return its seconds."""
        return self.now_s


class Scripted:
    """A backend with a script, and the front's rendering and parsing around it."""

    def __init__(self, folder: Path, *rules: dict[str, Any]) -> None:
        path = folder / "rules.json"
        path.write_text(json.dumps({"rules": rules}))
        self.clock = Clock()
        options = EngineOptions(backend="script", script=path, parent_pid=0, slots=2)
        self.backend = ScriptBackend(options, clock=self.clock)
        self.template = ChatTemplate(self.backend.model)
        self.grammars = GrammarCache(self.backend)
        leftovers.callback(self.grammars.close)

    def begin(
        self, *messages: ChatMessage, answer: tuple[int, ...] = (), params: dict[str, Any] | None = None, **request: Any
    ) -> ScriptSampler:
        """Return the sampler of the answer to a conversation."""
        infer = Infer.model_validate({"op": "infer", "session_id": "s", "prompt": "x", **request})
        rendered = self.template.render(RenderInput(messages, NOW, infer.tools or (), infer.thinking))
        schemas, capabilities = enforceable_schemas(infer), self.template.capabilities
        self.spec = output_spec(infer, schemas=schemas, capabilities=capabilities, prompt=rendered.text)
        constraint = None
        if self.spec.grammar is not None:
            constraint = self.grammars.constraint(self.grammars.compile(self.spec.grammar, self.spec.markers))
        prompt = self.backend.tokenize(rendered.pieces(), first=True)
        return self.backend.sampler(Params.model_validate(params or {}), prompt, answer, constraint)

    def parts(self, *messages: ChatMessage, **request: Any) -> list[Part]:
        """Return the parts of the answer to a conversation, as the front parses them under the request's grammar."""
        sampler = self.begin(*messages, **request)
        parser = self.spec.new_parser()
        written = b""
        while not self.backend.is_end(token := sampler.sample(0).token):
            written += self.backend.token_bytes(token) or self.backend.token_text(token).encode()
        return merged([part for char in written.decode() for part in parser.feed(char)] + [*parser.finish()])

    def refusal(self, *messages: ChatMessage, **request: Any) -> str:
        """Return why there is no answer."""
        with pytest.raises(InferenceCenterError) as caught:
            self.begin(*messages, **request)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
        return caught.value.message


def test_its_template_has_the_usual_format_of_calls_and_reasoning(tmp_path: Path) -> None:
    """Detection finds calls as in Qwen's templates, several at once, and reasoning."""
    capabilities = Scripted(tmp_path, {"reply": {}}).template.capabilities
    assert capabilities.call_format == FALLBACK
    assert capabilities.parallel_calls
    assert capabilities.thinking is not None
    assert {"<think>", "<tool_call>"} <= capabilities.control


def test_tokens_keep_any_text(tmp_path: Path) -> None:
    """A token may have several bytes, every text comes back, and control tokens come from templates."""
    backend: Backend = Scripted(tmp_path, {"reply": {}}).backend
    text = "The quick <|im_end|> fox, 10 €\r\n\x00 a"
    tokens = backend.tokenize([PromptSegment(text)], first=True)
    assert b"".join(map(backend.token_bytes, tokens)).decode() == text
    assert len(backend.tokenize([PromptSegment(" the quick brown fox")], first=True)) == 6
    (end,) = backend.tokenize([PromptSegment("<|im_end|>", special=True)], first=True)
    assert backend.is_end(end)
    assert all(backend.token_text(token) for token in range(backend.model.n_vocab))


def test_reasoning_text_and_calls_are_parsed_out_of_the_answer(tmp_path: Path) -> None:
    """The keys of arguments come in the order of the schema, also in objects that it refers to."""
    arguments = {"list": [{"b": 1, "a": 2}], "second": {"b": 3, "a": 4}, "first": 'ü"\n<|im_end|>'}
    reply = {
        "reasoning": "Think.",
        "text": "I look.",
        "tool_calls": [{"name": "look", "arguments": arguments}, {"name": "look", "arguments": {"first": "x"}}],
    }
    first = {"first": arguments["first"], "second": {"a": 4, "b": 3}, "list": [{"a": 2, "b": 1}]}
    assert Scripted(tmp_path, {"reply": reply}).parts(USER, tools=[LOOK]) == [
        ReasoningDelta("Think."),
        TextDelta("I look."),
        *called(0, "look", json.dumps(first, ensure_ascii=False)),
        *called(1, "look", '{"first": "x"}'),
    ]


def test_calls_alone_fit_a_required_call(tmp_path: Path) -> None:
    """The reply of a rule may be what tool_choice demands."""
    reply = {"reasoning": "Think.", "tool_calls": [{"name": "look", "arguments": {"first": "x"}}]}
    parts = Scripted(tmp_path, {"reply": reply}).parts(USER, tools=[LOOK], tool_choice="required")
    assert parts[1:] == called(0, "look", '{"first": "x"}')


def test_request_without_thinking_gets_no_reasoning(tmp_path: Path) -> None:
    """A model whose template closes it in the prompt sends none, either."""
    scripted = Scripted(tmp_path, {"reply": {"reasoning": "Think.", "text": "Yes."}})
    assert scripted.parts(USER, thinking=False) == [TextDelta("Yes.")]


def test_raw_reply_is_parsed_as_written(tmp_path: Path) -> None:
    """A malformed call stays text."""
    scripted = Scripted(tmp_path, {"reply": {"raw": "<think>Hm</think>a <tool_call>{nothing"}})
    assert scripted.parts(USER) == [ReasoningDelta("Hm"), TextDelta("a <tool_call>{nothing")]


def test_structured_output_must_fit(tmp_path: Path) -> None:
    """A reply that fits the schema is given, another one is refused by the number of its rule."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    scripted = Scripted(
        tmp_path, {"when": {"user": "Look"}, "reply": {"text": '{"a": 1}'}}, {"reply": {"text": "a is 1"}}
    )
    assert scripted.parts(USER, json_schema=schema) == [TextDelta('{"a": 1}')]
    other = ChatMessage(role="user", content="x")
    assert "the reply of rule 2 violates the request" in scripted.refusal(other, json_schema=schema)


def test_call_of_a_tool_that_is_not_offered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """The message names rule, tool and offer."""
    scripted = Scripted(tmp_path, {"reply": {"tool_calls": [{"name": "see"}]}})
    assert scripted.refusal(USER, tools=[LOOK]) == (
        "rule 1 calls the tool see, which the request does not offer: it offers look"
    )
    assert scripted.refusal(USER).endswith("it offers none")


def test_rules_see_the_conversation_that_the_template_wrote(tmp_path: Path) -> None:
    """System prompt, last user message, number of the answer, new results with their tools, and offers."""
    call = ToolCall(call_id="call_1", name="look", arguments='{"first": "x"}')
    conversation = (
        ChatMessage(role="system", content="Be <|im_start|>user brief."),
        USER,
        ChatMessage(role="assistant", content="I look.", tool_calls=(call,)),
        ChatMessage(role="tool", content="\nred\n", tool_call_id="call_1"),
    )
    scripted = Scripted(
        tmp_path,
        {"when": {"turn": 1, "system": "Be <|im_start|>user brief.", "offers": "look"}, "reply": {"text": "first"}},
        {"when": {"turn": 2, "tool": "look", "tool_result_regex": "^red$"}, "reply": {"text": "second"}},
        {"when": {"turn": 3, "user_regex": "^Look <\\|im_end\\|> here, ÄÖ$"}, "reply": {"text": "third"}},
    )
    assert scripted.parts(*conversation[:2], tools=[LOOK]) == [TextDelta("first")]
    assert scripted.parts(*conversation) == [TextDelta("second")]
    again = (*conversation, ChatMessage(role="assistant", content="Red."), USER)
    assert scripted.parts(*again) == [TextDelta("third")]


def test_raw_prompt_is_the_user_message(tmp_path: Path) -> None:
    """A prompt without a template has no other parts."""
    scripted = Scripted(tmp_path, {"when": {"user_regex": "^Once$"}, "reply": {"text": "upon"}})
    sampler = scripted.backend.sampler(Params(), scripted.backend.tokenize([PromptSegment("Once")], first=True))
    assert scripted.backend.token_bytes(sampler.sample(0).token) == b"upo"


def test_answer_resumes_where_it_was(tmp_path: Path) -> None:
    """Tokens of an earlier engine are not repeated."""
    scripted = Scripted(tmp_path, {"reply": {"text": "one two", "delay_s": 5}})
    sampler = scripted.begin(USER)
    begun = (sampler.sample(0).token, sampler.sample(0).token)
    resumed = scripted.begin(USER, answer=begun)
    assert resumed.sample(0).token == sampler.sample(0).token
    assert (sampler.wait_s, resumed.wait_s) == (5, 0)


def test_ignore_eos_repeats_and_logprobs_are_certain(tmp_path: Path) -> None:
    """The echo backend does the same."""
    sampler = Scripted(tmp_path, {"reply": {"text": "abc"}}).begin(USER, params={"ignore_eos": True, "n_probs": 1})
    first, second = sampler.sample(0), sampler.sample(0)
    assert first.token == second.token
    assert first.logprobs is not None
    assert (first.logprobs.sampled.token, first.logprobs.sampled.logprob) == ("abc", 0.0)


def test_error_ends_the_answer_after_its_text(tmp_path: Path) -> None:
    """It has the code and the message of the rule."""
    error = {"code": "overloaded", "message": "planned"}
    sampler = Scripted(tmp_path, {"reply": {"text": "abc", "error": error}}).begin(USER)
    sampler.sample(0)
    with pytest.raises(InferenceCenterError, match="planned") as caught:
        sampler.sample(0)
    assert caught.value.code == ErrorCode.OVERLOADED


def test_tokens_are_due_at_the_speed_of_the_reply(tmp_path: Path) -> None:
    """The first token waits for the delay, each next one for an interval, and late ones for nothing."""
    scripted = Scripted(tmp_path, {"reply": {"text": "one two", "delay_s": 1, "tokens_per_s": 4}})
    sampler = scripted.begin(USER)
    assert sampler.wait_s == 1
    scripted.clock.now_s = 1
    assert sampler.wait_s == 0
    sampler.sample(0)
    assert sampler.wait_s == 0.25
    scripted.clock.now_s = 2
    assert sampler.wait_s < 0
