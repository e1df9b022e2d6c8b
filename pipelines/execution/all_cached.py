"""Take all results of a run from the store, without engines or servers, if nothing is left to compute."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipelines.execution.executor import Listener
from pipelines.execution.plan import PlannedStage
from pipelines.services.home import Home
from pipelines.services.running import running
from pipelines.services.user_servers import user_prefect
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.run import find
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef


def is_watched(home: Home) -> bool:
    """Return whether somebody may be watching: then even a fully cached run is recorded in Prefect and MLflow."""
    return running(home) is not None or bool(os.environ.get("MLFLOW_TRACKING_URI")) or bool(user_prefect(home))


def results_if_all_cached(
    planned: Sequence[PlannedStage], store: ArtifactStore, listener: Listener, *, strict: Strictness
) -> dict[str, ArtifactRef] | None:
    """Return the artifacts by label, and report them to the listener, if every stage is still cached; else None.

    A run with a gate that does not hold is none of these: it has to end as blocked, or to ask.
    """
    if any(stage.decision.action != "HIT" or not stage.gates_hold for stage in planned):
        return None
    found = {}
    for stage in planned:
        hit = find(store, stage.spec, strict=strict)
        if hit is None:  # removed since the plan
            return None
        found[stage.label] = hit
    for label, (record, decision) in found.items():
        listener.planned(label, decision)
        listener.started(label, decision)
        listener.finished(label, decision, record.metrics, 0.0)
    return {label: record.handle for label, (record, _) in found.items()}
