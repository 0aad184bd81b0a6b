"""The llama.cpp implementation of ``engine.backend``; the only package that calls it, through its low-level API.

Importing it has the bindings find the libraries, which they look for when they are imported themselves.
"""

import os

from inferencecenter.hardware.ggml import LIBRARY_PATH, library_dir

if (_place := library_dir()) is not None:
    os.environ[LIBRARY_PATH] = str(_place)
