"""Run the points of `rlhf sweep` as `rlhf run` does, on the same engines, below one run in MLflow."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipelines.cli.common import console
from pipelines.cli.display import open_display
from pipelines.cli.run_command import kept_log, prefect_server, run_options, run_recorded
from pipelines.execution.all_cached import is_watched, results_if_all_cached
from pipelines.execution.lazy_runtime import KeptRuntime
from pipelines.execution.listener import Listener
from pipelines.execution.opening import open_tracker, plan_run, store_of
from pipelines.execution.plan import PlannedStage
from pipelines.execution.summary import shown_overrides
from pipelines.execution.sweep import Goal, GoalIn, PointResult, Points, Tally, best_of
from pipelines.execution.sweep_points import Point, keys_of, named
from pipelines.execution.tracker import Status, Tracker
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from pipelines.services.servers import PrivateServer
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import ArtifactRef

NOT_PUBLISHED = "publish=none"
"""An override of every point: a sweep must not move the aliases of the registry."""


def overrides_of(options: argparse.Namespace, point: Point) -> list[str]:
    """Return all overrides of the run at a point."""
    return [*options.overrides, *point, NOT_PUBLISHED]


@dataclass
class Sweep:
    """A sweep at work: what its points share is opened when the first point needs it."""

    options: argparse.Namespace
    points: Points
    home: Home
    tracker: Tracker | None = None
    """The tracker of the sweep itself; None if nothing is computed and nobody is watching."""
    parent: str = ""
    """Id of the sweep's run in MLflow; empty while it is away."""
    _shared: ExitStack = field(default_factory=ExitStack)
    _engines: KeptRuntime = field(default_factory=KeptRuntime)
    _server: list[PrivateServer | None] = field(default_factory=list)
    """The Prefect server of this sweep, once a point has needed one; None if another one is up."""

    @property
    def id(self) -> str:
        """Return the name of this sweep: the same for the same profile and points."""
        points = self.points.identity(self.options.metric)
        return sha256_text(canonical_json([self.options.profile, self.options.overrides, points]))[:8]

    @contextmanager
    def tracked(self, config: PipelineConfig, plans: Sequence[Sequence[PlannedStage]]) -> Iterator[None]:
        """Track the sweep as the parent of its runs, unless there is nothing to compute and nobody is watching."""
        done = all(stage.decision.action == "HIT" and stage.gates_hold for planned in plans for stage in planned)
        if not (done and self.points.known) or is_watched(self.home):
            self._track(config)
        status: Status = "KILLED"
        try:
            with self._shared:
                self._shared.callback(self._engines.close)
                yield
            status = "FINISHED"
        finally:
            if self.tracker is not None:
                self.tracker.finish(status, note="")

    def _track(self, config: PipelineConfig) -> None:
        self.tracker = open_tracker(config, self.home)
        params = {"profile": self.options.profile, **self.points.params()}
        title = f"sweep {' '.join(keys_of(self.points.to_check()))} ({self.id})"
        self.parent = self.tracker.start(title, run_id=None, params=params, tags={"sweep": self.id})

    def execute(self, store: ArtifactStore, goal_in: GoalIn) -> list[PointResult]:
        """Run all points and return their results; `goal_in` returns what a search goes by."""
        numbers = itertools.count(1)

        def run_point(point: Point, tally: Tally) -> Mapping[str, ArtifactRef]:
            console.print(
                f"point {next(numbers)} of {self.points.count}: {named(point)}", highlight=False, markup=False
            )
            with open_display(console) as display, kept_log(self.home, display):
                tally.inner = display
                return self._run(point, tally)

        return self.points.run(run_point, store, goal_in)

    def _run(self, point: Point, listener: Listener) -> Mapping[str, ArtifactRef]:
        overrides = overrides_of(self.options, point)
        options = argparse.Namespace(**{**vars(self.options), "overrides": overrides})
        config = load_profile(self.options.profile, overrides)
        wanted, store = run_options(options), store_of(config, self.home)
        planned = plan_run(config, lifecycle, wanted, store=store)
        if self.tracker is None:
            results = results_if_all_cached(planned, store, listener, strict=wanted.strict)
            if results is not None:
                return results
        if not self._server:
            self._server.append(self._shared.enter_context(prefect_server(self.home)))
        wanted = replace(wanted, overrides=(*self.options.overrides, *point), tags=self._tags(point))
        engines = self._engines.of(config.runtime)
        try:
            return run_recorded(
                config, planned, wanted, options, self.home, listener, server=self._server[0], runtime=engines
            )
        except BaseException:
            self._engines.close()  # the failure may have left them in any state
            raise

    def _tags(self, point: Point) -> dict[str, str]:
        """Return the tags by which MLflow finds, and shows together, the runs of a sweep."""
        values = {f"sweep.{key}": value for key, _, value in (part.partition("=") for part in shown_overrides(point))}
        parent = {"mlflow.parentRunId": self.parent} if self.parent else {}
        return {"sweep": self.id, **values, **parent}

    def record(
        self, rows: Sequence[Sequence[str]], results: Sequence[PointResult], goal: Goal | None, folder: Path
    ) -> None:
        """Record the table, the plot and the best point on the sweep's run in MLflow."""
        if self.tracker is None:
            return
        ours = self.tracker.parent
        ours.table("sweep", rows[0], rows[1:])
        for path in sorted(folder.iterdir()):
            ours.file(path, "")
        counts = {"sweep/hits": sum(len(result.hits) for result in results)}
        counts |= {"sweep/computed": sum(len(result.computed) for result in results)}
        ours.metrics(0, {name: float(value) for name, value in counts.items()})
        best = None if goal is None else best_of(results, goal)
        found = None if best is None or goal is None else goal.finite(best)
        if best is not None and found is not None:
            self.tracker.tag(
                {"sweep.best": named(best.point), "sweep.metric": f"{goal.direction} {goal}" if goal else ""}
            )
            ours.metrics(0, {"sweep/best": found.mean})
