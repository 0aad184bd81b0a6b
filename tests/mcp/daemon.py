"""A daemon with scripted answers that call tools of MCP servers."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RULES = """
[[rules]]
when = { tool_result_regex = "did not allow this call. Too cold" }
reply = { text = "Then not: Too cold." }

[[rules]]
when = { tool_result_regex = "result is unknown" }
reply = { text = "It is not known." }

[[rules]]
when = { tool_result_regex = '.' }
reply = { text = "So it is." }

[[rules]]
when = { user_regex = "^remote weather" }
reply = { tool_calls = [{ name = "weather__get_weather", arguments = { city = "Oslo" } }] }

[[rules]]
when = { user_regex = "^remote slow" }
reply = { tool_calls = [{ name = "weather__slow", arguments = { seconds = 30 } }] }

[[rules]]
when = { user_regex = "^remote fail" }
reply = { tool_calls = [{ name = "weather__fail", arguments = {} }] }

[[rules]]
when = { user_regex = "^weather" }
reply = { tool_calls = [{ name = "get_weather", arguments = { city = "Oslo" } }] }

[[rules]]
when = { user_regex = "^slow" }
reply = { tool_calls = [{ name = "slow", arguments = { seconds = 30 } }] }

[[rules]]
when = { user_regex = "^fail" }
reply = { tool_calls = [{ name = "fail", arguments = {} }] }

[[rules]]
when = { user_regex = "^long" }
reply = { tool_calls = [{ name = "long", arguments = { n_bytes = 100000 } }] }

[[rules]]
when = { user_regex = "^two" }
[rules.reply]
tool_calls = [
    { name = "get_weather", arguments = { city = "A" } },
    { name = "get_weather", arguments = { city = "B" } },
]

[[rules]]
when = { user_regex = "^hostile" }
reply = { tool_calls = [{ name = "hostile", arguments = {} }] }

[[rules]]
reply = { text = "Hello." }
"""


@contextmanager
def mcp_daemon(folder: Path, servers: dict[str, Any] | None, **variables: str) -> Iterator[Daemon]:
    """Run a scripted daemon that declares MCP servers, by default none, with more variables of the environment."""
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    settings = {"ENGINE__BACKEND": "script", "ENGINE__SCRIPT": str(rules), "ENGINE__N_CTX": "0"}
    if servers is not None:
        settings["MCP"] = json.dumps(servers)
    own = {f"INFERENCECENTER_{name}": value for name, value in settings.items()}
    with run_daemon(folder / "state", None, **own, **variables) as running:
        yield running


def declared(port: int) -> dict[str, Any]:
    """One server that may be used, one that is not there, and one of another account."""
    url = f"http://127.0.0.1:{port}/mcp"
    return {
        "weather": {"url": url, "scope": "user", "approvals": {"get_weather": "never"}, "max_result_bytes": 1000},
        "gone": {"url": "http://127.0.0.1:1/mcp", "scope": "user"},
        "private": {"url": url, "accounts": ["someone"], "scope": "admin", "allowed_tools": ["get_weather"]},
    }
