"""Run the command `rlhf` with leases of seconds, on a simulated machine and with a simulated clock.

python -m campaigns.durability.command '{"wall_s": 4000, "age_s": 300, "elsewhere": true}' run tiny/full
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from campaigns.durability import clocks, takeovers
from campaigns.durability.clocks import Skew
from pipelines.cli import main as cli

TTL_S, HEARTBEAT_S = 10.0, 1.0
"""Long enough for the heartbeats of a process that loads large libraries on a busy machine."""


def command(believed: Skew) -> list[str]:
    """The module for `python -m`, and its first argument."""
    return ["campaigns.durability.command", json.dumps(asdict(believed))]


def main(arguments: Sequence[str]) -> int:
    """Run a verb of `rlhf` in this process, with the machine and clock of the first argument."""
    takeovers.short_leases(ttl_s=TTL_S, heartbeat_s=HEARTBEAT_S)
    clocks.apply(Skew(**json.loads(arguments[0])))
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
