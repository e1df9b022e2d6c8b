"""Choose how long OpenMP threads that have nothing to do look for work before they sleep.

Trainer and sampler mostly use the same cores in turn, so idle threads must soon sleep. To be woken takes longer than a
small operation, though, so they wait awake as long as it is from one operation of a step to the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPINS = "30000"
"""Rounds of libgomp's waiting loop: about 0.4 ms on AMD's Zen 4, up to 2 ms on other processors. Its default is 300000."""


def idle_threads(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a process; OpenMP reads them when it is loaded. The user's own choice goes first.

    >>> idle_threads({})
    {'GOMP_SPINCOUNT': '30000'}
    >>> idle_threads({"OMP_WAIT_POLICY": "PASSIVE"})
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    """
    chosen = {name: environment[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in environment}
    return chosen or {"GOMP_SPINCOUNT": SPINS}
