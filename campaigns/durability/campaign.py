"""Kill pipelines repeatedly until they are complete, and compare them with a twin that was never killed."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.durability import checks, clocks, edits, instants, lives, processes, takeovers
from campaigns.durability.checks import Repeat
from campaigns.durability.instants import Census
from campaigns.durability.lives import Kill, Life, Peace
from campaigns.durability.pipeline import (
    LOG,
    PROFILE,
    EventLog,
    Setup,
    checkpoint_intervals,
    import_ahead,
    import_all,
    make_mlflow_database,
    read_events,
    run_pipeline,
    write_imports,
)
from pipelines.flows.profile import load_profile

KILLS_PER_PIPELINE = (2, 6)


@dataclass(frozen=True)
class Plan:
    """At least `kills` kills, drawn from `seed`, in `workers` processes at a time.

    Every `mlflow_every`-th pipeline (0: none) records to an MLflow database, the others to memory. Two runs share a
    store `pairs` times, and as often one of two is killed. A fraction `others` of the pipelines is taken over, has
    wrong clocks or is edited; their kills count, too. With `takeovers_in_mlflow`, pipelines that are taken over may
    record to MLflow, too.
    """

    kills: int
    seed: int
    workers: int
    mlflow_every: int
    pairs: int
    others: float
    takeovers_in_mlflow: bool = False


def run_in_peace(folder: Path, *, mlflow: bool) -> Peace:
    """Run the pipeline without a kill, and import its modules here, so that later children start immediately.

    With `mlflow`, another run records to an MLflow database.
    """
    template, imports, log = folder / "mlflow-template.db", folder / "imports.txt", folder / LOG
    if mlflow:
        _must_complete(processes.run(partial(make_mlflow_database, template), log).how, log)
    cold = lives.new_home(folder / "cold", mlflow, template)
    child = processes.start(partial(_counted, cold, cold.home / "census.json", imports), cold.home / LOG)
    import_ahead()  # meanwhile, import the modules that are always needed
    how, _ = processes.finish(child, kill_after_s=None)
    _must_complete(how, cold.home / LOG)
    import_all(imports)
    setups = [lives.new_home(folder / "memory", False, template)]
    setups += [lives.new_home(folder / "mlflow", True, template)] if mlflow else []
    censuses = [_census(setup, imports) for setup in setups]
    edited = lives.new_home(folder / "edited", False, template)
    edits.edit(edited.reward, "result")
    _must_complete(lives.attempt(edited, None).how, edited.home / LOG)
    twin = checks.results(setups[0].home)
    problems = [problem for setup in setups for problem in checks.problems(setup.home, twin)]
    problems += [f"left over: {name}" for setup in setups for name in checks.leftovers(setup.home)]
    return Peace(twin, checks.results(edited.home), censuses[0], censuses[-1], tuple(problems), template)


def run_workers(folder: Path, peace: Peace, plan: Plan) -> list[Life]:
    """Run the plan in its number of processes; returns all lives."""
    files = [folder / f"lives-{index}.jsonl" for index in range(plan.workers)]
    children = [
        processes.start(partial(_work, folder, peace, plan, index, file), folder / LOG)
        for index, file in enumerate(files)
    ]
    printed, waiting = [0] * plan.workers, set(children)
    while waiting:
        time.sleep(1.0)
        for child in list(waiting):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                waiting.remove(child)
                if status:
                    raise SystemExit(f"a worker of the campaign ended with status {status}; read {folder / LOG}")
        _print_news(files, printed)
    return [life for file in files for life in _read_lives(file)]


def live(folder: Path, peace: Peace, number: int, seed: int, *, mlflow: bool) -> Life:
    """Start one pipeline repeatedly, killing it at random instants, until it completes; then check the result."""
    source = random.Random(f"{seed}/{number}")
    census = peace.mlflow if mlflow else peace.memory
    life = Life(f"pipeline {number}", mlflow)
    planned = source.randint(*KILLS_PER_PIPELINE)
    setup = lives.new_home(folder / f"life-{number:04d}", mlflow, peace.database)
    began = time.monotonic()
    for attempt in range(planned + 1):
        instant = None
        if attempt < planned:
            instant = instants.draw(source, census, reach=2 / (planned + 1), done=_stages_done(setup))
        ended = lives.attempt(setup, instant)
        life.leftovers += [f"process {name}" for name in ended.survivors]
        if ended.how != "killed":
            break
        life.kills.append(lives.describe(instant, setup.events, ended.lingered_s))
    life.repeats = checks.repeats(read_events(setup.events), checkpoint_intervals(load_profile(PROFILE)))
    if ended.how != "completed":
        life.problems.append(f"the pipeline {ended.how}; read {setup.home / LOG}")
    lives.examine(life, setup, peace.results, began)
    return life


def side_by_side(folder: Path, peace: Peace, number: int, seed: int, *, kill_one: bool) -> Life:
    """Run the same profile twice at the same time on one store, optionally kill one run, and check the result.

    If both survive, each stage must have been computed once.
    """
    setup = lives.new_home(folder / f"{'one' if kill_one else 'two'}-of-two-{number:04d}", False, peace.database)
    life, began = Life(setup.home.name, mlflow=False), time.monotonic()
    after = random.Random(f"{seed}/two/{number}").uniform(0.0, 0.9) * peace.memory.seconds if kill_one else None
    first, second = (processes.start(partial(lives.logged, setup, None), setup.home / LOG) for _ in range(2))
    ends = [processes.finish(first, kill_after_s=after)[0], processes.finish(second, kill_after_s=None)[0]]
    life.leftovers += [f"process {name}" for name in processes.wait_for_family()[1]]
    if ends == ["killed", "completed"] and kill_one:
        life.kills.append(Kill("one of two runs at once", "either", "", 0.0))
    elif ends != ["completed", "completed"]:
        life.problems.append(f"the runs {' and '.join(ends)}; read {setup.home / LOG}")
    else:
        made = checks.results(setup.home).items()
        life.problems += [f"{label}: computed {one.attempts} times" for label, one in made if one.attempts != 1]
    life.problems += checks.problems(setup.home, peace.results)
    life.leftovers += checks.leftovers(setup.home)
    life.seconds = time.monotonic() - began
    return life


def over_the_limit(repeat: Repeat) -> bool:
    """Whether more steps were repeated than can lie between two whole checkpoints.

    While a checkpoint is written in the background, the next steps run already, so the limit is two intervals.
    """
    return repeat.steps > 2 * repeat.interval


# ---------------------------------------------------------------- one attempt


def _census(setup: Setup, imports: Path) -> Census:
    """Run the pipeline undisturbed; returns its census and writes the imported modules to `imports`."""
    file, log = setup.home / "census.json", setup.home / LOG
    ended = processes.run(partial(_counted, setup, file, imports), log)
    _must_complete(ended.how, log)
    return replace(Census(**json.loads(file.read_text(encoding="utf-8"))), seconds=ended.seconds)


def _counted(setup: Setup, file: Path, imports: Path) -> None:
    census, log = Census(), EventLog(setup.events)
    instants.count(setup.home, log.stage, census)
    run_pipeline(setup, log)
    file.write_text(json.dumps(asdict(census)), encoding="utf-8")
    write_imports(imports)


def _stages_done(setup: Setup) -> set[str]:
    return {event["label"] for event in read_events(setup.events) if event["event"] == "finished"}


def _must_complete(how: processes.End, log: Path) -> None:
    if how != "completed":
        raise SystemExit(f"a run in peace {how}; read {log}\n{log.read_text(encoding='utf-8')[-2000:]}")


# ---------------------------------------------------------------- workers


def _work(folder: Path, peace: Peace, plan: Plan, worker: int, file: Path) -> None:
    """Run one worker's share of the plan, and write each life to `file`."""
    processes.adopt_orphans()
    for number, kill_one in enumerate([False, True] * plan.pairs):
        if number % plan.workers == worker:
            _write_life(file, side_by_side(folder, peace, number, plan.seed, kill_one=kill_one))
    share, done = -(-plan.kills // plan.workers), 0
    for number in range(worker, sys.maxsize, plan.workers):
        if done >= share:
            return
        mlflow = plan.mlflow_every > 0 and number % plan.mlflow_every == plan.mlflow_every - 1
        life = _one(folder, peace, number, plan, mlflow=mlflow)
        done += len(life.kills)
        _write_life(file, life)


def _one(folder: Path, peace: Peace, number: int, plan: Plan, *, mlflow: bool) -> Life:
    """Run one pipeline, with a kind of disturbance drawn by its number; returns its life."""
    source = random.Random(f"{plan.seed}/kind/{number}")
    kinds = ("killed", "taken over", "wrong clocks", "comment", "result", "edited while running")
    weights = (1 - plan.others, *(plan.others * share for share in (0.4, 0.2, 0.1, 0.15, 0.15)))
    match source.choices(kinds, weights)[0]:
        case "taken over":
            return takeovers.taken_over(folder, peace, number, plan.seed, mlflow=mlflow and plan.takeovers_in_mlflow)
        case "wrong clocks":
            return clocks.skewed(folder, peace, number, plan.seed)
        case "comment":
            return edits.edited_between(folder, peace, number, plan.seed, what="comment", mlflow=mlflow)
        case "result":
            return edits.edited_between(folder, peace, number, plan.seed, what="result", mlflow=mlflow)
        case "edited while running":
            return edits.edited_while_running(folder, peace, number, plan.seed)
    return live(folder, peace, number, plan.seed, mlflow=mlflow)


def _write_life(file: Path, life: Life) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(life)) + "\n")


def _read_lives(file: Path) -> list[Life]:
    return [_life(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _life(table: dict[str, Any]) -> Life:
    kills, others = ([Kill(**kill) for kill in table.pop(name)] for name in ("kills", "others"))
    repeats = [Repeat(**repeat) for repeat in table.pop("repeats")]
    return Life(**table, kills=kills, others=others, repeats=repeats)


def _print_news(files: list[Path], printed: list[int]) -> None:
    for index, file in enumerate(files):
        for life in _read_lives(file)[printed[index] :]:
            printed[index] += 1
            state = "; ".join([*life.problems, *(f"left over: {name}" for name in life.leftovers)]) or "as the twin"
            print(f"{life.name}: {len(life.kills)} kills, {life.seconds:.0f} s, {state}", flush=True)
