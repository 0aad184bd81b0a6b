"""Links of the documentation, without network access."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest

from tests.documentation import ROOT, Page, all_pages

PAGES = {page.path: page for page in all_pages()}


def target_of(page: Page, link: str) -> tuple[str, str]:
    """Return the repository path and anchor of a relative link."""
    path, _, anchor = unquote(link).partition("#")
    if not path:
        return page.path, anchor
    place = (ROOT / page.path).parent.joinpath(path).resolve()
    assert place.is_relative_to(ROOT), f"{page}: {link} leads out of the repository"
    return str(place.relative_to(ROOT)), anchor


def is_outside(link: str) -> bool:
    """Return whether a link leads to another machine."""
    return bool(urlsplit(link).scheme)


@pytest.mark.parametrize("page", PAGES.values(), ids=str)
def test_links_resolve(page: Page) -> None:
    """Files and anchors exist."""
    broken = []
    for link in filter(lambda each: not is_outside(each), page.links):
        path, anchor = target_of(page, link)
        if not (ROOT / path).exists() or (anchor and (path not in PAGES or anchor not in PAGES[path].anchors)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES.values(), ids=str)
def test_external_links_use_https(page: Page) -> None:
    """They are full addresses."""
    for link in filter(is_outside, page.links):
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert "." in parts.netloc, link


def test_every_page_is_reachable_from_the_readme() -> None:
    """Each is reached by following links."""
    found, ahead = set(), ["README.md"]
    while ahead:
        path = ahead.pop()
        if path in found or path not in PAGES:
            continue
        found.add(path)
        links = [link for link in PAGES[path].links if not is_outside(link)]
        ahead += [target_of(PAGES[path], link)[0] for link in links]
    decisions = {path for path in PAGES if PurePosixPath(path).parent.name == "decisions"}
    assert PAGES.keys() - found - decisions == set()


def test_anchors_follow_the_forges_rules() -> None:
    """Punctuation is dropped, capitals become lower case, spaces become hyphens, and repeated titles are numbered."""
    page = Page(
        "x.md", "# What's `new`? (v1)\n\n## [Linked](a.md) *twice*\n\n## Same\n\n## Same\n\n```\n# no title\n```\n"
    )
    assert page.anchors == {"whats-new-v1", "linked-twice", "same", "same-1"}
