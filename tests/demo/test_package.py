"""The import cost of the package."""

import subprocess
import sys


def test_import_is_lightweight() -> None:
    """The path of the model is available without torch, llama.cpp or the corpus."""
    code = (
        "import sys, inferencecenter.demo as demo\n"
        "assert demo.demo_model_path().name == 'demo.gguf'\n"
        "heavy = {'torch', 'tokenizers', 'gguf', 'llama_cpp', 'numpy'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
