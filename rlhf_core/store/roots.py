"""The roots of a store, which `gc` keeps with all that they were made from: pins, and what waiting runs need.

A run that waits for people may wait for longer than unused results are kept. So an open question, a stage that has halted
(people are to judge, or the time or the money was spent), and the finished stages of a run that waits are roots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.store import attempts
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.gate_decisions import ASKERS, QUESTION, Asker, GateDecisions, Question
from rlhf_core.store.index import Unreadable
from rlhf_core.store.layout import StoreLayout, fsync_path, write_json
from rlhf_core.store.leases import alone
from rlhf_core.store.typed_json import Stored, read_stored


@dataclass(frozen=True, slots=True)
class Root:
    """What is kept, by a key, the digest of an object or that of an artifact, and why."""

    target: str
    why: str


class _Pin(Stored):
    target: str
    note: str


class _Wait(Stored):
    run: str
    keys: list[str]


def roots_of(layout: StoreLayout) -> tuple[list[Root], list[Unreadable]]:
    """Return all roots, and the files of roots that cannot be read."""
    found, unreadable = _pins(layout)
    roots = [Root(pin.target, f"pinned ({pin.note})" if pin.note else "pinned") for pin in found]
    for path in sorted(layout.waits.glob("*.json")):
        wait = read_stored(path, _Wait)
        if wait is not None:
            roots += [Root(key, f"the run {wait.run} waits") for key in wait.keys]
        elif path.exists():
            unreadable.append(Unreadable(path, "does not name what a waiting run needs"))
    for name, kind in ((QUESTION, Question), (ASKERS, Asker)):
        damaged = (path for path in sorted(layout.gates.glob(f"*/{name}")) if read_stored(path, kind) is None)
        unreadable += [Unreadable(path, "is damaged, until its run asks again") for path in damaged if path.exists()]
    try:
        roots += _asked_about(layout)
    except ArtifactError as error:
        unreadable.append(Unreadable(layout.gates, f"has an answer that cannot be read ({error})"))
    for folder in sorted(layout.attempts.glob("*")):
        past = attempts.history(folder)
        if past and past[-1].halted:
            why = "a stage that has halted needs it"
            roots += [Root(name, why) for name in (folder.name, *map(object_of, past[-1].inputs))]
    return roots, unreadable


def _asked_about(layout: StoreLayout) -> Iterator[Root]:
    for request in GateDecisions(layout).requests():
        if request.answer is None:
            runs = ", ".join(dict.fromkeys(asker.run for asker in request.askers))
            yield Root(request.question.digest, f"gate {request.question.gate} of {runs} waits for an answer")


def object_of(uri: str) -> str:
    """Return the digest of the object that a uri belongs to; a digest or a key is returned as it is."""
    return uri.removeprefix("store://").partition("/")[0]


# ---------------------------------------------------------------- runs that wait


def note_wait(layout: StoreLayout, run: str, keys: Iterable[str]) -> None:
    """Keep the results of these keys until the run of this name has completed (`forget_wait`)."""
    write_json(_wait_path(layout, run), {"run": run, "keys": list(keys)})


def forget_wait(layout: StoreLayout, run: str) -> None:
    """Keep no more what the run of this name needed while it waited."""
    _wait_path(layout, run).unlink(missing_ok=True)


def _wait_path(layout: StoreLayout, run: str) -> Path:
    return layout.waits / f"{sha256_text(run)}.json"


# ---------------------------------------------------------------- pins


def pin(layout: StoreLayout, target: str, note: str) -> None:
    """Protect the object or record that `target` (a digest, a key or a uri) names from `gc`."""
    name = object_of(target)
    with alone(layout.leases):  # `gc` removes nothing meanwhile
        if not (layout.object(name).is_dir() or layout.key(name).is_file()):
            raise ArtifactError(
                explain("pin", target, "is neither an object nor a key of this store", "see `rlhf store ls`")
            )
        write_pin(layout, name, note)


def write_pin(layout: StoreLayout, name: str, note: str) -> None:
    """Write the pin of a digest or a key; the caller holds the lock of the store."""
    write_json(_pin_path(layout, name), {"target": name, "note": note})


def unpin(layout: StoreLayout, target: str) -> None:
    """Remove a pin. Raises ArtifactError if there is none."""
    path = _pin_path(layout, object_of(target))
    try:
        path.unlink()
    except FileNotFoundError:
        remedy = f"the pins are {sorted(pins(layout))}"
        raise ArtifactError(explain("unpin", target, "is not pinned", remedy)) from None
    with suppress(OSError):  # a pin that a power cut brings back keeps too much
        fsync_path(path.parent)


def pins(layout: StoreLayout) -> dict[str, str]:
    """Return the notes of all pins by target."""
    return {pin.target: pin.note for pin in _pins(layout)[0]}


def _pins(layout: StoreLayout) -> tuple[list[_Pin], list[Unreadable]]:
    found, unreadable = [], []
    for path in sorted(layout.pins.glob("*.json")):
        read = read_stored(path, _Pin)
        if read is not None:
            found.append(read)
        elif path.exists():
            unreadable.append(Unreadable(path, "is not a pin"))
    return found, unreadable


def _pin_path(layout: StoreLayout, name: str) -> Path:
    return layout.pins / f"{sha256_text(name)}.json"
