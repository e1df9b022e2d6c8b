"""The toy stage in a forked child, as the campaign runs its pipeline: with a log of events, short leases and a drawn instant."""

from collections.abc import Callable

from campaigns.durability import instants, takeovers
from campaigns.durability.instants import Instant
from campaigns.durability.pipeline import EventLog, Setup
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.toy_stage import NoEngines, RecordingTracker


def run_toy(
    setup: Setup,
    spec: StageSpec,
    *,
    instant: Instant | None = None,
    act: Callable[[], None] = instants.die,
    elsewhere: bool = False,
    prepare: Callable[[], None] = lambda: None,
    ttl_s: float = 0.4,
) -> None:
    """Run the toy stage on the store of `setup`; note decisions and how it ended as the campaign does."""
    takeovers.short_leases(ttl_s=ttl_s, heartbeat_s=0.1)
    prepare()
    if elsewhere:
        takeovers.be_elsewhere()
    log = EventLog(setup.events)
    instants.obey(instant, setup.home, lambda: "toy", lambda what: log.note("dying", during=what), act)
    try:
        _, decision = execute(
            ArtifactStore(setup.home / "store"),
            spec,
            runtime=NoEngines(),
            tracker=RecordingTracker(),
            progress=lambda *_: None,
            on_decision=lambda decision: log.started("toy", decision),
        )
    except BaseException as error:
        log.note("ended", error=type(error).__name__, message=str(error))
        raise
    log.finished("toy", decision, {}, 0.0)
    log.note("ended", error="", message="")
