"""Sequences in Ray's object store, each array once. Workers on the same node map them without a copy."""

from typing import Any, NamedTuple

from rlhf_core.runtime.ray_settings import ray
from rlhf_core.sequences import Sequences


class SharedSequences(NamedTuple):
    """Where the arrays of `Sequences` are: token ids, mask, offsets, and the fields of these names."""

    places: list[tuple[Any, int]]
    """A reference to a list of arrays, and which of them it is."""
    names: tuple[str, ...]

    def map(self) -> Sequences:
        """The sequences, whose arrays cannot be written to."""
        lists = ray.get([ref for ref, _ in self.places])
        arrays = [each[at] for each, (_, at) in zip(lists, self.places, strict=True)]
        return Sequences.of_arrays(arrays, self.names)
