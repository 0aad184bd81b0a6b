"""Images in the engine: where a prompt has rows of them, and the pixels and embeddings that exist.

Mechanism: the tokens of a prompt name its images by the numbers of their rows (see ``ipc.images``), which is all that
prefix matching needs. Pixels are requested from the front only when a prompt is prefilled up to rows whose embeddings
do not exist, which is never the case while its KV does. A run of rows, which is an image or a tile of one, is then
encoded in a step of its own, so that other turns wait for one run at most. Invariant: the KV of a slot never ends
within a run, because a run is always decoded as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.images import ImageRef, is_row, row_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from inferencecenter.engine.backend import RowPositions


IMAGE_BYTES: Final = 256 * 2**20
"""Pixels and embeddings that are kept; those used last stay."""


class Projector(Protocol):
    """Turns images into rows of embeddings; ``tokens`` may be called from any thread."""

    def tokens(self, image: ImageRef) -> list[int]:
        """Return the tokens of an image: those of marks around it, and the ids of its rows.

        Raises:
            InferenceCenterError: ``invalid_request`` for an image that cannot be taken.
        """

    def encode(self, image: ImageRef, pixels: bytes, run: int) -> NDArray[np.float32]:
        """Return the embeddings of a run of rows, of shape ``(rows, width)``.

        Raises:
            InferenceCenterError: ``internal`` on failure.
        """

    def positions(self, image: ImageRef, run: int) -> RowPositions | None:
        """Return the positions of a run of rows in a model with M-RoPE; ``None`` if each row has the next position."""


class ImageSpan(NamedTuple):
    """Run number ``run`` of an image's ``runs`` in a list of tokens, from ``start`` to before ``end``."""

    start: int
    end: int
    image: ImageRef
    run: int
    runs: int = 1


def find_spans(tokens: Sequence[int], images: Iterable[ImageRef], projector: Projector) -> tuple[ImageSpan, ...]:
    """Return the runs of rows in a list of tokens, in order; ``images`` are those that occur.

    Raises:
        InferenceCenterError: ``internal`` for rows of an image that is not among them.
    """
    known: dict[int, ImageSpan] = {}
    for image in images:
        rows = [token for token in projector.tokens(image) if is_row(token)]
        starts = [0]
        while starts[-1] < len(rows):
            starts.append(starts[-1] + _run_length(rows[starts[-1] :], image, len(starts) - 1))
        for run, (start, end) in enumerate(pairwise(starts)):
            known[rows[start]] = ImageSpan(0, end - start, image, run, len(starts) - 1)
    spans: list[ImageSpan] = []
    at = 0
    while at < len(tokens):
        if not is_row(tokens[at]):
            at += 1
            continue
        if tokens[at] not in known:
            raise InferenceCenterError(ErrorCode.INTERNAL, "A prompt has rows of an image that is not known.")
        found = known[tokens[at]]
        spans.append(found._replace(start=at, end=at + found.end))
        at += found.end
    return tuple(spans)


def _run_length(rows: Sequence[int], image: ImageRef, run: int) -> int:
    """Return how many of an image's ``rows`` belong to the run that they begin with."""
    ids = row_ids(image, run, len(rows))
    return next((number for number, (row, own) in enumerate(zip(rows, ids, strict=True)) if row != own), len(rows))


@dataclass(slots=True)
class _StoredImage:
    pixels: bytes | None = None
    runs: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return len(self.pixels or b"") + sum(each.nbytes for each in self.runs.values())


class ImageStore:
    """Pixels and embeddings, of at most ``max_bytes`` unless one image alone has more.

    Args:
        projector: Encodes.
        fetch: Called with an image whose pixels are needed; they arrive by ``put``, or ``drop`` is called.
        max_bytes: The limit; the least recently used image is evicted first.
    """

    def __init__(
        self, projector: Projector, *, fetch: Callable[[ImageRef], None], max_bytes: int = IMAGE_BYTES
    ) -> None:
        self._projector = projector
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, _StoredImage] = OrderedDict()
        self._requested: set[str] = set()

    @property
    def size_bytes(self) -> int:
        """Bytes in use."""
        return sum(each.size_bytes for each in self._stored.values())

    def is_ready(self, span: ImageSpan) -> bool:
        """Return whether the embeddings of a run exist."""
        stored = self._stored.get(span.image.digest)
        return stored is not None and span.run in stored.runs

    def can_encode(self, span: ImageSpan) -> bool:
        """Return whether the pixels of an image are here; they are freed when all of its runs are encoded."""
        stored = self._stored.get(span.image.digest)
        return stored is not None and stored.pixels is not None

    def request(self, span: ImageSpan) -> None:
        """Request the pixels of an image, unless they have been."""
        digest = span.image.digest
        if digest not in self._requested:
            self._requested.add(digest)
            self._fetch(span.image)

    def put(self, digest: str, pixels: bytes) -> None:
        """Take requested pixels; others are ignored."""
        if digest in self._requested:
            self._requested.discard(digest)
            self._stored.setdefault(digest, _StoredImage()).pixels = pixels
            self._evict(digest)

    def drop(self, digest: str) -> None:
        """Forget that pixels were requested: the front does not have them."""
        self._requested.discard(digest)

    def forget_requests(self) -> None:
        """Forget all requests for pixels: nothing answers them."""
        self._requested.clear()

    def encode(self, span: ImageSpan) -> None:
        """Compute the embeddings of a run from the image's pixels.

        Raises:
            InferenceCenterError: ``internal`` on failure.
        """
        stored = self._stored[span.image.digest]
        assert stored.pixels is not None, "see can_encode"
        stored.runs[span.run] = self._projector.encode(span.image, stored.pixels, span.run)
        if len(stored.runs) == span.runs:
            stored.pixels = None
        self._evict(span.image.digest)

    def rows(self, span: ImageSpan) -> NDArray[np.float32] | None:
        """Return the embeddings of a run, if they exist."""
        stored = self._stored.get(span.image.digest)
        if stored is None:
            return None
        self._stored.move_to_end(span.image.digest)
        return stored.runs.get(span.run)

    def positions(self, span: ImageSpan) -> RowPositions | None:
        """Return the positions of a run; see ``Projector``."""
        return self._projector.positions(span.image, span.run)

    def _evict(self, used: str) -> None:
        self._stored.move_to_end(used)
        size_bytes = self.size_bytes
        while size_bytes > self._max_bytes and len(self._stored) > 1:
            _, evicted = self._stored.popitem(last=False)
            size_bytes -= evicted.size_bytes
