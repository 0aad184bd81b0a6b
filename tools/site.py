"""Pages of the site beyond docs/: those of other folders, and the API reference from docstrings.

On a forge, pages in docs/ link to files beside that folder and to folders. A site has neither, so the files that are
linked become part of it, folders get a page that lists them, and the links are turned to those. Pages of the API
reference exist only in the site, so that docs/ holds nothing that a forge shows as bare directives. The site requests
nothing from other origins.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
BESIDE: Final = ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "LICENSE", "SECURITY.md")
FOLDERS: Final = {
    "examples": "Examples",
    "examples/c": "A C program",
    "examples/wasm": "WebAssembly guests",
    "docs/decisions": "Decisions",
}
"""Folders with a page that lists their files, and its title."""
REFERENCE: Final = {
    "reference/client.md": ("Python client", "inferencecenter.client"),
    "reference/blocking.md": ("Python client without asyncio", "inferencecenter.client.blocking"),
    "reference/requests.md": ("Requests", "inferencecenter.protocol.requests"),
    "reference/events.md": ("Events", "inferencecenter.protocol.events"),
    "reference/values.md": ("Values", "inferencecenter.protocol.values"),
    "reference/params.md": ("Parameters", "inferencecenter.protocol.params.Params"),
}
"""Pages of the API reference: title and module."""
_LINK: Final = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files beside docs/, the lists of folders, and the reference."""
    beside = [*BESIDE, "config/inferencecenter.toml", "inferencecenter/web/vendor/LICENSES"]
    for folder in FOLDERS:
        if not folder.startswith("docs/"):
            beside += [f"{folder}/{path.name}" for path in sorted((ROOT / folder).iterdir()) if path.is_file()]
    for name in beside:
        files.append(File.generated(config, place_in_site(name), abs_src_path=str(ROOT / name)))
    for folder, title in FOLDERS.items():
        entries = [f"- [{title_of(path)}]({path.name})" for path in sorted((ROOT / folder).iterdir()) if path.is_file()]
        text = "\n".join([f"# {title}", "", *entries, ""])
        files.append(File.generated(config, f"{place_in_site(folder)}/index.md", content=text))
    for name, (title, module) in REFERENCE.items():
        files.append(File.generated(config, name, content=f"# {title}\n\n::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into the repository to where the site has their files."""
    del config
    here = page.file.src_uri
    source = here if here in {place_in_site(name) for name in BESIDE} else f"docs/{here}"
    if here == place_in_site("README.md"):
        source = "README.md"

    def turned(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        place = place_in_site(target)
        if target in FOLDERS:
            place += "/index.md"
        if files.get_file_from_path(place) is None:
            return link[0]  # mkdocs reports the broken link
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + (link[2] or "")

    return _LINK.sub(turned, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load mermaid from the site on pages with a diagram; the theme alone would load it from another origin."""
    del config
    if '<pre class="mermaid">' not in output:
        return output
    script = posixpath.relpath("vendor/mermaid.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def place_in_site(path: str) -> str:
    """Return where the site has a file of the repository: docs/ is its root, and the first page is docs/index.md."""
    return {"README.md": "readme.md"}.get(path, path.removeprefix("docs/"))


def title_of(path: Path) -> str:
    """Return the title of a page, or the name of another file."""
    if path.suffix != ".md":
        return path.name
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
