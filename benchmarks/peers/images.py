"""Chats about images, in `/v1/chat/completions` as other servers know it: images are data URLs, sent with each turn."""

from __future__ import annotations

import base64
import io
import random
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from benchmarks.peers.openai import CompletionsSession
from benchmarks.peers.sampling import sampling

if TYPE_CHECKING:
    from benchmarks.peers.http import Http
    from benchmarks.target import TargetSpec, Work

_ROLES: Final = ("user", "assistant")
_SIDE: Final = 224
"""Of an image in pixels; noise, so that no two compress to the same file."""


class ImageChatSession(CompletionsSession):
    """A client of `/v1/chat/completions` whose questions may have an image."""

    _path = "/v1/chat/completions"
    _keeps_connection = False  # llama-server closes one that is idle for some seconds, while other clients ask

    def __init__(self, http: Http, spec: TargetSpec) -> None:
        super().__init__(http, spec)
        self._images: dict[str | None, dict[int, str]] = {}

    def _body(self, work: Work, texts: tuple[str, ...]) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": _ROLES[place % 2], "content": text} for place, text in enumerate(texts)
        ]
        images = self._images.setdefault(work.history_id, {})
        if work.image:
            images[len(texts) - 1] = _data_url(work.seed if work.opening is None else work.opening.seed)
        for place, url in images.items():
            image = {"type": "image_url", "image_url": {"url": url}}
            messages[place]["content"] = [image, {"type": "text", "text": texts[place]}]
        if work.history_id is None or work.ends_history:
            del self._images[work.history_id]
        return {**sampling(work), "messages": messages, "max_tokens": work.max_tokens}


def _data_url(seed: int) -> str:
    pixels = random.Random(seed).randbytes(3 * _SIDE * _SIDE)  # noqa: S311 - the same image for the same seed
    file = io.BytesIO()
    Image.frombytes("RGB", (_SIDE, _SIDE), pixels).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
