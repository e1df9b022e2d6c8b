"""Find the policy that a published one has to beat: the champion in the registry, as an artifact of the store."""

from __future__ import annotations

from contextlib import suppress

from pipelines.flows.inputs import Opponents, find_artifact
from pipelines.flows.profile import PipelineConfig
from pipelines.services.home import Home
from pipelines.services.registry import tracking_uri
from rlhf_core.errors import ArtifactError, ConfigError, explain
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from stages.config.publish import PublishConfig


def champion_of(config: PipelineConfig, store: ArtifactStore) -> Opponents | None:
    """Return the champion that `[publish.challenge]` compares with; None without that section or without a champion.

    Raises ConfigError if the champion's weights are not in this store, TrackingError if the registry does not answer.
    """
    return None if config.publish is None else champion_for(config.publish, store)


def champion_for(publish: PublishConfig, store: ArtifactStore) -> Opponents | None:
    """Return the champion that the challenge of this section compares with, as `champion_of`."""
    if publish.challenge is None:
        return None
    from rlhf_core.tracking.champions import champion_digests  # MLflow's parts, which most plans do without

    name = publish.name
    digest, previous = champion_digests(tracking_uri(Home.here()), name)
    if not digest:
        return None
    try:
        current = find_artifact(store, PolicyRef, digest)
    except ArtifactError:
        rule = f"the champion of {name} ({digest[:12]}) is not in the store {store.root}"
        remedy = "use the store that it was made in, or remove [publish.challenge] for this run"
        raise ConfigError(explain("publish.challenge", name, rule, remedy)) from None
    with suppress(ArtifactError):  # needed only when the champion is made again; then it has no opponent
        return Opponents(current, find_artifact(store, PolicyRef, previous) if previous else None)
    return Opponents(current)
