"""Disturb runs with the real engines by takeovers, wrong clocks, and edits of a user's file."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.processes import kill_family, stop_family, wake_family
from campaigns.durability import clocks, edits, lives, processes, real_runs, takeovers
from campaigns.durability.clocks import Skew
from campaigns.durability.edits import Edit
from campaigns.durability.lives import Kill, Life
from campaigns.durability.pipeline import REWARD, Setup
from campaigns.durability.real_runs import RealPeace

KIND = "a run with wrong clocks"
TAKEN_WITHIN_S = 120.0
"""If a takeover takes longer, with a run's start, it waits for a lock of the stopped run, which is then woken."""
MOST_KILLS = 2
IN_USER = 0.6
"""Fraction of kills before an edit that hit the stage which uses the edited file."""


def taken_over(peace: RealPeace, number: int, *, tracked: bool) -> Life:
    """Stop all processes of a run at a random instant, let a second run take over, and wake the first.

    Like `takeovers.taken_over`. MLflow is checked if `tracked`.
    """
    source = peace.draws("takeover", number)
    life, began = Life(f"real takeover {number}", mlflow=True), time.monotonic()
    home = real_runs.new_home(peace.folder / f"takeover-{number:03d}")
    moment, elsewhere = peace.moment(source, reach=0.95), source.random() < 0.5
    pause = source.choice((source.uniform(0.0, 2.0), source.uniform(0.0, 0.6 * peace.seconds)))
    first = real_runs.start(home, Skew(0.0, 0.0, elsewhere))
    try:
        stopped = real_runs.reach(first, moment)
        if stopped:
            stop_family(first.process.pid)
            kind = f"{takeovers.KIND}, as if on another machine" if elsewhere else takeovers.KIND
            life.others.append(Kill(kind, real_runs.stage(first.log), str(moment), 0.0))
            print(f"{life.name}: {kind}: {moment}", flush=True)
        second = real_runs.start(home, Skew(0.0, 0.0, False))
        if stopped:
            real_runs.wait_until(second.works, second, TAKEN_WITHIN_S)
            real_runs.wait_until(lambda: False, second, pause)
            print(f"{life.name}: woken, the other is at {real_runs.stage(second.log)}", flush=True)
            wake_family(first.process.pid)
        ends = [real_runs.finish(run) for run in (first, second)]
    finally:
        if first.process.poll() is None:
            kill_family(first.process.pid)
    real_runs.note_survivors(life)
    life.problems += takeovers.wrong_words(ends, first.words(), second.words())
    if "Traceback" in first.log.read_text(encoding="utf-8"):
        life.problems.append(f"the woken run said more than a sentence; read {first.log}")
    life.ends.append(f"the woken run {takeovers.how(first.words())}")
    lives.examine(life, Setup(home, mlflow=True), peace.results, began, tracked=tracked)
    return life


def skewed(peace: RealPeace, number: int) -> Life:
    """Kill a run whose clocks are wrong, and complete it with a run that has different wrong clocks."""
    source = peace.draws("skew", number)
    life, began = Life(f"real wrong clocks {number}", mlflow=True), time.monotonic()
    home = real_runs.new_home(peace.folder / f"skew-{number:03d}")
    moment, elsewhere = peace.moment(source, reach=0.95), source.random() < 0.5
    skews = [clocks.draw(source, elsewhere and first, patient=True) for first in (True, False)]
    kind = f"{KIND}, as if on another machine" if elsewhere else KIND
    how = real_runs.killed(life, real_runs.start(home, skews[0]), moment, alone=source.random() < 0.5, kind=kind)
    if how in ("killed", "completed"):
        life.others.append(Kill(f"wrong clocks: {clocks.shown(skews)}", "", "", 0.0))
        how = complete(life, home, skews[1])
        life.ends.append(f"the second run with wrong clocks {how}")
        if elsewhere:
            _reconcile_there(life, home)
    if how != "completed":
        life.problems.append(f"the run {how}; read {real_runs.logs(home)[-1]}")
    lives.examine(life, Setup(home, mlflow=True), peace.results, began)
    return life


def edited_between(peace: RealPeace, number: int, *, what: Edit) -> Life:
    """Kill a run, edit the reward file, and resume until it is complete, possibly with another kill.

    Like `edits.edited_between`: after a comment, the result must equal the twin's, otherwise the edited twin's.
    """
    source = peace.draws("edit", number)
    twin = peace.results if what == "comment" else peace.edited
    touched = edits.touched_by_result(peace.results, twin)
    life, began = Life(f"real edited {what} {number}", mlflow=True), time.monotonic()
    home = real_runs.new_home(peace.folder / f"edit-{number:03d}")
    planned = source.randint(1, MOST_KILLS)
    edit_after = source.randrange(planned)
    for attempt in range(planned):
        moment = peace.moment(source, reach=2 / (planned + 1))
        if attempt == edit_after and source.random() < IN_USER:
            moment = peace.moment_in(edits.USER, source)
        how = real_runs.killed(life, real_runs.start(home), moment, alone=source.random() < 0.5)
        if how not in ("killed", "completed"):
            life.problems.append(f"the pipeline {how}; read {real_runs.logs(home)[-1]}")
        if attempt == edit_after:
            at = real_runs.stage(real_runs.logs(home)[-1])
            life.others.append(Kill(f"reward file edited after a kill: {what}", at, "", 0.0))
            edits.edit(home / REWARD.name, what)
            real_runs.note_edit(home)
    how = complete(life, home)
    if how != "completed":
        life.problems.append(f"the pipeline {how}; read {real_runs.logs(home)[-1]}")
    events = real_runs.events(*real_runs.logs(home))
    life.problems += edits.wrong_actions(events, touched)
    if what == "result" and edits.published_before(events):
        twin = edits.published_again(twin, home)
    old = {peace.results[label].key for label in touched}
    lives.examine(life, Setup(home, mlflow=True), twin, began, unfinished=old)
    return life


def complete(life: Life, home: Path, believed: Skew | None = None) -> processes.End:
    """Run the profile to its end; returns how it ended."""
    how = real_runs.finish(real_runs.start(home, believed))
    real_runs.note_survivors(life)
    return how


def _reconcile_there(life: Life, home: Path) -> None:
    """Remove the remains of a killed run on the other machine that it simulated, as a person would do there."""
    run = real_runs.start(home, Skew(0.0, 0.0, elsewhere=True), verb="reconcile")
    if real_runs.finish(run) != "completed":
        life.problems.append(f"reconciling on the other machine failed; read {run.log}")
    real_runs.note_survivors(life)
