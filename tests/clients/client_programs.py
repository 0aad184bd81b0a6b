"""Clients as their packages ship them: what is installed for each, the program that uses it, and what it gets.

A program is run in an environment of its own with the daemon's address and a token, and prints what it got for each
feature as JSON. docs/clients.md shows those of its lines that configure the client, and a table of the features.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.documentation import read_page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.harness import Daemon

PROGRAMS: Final = Path(__file__).parent / "programs"
INSTALL_TIMEOUT_S: Final = 1800
RUN_TIMEOUT_S: Final = 240
NEWEST: Final = "INFERENCECENTER_TEST_NEWEST_CLIENTS"
LARGE: Final = "INFERENCECENTER_TEST_LARGE_CLIENTS"
_PORT: Final = "127.0.0.1:3000"
_COMMANDS: Final = {".py": "python", ".mjs": "node", ".sh": "bash"}

PERSON: Final = {"name": "Ada", "age": 36}
HELLO: Final = {"text": "Hello there.", "streaming": "Hello there."}
SUNNY: Final = {"tools": "It is sunny in Oslo."}
STRUCTURED: Final = {"structured output": PERSON}
REASONING: Final = {"reasoning": "Six times seven."}
RESPONSES: Final = {"responses": "42"}


@dataclass(frozen=True)
class ClientProgram:
    """A client: its ``name`` in the documentation, its pinned ``packages``, and what its program prints by feature."""

    name: str
    program: str
    packages: tuple[str, ...]
    expected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uses_npm(self) -> bool:
        """Whether the packages are npm's."""
        return "@" in self.packages[0]

    @property
    def text(self) -> str:
        """The program."""
        return (PROGRAMS / self.program).read_text(encoding="utf-8")

    def __str__(self) -> str:
        return self.name


SDKS: Final = (
    ClientProgram(
        "openai (Python)",
        "openai.py",
        ("openai==3.54.0",),
        HELLO | SUNNY | STRUCTURED | REASONING | RESPONSES | {"errors": ["overloaded", "context_length_exceeded"]},
    ),
    ClientProgram(
        "openai (npm)",
        "openai.mjs",
        ("openai@6.49.0",),
        HELLO | SUNNY | STRUCTURED | REASONING | RESPONSES | {"errors": "overloaded"},
    ),
    ClientProgram(
        "anthropic (Python)",
        "anthropic.py",
        ("anthropic==2.12.0",),
        HELLO | SUNNY | STRUCTURED | REASONING | {"errors": 503, "messages": "42"},
    ),
    ClientProgram(
        "langchain-openai",
        "langchain_openai.py",
        ("langchain-openai==1.7.3",),
        HELLO | SUNNY | STRUCTURED | RESPONSES | {"errors": "overloaded"},
    ),
    ClientProgram(
        "pydantic-ai",
        "pydantic_ai.py",
        ("pydantic-ai-slim[openai]==2.68.0",),
        HELLO | SUNNY | STRUCTURED | REASONING | RESPONSES | {"errors": 503},
    ),
    ClientProgram(
        "openai-agents",
        "openai_agents.py",
        ("openai-agents==0.24.0",),
        HELLO | SUNNY | STRUCTURED | REASONING | RESPONSES | {"errors": "overloaded"},
    ),
    ClientProgram(
        "litellm",
        "litellm.py",
        ("litellm==1.106.2", "mcp==2.3.0"),
        HELLO
        | SUNNY
        | STRUCTURED
        | REASONING
        | RESPONSES
        | {"errors": ["ServiceUnavailableError", "ContextWindowExceededError"]},
    ),
    ClientProgram("instructor", "instructor.py", ("instructor==1.17.0",), STRUCTURED | {"streaming": PERSON}),
    ClientProgram(
        "llm",
        "llm.sh",
        ("llm==0.36",),
        HELLO | STRUCTURED | {"tools": "Let me look. It is sunny in Oslo."},
    ),
    ClientProgram(
        "ollama (Python)",
        "ollama.py",
        ("ollama==0.6.3",),
        HELLO | SUNNY | STRUCTURED | REASONING | {"errors": 503},
    ),
    ClientProgram(
        "Home Assistant",
        "home_assistant.py",
        ("ollama==0.5.1",),
        HELLO | SUNNY | STRUCTURED | {"errors": 401},
    ),
    ClientProgram(
        "Continue",
        "continue.mjs",
        ("@continuedev/openai-adapters@1.37.0",),
        HELLO | SUNNY | REASONING | {"errors": 401},
    ),
    ClientProgram(
        "Vercel AI SDK",
        "ai.mjs",
        ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"),
        HELLO | SUNNY | STRUCTURED | REASONING | {"errors": 503},
    ),
)

OPENAI_MODEL: Final = "gpt-5.5"
"""Another name of the model, for which Codex has the tools of OpenAI's models."""
FIXED: Final = "The file says world now."
CODEX: Final = ClientProgram(
    "Codex CLI",
    "codex.sh",
    ("@openai/codex@0.169.0",),
    {
        "text": FIXED,
        "streaming": FIXED,  # it makes no other requests
        "tools": ["cat notes.txt", "sed -i s/wrld/world/ notes.txt", "grep -c world notes.txt"],
        "responses": FIXED,
    },
)
CLAUDE_CODE: Final = ClientProgram(
    "Claude Code",
    "claude.sh",
    ("@anthropic-ai/claude-code@2.1.197",),
    {"text": FIXED, "streaming": FIXED, "tools": ["Read", "Edit", "Bash"], "messages": FIXED},
)
OPEN_WEBUI: Final = ClientProgram(
    "Open WebUI",
    "openwebui.sh",
    ("open-webui==0.12.4",),
    {
        "text": {"script": ["openai", "Hello there."], "script:latest": ["ollama", "Hello there."]},
        "streaming": ["Hello there.", "Hello there."],
    },
)
CLIENTS: Final = (*SDKS, OPEN_WEBUI, CODEX, CLAUDE_CODE)


def install(client: ClientProgram, cache: Path) -> Path:
    """Return the folder of the programs of a client's packages, installed once for each set of versions.

    Skips the test where they cannot be installed.
    """
    if client.uses_npm and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    newest = bool(os.environ.get(NEWEST))
    packages = [_unpinned(package) for package in client.packages] if newest else [*client.packages]
    folder = cache / sha256(" ".join(packages).encode()).hexdigest()[:16]
    programs = folder / ("node_modules/.bin" if client.uses_npm else "bin")
    complete = folder / "complete"
    if newest or not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.uses_npm:
            run_installer("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
        else:
            # Without a pip of its own, and compiled when imported: most modules of these packages never are.
            run_installer(sys.executable, "-m", "venv", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin/python"))
            run_installer(*pip, "install", "--quiet", "--no-compile", *packages)
        complete.touch()
    return programs


def _unpinned(package: str) -> str:
    name, separator, _ = package.partition("==")
    return name if separator else package[: package.rindex("@")] + "@latest"


def run_installer(*command: str) -> None:
    """Run a command that installs the package that it names last; skips the test where it cannot be installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[-1]} could not be installed in {INSTALL_TIMEOUT_S} s")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        pytest.skip(f"{command[-1]} cannot be installed: {last}")


def run(
    client: ClientProgram, programs: Path, daemon: Daemon, home: Path, *arguments: str, text: str | None = None
) -> str:
    """Run a client's program, or another one, in the folder ``home``, and return its output."""
    suffix = Path(client.program).suffix
    # Modules of npm are searched from the program's folder upwards, and modules of Python beside it.
    folder = programs.parents[1] if client.uses_npm and suffix == ".mjs" else home
    program = folder / f"program{suffix}"
    program.write_text((text or client.text).replace(_PORT, f"127.0.0.1:{daemon.port}"), encoding="utf-8")
    done = subprocess.run(
        [_COMMANDS[suffix], *(("-eu",) if suffix == ".sh" else ()), str(program), *arguments],
        cwd=home,
        env=environment(daemon, programs, home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def blocks_of(client: ClientProgram) -> list[str]:
    """Return the blocks of code in a client's section of docs/clients.md."""
    sections = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", read_page("docs/clients.md").source, re.MULTILINE))
    return re.findall(r"^```\w+\n(.*?)^```$", sections[client.name], re.MULTILINE | re.DOTALL)


def environment(daemon: Daemon, programs: Path, home: Path) -> dict[str, str]:
    """Return the environment of a client, which has nothing of this process's but where programs are."""
    node = shutil.which("node")
    folders = [str(programs), *([str(Path(node).parent)] if node else []), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "HOME": str(home),
        "PATH": ":".join(folders),
        "LANG": "C.UTF-8",
        "INFERENCECENTER_TOKEN": daemon.admin_token,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm fetches prices otherwise
        "LLM_USER_PATH": str(home),
    }


def printed(output: str) -> Any:
    """Return the last line of a program's output as JSON."""
    return json.loads(output.strip().splitlines()[-1])
