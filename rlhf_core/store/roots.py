"""The roots of a store, which a collection keeps with everything that they were made from: pins, and the needs of waiting runs.

A run that waits for people may wait for longer than unused results are kept. So an open question, a stage that has
halted (for judgments of people, or out of time or budget), and the finished stages of a run that waits are roots.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import object_of
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import DamagedTable, Store, StoredTable, discard, update
from rlhf_core.store.typed_json import Stored, stored_in

_WHOLE = re.compile("[0-9a-f]{64}")
"""A whole digest or key, not the beginning of one."""


@dataclass(frozen=True, slots=True)
class Root:
    """The digest or key that is kept, with the reason."""

    target: str
    why: str


class _Pin(Stored):
    target: str
    note: str

    def roots(self) -> list[Root]:
        return [Root(self.target, f"pinned ({self.note})" if self.note else "pinned")]


class _Wait(Stored):
    run: str
    keys: list[str]

    def roots(self) -> list[Root]:
        return [Root(key, f"the run {self.run} waits") for key in self.keys]


class _Asker(Stored):
    run: str


class _Question(Stored):
    gate: str
    digest: str


class _Gate(Stored):
    """The part of a question (`rlhf_core.stage.gate_decisions`) that decides whether its artifact is kept."""

    question: _Question
    askers: dict[str, _Asker]
    answers: list[dict[str, Any]]

    def roots(self) -> list[Root]:
        runs = ", ".join(sorted({one.run for one in self.askers.values()}))
        why = f"gate {self.question.gate} of {runs} waits for an answer"
        return [Root(self.question.digest, why)] if runs and not self.answers else []


_KINDS: dict[str, tuple[type[_Pin | _Wait | _Gate], str]] = {
    "pins/": (_Pin, "is not a pin"),
    "waits/": (_Wait, "does not name the needs of a waiting run"),
    "gates/": (_Gate, "is not a question with its answers"),
}
"""Tables that keep something, and the rule for an unreadable one."""


def roots_of(store: Store, keys: Iterable[StoredTable]) -> tuple[list[Root], list[str]]:
    """All roots, and a description of each table whose root cannot be read. `keys`: the tables of all keys."""
    roots: list[Root] = []
    damaged: list[DamagedTable] = []
    unreadable = []
    for prefix, (kind, rule) in _KINDS.items():
        for table in store.tables(prefix, damaged=damaged):
            found = stored_in(table, kind)
            if found is None:
                unreadable.append(f"{table.name} {rule}")
            else:
                roots += found.roots()
    for table in keys:
        past = table.value.get("attempts") or [{}]
        if past[-1].get("halted"):
            why = "a stage that has halted needs it"
            key = table.name.rpartition("/")[2]
            roots += [Root(name, why) for name in (key, *map(object_of, past[-1].get("inputs", ())))]
    return roots, [*unreadable, *map(str, damaged)]


# ---------------------------------------------------------------- runs that wait


def note_wait(store: Store, run: str, keys: Iterable[str]) -> None:
    """Keep the results of these keys until the run of this name has completed (`forget_wait`)."""
    wait = _Wait(run=run, keys=list(keys)).model_dump()
    update(store, f"waits/{sha256_text(run)}", lambda _: wait)


def forget_wait(store: Store, run: str) -> None:
    """Release the objects that the run of this name kept while it waited."""
    discard(store, f"waits/{sha256_text(run)}")


# ---------------------------------------------------------------- pins


def pin(store: Store, target: str, note: str) -> None:
    """Protect the object or record that `target` (a digest, a key or a uri) names from collections."""
    name = object_of(target)
    refers = [name] if _WHOLE.fullmatch(name) and store.has(name) else []
    found = store.read(name_of(name)) if _WHOLE.fullmatch(name) else None
    record = None if found is None else found.value.get("record")
    if not refers and record is None:
        rule, remedy = "is neither an object nor a key of this store", "see the digests of `rlhf store ls --json`"
        raise ArtifactError("pin", target, rule, remedy)
    if record is not None:
        refers = [record["object"]]
    value = _Pin(target=name, note=note).model_dump()
    update(store, _pin(name), lambda _: value, refers=refers)


def unpin(store: Store, target: str) -> None:
    """Remove a pin. Raises ArtifactError if the target is not pinned."""
    name = _pin(object_of(target))
    if store.read(name) is None:
        remedy = f"the pins are {', '.join(sorted(pins(store))) or 'none'}"
        raise ArtifactError("unpin", target, "is not pinned", remedy)
    discard(store, name)


def pins(store: Store) -> dict[str, str]:
    """Target and note of each pin."""
    found = [_Pin.model_validate(table.value) for table in store.tables("pins/")]
    return {pin.target: pin.note for pin in found}


def _pin(name: str) -> str:
    return f"pins/{sha256_text(name)}"
