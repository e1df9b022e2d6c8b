"""Run each engine and path once on a GPU, one after the other; print results, measurements, and skipped parts.

    make gpu                                     # in 12 minutes, most valuable first; results in build/gpu
    python -m benchmarks.gpu --minutes 90        # with three seeds, and time for all steps
    python -m benchmarks.gpu --steps sync sleep --out FOLDER
    python -m benchmarks.gpu --device cpu        # the parts that a CPU can run, on Gloo, with tiny models

A step is a separate process with a time limit: it writes `STEP.json` (status, seconds, figures, error) and `STEP.log`
into the folder, and a failing step does not stop the others. `table.md` has the results so far. A step may take a
quarter of `--minutes`; steps without time left are skipped. The exit status is 1 if a step failed, 2 without a GPU.
`--trl-python` names an interpreter with TRL, for the last comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.steps import STEPS, Device, Place, Step
from benchmarks.processes import kill_family
from rlhf_core.errors import ConfigError

Status = Literal["passed", "failed", "timed out", "not run"]
ENVIRONMENT = {
    # Without it, cuBLAS may be nondeterministic, and `use_deterministic_algorithms` warns about every product.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # A cluster that was started without it shows all GPUs to workers that requested none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # Detecting a GPU must not open it, or processes that are forked afterwards could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables of a step, unless already set; `imports` records them."""
MINUTES = 12.0
LEAST_S = 20.0
"""Seconds; in less time, no step gets beyond its imports."""


@dataclass
class Result:
    """The result of a step."""

    step: str
    status: Status
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    never_ran: str = ""
    """Parts of the step that this device cannot run."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", nargs="*", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="for all steps; default: 12 on a GPU, no limit on a CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    parser.add_argument("--trl-python", default="", metavar="PATH", help="an interpreter that has TRL")
    parser.add_argument("--one-step", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    minutes = options.minutes or (MINUTES if options.device == "cuda" else math.inf)
    place = Place(options.device, options.out.resolve(), options.trl_python, thorough=minutes > MINUTES)
    if options.one_step:
        return run_here(STEPS[options.one_step], place)
    try:
        check_device(options.device)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    results: list[Result] = []
    ends = time.monotonic() + 60 * minutes
    for name in options.steps:
        print(f"{name}: {STEPS[name].says}", flush=True)
        left = min(ends - time.monotonic(), 60 * minutes / 4)
        results.append(run_apart(STEPS[name], place, left, minutes=options.minutes))
        print(f"{name}: {results[-1].status}, {results[-1].seconds:.0f} s", flush=True)
        (place.folder / "table.md").write_text("\n".join([*table(results), ""]), encoding="utf-8")
    print("\n".join(["", *table(results)]))
    return 1 if any(one.status in ("failed", "timed out") for one in results) else 0


def check_device(device: Device) -> None:
    """Raise ConfigError if torch sees no GPU although one is requested."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        rule = f"torch {torch.__version__} sees no GPU on this machine"
        remedy = "run it where nvidia-smi lists one, or with --device cpu"
        if not torch.version.cuda:
            rule, remedy = f"torch {torch.__version__} is a build for CPUs", "make clean-venv install, or --device cpu"
        raise ConfigError("--device", device, rule, remedy)


def run_apart(step: Step, place: Place, left: float = math.inf, *, minutes: float = 0.0) -> Result:
    """Run a step in a separate process; at its limit, or after `left` s, it is killed with its descendants."""
    file = place.folder / f"{step.name}.json"
    file.unlink(missing_ok=True)
    if place.device == "cpu" and not step.on_cpu:
        return keep(Result(step.name, "not run", never_ran=step.never_on_cpu), file)
    if left < LEAST_S:
        return keep(Result(step.name, "not run", never_ran="no time was left (--minutes)"), file)
    limit = min(step.timeout_s, left)
    command = [sys.executable, "-m", "benchmarks.gpu", "--one-step", step.name, "--minutes", str(minutes)]
    command += ["--device", place.device, "--out", str(place.folder), "--trl-python", place.trl_python]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if place.device == "cpu" else {}
    began = time.monotonic()
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        environment = ENVIRONMENT | os.environ | hidden
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            kill_family(process.pid)
            rule = f"took more than {limit:.3g} s; see {step.name}.log"
            return keep(Result(step.name, "timed out", limit, error=rule), file)
    if not file.exists():
        rule = f"ended with status {process.returncode} without a result; see {step.name}.log"
        return keep(Result(step.name, "failed", time.monotonic() - began, error=rule), file)
    return Result(**json.loads(file.read_text(encoding="utf-8")))


def run_here(step: Step, place: Place) -> int:
    """Run a step in this process and record its measurements, even if it fails half-way."""
    result = Result(step.name, "passed", never_ran=step.never_on_cpu if place.device == "cpu" else "")
    began = time.monotonic()
    try:
        step.run(place, result.figures)
    except Exception as error:
        traceback.print_exc()
        result.status, result.error = "failed", f"{type(error).__name__}: {error}"
    result.seconds = round(time.monotonic() - began, 1)
    keep(result, place.folder / f"{step.name}.json")
    return 0


def keep(result: Result, file: Path) -> Result:
    """Write a result to a file, and return it."""
    file.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the summary: a row for each step, then errors, then the parts that never ran."""
    yield "| step | status | seconds | measured |\n|---|---|--:|---|"
    for one in results:
        yield f"| {one.step} | {one.status} | {one.seconds:.0f} | {', '.join(in_words(one.figures))} |"
    yield from (f"{one.step} failed: {one.error}" for one in results if one.error)
    yield from (f"never run here: {one.step}: {one.never_ran}" for one in results if one.never_ran)


def in_words(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield each figure with its name.

    >>> list(in_words({"rank": 1, "loss": {"first": 6.25, "last": 2e-07}}))
    ['rank 1', 'loss first 6.25', 'loss last 2e-07']
    """
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from (f"{name} {more}" for more in in_words(value))
        else:
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


if __name__ == "__main__":
    sys.exit(main())
