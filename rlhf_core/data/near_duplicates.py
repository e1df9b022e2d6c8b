"""Find near-duplicates by MinHash and locality-sensitive hashing (Broder 1997; Lee et al., arXiv 2107.06499)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhf_core.data.cleaning import normalize
from rlhf_core.data.formats import Example, Turns
from rlhf_core.data.validation import DropReport, Origin
from rlhf_core.types import Message

PERMUTATIONS = 128
SHINGLE = 3
"""Number of words in a shingle; a shorter text is one shingle."""


def shingles(text: str) -> set[bytes]:
    """Return the word trigrams of a normalized text.

    >>> sorted(shingles("a b c d"))
    [b'a b c', b'b c d']
    """
    words = text.split()
    starts = range(max(1, len(words) - SHINGLE + 1))
    return {" ".join(words[start : start + SHINGLE]).encode() for start in starts}


class NearDuplicates:
    """The distinct rows of one table so far; rows from the same line of a file (pairs of a ranking) never count."""

    def __init__(self, threshold: float) -> None:
        """Start with no rows; rows whose estimated similarity is `threshold` or more are near-duplicates."""
        from datasketch import MinHashLSH  # three seconds: it imports scipy, which few runs need

        self._threshold = threshold
        self._index: Any = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._rows: list[tuple[Any, Origin]] = []

    def distinct(self, examples: Sequence[Example], report: DropReport) -> list[Example]:
        """Return the examples that are not near-duplicates of earlier ones, and add the others to `report`."""
        kept = []
        for example in examples:
            found = self._similar(example)
            if found is None:
                kept.append(example)
            else:
                similarity, origin = found
                reason = f"near-duplicate: {similarity:.2f} similar to {origin.file}:{origin.line}"
                report.add(example.source, example.origin, reason)
        return kept

    def _similar(self, example: Example) -> tuple[float, Origin] | None:
        """Return the similarity and the origin of the most similar earlier row, or None after adding `example`."""
        from datasketch import MinHash

        sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch(sorted(shingles(normalize(_compared(example)))))
        # The index finds candidates with some error on both sides of the threshold, so each is compared.
        close = [
            (similarity, origin)
            for other, origin in (self._rows[place] for place in self._index.query(sketch))
            if origin != example.origin and (similarity := float(sketch.jaccard(other))) >= self._threshold
        ]
        if close:
            return max(close, key=lambda found: (found[0], found[1].file, -found[1].line))
        self._index.insert(len(self._rows), sketch)
        self._rows.append((sketch, example.origin))
        return None


def _compared(example: Example) -> Turns:
    """Return the turns of a row with their tool calls as words, without what whole sources share.

    That is system turns and the schemas of tools; a long one would make every two rows similar.
    """
    turns = (*example.prompt, *example.chosen, *example.rejected)
    own = tuple(message for message in turns if message.role != "system") or turns
    return tuple(Message(message.role, f"{message.content} {_calls(message)}") for message in own)


def _calls(message: Message) -> str:
    """Return the JSON of a turn's tool calls, or of the name of the tool whose result it is."""
    fields = json.loads(message.tool_fields) if message.tool_fields else {}
    return json.dumps({name: value for name, value in fields.items() if name != "tools"}, ensure_ascii=False)
