"""The number of examples that the fast and the slow run of a property try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
from collections import Counter
from hypothesis import given, settings, strategies

tried = Counter()

@given(strategies.integers())
@settings(max_examples=40, database=None)
def test_property(number):
    tried["all" if test_property._hypothesis_internal_use_settings.max_examples == 40 else "sample"] += 1

def test_number_of_examples():
    assert tried == {"sample": 10, "all": 40}
"""


def test_fast_run_tries_a_quarter_of_the_examples(tmp_path: Path) -> None:
    """The run among the slow tests tries all of them."""
    module = tmp_path / "test_module.py"
    module.write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    plugins = [f"-p{name}" for name in ("tests.examples", "_hypothesis_pytestplugin", "no:cacheprovider")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, str(module)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        cwd=Path(__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
    )
    assert " 3 passed" in done.stdout, done.stdout
