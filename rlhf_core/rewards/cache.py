"""Results of a reward by the content of what was scored, so that the same answer is not paid for twice.

A file is kept beside the shards or checkpoints of an attempt: a stage that goes on after a kill reads it again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.fingerprint import sha256_text
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
        self._known: dict[str, float | None] = _read(path) if path is not None and path.is_file() else {}

    def key(self, generation: Generation) -> str:
        """Return the key of a generation: the reward's identity, the prompt with its label, and the answer's content.

        Log-probabilities, seed and policy version do not count: an answer has its reward whoever sampled it.
        """
        prompt, completion = generation.prompt, generation.completion
        content = [
            self._identity,
            [prompt.id, prompt.source, prompt.label, [(message.role, message.content) for message in prompt.messages]],
            [completion.text, completion.finish_reason, completion.token_ids, sorted(completion.extras.items())],
            [(span.start, span.end, span.reward) for span in completion.spans],
        ]
        return sha256_text(json.dumps(content, separators=(",", ":")))

    def known(self, key: str) -> bool:
        """Return whether there is a value; None, does not apply, is one."""
        return key in self._known

    def value(self, key: str) -> float | None:
        """Return the value of a known key."""
        return self._known[key]

    def add(self, values: Mapping[str, float | None]) -> None:
        """Keep values by key."""
        with self._adding:
            self._known.update(values)
            if self._path is not None and values:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as stream:
                    # After a kill the last line may be half written: a line of its own begins what comes after it.
                    stream.write("".join(f"\n{json.dumps([key, value])}" for key, value in values.items()))


def _read(path: Path) -> dict[str, float | None]:
    """Return the values of a cache file; a line that a kill cut off is passed over."""
    known: dict[str, float | None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            key, value = json.loads(line)
        except ValueError:
            continue
        known[key] = value
    return known
