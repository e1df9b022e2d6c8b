"""Store the process that a run belongs to in the run's tags."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf_core.processes.identity import user_name
from rlhf_core.store import leases
from rlhf_core.store.leases import Owner

USER_TAG = "mlflow.user"
"""Tag that MLflow's page shows as the user of a run."""
_FIELDS = ("host", "boot_id", "pid_namespace", "pid", "pid_started")


def tags() -> dict[str, str]:
    """Return the tags of a run that this process drives."""
    process = leases.ourselves()
    return {f"owner.{name}": str(getattr(process, name)) for name in _FIELDS} | {USER_TAG: user_name()}


def from_tags(values: Mapping[str, str]) -> Owner | None:
    """Return the owner that `tags` described; None if the run is not one of ours.

    It never expires: the tags have no heartbeat, so whether a process of another machine is alive cannot be decided.
    """
    if any(f"owner.{name}" not in values for name in _FIELDS):
        return None
    host, boot_id, pid_namespace, pid, pid_started = (values[f"owner.{name}"] for name in _FIELDS)
    return Owner(
        host=host,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        pid=int(pid),
        pid_started=int(pid_started),
        token="",
        expires=math.inf,
    )
