"""Who did what in a store, and when: one small file per deed, `roots/audit/<time>-<random>.json`, never changed or removed.

Pins, their removal and collections of garbage are written here. Decisions at gates are kept with their question, and moves
of a champion in the registry, with the same facts; `rlhf audit` shows all of them.
"""

import secrets
from datetime import UTC, datetime

from rlhf_core.processes.identity import user_name
from rlhf_core.store.gate_decisions import GateDecisions
from rlhf_core.store.layout import StoreLayout, write_json
from rlhf_core.store.typed_json import Stored, read_stored


class Deed(Stored):
    """What a person did. `at` is the time in ISO 8601 in UTC."""

    at: str
    by: str
    did: str
    """`pin`, `unpin`, `gc`, `approve`, `reject`, `publish` or `rollback`."""
    to: str
    """Digest, gate or model."""
    why: str = ""


def note(layout: StoreLayout, did: str, to: str, why: str = "") -> None:
    """Write down what the user of this process has just done."""
    now = datetime.now(UTC)
    deed = Deed(at=now.isoformat(timespec="seconds"), by=user_name(), did=did, to=to, why=why)
    name = f"{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{secrets.token_hex(3)}.json"
    write_json(layout.audit / name, deed.model_dump())


def deeds(layout: StoreLayout) -> list[Deed]:
    """Return what was done in a store, decisions at gates included, oldest first."""
    read = (read_stored(path, Deed) for path in layout.audit.glob("*.json"))
    found = [deed for deed in read if deed is not None]
    for request in GateDecisions(layout).requests():
        to = f"{request.question.gate} {request.question.digest[:12]}"
        found += [Deed(at=one.at, by=one.by, did=one.answer, to=to, why=one.reason) for one in request.answers]
    return sorted(found, key=lambda deed: deed.at)
