"""Open the parts of a run: its store, tracker, plan and executor; or take all of its results from the store."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipelines.execution.executor import Listener, Listeners, RunContext, RunOptions, StageExecutor, Tracker
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.plan import Pipeline, PlannedStage, plan_stages
from pipelines.execution.progress_lines import ProgressLines
from pipelines.execution.reward_arguments import check_rewards
from pipelines.execution.run import PipelineRun, still_forced
from pipelines.execution.summary import shown_overrides
from pipelines.flows.profile import PipelineConfig, profile_digest
from pipelines.services.home import Home
from pipelines.services.run_notes import RunNote, new_note
from pipelines.services.running import running
from pipelines.services.user_servers import tracking_place, tracking_uri, user_prefect
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.run import find_hit
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import check_writable, store_root
from rlhf_core.tracking.further import FurtherTrackers
from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.tracking.mlflow_client import open_client
from rlhf_core.types import ArtifactRef
from rlhf_core.user_code.modules import load_callable

logger = logging.getLogger(__name__)


def store_of(config: PipelineConfig, home: Home) -> ArtifactStore:
    """The store that a profile names, or the one in the state folder."""
    return ArtifactStore(store_root(config.store) if config.store else home.store)


def plan_run(
    config: PipelineConfig, pipeline: Pipeline, options: RunOptions, *, store: ArtifactStore, here: bool = True
) -> list[PlannedStage]:
    """Plan a run with these options. A run that is resumed after a wait forces no stage twice.

    Raises ConfigError for a store that this user cannot write to.
    """
    if here:  # else it is only looked at
        check_writable(store.root)
    options = still_forced(options, config, store)
    until, force, strict = options.until, options.force, options.strict
    return plan_stages(config, store, pipeline=pipeline, until=until, force=force, strict=strict, here=here)


@contextmanager
def open_run(
    config: PipelineConfig,
    pipeline: Pipeline,
    options: RunOptions,
    *,
    home: Home,
    tracker: Tracker,
    listener: Listener,
    planned: list[PlannedStage] | None = None,
    runtime: LazyRuntime | None = None,
) -> Iterator[PipelineRun]:
    """Yield a run whose engines start in the background as planned; close them at the end.

    `planned` is the recent result of `plan_run` for this run; None plans here. An outdated plan does no harm: every
    stage is decided again before it runs. `runtime` holds engines that outlive the run; None opens and closes them here.
    """
    hide_in_logs()  # a program of the user's may have called `pipelines.run`
    store = store_of(config, home)
    store.create()
    options = still_forced(options, config, store, say=True)
    if planned is None:
        planned = plan_run(config, pipeline, options, store=store)
    if not config.runtime.executor_path:  # else functions are loaded on other machines
        to_run = [stage.spec for stage in planned if stage.decision.action != "HIT"]
        check_rewards(to_run, [stage.spec for stage in planned], load=True)
    for stage in planned:
        listener.planned(stage.label, stage.decision)
    # Prefect's log of the run has the lines that a terminal would show.
    context = RunContext(config, options, store, tracker, Listeners(ProgressLines(), listener))
    executor = open_executor(context, runtime)
    try:
        executor.prepare(planned)
        yield PipelineRun(context, executor, planned, note=note_of(config, options, home))
    finally:
        executor.close()


def note_of(config: PipelineConfig, options: RunOptions, home: Home) -> RunNote:
    """The note of a run, which `rlhf runs` lists."""
    return new_note(
        home,
        config.name,
        profile=options.profile,
        digest=profile_digest(config),
        overrides=shown_overrides(options.overrides),
        until=options.until,
        store=store_of(config, home).root,
    )


def open_executor(context: RunContext, runtime: LazyRuntime | None = None) -> StageExecutor:
    """The executor that `runtime.execution` names. A `runtime` that is given is not closed by it."""
    if path := context.config.runtime.executor_path:
        executor: StageExecutor = load_callable("runtime.execution", path)(context)
        return executor
    if runtime is not None:
        return LocalExecutor(context, runtime, owns_runtime=False)
    return LocalExecutor(context, LazyRuntime(context.config.runtime))


def open_tracker(config: PipelineConfig, home: Home, *, join: str = "") -> MlflowTracker:
    """The MLflow tracker of a run; `join` is the token of a run that another process opened."""
    uri, place = tracking_uri(home), tracking_place(home)
    ours = place == home.mlflow_uri
    return MlflowTracker(
        uri,
        experiment=config.experiment,
        artifact_root=home.mlflow_artifacts if ours else None,
        spool=home.mlflow_artifacts / ".spool",
        place=place,
        join=join,
        store=store_of(config, home).root,
        further=FurtherTrackers(config.track.also, home.root / "trackers" / config.name, config.name),
        locate=lambda: tracking_uri(home),
    )


def import_tracker(home: Home) -> None:
    """Import MLflow and create its database if needed, so that `Tracker.start` does not wait for either."""
    try:
        open_client(tracking_uri(home))
    except Exception as error:
        # The tracker handles and reports a server that is away.
        logger.debug("tracking: could not connect in advance: %s", error)


# ---------------------------------------------------------------- runs of cached stages


def is_watched(home: Home) -> bool:
    """Whether somebody may be watching: then even a fully cached run is recorded in Prefect and MLflow."""
    return running(home) is not None or bool(os.environ.get("MLFLOW_TRACKING_URI")) or bool(user_prefect(home))


def results_if_all_cached(
    planned: Sequence[PlannedStage], store: ArtifactStore, listener: Listener, *, strict: Strictness
) -> dict[str, ArtifactRef] | None:
    """The artifacts by label, also reported to the listener, if every stage is still cached; else None.

    None as well for a run with a gate that does not hold, because it has to end as blocked, or to ask.
    """
    if any(stage.decision.action != "HIT" or not stage.gates_hold for stage in planned):
        return None
    found = {}
    for stage in planned:
        hit = find_hit(store, stage.spec, strict=strict)
        if hit is None:  # removed since the plan
            return None
        found[stage.label] = hit
    for label, (record, decision) in found.items():
        listener.planned(label, decision)
        listener.started(label, decision)
        listener.finished(label, decision, record.metrics, 0.0)
    return {label: record.handle for label, (record, _) in found.items()}
