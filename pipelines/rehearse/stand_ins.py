"""Functions of a rehearsal in place of people, and to tell answers of equal reward apart."""

import hashlib
from collections.abc import Sequence

from rlhf_core.types import Generation


def break_ties(generations: Sequence[Generation]) -> list[float]:
    """A number in [0, 1) that depends only on the text of each answer."""
    texts = (generation.completion.text for generation in generations)
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48 for text in texts]
