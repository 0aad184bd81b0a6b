"""The file of scripted answers: what is refused, and which rule answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.script import MAX_RULES, MAX_SCRIPT_BYTES, Conversation, Reply, Script, read_script

if TYPE_CHECKING:
    from pathlib import Path

CALL = {"name": "look", "arguments": {"at": ["it", 1, None]}}


def script(*rules: dict[str, Any], **more: Any) -> Script:
    """Return a script of rules."""
    return Script.model_validate({"rules": rules, **more})


def answer(found: Script, **conversation: Any) -> str:
    """Return the text that answers a conversation."""
    return found.find(Conversation(**conversation))[1].text


def problem(path: Path, content: str | bytes) -> str:
    """Return why a file is refused."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InferenceCenterError) as caught:
        read_script(path)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_CONFIG, "engine.script")
    assert caught.value.message.startswith(f"{path}: ")
    return caught.value.message.removeprefix(f"{path}: ")


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    """The name of the file decides how it is read."""
    rule = {"when": {"user": "x", "turn": 2}, "reply": {"text": "a", "tool_calls": [CALL], "tokens_per_s": 5}}
    as_json = tmp_path / "rules.json"
    as_json.write_text(json.dumps({"rules": [rule]}))
    as_toml = tmp_path / "rules.toml"
    as_toml.write_text(
        '[[rules]]\nwhen = { user = "x", turn = 2 }\n[rules.reply]\ntext = "a"\ntokens_per_s = 5\n'
        'tool_calls = [{ name = "look", arguments = { at = ["it", 1] } }]\n'
    )
    expected = read_script(as_json).rules[0]
    assert expected.reply.tool_calls[0].arguments == {"at": ["it", 1, None]}
    assert read_script(as_toml).rules[0].when == expected.when


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rules = [", "is not TOML"),
        ("", "rules is missing"),
        ("rules = []", "rules is []: tuple should have at least 1 item"),
        ("rules = 3", "rules is 3: input should be a valid tuple"),
        ("[[rules]]\n", "rules.1.reply is missing"),
        ("[[rules]]\nreply = { tokens_per_s = 0 }", "rules.1.reply.tokens_per_s is 0: input should be greater than 0"),
        ("[[rules]]\nreply = { txt = 'a' }", "unknown field rules.1.reply.txt"),
        ("[[rules]]\nreply = { text = 3 }", "rules.1.reply.text is 3: input should be a valid string"),
        ("[[rules]]\nreply = { raw = 'a', text = 'b' }", "rules.1.reply: raw replaces text, reasoning and tool_calls"),
        ("[[rules]]\nwhen = { turn = 0 }\nreply = {}", "rules.1.when.turn is 0: input should be greater than or equal"),
        (
            "[[rules]]\nwhen = { user_regex = '(' }\nreply = {}",
            'rules.1.when.user_regex is "(": is no regular',
        ),
        (
            "[[rules]]\nreply = { error = { code = 'sad' } }",
            "rules.1.reply.error.code is \"sad\": input should be 'invalid_json'",
        ),
        (
            "[[rules]]\nreply = { error = { code = 'address_in_use' } }",
            'rules.1.reply.error.code is "address_in_use": address_in_use never ends a turn',
        ),
        ("[[rules]]\nreply = {}\n[[rules]]\nreply = {}", "rule 1 has no conditions, so the rules after it never apply"),
        ("[[rules]]\nreply = { tool_calls = [{ name = 'a', arguments = { d = 2026-01-01 } }] }", "rules.1.reply.tool"),
        (b"\xff", "is not UTF-8 at byte 0"),
        (b"#" * (MAX_SCRIPT_BYTES + 1), "is larger than 4194304 bytes"),
        ("[[rules]]\nwhen = { turn = 1 }\nreply = {}\n" * (MAX_RULES + 1), "rules is "),
    ],
)
def test_wrong_file_is_refused_with_field_and_value(tmp_path: Path, content: str | bytes, message: str) -> None:
    """The message names the invalid field and its value."""
    found = problem(tmp_path / "rules.toml", content)
    assert found.startswith(message)
    assert len(found) < 2000


def test_wrong_json_and_missing_file_are_refused(tmp_path: Path) -> None:
    """So are files that cannot be read at all."""
    assert problem(tmp_path / "rules.json", "{").startswith("is not JSON")
    assert problem(tmp_path / "deep.json", "[" * 100_000).startswith("cannot be parsed: RecursionError")
    with pytest.raises(InferenceCenterError, match="cannot be read: No such file"):
        read_script(tmp_path / "none.toml")


def test_first_rule_that_applies_answers() -> None:
    """Order decides; all conditions of a rule must hold."""
    found = script(
        {"when": {"user": "fish", "turn": 2}, "reply": {"text": "second"}},
        {"when": {"user_regex": "(?i)^fish"}, "reply": {"text": "fish"}},
        {"when": {"system": "pirate"}, "reply": {"text": "arr"}},
        {"reply": {"text": "other"}},
    )
    assert answer(found, user="a fish", turn=2) == "second"
    assert answer(found, user="Fish", turn=1) == "fish"
    assert answer(found, user="a fish", system="You are a pirate.") == "arr"
    assert answer(found, user="a fish") == "other"


def test_conditions_on_tools_see_results_and_offers() -> None:
    """A result counts with its text and its tool; no rule on results applies without one."""
    found = script(
        {"when": {"tool": "look", "tool_result": "red"}, "reply": {"text": "looked red"}},
        {"when": {"tool_result_regex": r"^\d+$"}, "reply": {"text": "number"}},
        {"when": {"offers": "look"}, "reply": {"text": "may look"}},
        {"reply": {"text": "none"}},
    )
    assert answer(found, results=("blue", "is red"), called=("a", "look")) == "looked red"
    assert answer(found, results=("42",), called=("count",)) == "number"
    assert answer(found, offers=frozenset({"look"})) == "may look"
    assert answer(found) == "none"


def test_no_rule_for_a_conversation_is_an_error_that_shows_it() -> None:
    """It shows what the rules were compared with."""
    with pytest.raises(InferenceCenterError, match=r'answer 3, the user message "Hi", the tool result "ok"') as caught:
        script({"when": {"turn": 1}, "reply": {}}).find(Conversation(user="Hi", turn=3, results=("ok",)))
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_slow_pattern_does_not_match() -> None:
    """A regular expression that backtracks excessively times out."""
    found = script({"when": {"user_regex": "(a|a)+$"}, "reply": {"text": "slow"}}, {"reply": {"text": "other"}})
    assert answer(found, user="a" * 60 + "b") == "other"


def test_speed_of_the_file_is_the_default_of_replies() -> None:
    """A reply's own speed comes first."""
    found = script(
        {"when": {"turn": 1}, "reply": {"text": "a"}}, {"reply": {"text": "b", "tokens_per_s": 7}}, tokens_per_s=3
    )
    assert found.find(Conversation())[1] == Reply(text="a", tokens_per_s=3)
    assert found.find(Conversation(turn=2))[1].tokens_per_s == 7
