from __future__ import annotations

import subprocess
import sys

from tests.rlhf_core.agents.scripted import WORLDS
from tests.support.process_state import assert_gone

PROGRAM = """
import os, sys
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
environments = Environments(EnvironmentAgent(environment=sys.argv[1]), tokenizer="")
environments.begin({"label": "hang"}, 7, timeout_s=60.0)
while not environments.events(timeout_s=1.0):
    pass
environments.tell(0, "step", "a", {}, timeout_s=60.0)
print(environments._children[0]._host.process.pid, flush=True)
os._exit(1)
"""


def test_environments_outlive_nobody_even_while_they_hang() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{WORLDS}:Faulty"], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert_gone([int(ran.stdout)])
