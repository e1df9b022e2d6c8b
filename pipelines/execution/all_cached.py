"""A run in which there is nothing to compute: its results are taken from the store, without engines or servers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipelines.execution.listener import Listener
from pipelines.execution.plan import PlannedStage
from pipelines.services.home import Home
from pipelines.services.running import running
from pipelines.services.user_servers import user_prefect
from rlhf_core.stage.run import find
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef


def is_watched(home: Home) -> bool:
    """Say whether somebody may be looking: then a run is recorded in Prefect and MLflow though it only takes hits."""
    return running(home) is not None or "MLFLOW_TRACKING_URI" in os.environ or bool(user_prefect(home))


def take_hits(
    planned: Sequence[PlannedStage],
    store: ArtifactStore,
    listener: Listener,
    *,
    strict_code: bool,
    strict_env: bool = False,
) -> dict[str, ArtifactRef] | None:
    """Return the artifacts by label if every stage is a hit, still, and tell the listener so; None if one is not."""
    if any(stage.decision.action != "HIT" for stage in planned):
        return None
    found = {}
    for stage in planned:
        hit = find(store, stage.spec, strict_code=strict_code, strict_env=strict_env)
        if hit is None:  # somebody has removed it since the plan
            return None
        found[stage.label] = hit
    for label, (record, decision) in found.items():
        listener.planned(label, decision)
        listener.started(label, decision)
        listener.finished(label, decision, record.metrics, 0.0)
    return {label: record.handle for label, (record, _) in found.items()}
