"""Edit the file of a reward function, as a user would: between two attempts at a pipeline, or while it runs."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from campaigns.durability import checks, instants, lives, processes
from campaigns.durability.checks import StageResult
from campaigns.durability.instants import AtTime, InStage, Instant
from campaigns.durability.lives import Life, Peace
from campaigns.durability.pipeline import LOG, EventLog, Setup, read_events
from rlhf_core.store.artifacts import ArtifactStore

Edit = Literal["comment", "result"]
USER = "ppo"
"""The stage that uses the reward file."""
PUBLISH = "publish"
KILLS = (1, 3)
CHANGED = "has changed since the stage began"


def edit(path: Path, what: Edit) -> None:
    """Edit the reward file: add a comment, or change its values."""
    text = path.read_text(encoding="utf-8")
    edited = f"# as it was\n{text}" if what == "comment" else text.replace("LENGTH = 20.0", "LENGTH = 30.0")
    new = path.with_name(f"{path.name}.new")
    new.write_text(edited, encoding="utf-8")
    new.replace(path)


def edited_between(folder: Path, peace: Peace, number: int, seed: int, *, what: Edit, mlflow: bool) -> Life:
    """Kill a pipeline, edit its reward file, and resume until it is complete, possibly with more kills.

    After a comment, the result must equal the twin's, otherwise the twin's of the edited file. Finished stages that the
    edit does not affect must not be computed again, and affected stages must start from the beginning.
    """
    source = random.Random(f"{seed}/edit/{number}")
    census = peace.mlflow if mlflow else peace.memory
    setup = lives.new_home(folder / f"edit-{number:04d}", mlflow, peace.database)
    life, began = Life(f"edited {what} {number}", mlflow), time.monotonic()
    planned = source.randint(*KILLS)
    edit_before = source.randint(1, planned)
    ended = None
    for attempt in range(planned + 1):
        if attempt == edit_before:
            edit(setup.reward, what)
            EventLog(setup.events).note("edited")
            life.others.append(lives.describe(None, setup.events, kind=f"reward file edited after a kill: {what}"))
        instant: Instant | None = None
        if attempt < planned:
            instant = _in_user(source, census.stages) if attempt == edit_before - 1 and source.random() < 0.6 else None
            instant = instant or instants.draw(source, census, reach=2 / (planned + 1), done=())
        ended = lives.attempt(setup, instant)
        life.leftovers += [f"process {name}" for name in ended.survivors]
        if ended.how == "killed":
            life.kills.append(lives.describe(instant, setup.events, ended.lingered_s))
        elif attempt >= edit_before or ended.how != "completed":
            break
    assert ended is not None
    if ended.how != "completed":
        life.problems.append(f"the pipeline {ended.how}; read {setup.home / LOG}")
    life.problems += wrong_decisions(setup, peace, what)
    _examine(life, setup, peace, what, began)
    return life


def edited_while_running(folder: Path, peace: Peace, number: int, seed: int) -> Life:
    """Edit the reward file during a run: it must end as the twin of either file, or with a one-sentence error.

    By its key, each result must belong to one of the two files. The next run must compute all results of the edited
    file.
    """
    source = random.Random(f"{seed}/edit/{number}")
    setup = lives.new_home(folder / f"edit-{number:04d}", False, peace.database)
    life, began = Life(f"edited while running {number}", mlflow=False), time.monotonic()
    stages = peace.memory.stages
    instant = _in_user(source, stages) if source.random() < 0.7 else instants.draw(
        source, peace.memory, reach=1.0, done=()
    )  # fmt: skip
    child = processes.start(partial(_run_and_edit, setup, instant), setup.home / LOG)
    how, _ = processes.finish(child, kill_after_s=None)
    life.leftovers += [f"process {name}" for name in processes.wait_for_family()[1]]
    life.others.append(lives.describe(instant, setup.events, kind="reward file edited while a run goes on"))
    words = lives.last_words(setup, child)
    if how != "completed" and not (how == "failed" and words.startswith("ConfigError: ") and CHANGED in words):
        life.problems.append(f"the run {how}: {words}; read {setup.home / LOG}")
    life.problems += mixtures(setup.home, peace)
    made = checks.results(setup.home)
    file = "none" if USER not in made else "the old" if made[USER].key == peace.results[USER].key else "the edited"
    life.ends.append(f"the edited run {'ended with one sentence' if words else f'completed, with {file} file'}")
    ended = lives.attempt(setup, None)
    if ended.how != "completed":
        life.problems.append(f"the run after the edit {ended.how}; read {setup.home / LOG}")
    _examine(life, setup, peace, "result", began)
    return life


def published_before(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `publish` began before the event `edited`, so that it may have registered the earlier policy.

    >>> published_before([{"event": "edited"}, {"event": "started", "label": "publish", "action": "RUN"}])
    False
    """
    before = itertools.takewhile(lambda event: event["event"] != "edited", events)
    return any((event["event"], event.get("label")) == ("started", PUBLISH) for event in before)


def published_again(twin: Mapping[str, StageResult], home: Path) -> Mapping[str, StageResult]:
    """The twin, with the results of `publish` from `home` if it had begun before an edit.

    The card of each published policy contains its version number in MLflow, which is 1 for the twin.
    """
    return {**twin, **{label: one for label, one in checks.results(home).items() if label == PUBLISH}}


def mixtures(home: Path, peace: Peace) -> list[str]:
    """List the results that, by their key, equal neither the twin's nor the edited twin's."""
    twins = {one.key: one for twin in (peace.results, peace.edited) for one in twin.values()}
    return [
        f"{label} of key {one.key[:12]}: " + ("in no twin" if one.key not in twins else "not as the twin of its file")
        for label, one in checks.every_result(ArtifactStore(home / "store"))
        if one.key not in twins or list(checks.differences({label: one}, {label: twins[one.key]}))
    ]


def _run_and_edit(setup: Setup, instant: Instant) -> None:
    change = partial(edit, setup.reward, "result")
    if isinstance(instant, AtTime):
        timer = threading.Timer(instant.seconds, change)
        timer.daemon = True
        timer.start()
    lives.logged(setup, instant, act=change)
    if "LENGTH = 20.0" in setup.reward.read_text(encoding="utf-8"):  # the instant was never reached
        change()


def _in_user(source: random.Random, stages: Mapping[str, int]) -> Instant:
    return InStage(USER, source.randint(1, stages[USER]))


def wrong_decisions(setup: Setup, peace: Peace, what: Edit) -> list[str]:
    """List finished stages that were computed again after the edit, and stages that resumed from before it."""
    touched = touched_by_result(peace.results, peace.edited) if what == "result" else set()
    return wrong_actions(read_events(setup.events), touched)


def wrong_actions(events: Sequence[Mapping[str, Any]], touched: Collection[str]) -> list[str]:
    """List finished stages that were computed again after the event `edited`, and stages that resumed from before it.

    Stages in `touched` are affected by the edit and must start from the beginning.
    """
    at = next((index for index, event in enumerate(events) if event["event"] == "edited"), len(events))
    done = {event["label"] for event in events[:at] if event["event"] == "finished"}
    first: dict[str, str] = {}
    for event in events[at:]:
        if event["event"] == "started":
            first.setdefault(event["label"], event["action"])
    again = done - set(touched)
    return sorted(
        f"{label}: {action} after the edit"
        for label, action in first.items()
        if (label in again and action != "HIT") or (label in touched and action != "RUN")
    )


def touched_by_result(results: Mapping[str, StageResult], edited: Mapping[str, StageResult]) -> set[str]:
    """The labels of stages whose key changes with the edit."""
    return {label for label, one in results.items() if edited[label].key != one.key}


def _examine(life: Life, setup: Setup, peace: Peace, what: Edit, began: float) -> None:
    """Compare with the matching twin; unfinished work of the earlier file may stay, in case that file is restored."""
    old = (
        set()
        if what == "comment"
        else {peace.results[label].key for label in touched_by_result(peace.results, peace.edited)}
    )
    twin: Mapping[str, StageResult] = peace.results if what == "comment" else peace.edited
    if what == "result" and setup.mlflow and published_before(read_events(setup.events)):
        twin = published_again(twin, setup.home)
    lives.examine(life, setup, twin, began, unfinished=old)
