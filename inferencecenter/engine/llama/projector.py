"""The projector of a model that sees: libmtmd, which turns an image into rows for the model's context.

An image becomes tokens of the vocabulary (marks around it, or around the tiles it is cut into) and runs of rows. A row
is an embedding of the model's width that takes the place of a token's. In a list of tokens it is a negative number
derived from the image's digest (``ipc.images.row_ids``), so that equal images are equal prefixes, and everything that
compares, parks or stores tokens handles images without knowing of them. Only ``LlamaContext.decode`` needs the rows.

How many rows an image has depends on its size alone, so ``tokens`` needs no pixels. Encoding takes as long as the
prefill of some thousand tokens; the caller keeps the result as long as it may be needed again.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import RowPositions
from inferencecenter.engine.llama.model_file import check_projector_file, unusable
from inferencecenter.hardware.ggml import library_dir
from inferencecenter.ipc.images import row_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.log import LlamaLog
    from inferencecenter.engine.llama.model import LlamaModel
    from inferencecenter.ipc.images import ImageRef

_TEXT = 0
"""``MTMD_INPUT_CHUNK_TYPE_TEXT`` of mtmd.h."""


class LlamaProjector:
    """A loaded ``mtmd_context``.

    ``tokens`` may be called from any thread, ``encode`` from one.

    Attributes:
        is_causal: Whether a row attends only to earlier rows; otherwise all rows of a run are computed at once.
    """

    def __init__(self, handle: int, *, mtmd: Any, n_embd: int, log: LlamaLog) -> None:
        self._handle = handle
        self._mtmd = mtmd
        self._log = log
        self.n_embd = n_embd
        self.is_causal = not mtmd.mtmd_decode_use_non_causal(handle, None)
        self._has_mrope: bool = mtmd.mtmd_decode_use_mrope(handle)

    @classmethod
    def load(  # noqa: PLR0913 - keyword-only
        cls, path: Path, model: LlamaModel, *, device: int | None, n_threads: int, max_rows: int, log: LlamaLog
    ) -> LlamaProjector:
        """Load a projector for a model; an image has at most ``max_rows`` rows where its projector leaves a choice.

        ``device`` is llama.cpp's pointer to the GPU that computes it, ``None`` the CPU. Its memory is taken at once.

        Raises:
            InferenceCenterError: ``invalid_model_file``, or ``invalid_config`` where llama.cpp's libraries lack mtmd.
        """
        check_projector_file(path)
        mtmd = _load_library()
        log.take_problems()
        log.install(mtmd.mtmd_log_set)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = device is not None
        params.device = device
        params.print_timings = False
        params.n_threads = n_threads
        params.warmup = True
        params.image_max_tokens = max_rows
        handle = mtmd.mtmd_init_from_file(str(path).encode(), model.handle, params)
        if not handle:
            log.close(mtmd.mtmd_log_set)
            raise unusable(path, f"is not a projector for {model.path.name}: {' '.join(log.take_problems())}")
        if not mtmd.mtmd_support_vision(handle):
            mtmd.mtmd_free(handle)
            log.close(mtmd.mtmd_log_set)
            raise unusable(path, "has no vision encoder.")
        return cls(handle, mtmd=mtmd, n_embd=lib.llama_model_n_embd_inp(model.handle), log=log)

    def tokens(self, image: ImageRef) -> list[int]:
        """Return the tokens of an image: those of its marks, and the ids of its rows.

        Raises:
            InferenceCenterError: ``invalid_request`` for an image that the projector cannot take.
        """
        tokens: list[int] = []
        runs = 0
        with self._parts(image, None) as parts:
            for part in parts:
                n_tokens = self._mtmd.mtmd_input_chunk_get_n_tokens(part)
                if self._mtmd.mtmd_input_chunk_get_type(part) == _TEXT:
                    count = ctypes.c_size_t()
                    texts = self._mtmd.mtmd_input_chunk_get_tokens_text(part, ctypes.byref(count))
                    tokens += texts[: count.value]
                else:
                    tokens += row_ids(image, runs, n_tokens)
                    runs += 1
        return tokens

    def encode(self, image: ImageRef, pixels: bytes, run: int) -> NDArray[np.float32]:
        """Return the embeddings of a run of rows, of shape ``(rows, width)``.

        ``pixels`` are red, green and blue bytes, row by row from the top.

        Raises:
            ValueError: There are not as many pixels as the image has.
            InferenceCenterError: ``internal`` where llama.cpp fails.
        """
        if len(pixels) != 3 * image.width * image.height:
            raise ValueError(f"{len(pixels)} bytes for {image.width} x {image.height} pixels")
        mtmd = self._mtmd
        with self._parts(image, pixels) as parts:
            part = [each for each in parts if mtmd.mtmd_input_chunk_get_type(each) != _TEXT][run]
            if mtmd.mtmd_encode_chunk(self._handle, part):
                raise InferenceCenterError(ErrorCode.INTERNAL, "llama.cpp could not encode an image.")
            shape = mtmd.mtmd_input_chunk_get_n_tokens(part), self.n_embd
            rows: NDArray[np.float32] = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._handle), shape).copy()
        return rows

    def positions(self, image: ImageRef, run: int) -> RowPositions | None:
        """Return the positions of a run of rows in a model with M-RoPE; ``None`` if each row has the next position."""
        if not self._has_mrope:
            return None
        mtmd = self._mtmd
        with self._parts(image, None) as parts:
            part = [each for each in parts if mtmd.mtmd_input_chunk_get_type(each) != _TEXT][run]
            rows, n_rows = mtmd.mtmd_input_chunk_get_tokens_image(part), mtmd.mtmd_input_chunk_get_n_tokens(part)
            at_0, at_1 = (
                np.array(
                    [_coordinates(mtmd.mtmd_image_tokens_get_decoder_pos(rows, start, row)) for row in range(n_rows)],
                    np.int32,
                ).T
                for start in (0, 1)
            )
            return RowPositions(at_0, at_1, mtmd.mtmd_input_chunk_get_n_pos(part))

    def close(self) -> None:
        """Free the projector."""
        self._mtmd.mtmd_free(self._handle)
        self._log.close(self._mtmd.mtmd_log_set)

    @contextmanager
    def _parts(self, image: ImageRef, pixels: bytes | None) -> Iterator[list[int]]:
        """Yield the parts of an image, valid inside the block; without ``pixels`` they can only be counted."""
        mtmd = self._mtmd
        data = None if pixels is None else (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)
        bitmap = mtmd.mtmd_bitmap_init(image.width, image.height, data)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap)
            pointers = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if mtmd.mtmd_tokenize_from_parts(self._handle, chunks, pointers, 1, False):
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST,
                    f"The model's projector cannot take an image of {image.width} x {image.height} pixels.",
                    hint="Send a larger image, or one whose sides differ less.",
                    field="images",
                )
            n_parts = mtmd.mtmd_input_chunks_size(chunks)
            yield [mtmd.mtmd_input_chunks_get(chunks, number) for number in range(n_parts)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)


def _coordinates(position: Any) -> tuple[int, int, int, int]:
    return position.t, position.y, position.x, position.z


def _load_library() -> Any:
    try:
        return importlib.import_module("llama_cpp.mtmd_cpp")
    except (OSError, RuntimeError, AttributeError) as error:  # what ctypes and the bindings raise
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"llama.cpp's libraries in {library_dir()} lack mtmd, which reads images: {error}",
            hint="Install them anew with `make run` or `make libraries`, or remove mmproj from the model's settings.",
            field="mmproj",
        ) from error
