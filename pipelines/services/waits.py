"""Record the conditions of waiting flow runs, and check them: `python -m pipelines.services.waits FLOW_RUN ...`.

A run waits for an answer to a question, or for enough judgments. A note is a small file in the state folder, so nothing
is lost while no process waits. The command prints the named runs whose condition is met; it is a separate process
because MLflow's client takes 200 MB.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.secrets.redaction import hide_in_logs, without_secrets
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.opening import open_store

logger = logging.getLogger(__name__)


def answers_awaited(questions: Sequence[str], store: Path) -> dict[str, Any]:
    """The condition of a run that resumes when any of these questions in the store is answered."""
    return {"questions": list(questions), "store": str(store.resolve())}


def may_go_on(condition: Mapping[str, Any], *, uri: str) -> bool:
    """Whether the condition of a waiting run is met; `uri` is the address of MLflow."""
    if "questions" in condition:
        decisions = GateDecisions(open_store(Path(condition["store"])))
        found = (decisions.find(question) for question in condition["questions"])
        return any(one is not None and one.answer is not None for one in found)
    # MLflow, 3 s: only a run that waits for annotators needs it here.
    from rlhf_core.annotation.people import is_met

    return is_met(condition, uri=uri)


def note_condition(home: Home, flow_run: str, condition: Mapping[str, Any]) -> None:
    """Remember that a flow run waits until `condition` is met; a note of an earlier wait is replaced."""
    write_json(_path(home, flow_run), dict(condition))


def waiting_runs(home: Home) -> list[str]:
    """Ids of the flow runs that have a note."""
    return sorted(path.stem for path in _path(home, "").parent.glob("*.json"))


def forget_condition(home: Home, flow_run: str) -> None:
    """Remove the note of a flow run, if it has one."""
    _path(home, flow_run).unlink(missing_ok=True)


def met(home: Home, flow_runs: Sequence[str]) -> list[str]:
    """Select the flow runs whose condition is met. A check that fails is logged, and counts as not met."""
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
    hide_in_logs()
    sys.stdout.write("".join(f"{name}\n" for name in met(Home.here(), sys.argv[1:])))
