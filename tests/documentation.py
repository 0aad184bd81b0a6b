"""Parser of the documentation for tests: pages, headings, links, code spans and fenced blocks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = frozenset(f"docs/{name}.md" for name in ("configuration", "errors", "metrics", "protocol", "states"))
"""Pages that come from code, by their path."""
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_BESIDE_ALPHABET: Final = re.compile(r"[^\w\- ]")
_ASSIGNMENT: Final = re.compile(r"^[A-Za-z_]\w*=")
_DRAWN: Final = re.compile("[─│]")
_STOPS: Final = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "(", ")"})


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text without indentation, and position."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page of the documentation; ``path`` is relative to the repository."""

    path: str
    source: str

    def __str__(self) -> str:
        return self.path

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The fenced blocks in order."""
        return tuple(
            Block(
                page=self.path,
                line=self.source.count("\n", 0, found.start()) + 1,
                language=found["info"].strip(),
                text=re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            )
            for found in _FENCE.finditer(self.source)
        )

    @cached_property
    def prose(self) -> str:
        """The text outside fenced blocks."""
        return _FENCE.sub("", self.source)

    @cached_property
    def spans(self) -> tuple[str, ...]:
        """The code spans of the prose, each on one line."""
        paragraphs = re.split(r"\n\s*\n", self.prose)
        return tuple(" ".join(span.split()) for text in paragraphs for span in _SPAN.findall(text))

    @cached_property
    def links(self) -> tuple[str, ...]:
        """The link targets of the prose."""
        return tuple(_LINK.findall(_SPAN.sub("", self.prose)))

    @cached_property
    def anchors(self) -> frozenset[str]:
        """The headings' anchors as forges generate them."""
        found: list[str] = []
        for title in _HEADING.findall(self.prose):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
            slug = _BESIDE_ALPHABET.sub("", plain).replace(" ", "-")
            earlier = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
            found.append(f"{slug}-{earlier}" if earlier else slug)
        return frozenset(found)


def read_page(path: str) -> Page:
    """Return the page at a path of the repository."""
    return Page(path, (ROOT / path).read_text(encoding="utf-8"))


def all_pages() -> tuple[Page, ...]:
    """Return every page of the documentation."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return tuple(read_page(str(path.relative_to(ROOT))) for path in sorted(files))


def commands_in(text: str) -> list[list[str]]:
    """Return the simple commands of shell text as words.

    Prompts, comments, `sudo` with its options, leading assignments and trailing variables are dropped. Drawings and
    lines that are not valid shell syntax are skipped.
    """
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if _DRAWN.search(line):
            continue
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue
        found += [plain for command in _split(words) if (plain := _without_prefix(command))]
    return found


def _split(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word in _STOPS:
            commands.append([])
        elif not re.fullmatch(r"\$\w+", word):
            commands[-1].append(word)
    return commands


def _without_prefix(words: list[str]) -> list[str]:
    words = list(words)
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if words and words[0] == "sudo":
        words.pop(0)
        while words and words[0].startswith("-"):
            words = words[2:] if words[0] == "-u" else words[1:]
        return _without_prefix(words)
    return words
