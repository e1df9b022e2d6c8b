"""Run the kill campaign with the real engines, Ray, vLLM and DeepSpeed, through the `rlhf` command."""

from __future__ import annotations

import time
from pathlib import Path

from campaigns.durability import checks, lives, real_others, real_runs
from campaigns.durability.lives import Life
from campaigns.durability.pipeline import Setup
from campaigns.durability.real_runs import RealPeace

KILLS_PER_PIPELINE = 3


def campaign(folder: Path, *, kills: int, seed: int, others: float, takeovers_in_mlflow: bool) -> list[Life]:
    """Kill or stop runs of a reduced `tiny/full` until `kills` kills and stops have hit; returns their checked lives.

    Each kill hits either all processes at once, or only the command's process, whose workers must then end by
    themselves. A fraction `others` of the pipelines is taken over, has wrong clocks or is edited.
    """
    twin = real_runs.new_home(folder / "twin")
    seconds = real_runs.in_peace(twin)
    print(f"with real engines, in peace: {seconds:.0f} s", flush=True)
    peace = RealPeace(folder, seed, seconds, real_runs.seconds(*real_runs.logs(twin)), checks.results(twin))
    done: list[Life] = []
    while (left := kills - sum(hits(life) for life in done)) > 0:
        life = _one(peace, len(done), others, most=left, takeovers_in_mlflow=takeovers_in_mlflow)
        state = "; ".join([*life.problems, *(f"left over: {name}" for name in life.leftovers)]) or "as the twin"
        print(f"{life.name}: {life.seconds:.0f} s, {', '.join([*life.ends, state])}", flush=True)
        done.append(life)
    return done


def hits(life: Life) -> int:
    """The number of kills and stops that have hit a pipeline."""
    return len(life.kills) + sum(other.kind.startswith("stopped") for other in life.others)


def _one(peace: RealPeace, number: int, others: float, *, most: int, takeovers_in_mlflow: bool) -> Life:
    """Run one pipeline, with a kind of disturbance drawn by its number; returns its life."""
    kinds = ("killed", "taken over", "wrong clocks", "comment", "result")
    weights = (1 - others, *(others * share for share in (0.4, 0.2, 0.15, 0.25)))
    match peace.draws("kind", number).choices(kinds, weights)[0]:
        case "taken over":
            return real_others.taken_over(peace, number, tracked=takeovers_in_mlflow)
        case "wrong clocks":
            return real_others.skewed(peace, number)
        case "comment":
            return real_others.edited_between(peace, number, what="comment")
        case "result":
            return real_others.edited_between(peace, number, what="result")
    return _live(peace, number, most=most)


def _live(peace: RealPeace, number: int, *, most: int) -> Life:
    source, planned = peace.draws("killed", number), min(most, KILLS_PER_PIPELINE)
    life, began = Life(f"real pipeline {number}", mlflow=True), time.monotonic()
    home = real_runs.new_home(peace.folder / f"life-{number:03d}")
    for _ in range(planned):
        moment = peace.moment(source, reach=min(1.0, 2 / (planned + 1)))
        how = real_runs.killed(life, real_runs.start(home), moment, alone=source.random() < 0.5)
        if how != "killed":
            break
    else:
        how = real_others.complete(life, home)
    if how != "completed":
        life.problems.append(f"the pipeline {how}; read {real_runs.logs(home)[-1]}")
    lives.examine(life, Setup(home, mlflow=True), peace.results, began)
    return life
