"""One folder per stage of the lifecycle: `__init__.py` declares it and has its options, `run.py` reads like the paper."""

import rlhf_core  # noqa: F401  # finds former names
