from __future__ import annotations

import subprocess
import sys
import time

from rlhf_core.processes import process_stat
from tests.rlhf_core.agents.scripted import WORLDS

PROGRAM = """
import os, sys
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
environments = Environments(EnvironmentAgent(environment=sys.argv[1]), tokenizer="")
environments.begin({"label": "hang"}, 7, timeout_s=60.0)
while not environments.events(timeout_s=1.0):
    pass
environments.tell(0, "step", "a", {}, timeout_s=60.0)
print(environments._children[0]._process.pid, flush=True)
os._exit(1)
"""


def test_environments_outlive_nobody_even_while_they_hang() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{WORLDS}:Faulty"], stdout=subprocess.PIPE, timeout=60, check=False
    )
    child = int(ran.stdout)
    deadline = time.monotonic() + 20.0
    while (stat := process_stat(child)) is not None and stat[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.05)
