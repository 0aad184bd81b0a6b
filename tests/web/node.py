"""Runs pure modules of the web page in Node.js."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

JS: Final = (Path(__file__).parents[2] / "inferencecenter/web/js").as_uri()
_PROGRAM: Final = """
import { parentPort, workerData as input } from "node:worker_threads";
parentPort.postMessage(JSON.stringify((() => { BODY })()));
"""
_HOST: Final = """
import { createInterface } from "node:readline";
import { Worker } from "node:worker_threads";

const run = ({ program, input }) =>
  new Promise((resolve) => {
    const worker = new Worker(new URL(`data:text/javascript,${encodeURIComponent(program)}`), { workerData: input });
    worker.once("message", (value) => resolve({ value }));
    worker.once("error", (error) => resolve({ error: String(error?.stack ?? error) }));
  });
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await run(JSON.parse(line))));
}
"""
"""Runs each program in a thread of its own, with modules of its own, which costs less than a process."""


@cache
def _host() -> subprocess.Popen[str] | None:
    """Start the process that runs all programs; ``None`` without Node.js."""
    node = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if node is None:
        return None
    command = [node, "--input-type=module", "--eval", _HOST]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    atexit.register(host.communicate)
    return host


def run(imports: str, body: str, *, given: object = None) -> Any:
    """Return what ``body``, the inside of a function of ``input``, returns; the test is skipped without Node.js.

    Args:
        imports: Statements; ``JS`` in them stands for where the modules are.
        body: Statements, the last a ``return``.
        given: ``input``.
    """
    host = _host()
    if host is None:
        pytest.skip("there is no Node.js here")
    assert host.stdin is not None and host.stdout is not None  # noqa: PT018 - for the types
    program = imports.replace("JS", JS) + _PROGRAM.replace("BODY", body)
    host.stdin.write(json.dumps({"program": program, "input": given}) + "\n")
    answer = json.loads(host.stdout.readline())
    assert "error" not in answer, answer["error"]
    return json.loads(answer["value"])
