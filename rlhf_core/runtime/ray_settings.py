"""Import Ray with our settings. The modules of this folder take `ray` from here, since it reads them when imported."""

import os
import sys

from rlhf_core.runtime.cluster import SEE_NO_GPU

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    SEE_NO_GPU: "1",
    # Ray would end this process without an error a minute after its head is gone. `RayWatch` notices the loss and acts.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    # Ray's handler of SIGTERM prints a stack trace and aborts the process after 3 s; ours lets the stage save.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}
"""Environment variables of a process that connects to Ray, and of the processes that Ray starts for it."""

if "ray" not in sys.modules:  # a worker was started by Ray, with the settings of its node
    os.environ.update(VARIABLES)
    # When the raylet is gone Ray ends this process at its next call, `ray.shutdown` included, unless this process lives.
    # Without the variable it takes the parent for the raylet, and a parent with number 1 (after `nohup`, or in a container)
    # for a dead one.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())

import ray  # noqa: E402

__all__ = ["VARIABLES", "ray"]
