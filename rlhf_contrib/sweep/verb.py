"""Run a profile with several values of its options (`rlhf sweep`): a table, a plot, and the best point."""

import argparse
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipelines.cli.common import console, print_line, short
from pipelines.cli.display import open_display
from pipelines.cli.options import profile_options
from pipelines.cli.run_command import kept_log, run_recorded, run_request
from pipelines.execution.executor import Listener, Listeners, Tally, Tracker
from pipelines.execution.local import KeptRuntime
from pipelines.execution.opening import is_watched, open_tracker, plan_run, results_if_all_cached, store_of
from pipelines.execution.plan import PlannedStage
from pipelines.execution.request import RunRequest
from pipelines.execution.summary import OF_POLICIES, shown_overrides
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile, profile_digest
from pipelines.services.home import Home
from pipelines.services.reconcile import prefect_server
from pipelines.services.servers import PrivateServer
from rlhf_contrib.sweep.points import (
    Goal,
    GoalIn,
    Listed,
    Point,
    PointResult,
    Points,
    Search,
    best_point,
    check_approved,
    check_metric,
    default_goal,
    goal_of,
    grid_points,
    key_of,
    keys_of,
    named,
    random_points,
    rivals,
    ties,
)
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.tracking.memory import RunStatus
from rlhf_core.types import ArtifactRef

# ---------------------------------------------------------------- sweep runs

NOT_PUBLISHED = "publish=none"
"""An override of every point, because a sweep must not move the aliases of the registry."""


def request_at(options: argparse.Namespace, point: Point) -> RunRequest:
    """The request for the run at a point."""
    return RunRequest.from_parameters(vars(options) | {"overrides": (*options.overrides, *point, NOT_PUBLISHED)})


@dataclass
class Sweep:
    """A running sweep. The resources that its points share are opened when the first point needs them."""

    options: argparse.Namespace
    points: Points
    home: Home
    tracker: Tracker | None = None
    """The tracker of the sweep itself; None if nothing is computed and no service runs."""
    parent: str = ""
    """Id of the sweep's run in MLflow; empty while MLflow is unreachable."""
    _shared: ExitStack = field(default_factory=ExitStack)
    _engines: KeptRuntime = field(default_factory=KeptRuntime)
    _server: list[PrivateServer | None] = field(default_factory=list)
    """The Prefect server of this sweep, once a point has needed one; None if another one is already running."""

    @property
    def id(self) -> str:
        """The name of this sweep: the same for the same profile and points."""
        points = self.points.identity(self.options.metric)
        return sha256_text(canonical_json([self.options.profile, self.options.overrides, points]))[:8]

    @contextmanager
    def tracked(self, config: PipelineConfig, plans: Sequence[Sequence[PlannedStage]]) -> Iterator[None]:
        """Track the sweep as the parent of its runs, unless there is nothing to compute and no service runs."""
        done = all(stage.decision.action == "HIT" and stage.gates_hold for planned in plans for stage in planned)
        if not (done and self.points.known) or is_watched(self.home):
            self._track(config)
        status: RunStatus = "KILLED"
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
        """Run all points and return their results; `goal_in` finds the goal of a search."""
        numbers = itertools.count(1)

        def run_point(point: Point, tally: Tally) -> Mapping[str, ArtifactRef]:
            print_line(f"point {next(numbers)} of {self.points.count}: {named(point)}")
            with open_display(console) as display, kept_log(self.home, display):
                return self._run(point, Listeners(display, tally))

        return self.points.run(run_point, store, goal_in)

    def _run(self, point: Point, listener: Listener) -> Mapping[str, ArtifactRef]:
        request = request_at(self.options, point)
        config, wanted = request.config(), request.options()
        store = store_of(config, self.home)
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
                config, planned, wanted, request, self.home, listener, server=self._server[0], runtime=engines
            ).results
        except BaseException:
            self._engines.close()  # the failure may have left them in any state
            raise

    def _tags(self, point: Point) -> dict[str, str]:
        """The tags by which MLflow groups the runs of a sweep."""
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
        best = None if goal is None else best_point(results, goal)
        found = None if best is None or goal is None else goal.finite(best)
        if best is not None and found is not None:
            self.tracker.tag(
                {"sweep.best": named(best.point), "sweep.metric": f"{goal.direction} {goal}" if goal else ""}
            )
            ours.metrics(0, {"sweep/best": found.mean})


# ---------------------------------------------------------------- sweep verb

EXIT_SOME_FAILED = 1
LONGEST_ERROR = 60


def sweep_options(parser: argparse.ArgumentParser) -> None:
    profile_options(parser)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=VALUE,...", help="values of a key; repeat for a product"
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw N random points from --range and --grid")
    parser.add_argument(
        "--range",
        action="append",
        default=[],
        metavar="KEY=LOW..HIGH",
        help="interval of a key for --random and --optuna; KEY=log:LOW..HIGH for a logarithmic scale",
    )
    parser.add_argument("--optuna", type=int, metavar="N", help="search N points with Optuna")
    parser.add_argument("--sweep-seed", type=int, help="seed of --random and --optuna (default 0)")
    parser.add_argument(
        "--metric",
        default="",
        metavar="[STAGE:]METRIC",
        help="metric to compare, such as ppo/gold or reward_model:held_out/accuracy",
    )
    parser.add_argument("--direction", choices=("max", "min"), default="max", help="whether high or low is better")
    parser.add_argument("--approve", action="store_true", help="run the best point to its end after an approval")


def sweep(options: argparse.Namespace) -> int:
    """Run every point, print the table and the best point. The exit status is 1 if a point has no result."""
    points, home = points_of(options), Home.here().make()
    checked = points.to_check()
    check_swept(options, keys_of(checked))
    for point in checked:
        # With [publish], as the best point is run in the end.
        load_profile(options.profile, [*options.overrides, *point])
    requests = [request_at(options, point) for point in checked]
    configs = [request.config() for request in requests]
    check_different(checked, configs)
    store = store_of(configs[0], home)
    wanted_runs = zip(configs, requests, strict=True)
    plans = [plan_run(config, lifecycle, one.options(), store=store) for config, one in wanted_runs]
    runs = [{stage.label: stage.spec for stage in planned} for planned in plans]
    policies = policies_at(configs)
    wanted = goal_of(options.metric, options.direction, runs=runs, policies=policies)
    work = Sweep(options, points, home)

    def goal_in(results: Sequence[PointResult]) -> Goal | None:
        return wanted or default_goal(results, policies, options.direction)

    with work.tracked(configs[0], plans):
        results = work.execute(store, goal_in)
        goal = goal_in(results)
        rows = rows_of(results, goal)
        print_table(rows, results)  # printed first, because the plot or MLflow may fail
        folder = write(home.root / "sweeps" / work.id, results, goal)
        work.record(rows, results, goal, folder)
    print_line(f"table and plot: {folder}")
    if len(results) < points.count:
        print_line(f"--optuna {points.count}: only {len(results)} different points were chosen")
    status = EXIT_SOME_FAILED if any(result.error for result in results) else 0
    if goal is None:
        print_line("no point has a gold reward or reward-model score: name a number with --metric STAGE:METRIC")
        return status
    check_metric(results, goal)
    best = best_point(results, goal)
    if best is not None:
        print_best(results, best, goal)
        go_on(options, best, goal, results, store)
    return status


def points_of(options: argparse.Namespace) -> Points:
    """The points described by the options: a search with `--optuna`, else a list."""
    return Listed(listed_points(options)) if options.optuna is None else search_of(options)


def listed_points(options: argparse.Namespace) -> list[Point]:
    """The points of a grid, or `--random` draws."""
    if options.random is None and options.sweep_seed is not None:
        rule = "a grid draws nothing"
        raise ConfigError("--sweep-seed", options.sweep_seed, rule, "leave it out, or add --random or --optuna")
    if options.random is None and options.range:
        rule = "needs --random N or --optuna N"
        raise ConfigError("--range", options.range[0], rule, "give the number of points to draw")
    if options.random is not None and not (options.range or options.grid):
        raise ConfigError("--random", options.random, "there is no key to draw", "add --range KEY=LOW..HIGH or --grid")
    if options.random is not None:
        points = random_points(options.random, options.range, options.grid, seed=options.sweep_seed or 0)
        if len(points) < options.random:
            print_line(f"--random {options.random}: only {len(points)} different points were drawn")
    else:
        points = grid_points(options.grid)
    return points


def search_of(options: argparse.Namespace) -> Search:
    """The search of `--optuna`."""
    if options.random is not None:
        rule = "chooses its points itself"
        raise ConfigError("--optuna", options.optuna, rule, "leave --random out")
    return Search(options.optuna, options.range, options.grid, options.direction, options.sweep_seed or 0)


def check_swept(options: argparse.Namespace, keys: Sequence[str]) -> None:
    """Raise ConfigError for a sweep without keys, and for options that contradict it."""
    if options.approve and options.force:
        rule = "would be computed again before and after the question"
        raise ConfigError("--force", ", ".join(options.force), rule, "sweep with --force first, then with --approve")
    if not keys:
        rule, remedy = (
            "there is nothing to sweep",
            "add --grid KEY=VALUE,VALUE, or --random N or --optuna N with --range KEY=LOW..HIGH",
        )
        raise ConfigError("--grid", " ".join(options.grid), rule, remedy)
    for override in options.overrides:
        if key_of(override) in keys:
            raise ConfigError("--set", override, "this key is swept", "leave it out")


def policies_at(configs: Sequence[PipelineConfig]) -> list[str]:
    """The policies of all points, in the order of the points with the most policies."""
    by_count = sorted((config.policies() for config in configs), key=len, reverse=True)
    return list(dict.fromkeys(name for names in by_count for name in names))


def check_different(points: Sequence[Point], configs: Sequence[PipelineConfig]) -> None:
    """Raise ConfigError if two points are the same run, because their comparison would be meaningless."""
    first: dict[str, Point] = {}
    for point, config in zip(points, configs, strict=True):
        same = first.setdefault(profile_digest(config), point)
        if same is not point:
            rule = f"is the same run as {named(same)}"
            remedy = "remove one of them; [publish] changes nothing in a sweep"
            raise ConfigError("--grid", named(point), rule, remedy)


# ---------------------------------------------------------------- output


def rows_of(results: Sequence[PointResult], goal: Goal | None) -> list[list[str]]:
    """The table with its headings first: changes, cost and results of each point."""
    columns = _columns(results, goal)
    rows = [["point", "hits", "computed", *columns, "seconds", "state"]]
    for result in results:
        numbers = [str(measures[name]) if name in measures else "" for label, name in columns.values()
                   for measures in [result.measures.get(label, {})]]  # fmt: skip
        state = short(result.error.partition("\n")[0], LONGEST_ERROR) or "done"
        counts = [str(len(result.hits)), str(len(result.computed))]
        rows.append([named(result.point), *counts, *numbers, f"{result.seconds:.1f}", state])
    return rows


def _columns(results: Sequence[PointResult], goal: Goal | None) -> dict[str, tuple[str, str]]:
    """Heading -> stage and metric: the number of the goal, and the others of the same policy."""
    if goal is None:
        return {}
    policy, slash, _ = goal.name.rpartition("/")
    of_policy = [f"{policy}/{name}" for name in OF_POLICIES] if goal.label == "evaluate" and slash else []
    known = {name for result in results for name in result.measures.get(goal.label, {})}
    names = dict.fromkeys([goal.name, *(name for name in of_policy if name in known)])
    return {str(Goal(goal.label, name, goal.direction)): (goal.label, name) for name in names}


def print_table(rows: Sequence[Sequence[str]], results: Sequence[PointResult]) -> None:
    """Print the table, and how often each stage was computed."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # plain lines, because a table of rich drops columns on a narrow terminal
        print_line("  ".join(map(str.ljust, row, widths)).rstrip())
    computed = Counter(label for result in results for label in result.computed)
    hits = sum(len(result.hits) for result in results)
    stages = ", ".join(f"{label} {count}" for label, count in computed.items())
    print_line(f"computed {computed.total()} stages ({stages or 'none'}); {hits} were hits")
    for result in results:
        if result.error:
            print_line(f"no result: {named(result.point)}: {result.error}")


def print_best(results: Sequence[PointResult], best: PointResult, goal: Goal) -> None:
    """Print the best point, and the points whose intervals overlap with its interval."""
    word = "highest" if goal.direction == "max" else "lowest"
    print_line(f"best: {named(best.point)} ({word} {goal}: {goal.of(best)})")
    same = ties(results, best, goal)
    if same:
        print_line(f"exactly the same: {', '.join(named(other.point) for other in same)}; the first of them is taken")
    others = [other for other in rivals(results, best, goal) if other not in same]
    if others:
        ours = goal.of(best)
        why = "its interval overlaps with" if ours and ours.has_interval else "without an interval it may equal"
        print_line(f"{why} {', '.join(named(other.point) for other in others)}: repeat with other seeds")


def write(folder: Path, results: Sequence[PointResult], goal: Goal | None) -> Path:
    """Write sweep.json, and sweep.png if a number was compared; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "metric": str(goal or ""),
        "direction": goal.direction if goal else "",
        "points": [asdict(result) | {"point": shown_overrides(result.point)} for result in results],
    }
    (folder / "sweep.png").unlink(missing_ok=True)  # left by an earlier run of the same sweep
    (folder / "sweep.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
    if goal is not None and any(goal.finite(result) for result in results):
        (folder / "sweep.png").write_bytes(plot(results, goal))
    return folder


def plot(results: Sequence[PointResult], goal: Goal) -> bytes:
    """Draw the number of the goal over the first swept key, with one line per value of the other keys."""
    from rlhf_core.evaluation.plots import SweptPoint, swept  # matplotlib, 1 s

    option = keys_of([result.point for result in results])[0]
    series: dict[str, list[SweptPoint]] = {}
    for result in results:
        measure = goal.finite(result)
        if measure is not None:
            first, *others = shown_overrides(result.point) or [named(result.point)]
            value = first.partition("=")[2]
            series.setdefault(" ".join(others), []).append(SweptPoint(value, measure.mean, measure.low, measure.high))
    return swept(series, option=option, y_label=str(goal))


# ---------------------------------------------------------------- the best point


def go_on(
    options: argparse.Namespace, best: PointResult, goal: Goal, results: Sequence[PointResult], store: ArtifactStore
) -> None:
    """Run the whole profile at the best point once a person has approved it, or print the command for it.

    Raises StageWaiting until a person has decided, RunBlocked if they have rejected it.
    """
    chosen = [*options.overrides, *best.point]
    config: PipelineConfig = load_profile(options.profile, chosen)
    if config.publish is None and not options.approve:
        return
    if not options.approve:
        words = ["rlhf", "run", options.profile, *(word for text in chosen for word in ("--set", text))]
        words += [f"--{name}" for name in ("strict-code", "strict-env") if getattr(options, name.replace("-", "_"))]
        print_line(f"a sweep publishes nothing; to publish the best: {shlex.join(words)}")
        return
    # The digest of the unchanged profile file, because `rlhf approve PROFILE sweep` looks for that one.
    asked_by = profile_digest(load_profile(options.profile))
    check_approved(config.name, best, goal, results, store, profile=asked_by)
    whole = vars(options) | {"overrides": chosen, "force": (), "until": ""}
    run_request(RunRequest.from_parameters(whole))
