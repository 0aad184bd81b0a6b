"""Gaps filled by a model with random weights, whose vocabulary has the tokens."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.api.http_client import HttpResponse, exchange
from tests.e2e.harness import Daemon, run_daemon
from tests.engine.llama.tiny_models import write_plain_model

if TYPE_CHECKING:
    from pathlib import Path

BEFORE = "hello hell " * 40


def post(daemon: Daemon, path: str, **body: Any) -> HttpResponse:
    """Send a request and return the response."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        f"Authorization: Bearer {daemon.admin_token}\r\n\r\n"
    )
    return asyncio.run(exchange(daemon.port, head.encode() + data))


def test_prefix_of_a_gap_is_found_in_kv(tmp_path: Path) -> None:
    """While a user types, the text before the gap grows, and the rest of it is not read again."""
    write_plain_model(tmp_path / "coder.gguf", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with run_daemon(tmp_path / "state", tmp_path / "coder.gguf", INFERENCECENTER_ENGINE__N_CTX="1024") as daemon:
        gap = {"input_suffix": " hello", "n_predict": 4}
        first, later = (post(daemon, "/infill", input_prefix=text, **gap).json for text in (BEFORE, BEFORE + "hello"))
        assert first["tokens_cached"] < later["tokens_cached"]
        assert later["tokens_evaluated"] - later["tokens_cached"] < 16
        completed = post(daemon, "/v1/completions", prompt=BEFORE + "hello", suffix=" hello", max_tokens=4)
        assert completed.json["usage"]["prompt_tokens"] == later["tokens_evaluated"]
        assert completed.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= later["tokens_cached"]
