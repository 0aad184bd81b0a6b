"""Stop strings and patterns in a text that arrives in pieces."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.sampling import text
from inferencecenter.engine.sampling.text import Scan, StopScanner

texts = st.text("ab\n", max_size=40)
stop_strings = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
PATTERNS = ["ab{2,}a", "a(?!b)b?\n", "b$", r"(?<=\n)a", r"\bab\b", "(?=aab)", "^b", "(?m)^b", "a|ab", "(a|b)\\1{3}"]
stop_patterns = st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True)


def cut(text: str, places: list[int]) -> list[str]:
    """Split a text at positions, which may repeat or exceed its length."""
    places = sorted(min(place, len(text)) for place in places)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def run(scanner: StopScanner, parts: list[str]) -> tuple[str, str | None]:
    """Feed all parts and return the whole released text and the first stop."""
    scans = [scanner.feed(part) for part in parts]
    released = "".join(scan.text for scan in scans) + scanner.finish()
    return released, next((scan.stop for scan in scans if scan.stop is not None), None)


def reference(text: str, strings: list[str], patterns: list[str]) -> tuple[str, str | None]:
    """Search every beginning of the text, the shortest first."""
    for end in range(1, len(text) + 1):
        found = [(end - len(string), string) for string in sorted(strings, key=len, reverse=True)]
        found = [(start, string) for start, string in found if start >= 0 and text[start:end] == string]
        for source in patterns:
            if (match := regex.compile(source).search(text, 0, end)) is not None:
                found.append((match.start(), source))
        if found:
            start, source = min(found, key=lambda place: place[0])
            return text[:start], source
    return text, None


@settings(deadline=None)
@given(texts, stop_strings, stop_patterns, st.lists(st.integers(0, 40), max_size=8))
def test_chunking_does_not_change_the_result(
    text: str, strings: list[str], patterns: list[str], places: list[int]
) -> None:
    """Any chunks release the same text and stop as the whole at once."""
    at_once = run(StopScanner(strings, patterns), [text])
    assert run(StopScanner(strings, patterns), cut(text, places)) == at_once
    assert run(StopScanner(strings, patterns), list(text)) == at_once


@given(texts, stop_strings)
def test_strings_stop_where_a_plain_search_finds_them(text: str, strings: list[str]) -> None:
    """The first complete string ends the answer, the longest if there are several."""
    assert run(StopScanner(strings), list(text)) == reference(text, strings, [])


@settings(deadline=None)
@given(texts, st.sampled_from(["ab{2,}a", r"(?<=\n)a", "a|ab", "(a|b)\\1{3}", "ba?b", "[^a]{3}"]))
def test_patterns_stop_where_a_plain_search_finds_them(text: str, source: str) -> None:
    """The first character that completes a match ends the answer where the match begins."""
    assert run(StopScanner([], [source]), list(text)) == reference(text, [], [source])


@given(texts, stop_strings)
def test_exactly_possible_stop_prefixes_are_held_back(text: str, strings: list[str]) -> None:
    """After each character, the longest suffix that begins a stop string is held back."""
    scanner = StopScanner(strings)
    released = ""
    for end in range(1, len(text) + 1):
        scan = scanner.feed(text[end - 1])
        released += scan.text
        if scan.stop is not None:
            break
        held = max(
            (size for string in strings for size in range(len(string)) if text[:end].endswith(string[:size])), default=0
        )
        assert len(released) == end - held


def test_text_without_stops_is_not_held_back() -> None:
    """All text is released at once."""
    scanner = StopScanner()
    assert scanner.feed("any text") == Scan("any text")
    assert scanner.finish() == ""


def test_partial_match_is_held_back_until_it_fails() -> None:
    """Digits wait for the full stop that would complete the pattern, and are released without it."""
    scanner = StopScanner([], [r"\d+\."])
    assert scanner.feed("in 19") == Scan("in ")
    assert scanner.feed("84 it") == Scan("1984 it")
    assert scanner.feed(" 5") == Scan(" ")
    assert scanner.feed(". x") == Scan("", r"\d+\.")


def test_nothing_is_released_after_a_stop() -> None:
    """Text behind the stop is dropped."""
    scanner = StopScanner(["END"])
    assert scanner.feed("abENDcd") == Scan("ab", "END")
    assert scanner.feed("more") == Scan("")
    assert scanner.finish() == ""


def test_finish_releases_a_stop_prefix() -> None:
    """The last characters of the answer are not lost because they begin a stop string."""
    scanner = StopScanner(["END"])
    assert scanner.feed("the EN") == Scan("the ")
    assert scanner.finish() == "EN"


def test_pattern_matches_across_released_text() -> None:
    """Lookbehind and line starts refer to released text, and the start of the text stays its start."""
    long = "x" * 10_000
    assert run(StopScanner([], ["(?<=x)END"]), [long, "END"]) == (long, "(?<=x)END")
    assert run(StopScanner([], ["^END"]), [long, "END"]) == (f"{long}END", None)
    assert run(StopScanner([], ["(?m)^END"]), [long, "\n", "END"]) == (f"{long}\n", "(?m)^END")


def test_released_text_is_dropped() -> None:
    """Memory does not grow with the answer."""
    scanner = StopScanner(["END"], ["E+N"])
    for _ in range(100):
        scanner.feed("no stop here. " * 20)
        assert len(scanner._text) < 5000


def test_slow_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catastrophic backtracking ends in an error, not in a hang."""
    monkeypatch.setattr(text, "_SEARCH_TIMEOUT_S", 0.01)
    scanner = StopScanner([], ["(a+)+b"])
    with pytest.raises(InferenceCenterError) as caught:
        scanner.feed("a" * 5000 + "c")
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "params.stop_regex")


class Work:
    """A clock on which each search takes a given time."""

    def __init__(self, search_s: float) -> None:
        self.now_s = 0.0
        self._search_s = search_s

    def __call__(self) -> float:
        """Return the time in seconds; a search lies between two calls."""
        self.now_s += self._search_s / 2
        return self.now_s


def test_patterns_that_are_slow_with_each_token_end_their_turn() -> None:
    """No single search is too slow; after a few tokens the turn's time budget is used up."""
    scanner = StopScanner([], [f"(?<=x.*)z{number}" for number in range(4)], clock=Work(0.005))
    with pytest.raises(InferenceCenterError, match="over and over") as refused:
        run(scanner, ["a"] * 100)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "params.stop_regex")
    assert len(scanner._text) <= 12


def test_ordinary_patterns_never_use_up_their_time() -> None:
    """The next token refills what a search has used, in an answer of any length."""
    work = Work(0.0001)
    scanner = StopScanner([], ["ab+c", "END"], clock=work)
    released = "".join(scanner.feed("aabb").text for _ in range(2000))
    assert released + scanner.finish() == "aabb" * 2000
    assert work.now_s > 1


def test_unbounded_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold back the whole answer."""
    monkeypatch.setattr(text, "_MAX_HELD_CHARS", 100)
    scanner = StopScanner([], ["(?s)a.*z"])
    with pytest.raises(InferenceCenterError, match="could still match after 100 characters"):
        scanner.feed("a" + "b" * 101)
