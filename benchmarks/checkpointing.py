"""Measure the cost of checkpoints: the seconds that training waits for one, and their share of the time per interval.

    python -m benchmarks.checkpointing
    python -m benchmarks.checkpointing --folder /mnt/store --markdown build/checkpointing.md

The variants alternate, three times, on Llamas with random weights. `waiting for the disk` is the cost without a
background thread: copy, files, checksums and seal, one after the other, before the next step. A checkpoint is written
during the `steps` of a case; the fraction is the time that it adds to the steps of one interval.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.policy import LoopConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.store.layout import folder_bytes
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample, ids, mask

REPEATS = 3
INTERVAL = LoopConfig().checkpoint_every
VOCABULARY = 512
POSITIONS = 256
OBJECTIVE = SftObjective(pack_to=None)


@dataclass(frozen=True)
class Case:
    """A Llama of `hidden` x `layers`, and `steps` steps of `rows` samples of `length` tokens."""

    name: str
    hidden: int
    layers: int
    rows: int
    length: int
    steps: int


CASES = (
    Case("tiny", hidden=64, layers=2, rows=32, length=64, steps=60),
    Case("135M", hidden=768, layers=19, rows=8, length=128, steps=6),
    Case("135M, shortest steps", hidden=768, layers=19, rows=1, length=16, steps=50),
)


@dataclass(frozen=True)
class Measured:
    """Megabytes of a checkpoint, seconds that training waits for it in each way, and of the loop without and with."""

    megabytes: float
    waits_disk: float
    waits_copy: float
    bare: float
    saved: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a temporary folder without it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--interval", type=int, default=INTERVAL, metavar="STEPS")
    options = parser.parse_args()
    lines = list(HEAD)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in [case for case in CASES if case.name in options.cases]:
            runs = measure(case, Path(folder) / case.name)
            named = [(f"{case.name}, run {number}", run) for number, run in enumerate(runs, 1)]
            median = Measured(*(statistics.median(values) for values in zip(*map(astuple, runs), strict=True)))
            lines += [line_of(name, case, run, options.interval) for name, run in named]
            lines.append(line_of(f"**{case.name}, median**", case, median, options.interval))
            print("\n".join(lines), flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


HEAD = (
    "| model | a checkpoint | waits for the disk | waits for the copy | bare loop | with one checkpoint | share of an interval |",
    "|---|---|---|---|---|---|---|",
)


def line_of(name: str, case: Case, run: Measured, interval: int) -> str:
    """A line of the table for one repeat; the fraction is the time that a checkpoint adds to `interval` bare steps."""
    share = (run.saved - run.bare) / (run.bare / case.steps * interval)
    cells = (
        name, f"{run.megabytes:.1f} MB", f"{run.waits_disk:.3f} s", f"{run.waits_copy:.3f} s",
        f"{case.steps} steps: {run.bare:.2f} s", f"{run.saved:.2f} s", f"{share:+.1%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def measure(case: Case, folder: Path) -> list[Measured]:
    """Make `REPEATS` measurements; the variants alternate, so that other load on the machine affects both."""
    with closing(make_trainer(case, folder / "policy")) as trainer:
        checkpoints = Checkpoints(folder / "checkpoints")
        train(trainer, case, steps=2)  # creates the optimizer states
        save(trainer, checkpoints)
        checkpoints.settle()
        runs = []
        for number in range(REPEATS):
            disk = seconds(lambda: save_and_wait(trainer, checkpoints))
            copy = seconds(lambda: save(trainer, checkpoints))
            checkpoints.settle()
            loops = {
                "bare": lambda: train(trainer, case, steps=case.steps),
                "saved": lambda: train_and_save(trainer, case, checkpoints, steps=case.steps),
            }
            order = list(loops) if number % 2 == 0 else list(reversed(loops))
            took = {name: seconds(loops[name]) for name in order}
            runs.append(Measured(megabytes(checkpoints), disk, copy, **took))
    return runs


def make_trainer(case: Case, folder: Path) -> LocalTrainer:
    """Open a trainer of the plain engine, whose model has random weights."""
    heads = case.hidden // 64
    shape = InitModel(
        vocab_size=VOCABULARY, hidden_size=case.hidden, layers=case.layers, heads=heads, kv_heads=heads,
        intermediate_size=case.hidden * 8 // 3, max_positions=POSITIONS,
    )  # fmt: skip
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=VOCABULARY, folder=folder)
    initialize_llama(shape, folder, seed=17)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=17)
    return LocalTrainer(spec, OptimizerConfig(), TrainerConfig(engine="torch"))


def train(trainer: LocalTrainer, case: Case, *, steps: int) -> None:
    """Take `steps` optimizer steps."""
    generator = random.Random(3)
    for _ in range(steps):
        rows = [ids([generator.randrange(10, VOCABULARY) for _ in range(case.length)]) for _ in range(case.rows)]
        trainer.forward_backward([TokenSample(row, mask([0] + [1] * (case.length - 1))) for row in rows], OBJECTIVE)
        trainer.optim_step(learning_rate=1e-5)


def train_and_save(trainer: LocalTrainer, case: Case, checkpoints: Checkpoints, *, steps: int) -> None:
    """Save, take `steps` steps, and wait for the pending write, as the next checkpoint would."""
    save(trainer, checkpoints)
    train(trainer, case, steps=steps)
    checkpoints.settle()


def save(trainer: LocalTrainer, checkpoints: Checkpoints) -> None:
    """Save as a stage does; returns when the copy is complete."""
    with checkpoints.saving(1, {}) as folder:
        trainer.save(folder)


def save_and_wait(trainer: LocalTrainer, checkpoints: Checkpoints) -> None:
    """Save, and wait until the checkpoint is complete and on the disk."""
    save(trainer, checkpoints)
    checkpoints.settle()


def seconds(work: Callable[[], object]) -> float:
    """Measure the duration of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def megabytes(checkpoints: Checkpoints) -> float:
    """Megabytes of the newest checkpoint."""
    newest = checkpoints.latest()
    return folder_bytes(newest.path) / 1e6 if newest else 0.0


if __name__ == "__main__":
    main()
