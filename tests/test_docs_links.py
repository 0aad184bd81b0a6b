"""Tests of the documentation's links; nothing is fetched."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest

from tests.documentation import ROOT, Page, all_pages

PAGES = {page.path: page for page in all_pages()}


def target_of(page: Page, link: str) -> tuple[str, str]:
    """Return the path in the repository and the anchor that a relative link leads to."""
    path, _, anchor = unquote(link).partition("#")
    if not path:
        return page.path, anchor
    place = (ROOT / page.path).parent.joinpath(path).resolve()
    assert place.is_relative_to(ROOT), f"{page}: {link} leads out of the repository"
    return str(place.relative_to(ROOT)), anchor


def is_outside(link: str) -> bool:
    """Tell whether a link leads to another machine."""
    return bool(urlsplit(link).scheme)


@pytest.mark.parametrize("page", PAGES.values(), ids=str)
def test_links_lead_somewhere(page: Page) -> None:
    """Files are there, and so are the headings that anchors name."""
    broken = []
    for link in filter(lambda each: not is_outside(each), page.links):
        path, anchor = target_of(page, link)
        if not (ROOT / path).exists() or (anchor and (path not in PAGES or anchor not in PAGES[path].anchors)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES.values(), ids=str)
def test_links_to_other_machines_are_encrypted(page: Page) -> None:
    """They are whole addresses of https."""
    for link in filter(is_outside, page.links):
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert "." in parts.netloc, link


def test_every_page_is_found_from_the_first() -> None:
    """Whoever follows links from README.md comes to all of them."""
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


def test_anchors_are_those_of_forges() -> None:
    """Marks are left out, capitals are made small, spaces are hyphens, and a title's repetitions are counted."""
    page = Page(
        "x.md", "# What's `new`? (v1)\n\n## [Linked](a.md) *twice*\n\n## Same\n\n## Same\n\n```\n# no title\n```\n"
    )
    assert page.anchors == {"whats-new-v1", "linked-twice", "same", "same-1"}
