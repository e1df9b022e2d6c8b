"""Token sequences of a training step as flat NumPy arrays, from the sampler's answers to the loss.

Legend: N sequences, S tokens of all of them together. Sequence n has the tokens `offsets[n]` to `offsets[n + 1]`.

Pickle (protocol 5) and Ray move such arrays as buffers. Workers on the same node map them without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.columns import Column
from rlhf_core.errors import DataError

Indices: TypeAlias = Sequence[int] | NDArray[np.int64]
ROUTED_EXPERTS = "routed_experts"
"""The only field that is not float32: the experts of each token in all layers, int16 [S, layers * experts per token], and
-1 where the sampler recorded none."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Sequences:
    """N sequences: token ids, the mask of trained tokens, and further values of every token by name.

    >>> two = Sequences.from_token_ids([(5, 7, 2), (4,)])
    >>> two.token_ids.tolist(), two.offsets.tolist(), two.select([1, 0]).token_ids.tolist()
    ([5, 7, 2, 4], [0, 3, 4], [4, 5, 7, 2])
    """

    token_ids: NDArray[np.int32]
    """[S]"""
    loss_mask: NDArray[np.uint8]
    """[S], 1 for a trained token: sampled by the policy, or in a demonstration's answer."""
    offsets: NDArray[np.int64]
    """[N + 1]"""
    fields: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> float32 [S]: `rollout_logprobs`, `old_logprobs`, `ref_logprobs`, `old_values`, `advantages`, `returns`,
    `labels`; and `routed_experts`."""

    def __post_init__(self) -> None:
        counts = {"token_ids": len(self.token_ids), "loss_mask": len(self.loss_mask)}
        counts |= {name: len(values_S) for name, values_S in self.fields.items()}
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or (self.lengths < 0).any() or set(counts.values()) != {last}:
            rule = "offsets increase, and every field has one entry per token; align them first"
            raise ValueError(f"Sequences: {counts}, offsets from {first} to {last}: {rule}")

    @classmethod
    def from_token_ids(cls, rows: Sequence[Any]) -> Sequences:
        """Concatenate sequences of token ids, none of which is trained on."""
        token_ids, lengths = join_rows("i", rows)
        return cls(token_ids, np.zeros(len(token_ids), np.uint8), offsets_of(lengths))

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Sequences:
        """Concatenate dataclasses with `token_ids`, `loss_mask` and further fields that have one number per token.

        Raises DataError if they do not all have the same fields.
        """
        names = tuple(samples[0].__dataclass_fields__) if samples else ()
        for row, one in enumerate(samples):
            for name in sorted(set(names).symmetric_difference(one.__dataclass_fields__)):
                rule, remedy = f"only some of the samples have the field {name}", "give all of them the same fields"
                raise DataError(f"samples[{row}]", type(one).__name__, rule, remedy)
        return replace(
            cls.from_token_ids([one.token_ids for one in samples]),
            loss_mask=join_rows("B", [one.loss_mask for one in samples])[0],
            fields={name: join_rows("f", [getattr(one, name) for one in samples])[0] for name in names[2:]},
        )

    @classmethod
    def of_answers(cls, answers: Sequence[Any]) -> Sequences:
        """Concatenate the prompts and completions of generations or rollouts.

        The mask has the sampled tokens, and the field is `rollout_logprobs`; also `routed_experts` if any were recorded.
        """
        completions = [one.completion for one in answers]
        parts = [part for one in answers for part in (one.prompt_ids, one.completion.token_ids)]
        token_ids, lengths = join_rows("i", parts)
        bounds = offsets_of(lengths)
        loss_mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(answers)), lengths)
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[loss_mask.view(bool)] = join_rows("f", [one.logprobs for one in completions])[0]
        for start, one in zip(bounds[1::2].tolist(), completions, strict=True):
            if one.spans:  # an environment has written some of it
                loss_mask[start : start + len(one.token_ids)] = one.action_mask.data
        fields: dict[str, NDArray[Any]] = {"rollout_logprobs": logprobs}
        if any(one.routed_experts for one in completions):
            fields[ROUTED_EXPERTS] = _routed_experts(completions, bounds[::2])
        return cls(token_ids, loss_mask, bounds[::2].copy(), fields)

    @classmethod
    def of_arrays(cls, arrays: Sequence[NDArray[Any]], names: Sequence[str]) -> Sequences:
        """The inverse of `arrays`, with the names of the fields."""
        token_ids, loss_mask, offsets, *values = arrays
        return cls(token_ids, loss_mask, offsets, dict(zip(names, values, strict=True)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Token ids, mask, offsets, and the values of each field."""
        return [self.token_ids, self.loss_mask, self.offsets, *self.fields.values()]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence [N]."""
        return np.diff(self.offsets)

    def split(self, values_S: NDArray[Any]) -> list[NDArray[Any]]:
        """Views of each sequence's values."""
        if len(values_S) != self.offsets[-1]:
            rule = f"{len(values_S)} values for rows of {self.offsets[-1]} in all"
            raise ValueError(f"{rule}; give each row its values")
        return [values_S[start:end] for start, end in pairwise(self.offsets.tolist())]

    def select(self, rows: Indices) -> Sequences:
        """Copy the sequences of these numbers, in this order."""
        numbers = np.asarray(rows, np.int64)
        copy = partial(copy_rows, offsets=self.offsets, rows=numbers)
        fields = {name: copy(values_S) for name, values_S in self.fields.items()}
        return Sequences(copy(self.token_ids), copy(self.loss_mask), offsets_of(self.lengths[numbers]), fields)

    def with_fields(self, **added: NDArray[Any]) -> Sequences:
        """The same sequences with more fields [S]."""
        return replace(self, fields={**self.fields, **added})

    def select_fields(self, *names: str) -> Sequences:
        """The same sequences with only these fields. Names of missing fields are ignored."""
        return replace(self, fields={name: self.fields[name] for name in names if name in self.fields})


@dataclass(frozen=True, slots=True, eq=False)
class Subset:
    """Row numbers of some sequences. A worker copies these rows from arrays that it maps."""

    sequences: Sequences
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.sequences.lengths[self.rows]

    def copy(self) -> Sequences:
        """These sequences in arrays that nobody else uses."""
        return self.sequences.select(self.rows)


Samples: TypeAlias = Sequences | Subset | Sequence[Any]
"""A batch: flat arrays, or one object for each sample or pair.

SFT, reward models, DPO and distillation pass objects. They read a data set once and draw each batch from its rows, so no
arrays come from workers, and `collate` joins the few rows of a micro-batch. As `Sequences`, a pair would be two of them
with arrays per pair (margins, sums of the reference), and a teacher's distributions would be no float32 per token.
"""


def offsets_of(lengths: Indices) -> NDArray[np.int64]:
    """Where each of N sequences begins in flat arrays, and where the last one ends [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def copy_rows(values_S: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Copy the values of the rows of these numbers, in this order. Negative numbers count from the end, as in a list."""
    spans = map(slice, offsets[:-1][rows].tolist(), offsets[1:][rows].tolist())
    return np.concatenate([values_S[:0], *map(values_S.__getitem__, spans)])


def _routed_experts(completions: Sequence[Any], offsets: NDArray[np.int64]) -> NDArray[np.int16]:
    """The experts of the tokens of prompts and completions [S, W], -1 for completions without a record."""
    rows = [
        np.asarray(one.routed_experts.data).reshape(length, -1)
        for one, length in zip(completions, np.diff(offsets).tolist(), strict=True)
    ]
    width = max(row.shape[1] for row in rows)
    return np.concatenate([row if row.size else np.full((len(row), width), -1, np.int16) for row in rows])


def join_rows(kind: str, rows: Sequence[Any]) -> tuple[NDArray[Any], list[int]]:
    """Concatenate columns of a kind, or other sequences of numbers, to one array [S]; also the length of each."""
    # A function call for each row would take longer than the copy of a short one.
    views = [row.data if type(row) is Column and row.data.format == kind else Column(kind, row).data for row in rows]
    return np.frombuffer(b"".join(views), kind), list(map(len, views))


def take(samples: Any, rows: Indices) -> Any:
    """Copy the samples of these numbers, in this order: `Sequences`, or a list."""
    return samples.select(rows) if isinstance(samples, Sequences) else [samples[at] for at in rows]
