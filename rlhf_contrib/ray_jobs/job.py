"""Run one stage inside a Ray job, as the flow would run it: `python -m rlhf_contrib.ray_jobs.job FOLDER`.

The job holds the lease of the stage's key and commits; no flow needs to wait for it.
"""

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from pipelines.execution.executor import RunContext, RunOptions, Tracker
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.opening import open_tracker
from pipelines.execution.run import PipelineRun
from pipelines.services.home import Home
from rlhf_contrib.ray_jobs.executor import SPEC, JobOutcome, JobSpec, Reporter, failure, read_spec, write_outcome
from rlhf_core.errors import ConfigError
from rlhf_core.processes.large_imports import skip_last_collections
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import target_of
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker

logger = logging.getLogger(__name__)

OUR_LOGGERS = ("pipelines", "stages", "rlhf_core", "rlhf_contrib")
EXIT = {"done": 0, "failed": 1, "waiting": 75, "stopped": 130}


def main(arguments: Sequence[str]) -> int:
    """Run the stage whose spec is in the folder, and write its outcome there."""
    (folder,) = map(Path, arguments)
    skip_last_collections()
    hide_in_logs()
    for number in stopping.terminations():
        signal.signal(number, _interrupt)
    try:
        outcome = run_job(read_spec(folder / SPEC), Reporter(folder))
    except stopping.StageWaiting as waiting:
        outcome = JobOutcome("waiting", error=str(waiting), condition=waiting.condition)
    except KeyboardInterrupt:
        outcome = JobOutcome("stopped")
    except Exception as error:
        logger.exception("the stage failed")
        outcome = failure(error)
    write_outcome(folder, outcome)
    return EXIT[outcome.status]


def run_job(job: JobSpec, reporter: Reporter) -> JobOutcome:
    """Run the stage and report its outcome; errors of the stage are raised."""
    _keep_log(reporter)
    store = ArtifactStore(job.store)
    _check_key(store, job)
    options = RunOptions(force=(job.stage.label,) if job.force else (), strict=job.strict)
    with _tracker(job) as tracker:
        links = {"ray.submission_id": job.job_id}
        context = RunContext(job.config, options, store, tracker, reporter, links)
        executor = LocalExecutor(context, LazyRuntime(job.config.runtime))
        with closing(executor), stopping.on_signals():
            outcome = PipelineRun(context, executor).stage(job.stage, lambda *_: None)
    return JobOutcome("done", outcome.decision, outcome.samples)


@contextmanager
def _tracker(job: JobSpec) -> Iterator[Tracker]:
    """Yield a tracker that joins the pipeline run opened by the submitter, and leave that run open."""
    if not job.tracking:
        yield MemoryTracker()
        return
    tracker = open_tracker(job.config, Home.here().make(), join=job.tracking)
    try:
        yield tracker
    finally:
        tracker.leave()


def _check_key(store: ArtifactStore, job: JobSpec) -> None:
    key = target_of(store, job.stage, strict=job.strict).key
    if key != job.key:
        rule = f"the cluster computes {key[:12]}: its version of this program, or of the files that the profile names, is another"
        raise ConfigError(f"{job.stage.label}.key", job.key[:12], rule, "use the same checkout and data folder on both")


def _keep_log(reporter: Reporter) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(reporter)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
