"""Tell a webhook that a run has ended or waits. A receiver that is away never fails a run."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping

from pipelines.flows.run_rules import Event, NotifyConfig
from rlhf_core.schema.secrets import with_secrets
from rlhf_core.secrets.redaction import hidden, without_secrets
from rlhf_core.stage.stopping import RunHalted
from rlhf_core.store.gate_decisions import now

logger = logging.getLogger(__name__)

EVENTS: Mapping[str, Event] = {"Waiting": "waiting", "Blocked": "blocked", "OverBudget": "over_budget"}
"""State of a halted run -> event."""
LONGEST_MESSAGE = 2000


def event_of(error: BaseException | None) -> Event | None:
    """Return the event that an end of a run is; None for a run that was interrupted, which whoever did it knows."""
    if error is None:
        return "finished"
    if isinstance(error, RunHalted):
        return EVENTS[error.state]
    return "failed" if isinstance(error, Exception) else None


def notify(config: NotifyConfig | None, error: BaseException | None, *, run: str, links: Mapping[str, str]) -> None:
    """Send one POST about the end of a run, if the profile asks for it; problems are logged."""
    event = event_of(error)
    if config is None or event is None or event not in config.events:
        return
    message = "" if error is None else without_secrets(str(error))[:LONGEST_MESSAGE]
    content = {"event": event, "run": run, "message": message, "time": now(), "links": hidden("links", dict(links))}
    try:
        address = with_secrets(config, "notify").webhook
        request = urllib.request.Request(
            address, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=config.timeout_s):
            logger.info("notify: the webhook was told that the run is %s", event)
    except Exception as failure:  # the receiver, its network or its address: never a reason to fail the run
        logger.warning("notify.webhook: could not be told that the run is %s: %s", event, type(failure).__name__)
