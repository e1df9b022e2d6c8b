"""Merge policies that have the same start into one: tensor by tensor on the CPU, in float32."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_core.errors import ConfigError
from rlhf_core.models.loading import shared_vocabulary
from rlhf_core.stage.context import StageContext
from rlhf_core.store.layout import MANIFEST
from rlhf_core.types import PolicyRef, derive_seed
from stages.merge import MergeConfig

WEIGHTS = "*.safetensors"


def run(
    config: MergeConfig, *, policies: dict[str, PolicyRef], base: PolicyRef | None = None, context: StageContext
) -> PolicyRef:
    """Merge `policies`; the first one determines dtype, tokenizer and chat template.

    Raises ConfigError if their shapes differ.
    """
    folders = {name: context.path(policies[name]) for name in sorted(config.weights)}  # keys are in no order
    start = None
    if config.uses_base:
        if base is None:
            raise ConfigError("merge.base", None, f"{config.method.type} merges changes from it", "name a policy")
        start = context.path(base)
        shared_vocabulary(next(iter(folders.values())), start, key=f"{context.label}.base")
    first = next(iter(folders.values()))
    for name, folder in folders.items():
        shared_vocabulary(first, folder, key=f"{context.label}.weights.{name}")
    counts = write_merged(config, folders, start, context)
    for path in first.iterdir():
        if path.is_file() and not path.match(WEIGHTS) and path.name != MANIFEST:
            shutil.copyfile(path, context.out / path.name)
    return context.commit(PolicyRef, metrics=counts)


def write_merged(
    config: MergeConfig, folders: Mapping[str, Path], start: Path | None, context: StageContext
) -> dict[str, float]:
    """Write a file of merged weights for each file of the first policy, and count tensors and parameters."""
    shards = sorted(next(iter(folders.values())).glob(WEIGHTS))
    tensors, parameters = 0, 0
    with ExitStack() as files:
        opened = {name: Opened(name, folder, files) for name, folder in folders.items()}
        first = next(iter(opened.values()))
        base = None if start is None else Opened("base", start, files)
        for other in (*opened.values(), *([base] if base else [])):
            other.check_like(first)
        for number, shard in enumerate(shards):
            merged = {name: one_tensor(config, name, opened, base, context.seed) for name in first.names(shard)}
            save_file(merged, context.out / shard.name, metadata={"format": "pt"})
            tensors += len(merged)
            parameters += sum(tensor.numel() for tensor in merged.values())
            context.progress(number + 1, len(shards), shard.name)
    return {"tensors": float(tensors), "parameters": float(parameters)}


def one_tensor(
    config: MergeConfig, name: str, opened: Mapping[str, Opened], base: Opened | None, seed: int
) -> torch.Tensor:
    """Merge one tensor, in the dtype of the first policy; integer tensors must be equal in all policies."""
    values = {policy: files.tensor(name) for policy, files in opened.items()}
    first = next(iter(values.values()))
    if not first.is_floating_point():
        for policy, value in values.items():
            if not torch.equal(first, value):
                raise ConfigError(f"merge.weights.{policy}", name, "differs and is not a number", "leave it out")
        return first
    models = [value.float() for value in values.values()]
    weights = [config.weights[policy] for policy in values]
    start = None if base is None else base.tensor(name).float()
    merged: torch.Tensor = config.method.merged(models, weights, start, derive_seed(seed, "merge", name))
    made = merged.to(first.dtype).contiguous()
    if not made.isfinite().all():
        rule = f"the merged values are not finite in {first.dtype}"
        raise ConfigError(
            "merge.weights", name, rule, "lower the weights or method.scale, or leave out a policy of such values"
        )
    return made


class Opened:
    """The weights of a policy, in one or several files, read one by one."""

    def __init__(self, policy: str, folder: Path, leases: ExitStack) -> None:
        self._policy = policy
        self._files: dict[Path, Any] = {
            path: leases.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob(WEIGHTS))
        }
        self._home = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    def names(self, shard: Path) -> list[str]:
        """Names of the tensors in a file."""
        return list(self._files[shard].keys())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        return self._home[name].get_tensor(name)

    def shape(self, name: str) -> list[int] | None:
        """Shape of a tensor; None if no file has this name."""
        return self._home[name].get_slice(name).get_shape() if name in self._home else None

    def check_like(self, first: Opened) -> None:
        """Raise ConfigError unless this policy has the tensors of `first`, in the same shapes."""
        for name in first._home.keys() | self._home.keys():
            theirs, ours = first.shape(name), self.shape(name)
            if ours != theirs:
                rule = f"{name} has shape {ours}, and {theirs} in {first._policy}"
                raise ConfigError("merge.weights", self._policy, rule, "merge policies of one architecture")
