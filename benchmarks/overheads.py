"""Measure the overhead of store, Prefect and MLflow, each compared with the bare work in one run, three times.

    python -m benchmarks.overheads stages commit
    python -m benchmarks.overheads cached --home .rlhf --profile tiny/full      # a state folder with a completed run

`stages`: a stage of 600 logged steps, and a chain of short ones, as Prefect tasks with MLflow and the store, compared
with the same work in a bare loop. `commit`: 270 MB into the store, compared with hashing and copying them with one
thread. `cached`: the whole command `rlhf run` when every stage is a hit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.busy_stage import BusyConfig, busy_spec, work
from pipelines.execution.executor import RunOptions, Silent
from pipelines.execution.opening import open_run, open_tracker
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from pipelines.services.servers import private_server
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import fsync_tree
from rlhf_core.store.records import Provenance
from rlhf_core.types import PolicyRef

REPEATS = 3
LONG = BusyConfig(steps=600, blocks_per_step=3)
SHORT = BusyConfig(steps=1, blocks_per_step=1)
CHAIN = 8
MODEL_MB = 270
TEN_MINUTES_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["stages", "commit", "cached"])
    parser.add_argument("--profile", default="tiny/full")
    parser.add_argument("--home", type=Path, default=Path(".rlhf"), help="state folder for `cached`")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores; median of {REPEATS} (each)")
    if "commit" in options.what:
        measure_commit()
    if "stages" in options.what:
        measure_stages()
    if "cached" in options.what:
        measure_cached(options.profile, options.home)
    return 0


# ---------------------------------------------------------------- orchestration


def measure_stages() -> None:
    """Print the overhead of a long stage, and of each stage in a chain of short ones, above their bare work."""
    with _prefect_and_mlflow() as home:
        long, short = [], []
        for repeat in range(REPEATS):
            bare = _seconds(_bare, LONG, 1)
            around = _seconds(_in_flow, home, LONG, 1, repeat) - bare
            long.append((bare, around))
            bare = _seconds(_bare, SHORT, CHAIN)
            around = _seconds(_in_flow, home, SHORT, CHAIN, repeat) - bare
            short.append(around / CHAIN)
    _print("bare loop of 600 steps, s", [bare for bare, _ in long])
    _print("added by store, Prefect and MLflow, s", [around for _, around in long])
    _print("  of ten minutes with as many steps, %", [100 * around / TEN_MINUTES_S for _, around in long])
    _print(f"added to each of {CHAIN} short stages, s", short)


def _bare(config: BusyConfig, stages: int) -> None:
    for _ in range(stages * config.steps):
        work(config)


def _in_flow(home: Home, config: BusyConfig, stages: int, seed: int) -> None:
    from prefect import flow

    from pipelines.prefect_flows.tasks import run_in_flow

    def chain(_: PipelineConfig, graph: Stages) -> None:
        for number in range(stages):
            graph.run_stage(busy_spec(config, label=f"busy_{number}", seed=seed), PolicyRef)

    @flow(name="overheads")
    def body() -> None:
        profile = load_profile("tiny/full")
        tracker = open_tracker(profile, home)
        with open_run(profile, chain, RunOptions(), home=home, tracker=tracker, listener=Silent()) as run:
            run_in_flow(run, chain)

    body()


@contextmanager
def _prefect_and_mlflow() -> Iterator[Home]:
    """Yield a state folder with a running, warm Prefect server: the first flow imports the modules for all others."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder)).make()
        with private_server(home) as server:
            os.environ.update(server.environment)
            server.wait()
            _in_flow(home, SHORT, 1, -1)
            yield home


# ---------------------------------------------------------------- commit


def measure_commit() -> None:
    """Print the seconds of a commit of 270 MB, and of hashing and of copying the same bytes."""
    rows: dict[str, list[float]] = {"sha256, one thread": [], "copy and fsync": [], "commit": []}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        store = ArtifactStore(root / "store")
        for _ in range(REPEATS):
            out = root / secrets.token_hex(4)
            _write_model(out)
            rows["sha256, one thread"].append(_seconds(_hash, out))
            rows["copy and fsync"].append(_seconds(_copy, out, root / "copy"))
            rows["commit"].append(_seconds(_commit, store, out))
            shutil.rmtree(root / "copy")
    for name, seconds in rows.items():
        _print(f"{MODEL_MB} MB: {name}, s", seconds)


def _write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(secrets.token_bytes(MODEL_MB * 1_000_000))
    (folder / "config.json").write_text("{}", encoding="utf-8")


def _hash(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def _copy(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target)
    fsync_tree(target)


def _commit(store: ArtifactStore, out: Path) -> None:
    record = Provenance(
        label="model", stage="model", payload={}, inputs=(), code={}, metrics={}, engines={}, environment={}, started="",
        seconds=0.0, tracking={}, attempts=1, resumed_from=None,
    )  # fmt: skip
    with store.lease(secrets.token_hex(32)) as lease:
        store.commit(lease, out, PolicyRef, children={}, record=record)


# ---------------------------------------------------------------- cached


def measure_cached(profile: str, home: Path) -> None:
    """Print the seconds of `rlhf run` where every stage is a hit."""
    command = [sys.executable, "-m", "pipelines.cli.main", "run", profile]
    environment = os.environ | {"RLHF_HOME": str(home)}

    def cached() -> None:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        if any(f": {word}: " in found for word in ("RUN", "RESUME")):
            raise SystemExit(f"{home}: not every stage of {profile} is in its store; run it first")

    _print(f"rlhf run {profile}, all hits, s", [_seconds(cached) for _ in range(REPEATS)])


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


def _print(name: str, values: list[float]) -> None:
    print(f"{name:<52} {median(values):8.3f}   ({', '.join(f'{value:.3f}' for value in values)})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
