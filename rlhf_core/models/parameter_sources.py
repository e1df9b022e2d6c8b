"""Locate the elements of each parameter in the safetensors files of a checkpoint, so that a rank can read a range of them.

transformers renames and joins tensors when it loads a checkpoint: separate experts become one stack, for example. Its
own rules (`transformers.conversion_mapping`) define which tensors of the files form which parameter. A parameter that
consists of stacks and concatenations can be read range by range. Any other parameter has no source here.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

Shape = tuple[int, ...]


class OpenFiles(ExitStack):
    """Safetensors files that are opened once each: opening one parses its whole header. Use it in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def __call__(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._files[file]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    file: Path
    name: str
    shape: Shape

    def read(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        """Read the elements from `begin` to `end` of the flattened tensor, in the dtype of the file."""
        return _read_range(files(self.file).get_slice(self.name), self.shape, begin, end)


@dataclass(frozen=True)
class JoinedTensors:
    """Tensors that follow one another along an axis: gate and up projection, or experts along a new first axis.

    `sizes` has the number of consecutive elements of each in the flattened parameter, where they take turns.
    """

    parts: tuple["ParameterSource", ...]
    sizes: tuple[int, ...]
    shape: Shape

    @classmethod
    def stack(cls, parts: Sequence["ParameterSource"]) -> "JoinedTensors":
        shape = parts[0].shape
        return cls(tuple(parts), (torch.Size(shape).numel(),) * len(parts), (len(parts), *shape))

    @classmethod
    def concatenate(cls, parts: Sequence["ParameterSource"], dim: int) -> "JoinedTensors":
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return cls(tuple(parts), tuple(torch.Size(part.shape[dim:]).numel() for part in parts), tuple(shape))

    def read(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        """Read the elements from `begin` to `end` of the flattened parameter."""
        turn, found = sum(self.sizes), []
        for number in range(begin // turn, -(-end // turn)):
            at = number * turn
            for part, size in zip(self.parts, self.sizes, strict=True):
                low, high, offset = max(begin, at), min(end, at + size), number * size - at
                if low < high:
                    found.append(part.read(files, low + offset, high + offset))
                at += size
        return found[0] if len(found) == 1 else torch.cat(found)


ParameterSource: TypeAlias = StoredTensor | JoinedTensors


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor in the safetensors files of `folder`, by its name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))
    return found


def find_sources(model: Any, folder: Path) -> dict[str, ParameterSource]:
    """Find the source of each weight of `model` in the files of `folder`, by the rules of `from_pretrained`.

    Like `from_pretrained`, notes the rules that matched on the model, so that an export undoes them. This mirrors the first
    half of `transformers.core_model_loading.convert_and_load_state_dict_in_model`, which reads every tensor whole.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    stored = find_tensors(folder)
    sources: dict[str, ParameterSource] = {}
    collected: dict[str, list[tuple[str, StoredTensor]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state and pattern is None:
            sources[name] = stored[key]
        elif name in state and pattern is not None:
            collected.setdefault(name, []).append((pattern, stored[key]))
    for name, tensors in collected.items():
        if source := _by_range(by_pattern[tensors[0][0]], tensors):
            sources[name] = source
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return sources


def _by_range(converter: WeightConverter, tensors: Sequence[tuple[str, StoredTensor]]) -> ParameterSource | None:
    """The source of the only parameter that `converter` makes, or None if it does more than stack and concatenate."""
    groups: dict[str, list[ParameterSource]] = {pattern: [] for pattern in converter.source_patterns}
    for pattern, tensor in tensors:
        groups[pattern].append(tensor)
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            groups = {pattern: [JoinedTensors.stack(parts)] for pattern, parts in groups.items()}
        elif isinstance(operation, Concatenate):
            # In the order of the patterns, as `Concatenate.convert` does.
            groups = {"": [JoinedTensors.concatenate([*chain(*groups.values())], operation.dim)]}
        else:
            return None
    made = [*chain(*groups.values())]
    return made[0] if len(made) == 1 else None


WHOLE_ROW = 2**16
"""Elements up to which a row of the first axis is read whole: a slice takes 0.1 ms, however small it is."""


def _read_range(tensor: Any, shape: Shape, begin: int, end: int, rows: tuple[slice, ...] = ()) -> Tensor:
    """Read a range of a `safe_open` slice, which is sliced along axes: `rows` of the first ones, and `shape` are the others.

    A row of a stack is a whole expert, of which only the needed part is read.
    """
    width = torch.Size(shape[1:]).numel()
    first, last = begin // width, -(-end // width)
    if width > WHOLE_ROW:
        spans = [(row, max(begin - row * width, 0), min(end - row * width, width)) for row in range(first, last)]
        return torch.cat(
            [_read_range(tensor, shape[1:], low, high, (*rows, slice(row, row + 1))) for row, low, high in spans]
        )
    found: Tensor = (tensor[(*rows, slice(first, last))] if shape else tensor[...]).reshape(-1)
    return found[begin - first * width : end - first * width]
