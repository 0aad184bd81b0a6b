"""The llama.cpp implementation of ``engine.backend``; the only package that calls it, through its low-level API.

Importing it has the bindings find the libraries, which they look for when they are imported themselves. Of the bindings
only ``llama_cpp.llama_cpp`` is used, the declarations. Their package would also import its own chat API with jinja2 and
caches, which takes an engine 80 ms at its start; so the package is put in place without being executed.
"""

import os
import sys
from importlib.util import find_spec, module_from_spec

from inferencecenter.hardware.ggml import LIBRARY_PATH, MTMD_LIBRARY_PATH, library_dir

if (_place := library_dir()) is not None:
    os.environ[LIBRARY_PATH] = str(_place)
    os.environ.setdefault(MTMD_LIBRARY_PATH, str(_place))
if "llama_cpp" not in sys.modules and (_bindings := find_spec("llama_cpp")) is not None:
    sys.modules["llama_cpp"] = module_from_spec(_bindings)
