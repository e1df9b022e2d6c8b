"""Log of people's actions in a store: one table per deed, `audit/<time>-<random>`, never changed or removed.

Pins, their removal and collections of garbage are written here. Decisions at gates are kept with their question, and moves
of a champion in the registry, with the same facts; `rlhf audit` shows all of them.
"""

import secrets
from datetime import UTC, datetime

from rlhf_core.processes.identity import user_name
from rlhf_core.store.protocol import Store
from rlhf_core.store.typed_json import Stored, stored_in


class Deed(Stored):
    """An action of a person. `at` is the time in ISO 8601 in UTC."""

    at: str
    by: str
    did: str
    """`pin`, `unpin`, `gc`, `verify`, `restore`, `approve`, `reject`, `publish` or `rollback`."""
    to: str
    """Digest, gate or model."""
    why: str = ""


def note(store: Store, did: str, to: str, why: str = "") -> None:
    """Record an action that the user of this process has just done."""
    now = datetime.now(UTC)
    deed = Deed(at=now.isoformat(timespec="seconds"), by=user_name(), did=did, to=to, why=why)
    name = f"audit/{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{secrets.token_hex(3)}"
    store.write(name, deed.model_dump(), None)


def deeds(store: Store) -> list[Deed]:
    """Actions of people in a store, without decisions at gates."""
    return [deed for table in store.tables("audit/") if (deed := stored_in(table, Deed)) is not None]
