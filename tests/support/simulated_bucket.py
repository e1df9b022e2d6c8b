"""A bucket in memory for simulated processes. Each request and each response is an operation, where a fault may strike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.durability.simulated_machines import World, current
from rlhf_core.store.protocol import Conflict, Unreachable

Entry = tuple[bytes, str, float]
"""Content, version, and time of the write by the clock of the bucket."""


@dataclass
class SimulatedBucket:
    """The requests of a bucket (`rlhf_core.store.bucket.Server`)."""

    world: World
    lag_s: float = 0.0
    """How old a listing may be."""
    clock_s: float = 0.0
    """How far the clock of the bucket is ahead of the true one."""
    bad_hosts: set[str] = field(default_factory=set)
    """Hosts that may read one wrong bit per response."""
    wrong_tables: float = 0.0
    """How often a bad host reads a wrong bit in a table."""
    wrong_files: float = 0.0
    entries: dict[str, Entry] = field(default_factory=dict)
    changed: Callable[[str, bytes | None, bytes | None], None] = lambda name, before, after: None
    """Called after each change with the content before and after."""
    _past: list[tuple[float, dict[str, Entry]]] = field(default_factory=list)

    def get(self, name: str) -> Entry:
        self._operation("request get", name)
        content, version, written = self._existing(name)
        self._operation("response get", name)
        return self._received(content, self.wrong_tables), version, written

    def put(self, name: str, content: bytes, expected: str | None) -> str:
        self._operation("request put", name)
        found = self.entries.get(name)
        fits = (None if found is None else found[1]) == expected
        version = self._set(name, content) if fits else ""
        self._operation("response put", name)
        if not fits:
            raise Conflict(name)
        return version

    def list(self, prefix: str) -> Iterator[tuple[str, str, float, int]]:
        self._operation("request list", prefix)
        seen = self.entries
        if self.lag_s:
            at = self.world.now - self.world.random.choice([0.0, 0.5, 1.0]) * self.lag_s
            seen = next((state for since, state in reversed(self._past) if since <= at), {})
        self._operation("response list", prefix)
        for name, (content, version, written) in sorted(seen.items()):
            if name.startswith(prefix):
                yield name, version, written, len(content)

    def upload(self, name: str, path: Path) -> None:
        content = path.read_bytes()
        self._operation("request upload", name)
        self._set(name, content)
        self._operation("response upload", name)

    def download(self, name: str, path: Path) -> None:
        self._operation("request download", name)
        content, _, _ = self._existing(name)
        self._operation("response download", name)
        path.write_bytes(self._received(content, self.wrong_files))

    def delete(self, name: str) -> None:
        self._operation("request delete", name)
        if name in self.entries:
            self._change(name, None)
        self._operation("response delete", name)

    def touch(self, name: str) -> float:
        self._operation("request touch", name)
        self._set(name, b"")
        self._operation("response touch", name)
        return self.entries[name][2]

    def _operation(self, call: str, name: str) -> None:
        self.world.step(call, name)

    def _existing(self, name: str) -> Entry:
        if name not in self.entries:
            raise FileNotFoundError(name)
        return self.entries[name]

    def _received(self, content: bytes, wrong: float) -> bytes:
        if not content or current().process.host not in self.bad_hosts or self.world.random.random() >= wrong:
            return content
        place = self.world.random.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    def _set(self, name: str, content: bytes) -> str:
        version = f"v{next(self.world.numbers)}"
        self._change(name, (content, version, self.world.now + self.clock_s))
        return version

    def _change(self, name: str, entry: Entry | None) -> None:
        before = self.entries.get(name)
        others = {other: there for other, there in self.entries.items() if other != name}
        self.entries = others if entry is None else others | {name: entry}
        if self.lag_s:
            self._past.append((self.world.now, self.entries))
        self.changed(name, before and before[0], entry and entry[0])


def unreachable(call: str) -> Unreachable:
    return Unreachable("bucket", call, "the connection broke", "try again")
