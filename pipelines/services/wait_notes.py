"""Record which flow runs wait for people, with their conditions: `python -m pipelines.services.wait_notes FLOW_RUN ...`.

A note is a small file in the state folder, so nothing is lost while no process waits. The command prints those of the
named runs whose condition is met; it is a process of its own, because MLflow's client takes 200 MB.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from pipelines.services.waits import may_go_on
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.layout import read_json, write_json

logger = logging.getLogger(__name__)


def note_wait(home: Home, flow_run: str, condition: Mapping[str, Any]) -> None:
    """Remember that a flow run waits until `condition` is met; a note of an earlier wait is replaced."""
    write_json(_path(home, flow_run), dict(condition))


def waiting_runs(home: Home) -> list[str]:
    """Return the ids of the flow runs that have a note."""
    return sorted(path.stem for path in _path(home, "").parent.glob("*.json"))


def forget_wait(home: Home, flow_run: str) -> None:
    """Remove the note of a flow run, if it has one."""
    _path(home, flow_run).unlink(missing_ok=True)


def met(home: Home, flow_runs: Sequence[str]) -> list[str]:
    """Return those of the flow runs for whom people have judged enough; a check that fails is logged, and not met."""
    found = []
    for name in flow_runs:
        condition = read_json(_path(home, name))
        try:
            if condition is not None and may_go_on(condition, uri=tracking_uri(home)):
                found.append(name)
        except Exception as error:  # a half-edited file, or a server that is away: the next look may succeed
            logger.warning("flow run %s: %s", name, without_secrets(f"{error}"))
    return found


def _path(home: Home, flow_run: str) -> Path:
    return home.root / "waiting" / f"{flow_run}.json"


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.stdout.write("".join(f"{name}\n" for name in met(Home.here(), sys.argv[1:])))
