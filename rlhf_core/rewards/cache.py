"""Cache the values of a reward by the content of what was scored, so that no answer is paid for twice.

A file is kept beside the shards or checkpoints of an attempt: a resumed stage reads it again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.types import Generation


class ResultCache:
    """Content -> value, for one reward. `identity` says which: its code, its arguments, its version.

    With a `path` every value is appended to that file, and those of the same identity in it are known from the start.
    Several threads may add.
    """

    def __init__(self, identity: str, path: Path | None) -> None:
        self._identity = identity
        self._path = path
        self._adding = threading.Lock()
        self._known: dict[str, _Kept] = _read(path) if path is not None and path.is_file() else {}

    def key(self, generation: Generation) -> str:
        """Return the key of a generation: the reward's identity, the prompt with its label, and the answer's content.

        Log-probabilities, seed and policy version do not count: the reward of an answer does not depend on them.
        """
        prompt, completion = generation.prompt, generation.completion
        content = [
            self._identity,
            [prompt.id, prompt.source, prompt.label, [(message.role, message.content) for message in prompt.messages]]
            + ["conversational"] * prompt.conversational,
            [completion.text, completion.finish_reason, completion.token_ids, sorted(completion.extras.items())],
            [(span.start, span.end, span.reward) for span in completion.spans],
        ]
        return sha256_text(json.dumps(content, separators=(",", ":")))

    def known(self, key: str) -> bool:
        """Return whether there is a value; None, does not apply, is one."""
        return key in self._known

    def value(self, key: str) -> float | None:
        """Return the value of a known key."""
        return self._known[key][0]

    def score(self, key: str) -> float | None:
        """Return the score that was given beside the value of a known key; None if none was."""
        return self._known[key][1]

    def add(
        self, values: Mapping[str, float | None], scores: Mapping[str, float | None] = MappingProxyType({})
    ) -> None:
        """Keep values by key, and the `scores` that were given beside them."""
        kept = {key: (value, scores.get(key)) for key, value in values.items()}
        with self._adding:
            self._known.update(kept)
            if self._path is not None and kept:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as stream:
                    # After a kill the last line may be half written: a line of its own begins what comes after it.
                    stream.write("".join(f"\n{json.dumps([key, *one])}" for key, one in kept.items()))


_Kept: TypeAlias = tuple[float | None, float | None]
"""A value and the score beside it."""


def _read(path: Path) -> dict[str, _Kept]:
    """Return what a cache file holds; a line that a kill cut off is passed over."""
    known: dict[str, _Kept] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            key, value, *score = json.loads(line)  # there were no scores once
        except ValueError:
            continue
        known[key] = (value, score[0] if score else None)
    return known
