"""The same question asked of the real engines: Ray, vLLM and DeepSpeed, through the command that a person types."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.durability import checks, processes
from benchmarks.durability.checks import StageResult
from benchmarks.durability.lives import Kill, Life
from benchmarks.processes import kill_family
from pipelines.flows.profile import find_profile

KILLS_PER_PIPELINE = 3
LIMIT_S = 1800.0
GONE_WITHIN_S = 90.0
"""Two of Ray's agents ask its dead head for 60 s before they end themselves; all others are gone within a second."""

SHRUNKEN = """
extends = "{full}"
name = "durability-real"
[prepare_data.data]
demonstrations = 192
preferences = 96
prompts = 24
eval_demonstrations = 16
eval_preferences = 16
eval_prompts = 8
[prepare_data.model]
hidden_size = 128
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 256
[sft.loop]
checkpoint_every = 4
[reward_model.loop]
checkpoint_every = 3
[rejection_sampling.generate]
shard_size = 8
samples_per_prompt = 4
sampling = {{max_tokens = 16}}
[rejection_sampling.select]
drop_truncated = false
[iterative_dpo]
rounds = 1
[iterative_dpo.generate]
shard_size = 8
samples_per_prompt = 4
sampling = {{max_tokens = 16}}
[iterative_dpo.select]
drop_truncated = false
[ppo]
steps = 8
prompts_per_step = 12
sampling = {{max_tokens = 16}}
checkpoint_every = 2
kl_target = 4.0
[ppo.rewards]
normalise = "running"
clip = 3.0
overlong = "none"
[evaluate.generate]
sampling = {{max_tokens = 16}}
"""


def campaign(folder: Path, *, kills: int, seed: int) -> list[Life]:
    """Kill runs of a shrunken `tiny/full` until `kills` kills have hit; return their lives, examined.

    In turn the whole family dies at once, or the command's own process alone, whose workers must then end by
    themselves.
    """
    folder.mkdir(parents=True)
    profile = folder / "real.toml"
    profile.write_text(SHRUNKEN.format(full=find_profile("tiny/full").resolve()))
    began = time.monotonic()
    if _run(profile, folder / "twin", kill=None) != "completed":
        raise SystemExit(f"the run in peace failed; read {folder / 'twin'}")
    peace_s = time.monotonic() - began
    print(f"with real engines, in peace: {peace_s:.0f} s", flush=True)
    twin = checks.results(folder / "twin")
    lives: list[Life] = []
    while sum(len(life.kills) for life in lives) < kills:
        left = kills - sum(len(life.kills) for life in lives)
        lives.append(_live(profile, folder, twin, len(lives), seed, peace_s, most=left))
    return lives


def _live(
    profile: Path, folder: Path, twin: Mapping[str, StageResult], number: int, seed: int, peace_s: float, *, most: int
) -> Life:
    source = random.Random(f"{seed}/real/{number}")
    planned = min(most, KILLS_PER_PIPELINE)
    life, home, began = Life(f"real pipeline {number}", mlflow=True), folder / f"life-{number:03d}", time.monotonic()
    for attempt in range(planned + 1):
        alone = source.random() < 0.5
        after = source.uniform(0.0, min(1.0, 2 / (planned + 1))) * peace_s
        how = _run(profile, home, kill=(after, alone) if attempt < planned else None)
        lingered, survivors = processes.wait_for_family(within_s=GONE_WITHIN_S)
        life.leftovers += [f"process {name}" for name in survivors]
        if how != "killed":
            break
        kind = "the process of the command alone" if alone else "the whole family at once"
        life.kills.append(Kill(kind, "", f"after {after:.0f} s", lingered))
        print(f"with real engines: killed {kind} after {after:.0f} s, all gone {lingered:.1f} s later", flush=True)
    if how == "completed":
        life.problems += checks.problems(home, twin)
        life.leftovers += checks.leftovers(home)
    else:
        life.problems.append(f"the pipeline {how}; read {home}")
    life.seconds = time.monotonic() - began
    return life


def _run(profile: Path, home: Path, *, kill: tuple[float, bool] | None) -> processes.End:
    """Run the profile; `kill` says after how many seconds it dies, and whether alone."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pipelines.cli.main", "run", str(profile)]
    environment = os.environ | {"RLHF_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    with (home / "output.log").open("a") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout=LIMIT_S if kill is None else kill[0])
        except subprocess.TimeoutExpired:
            if kill is not None and kill[1]:
                process.kill()
            else:
                kill_family(process.pid)
            process.wait()
            return "hung" if kill is None else "killed"
    return "completed" if process.returncode == 0 else "failed"
