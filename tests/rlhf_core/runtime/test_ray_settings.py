"""What Ray finds when it is imported, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.runtime.cluster import worker_environment

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, os, sys
{imports}
from ray._private import ray_constants
names = ("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "RAY_gcs_rpc_server_reconnect_timeout_s")
print(json.dumps({{
    "disabled": ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER,
    "set": [name for name in names if name in os.environ],
    "engines": sorted({{"torch", "transformers", "vllm", "deepspeed"}} & sys.modules.keys()),
}}))
"""
ORPHAN = """
import os, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
from rlhf_core.runtime.connection import connect, ray
import psutil
connect(1)
servers = [one for one in psutil.Process().children() if one.name() in ("raylet", "gcs_server")]
for server in servers:
    server.kill()
psutil.wait_procs(servers)
ray.shutdown()
print(len(servers), "servers are gone, this process is not")
"""


def seen_after(imports: str) -> dict[str, Any]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        env=ours | worker_environment(threads=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize("name", ["ray_runtime", "train_worker", "worker_group"])
def test_ray_is_imported_with_our_settings_and_without_the_engines(name):
    seen = seen_after(f"import rlhf_core.runtime.{name}")
    assert seen["disabled"] and len(seen["set"]) == 2
    assert seen["engines"] == []  # the workers import them


def test_a_worker_keeps_the_settings_of_its_node():
    seen = seen_after("import ray\nimport rlhf_core.runtime.train_worker")
    assert not seen["disabled"] and seen["set"] == []


def test_a_process_whose_parent_is_gone_outlives_its_raylet():
    """A parent with number 1 counts as a dead raylet for Ray, which ended the whole process without an error."""
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        env=os.environ | worker_environment(threads=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 servers are gone, this process is not\n", done.stderr
