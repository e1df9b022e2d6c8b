"""Pack requests and completions for messages to and from a sampling worker.

A request becomes a plain tuple, and the numbers of all completions become two arrays. Pickling each object separately
would take most of the time that the driver needs to receive short answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.sequences import join_rows, offsets_of
from rlhf_core.types import NO_EXPERTS, Column, Completion, SamplingRequest

PackedCompletions: TypeAlias = tuple[
    NDArray[np.int32], NDArray[np.float32], NDArray[np.int16], list[int], list[int], list[tuple[Any, ...]]
]
"""Token ids [S], log-probs [S], routed experts, the lengths of the first two and of the third of each completion [N], and
its other fields [N]."""
PackedRequest: TypeAlias = tuple[Column[int], int, int, bool]
pack_request = attrgetter(*(one.name for one in fields(SamplingRequest)))
_OTHERS = attrgetter(*(one.name for one in fields(Completion)[2:-1]))


def pack_completions(completions: Sequence[Completion]) -> PackedCompletions:
    token_ids, lengths = join_rows("i", [one.token_ids for one in completions])
    logprobs, _ = join_rows("f", [one.logprobs for one in completions])
    experts, counts = join_rows("h", [one.routed_experts for one in completions])
    return token_ids, logprobs, experts, lengths, counts, list(map(_OTHERS, completions))


def unpack_completions(packed: PackedCompletions) -> list[Completion]:
    """The inverse of `pack_completions`. The numbers of a completion are views if Ray has mapped the arrays, which are then read-only."""
    token_ids, logprobs, experts, lengths, counts, others = packed
    ids, values, chosen = Column[int]("i", token_ids), Column[float]("f", logprobs), Column[int]("h", experts)
    recorded: Iterable[Column[int]] = repeat(NO_EXPERTS, len(others))  # a slice of nothing for each answer takes time
    if len(experts):
        recorded = [chosen[start:end] for start, end in pairwise(offsets_of(counts).tolist())]
    rows = zip(pairwise(offsets_of(lengths).tolist()), others, recorded, strict=True)
    return [Completion(ids[start:end], values[start:end], *(*rest, one)) for (start, end), rest, one in rows]
