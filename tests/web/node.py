"""Runs pure modules of the web page in Node.js."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

JS: Final = (Path(__file__).parents[2] / "inferencecenter/web/js").as_uri()
_AROUND: Final = """
let text = "";
for await (const chunk of process.stdin) text += chunk;
const input = JSON.parse(text);
"""


def run(imports: str, body: str, *, given: object = None) -> Any:
    """Return what ``body``, the inside of a function of ``input``, returns; the test is skipped without Node.js.

    Args:
        imports: Statements; ``JS`` in them stands for where the modules are.
        body: Statements, the last a ``return``.
        given: ``input``.
    """
    node = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if node is None:
        pytest.skip("there is no Node.js here")
    program = f"{imports.replace('JS', JS)}{_AROUND}console.log(JSON.stringify((() => {{ {body} }})()));"
    command = [node, "--input-type=module", "--eval", program]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
