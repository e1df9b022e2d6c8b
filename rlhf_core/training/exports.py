"""Export the model on the way, after every k-th step, in the layout of Hugging Face, in addition to the last policy."""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.interfaces import Trainer

EXPORTS = "exports"
NEXT = "next"


def export_folder(artifact: Path, step: int) -> Path:
    """The folder of the model after `step` in the artifact of a training.

    >>> export_folder(Path("ppo"), 20).as_posix()
    'ppo/exports/step_000020'
    """
    return artifact / EXPORTS / f"step_{step:06d}"


@dataclass(frozen=True)
class Exports:
    """The models after `steps`, kept in the folder `work` until the end; a resumed training keeps earlier ones."""

    steps: Collection[int]
    work: Path

    def after_step(self, step: int, trainer: Trainer) -> None:
        """Export the model if `step` is an export step. A folder appears as a whole or not at all."""
        if step not in self.steps:
            return
        folder = export_folder(self.work, step)
        made = folder.with_name(NEXT)
        shutil.rmtree(made, ignore_errors=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        trainer.export(made)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed before its next checkpoint
        made.rename(folder)

    def deliver(self, out: Path) -> None:
        """Copy the models into the artifact of the training."""
        for step in self.steps:
            shutil.copytree(export_folder(self.work, step), export_folder(out, step), copy_function=shutil.copyfile)
