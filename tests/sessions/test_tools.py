"""Turns with reasoning and tool calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode
from inferencecenter.ipc.messages import Failed, SampledLogprobs, TokenDelta, TokenLogprob
from inferencecenter.protocol import events
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.journal import TokensAppended, TurnEnded
from inferencecenter.sessions.output_parsing import output_spec
from inferencecenter.sessions.output_parsing.schema_support import Unenforced, enforceable
from tests.sessions.conftest import FakeSink, SessionHarness, packed
from tests.sessions.oracle import kept
from tests.sessions.test_manager import refused
from tests.sessions.tool_model import ANSWER, CALL, OTHER_CALL, THOUGHT, WEATHER, Heard, heard, tool_world


@pytest.fixture
def world() -> SessionHarness:
    """Sessions with a model that emits reasoning and tool calls."""
    return tool_world()


def ask(world: SessionHarness, session_id: str, prompt: str = "Weather?", **fields: Any) -> None:
    """Send a turn with a tool."""
    world.infer(session_id, prompt, tools=[WEATHER], **fields)


def say(world: SessionHarness, text: str, *, pieces: int = 1) -> None:
    """Generate a text in pieces of that many characters."""
    for start in range(0, len(text), pieces):
        world.engine.generate(text[start : start + pieces])


def answered(world: SessionHarness, session_id: str, text: str = ANSWER) -> ChatMessage:
    """Run a turn with the answer ``text`` and return its message."""
    ask(world, session_id)
    world.engine.answer(text)
    return world.get(session_id).transcript[-1]


def test_reasoning_tokens_are_counted(world: SessionHarness) -> None:
    """All tokens up to the closing marker count; here each character is a token."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER)
    world.engine.finish(kept=ANSWER)
    (end,) = heard(world.sink).ends
    assert isinstance(end, events.End)
    usage = end.usage
    assert usage.reasoning_tokens == ANSWER.index("</think>") + len("</think>") < len(ANSWER)
    assert world.get(session_id).turns[-1].usage == usage == world.get(session_id).usage


def test_schemas_are_searched_once_a_turn(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result serves the warnings of the turn and its grammar, for each tool and for the response format."""
    searched: list[Any] = []

    def counted(schema: Any, *, strict: bool) -> tuple[Any, list[Unenforced]]:
        searched.append(schema)
        return enforceable(schema, strict=strict)

    monkeypatch.setattr(output_spec, "enforceable", counted)
    form = {"type": "object", "propertyNames": {"minLength": 2}}
    ask(world, world.create(), json_schema=form, strict_schema=False)
    world.engine.answer("{}")
    (end,) = heard(world.sink).ends
    assert isinstance(end, events.End)
    assert end.warnings == ("json_schema is enforced without propertyNames: this is left to the model",)
    assert searched == [WEATHER["parameters"], form]
    ask(world, world.create(), json_schema=form, strict_schema=False)
    assert searched == [WEATHER["parameters"], form], "a later turn has the same schemas"
    ask(world, world.create(), json_schema={**form, "title": "another"}, strict_schema=False)
    assert len(searched) == 3


def results(message: ChatMessage) -> list[dict[str, str]]:
    """Results for the tool calls of a message."""
    return [{"role": "tool", "content": "5 °C", "tool_call_id": call.call_id} for call in message.tool_calls or ()]


def test_answer_is_published_in_parts(world: SessionHarness) -> None:
    """Reasoning, text and calls are numbered events; the end reports ``tool_calls``."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER)
    world.engine.finish(kept=ANSWER)
    told = heard(world.sink)
    assert (told.reasoning, told.content, told.names) == ("North or south?", "Let me see.", ["weather", "weather"])
    assert told.arguments == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert world.sink.last.finish_reason == "tool_calls"
    assert [getattr(event, "seq", None) for event in world.sink.events] == list(range(1, len(world.sink.events) + 1))
    message = world.get(session_id).transcript[-1]
    assert message.tool_calls == told.calls
    assert (message.content, message.reasoning) == (told.content, told.reasoning)
    turn_id = world.engine.last.turn_id
    assert told.ids == [f"call_{turn_id[2:]}_0", f"call_{turn_id[2:]}_1"]


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    kills=st.sets(st.integers(0, 12), max_size=3),
    ends=st.sampled_from(["stop", "length", "aborted"]),
    upto=st.integers(0, len(ANSWER)),
)
def test_interruptions_do_not_change_the_answer(cuts: list[int], kills: set[int], ends: str, upto: int) -> None:
    """Any split and any restart give one end, the same parts and the same history."""
    text = ANSWER[:upto]
    plain, told = _run(text, cuts=[len(text) or 1], kills=set(), ends=ends)
    other, retold = _run(text, cuts=cuts, kills=kills, ends=ends)
    assert told.same_as(retold)
    (end,), (same_end,) = told.ends, retold.ends
    assert isinstance(end, events.End)
    assert isinstance(same_end, events.End)
    assert end.finish_reason == same_end.finish_reason
    assert plain == other


def _run(text: str, *, cuts: list[int], kills: set[int], ends: str) -> tuple[tuple[ChatMessage, ...], Heard]:
    world = tool_world()
    session_id = world.create()
    ask(world, session_id, params={"seed": 1})
    world.engine.start()
    position, step = 0, 0
    while position < len(text):
        if step in kills:
            _restart(world, session_id)
        size = cuts[step % len(cuts)]
        world.engine.generate(text[position : position + size])
        position, step = position + size, step + 1
    world.engine.say(world.engine.finished(ends, kept=text))
    return world.get(session_id).transcript, heard(world.sink)


def _restart(world: SessionHarness, session_id: str) -> None:
    assert world.journal is not None
    epoch, last = world.get(session_id).epoch, world.sink.last
    engine = world.engine
    engine.turns.clear()
    world.reopen().restore(kept(world.journal.records), clean=True)
    world.resume(session_id, FakeSink(), epoch=epoch, last_seq=last.seq)
    world.resume(session_id, epoch=epoch, last_seq=last.seq)
    world.sink.events = [event for event in world.sink.events if not isinstance(event, events.SessionResumed)]
    engine.start()


def test_tool_call_resumes_after_a_restart(world: SessionHarness) -> None:
    """The new daemon parses the stored text without publishing it again."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    middle = ANSWER.index("slo")
    say(world, ANSWER[:middle], pieces=3)
    before = heard(world.sink)
    assert before.arguments == ['{"city": "O']
    _restart(world, session_id)
    assert world.engine.last.answer == packed(ANSWER[:middle])
    assert world.engine.last.shown_chars == middle
    say(world, ANSWER[middle:], pieces=3)
    world.engine.finish(kept=ANSWER)
    after = heard(world.sink)
    assert after.ids[0] == before.ids[0]
    assert after.arguments == ['{"city": "Oslo"}', '{"city": "Rome"}']


def test_published_parts_are_kept_without_the_model(world: SessionHarness) -> None:
    """The rest cannot be parsed, and what was published stays."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER[: ANSWER.index("Rome")])
    assert world.journal is not None
    del world.engines.engines["toy"]
    world.engines.default = "large"
    world.add_model("large")
    world.reopen().restore(kept(world.journal.records), clean=True)
    message = world.get(session_id).transcript[-1]
    assert (message.content, message.reasoning) == ("Let me see.", "North or south?")
    assert [call.arguments for call in message.tool_calls or ()] == ['{"city": "Oslo"}']
    assert world.get(session_id).turns[-1].finish_reason == "aborted"


def test_results_continue_the_calls(world: SessionHarness) -> None:
    """The next prompt keeps the tokens of the answer and adds the results."""
    session_id = world.create()
    message = answered(world, session_id)
    ask(world, session_id, messages=results(message))
    assert world.engine.last.tokens, "what was read is not read again"
    assert world.engine.last_text.endswith("<|im_start|>tool\n5 °C<|im_end|>\n<|im_start|>assistant\n")
    world.engine.answer("Warm.")
    assert [each.role for each in world.get(session_id).transcript] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]


def test_adding_tools_renders_the_conversation_again(world: SessionHarness) -> None:
    """Tools belong to the turn and precede the messages in the prompt."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    ask(world, session_id)
    assert not world.engine.last.tokens
    assert '"name": "weather"' in world.engine.last_text
    assert world.engine.last.grammar is not None


@pytest.mark.parametrize("reason", ["aborted", "length", "context_full"])
def test_incomplete_tool_call_is_dropped(world: SessionHarness, reason: str) -> None:
    """It is not text either; complete calls before it stay."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    text = THOUGHT + CALL + OTHER_CALL[:-20]
    say(world, text)
    world.engine.finish(reason, kept=text, end_text="")
    assert world.sink.last.finish_reason == reason
    message = world.get(session_id).transcript[-1]
    assert (message.content, len(message.tool_calls or ())) == ("", 1)


def test_incomplete_tool_call_ends_with_stop(world: SessionHarness) -> None:
    """Without a complete call the finish reason is ``stop``."""
    session_id = world.create()
    message = answered(world, session_id, CALL[:-20])
    assert world.sink.last.finish_reason == "stop"
    assert message.tool_calls is None


def test_discarded_turn_leaves_no_tool_calls(world: SessionHarness) -> None:
    """The transcript is empty, as after a discarded turn with plain text."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER)
    world.abort(session_id, discard=True)
    world.engine.finish("aborted", kept=ANSWER, end_text="")
    assert world.get(session_id).transcript == ()


def test_forks_and_rewinds_keep_calls(world: SessionHarness) -> None:
    """Results can be sent to a fork and to a rewound session."""
    session_id = world.create()
    message = answered(world, session_id)
    turn = world.engine.last.turn_id
    forked = world.fork(session_id)
    ask(world, forked, messages=results(message))
    world.engine.answer("Warm.")
    ask(world, session_id, messages=results(message))
    world.engine.answer("Cold.")
    world.rewind(session_id, turn)
    assert world.get(session_id).transcript[-1] == message
    ask(world, session_id, messages=results(message))


def test_another_model_renders_calls_in_its_own_format(world: SessionHarness) -> None:
    """A change of the model loses nothing."""
    session_id = world.create()
    message = answered(world, session_id)
    world.add_model("large", chat_template="")
    world.engines.default = "large"
    ask(world, session_id, messages=results(message))
    assert not world.engine.last.tokens
    assert '"city": "Oslo"' in world.engine.last_text


def test_resume_joins_adjacent_parts(world: SessionHarness) -> None:
    """The missed reasoning, text and arguments of each call arrive as one event each."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER, pieces=1)
    again = FakeSink()
    world.resume(session_id, again, epoch=world.get(session_id).epoch, last_seq=1)
    ops = [event.op for event in again.events[1:]]
    assert ops == ["reasoning", "token", "tool_call", "tool_call", "tool_call", "tool_call"]
    assert heard(again).same_as(heard(world.sink))


def test_resume_after_dropped_events_sends_all_parts(world: SessionHarness) -> None:
    """They are reasoning, text and calls, the last call with as much of its arguments as was generated."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    say(world, ANSWER[: ANSWER.index('me"}')])
    world.resume(session_id)
    resumed = world.sink.last
    assert (resumed.content, resumed.reasoning) == ("Let me see.", "North or south?")
    assert [call.arguments for call in resumed.tool_calls] == ['{"city": "Oslo"}', '{"city": "Ro']
    say(world, "m", pieces=9)
    assert world.sink.last.arguments == "m"


def test_logprobs_go_with_the_first_part(world: SessionHarness) -> None:
    """None is lost, even of tokens without visible text."""
    session_id = world.create()
    ask(world, session_id, n_probs=0)
    world.engine.start()
    for token in ("<tool_call>\n", '{"name": "weather", ', '"arguments": {"city"', ': "Oslo"}}', "\n</tool_call>"):
        entry = SampledLogprobs(TokenLogprob(token, 1, -0.5), ())
        world.engine.say(TokenDelta(world.engine.last.turn_id, packed("x"), token, (entry,)))
    world.engine.finish(kept="")
    told = [
        entry.token
        for event in world.sink.events
        if isinstance(event, events.Token | events.ToolCall)
        for entry in event.logprobs or ()
    ]
    assert "".join(told).startswith('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n')


def test_parts_are_recorded_before_their_events(world: SessionHarness) -> None:
    """A step is one record, which has the number of its last event."""
    session_id = world.create()
    ask(world, session_id)
    world.engine.start()
    assert world.journal is not None
    world.journal.holding = True
    n_told = len(world.sink.events)
    say(world, CALL, pieces=len(CALL))
    assert len(world.sink.events) == n_told
    said = world.journal.of(TokensAppended)[-1]
    assert said.text == CALL
    world.journal.let_go()
    assert world.sink.last.seq == said.seq
    world.journal.holding = False
    world.engine.finish(kept=CALL)
    (ended,) = world.journal.of(TurnEnded)
    assert ended.history.messages[-1].tool_calls is not None


def test_turn_without_tools_is_not_parsed(world: SessionHarness) -> None:
    """Without tools and reasoning the text is published as it arrives."""
    world.engine.status = SessionHarness().engine.status
    session_id = world.create()
    world.turn(session_id, "Hi", "<tool_call>{}</tool_call>")
    assert world.sink.text == "<tool_call>{}</tool_call>"
    assert world.journal is not None
    assert all(record.parts is None for record in world.journal.of(TokensAppended))
    assert (world.engine.last.grammar, world.engine.last.markers) == (None, ())


def test_reasoning_and_calls_count_as_text(world: SessionHarness) -> None:
    """They count toward the limit of the history."""
    world.max_transcript_chars = len(ANSWER)
    world.reopen()
    session_id = world.create()
    answered(world, session_id)
    held = "Weather?" + "North or south?" + "Let me see." + 2 * ('{"city": "Oslo"}' + "weather")
    room = world.max_transcript_chars - len(held)
    refused(ErrorCode.CONTEXT_FULL, world.append, session_id, ("user", "x" * (room + 1)))
    world.append(session_id, ("user", "x" * room))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"tools": [WEATHER]}, "tools"), ({"thinking": True}, "thinking")],
)
def test_raw_sessions_refuse_tools(world: SessionHarness, fields: dict[str, Any], field: str) -> None:
    """Raw mode has no template for them; the session is usable."""
    session_id = world.create(mode="raw")
    assert refused(ErrorCode.INVALID_REQUEST, world.infer, session_id, **fields).field == field
    world.turn(session_id, "Once", " upon")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"regex": "[0-9]+"}, "regex"),
        ({"grammar": 'root ::= "a"'}, "gbnf"),
    ],
)
@pytest.mark.parametrize("mode", ["chat", "raw"])
def test_output_format_applies_in_every_mode(mode: str, fields: dict[str, Any], kind: str) -> None:
    """The engine gets the grammar; the answer is text."""
    world = SessionHarness()
    session_id = world.create(mode=mode)
    world.infer(session_id, **fields)
    grammar = world.engine.last.grammar
    assert grammar is not None
    assert grammar.kind == kind
    world.engine.answer("1")
    assert world.sink.text == "1"


def test_results_without_a_call_are_refused(world: SessionHarness) -> None:
    """The error names the field; calls may be in the same request."""
    session_id = world.create()
    message = answered(world, session_id)
    wrong = [{"role": "tool", "content": "5", "tool_call_id": "call_other"}]
    assert refused(ErrorCode.INVALID_REQUEST, ask, world, session_id, messages=wrong).field == "messages"
    other = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"call_id": "mine", "name": "weather", "arguments": "{}"}],
    }
    own = [other, {"role": "tool", "content": "5", "tool_call_id": "mine"}]
    ask(world, session_id, messages=[*results(message), *own])


def test_old_protocol_versions_receive_only_text() -> None:
    """Ops for reasoning and calls are filtered; see ``protocol.codec``."""
    assert not events.Reasoning.first_protocol
    assert not events.ToolCall.first_protocol


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"tools": [WEATHER]}, "tools"), ({"regex": "a"}, "regex"), ({"tools": [WEATHER], "json_schema": {}}, None)],
)
def test_refused_grammar_names_the_field_that_gave_it(
    world: SessionHarness, fields: dict[str, Any], expected: str | None
) -> None:
    """The engine knows the grammar only; where two fields may have given it, none is named."""
    world.infer(world.create(), "Weather?", **fields)
    world.engine.say(Failed(turn_id=world.engine.last.turn_id, code="invalid_grammar", message="No."))
    (failure,) = (event for event in world.sink.events if isinstance(event, events.Error))
    assert (failure.code, failure.field) == ("invalid_grammar", expected)
