"""The first day on a GPU as one command: `python -m benchmarks.gpu`."""

import sys
from importlib.util import find_spec

if find_spec("torch") is None:  # checked before importing the steps, whose errors would give no remedy
    raise SystemExit(f"torch is not installed for {sys.executable}; make install")
