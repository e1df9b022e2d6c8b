"""References that are made of the policy: without its adapters, or following it.

A moving one takes over the policy's weights, or a part of them, every n steps.

TR-DPO (arXiv 2404.09656): with `mix` = 1 the reference is the policy at that step (hard update), below 1 the weighted
mean of the two (soft update, eq. 4). The weights lie in a folder of the stage, a mean in float32 for models of any
type: a step of a small `mix` is lost in half precision, where the folder is rounded when it is loaded. Checkpoints have
a copy of it.
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_core.config.policy import ReferenceSync
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec, Runtime, Trainer
from rlhf_core.sequences import Sequences, Subset

IN_CHECKPOINT = "reference"
"""Folder of a checkpoint; missing until the reference has moved."""


class AdaptersOff:
    """The reference of a policy that trains adapters: the policy without them, so no separate model is needed."""

    def __init__(self, policy: Trainer) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequences | Subset, *, temperature: float) -> NDArray[np.float32]:
        """Compute the log-probs of the policy before training."""
        return self._policy.logprobs(samples, temperature=temperature, adapters=False)


class MovingReference:
    """Leases the reference anew whenever its weights change; enter it with `leases`, which end the last lease."""

    def __init__(
        self, runtime: Runtime, initial: Path, work: Path, sync: ReferenceSync, *, seed: int, leases: ExitStack
    ) -> None:
        self._runtime = runtime
        self._initial = initial
        self._folder = work / "reference"
        self._sync = sync
        self._seed = seed
        self._lease = leases.enter_context(ExitStack())
        self._trainer = self._opened(initial)
        self._moved = False

    def logprobs(self, samples: Sequences | Subset, *, temperature: float) -> NDArray[np.float32]:
        """Compute the log-probs of the present reference."""
        return self._trainer.logprobs(samples, temperature=temperature)

    def after_step(self, step: int, policy: Trainer) -> None:
        """Take over the weights of `policy` if `step` updates are a multiple of `every`."""
        if step % self._sync.every:
            return
        made = self._folder.with_name("reference-next")
        shutil.rmtree(made, ignore_errors=True)
        policy.export(made)
        if self._sync.mix < 1:
            mix_weights(made, self._folder if self._moved else self._initial, part=self._sync.mix)
        shutil.rmtree(self._folder, ignore_errors=True)
        made.rename(self._folder)
        self._moved = True
        self._trainer = self._opened(self._folder)

    def save(self, checkpoint: Path) -> None:
        """Keep the weights in a checkpoint, unless they are still the initial ones."""
        if self._moved:
            shutil.copytree(self._folder, checkpoint / IN_CHECKPOINT, copy_function=_link)

    def load(self, checkpoint: Path) -> None:
        """Restore the weights of a checkpoint."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._moved = (checkpoint / IN_CHECKPOINT).is_dir()
        if self._moved:
            shutil.copytree(checkpoint / IN_CHECKPOINT, self._folder, copy_function=_link)
        self._trainer = self._opened(self._folder if self._moved else self._initial)

    def _opened(self, folder: Path) -> Trainer:
        self._lease.close()  # the old weights first: two references may not fit
        spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=self._seed)
        return self._lease.enter_context(self._runtime.trainer("reference", spec, None))


def mix_weights(folder: Path, other: Path, *, part: float) -> None:
    """Replace each tensor of `folder` by part * tensor + (1 - part) * its counterpart in `other`: arXiv 2404.09656.

    Computed and stored in float32 where a tensor has fractions. ConfigError where `other` has other tensors.
    """
    files = {name: file for file in sorted(other.glob("*.safetensors")) for name in _names(file)}
    for file in sorted(folder.glob("*.safetensors")):
        mixed: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {"format": "pt"}
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                mine = tensors.get_tensor(name)
                theirs = _tensor(files, name, mine.shape)
                mean = torch.lerp(theirs.float(), mine.float(), part)  # theirs + part (mine - theirs), eq. 4
                mixed[name] = mean if mine.is_floating_point() else mean.to(mine.dtype)
        # A new file: the old one may be the target of a link.
        file.unlink()
        save_file(mixed, file, metadata=metadata)


def _tensor(files: dict[str, Path], name: str, shape: torch.Size) -> torch.Tensor:
    rule = "the reference has no such tensor of that shape, so the two cannot be averaged"
    remedy = "use a reference of the policy's architecture, or set kl.reference_sync.mix = 1"
    if name not in files:
        raise ConfigError("ppo.kl.reference_sync", name, rule, remedy)
    with safe_open(files[name], framework="pt") as tensors:
        found: torch.Tensor = tensors.get_tensor(name)
    if found.shape != shape:
        raise ConfigError("ppo.kl.reference_sync", f"{name} {tuple(shape)}", rule, remedy)
    return found


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links: files of a reference are never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
