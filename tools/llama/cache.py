"""Caches builds outside the checkout: ``$XDG_CACHE_HOME/inferencecenter/llama/<version>-<flags>``."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tools.llama.build import Builder
    from tools.llama.progress import Progress
    from tools.llama.recipe import Recipe

SUMS: Final = "SHA256SUMS"


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return the folder of all builds."""
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "inferencecenter" / "llama"


class Cache:
    """Folders of wheels with their checksums. An entry is renamed into place, so it is always complete."""

    def __init__(self, root: Path, progress: Progress) -> None:
        self._root = root
        self._progress = progress

    def bindings(self, builder: Builder) -> Path:
        """Return the entry with the bindings' wheel."""
        return self.entry(f"{builder.version}-bindings", builder.bindings)

    def libraries(self, recipe: Recipe, builder: Builder) -> Path:
        """Return the entry with the libraries' wheel; what it shares with its base is built as an entry of its own."""

        def build(folder: Path) -> None:
            base = None if recipe.base is None else self.libraries(recipe.base, builder)
            builder.libraries(recipe, folder, base=base)

        return self.entry(recipe.name, build)

    def entry(self, name: str, build: Callable[[Path], None]) -> Path:
        """Return an entry; if it is missing or damaged, ``build`` writes it into a new folder.

        If several processes need the entry, one builds it and the others wait.
        """
        place = self._root / name
        if is_whole(place):
            return place
        self._root.mkdir(parents=True, exist_ok=True)
        with self._locked(name):
            if is_whole(place):
                return place
            if place.exists():
                self._progress.print_line(f"{place} is damaged; it is built again")
                shutil.rmtree(place)
            for abandoned in self._root.glob(f".{name}.*.building"):
                shutil.rmtree(abandoned)
            with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".building", dir=self._root) as folder:
                new_entry = Path(folder) / "new"
                new_entry.mkdir()
                build(new_entry)
                sums = "".join(f"{digest(each)}  {each.name}\n" for each in sorted(new_entry.iterdir()))
                (new_entry / SUMS).write_text(sums, encoding="utf-8")
                new_entry.rename(place)
        return place

    def copy(self, entry: Path, folder: Path) -> None:
        """Copy the wheels of an entry."""
        folder.mkdir(parents=True, exist_ok=True)
        for wheel in entry.glob("*.whl"):
            shutil.copy(wheel, folder)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._root / f".{name}.lock").open("w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._progress.print_line("waiting for another build of llama.cpp")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def is_whole(entry: Path) -> bool:
    """Return whether all files of an entry match their checksums."""
    try:
        lines = (entry / SUMS).read_text(encoding="utf-8").splitlines()
        listed = [line.split("  ", 1) for line in lines]
        return bool(listed) and all(digest(entry / name) == expected for expected, name in listed)
    except (OSError, ValueError):
        return False


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
