from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from campaigns.durability import simulator
from rlhf_core.store import artifacts, checkpoints, layout, maintenance
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.checkpoints import Checkpoints
from rlhf_core.store.leases import Lease
from rlhf_core.store.places import local

finish, write_text = Checkpoints._finish, layout.write_text


def check_before_lock(lease: Lease) -> Any:
    lease.check()
    return local.alone(lease.folder)


def record_before_object(
    store: ArtifactStore, key: str, out: Path, kind: Any, *, children: Any, record: Any, **_: Any
) -> Any:
    files = artifacts._seal(out)
    handle = artifacts._handle(kind, files, children, ())
    written = artifacts.KeyRecord(key=key, handle=handle, **dict(record))
    artifacts.write_json(store.layout.key(key), written.to_json())
    store._store_object(out, files, object_digest(handle))
    return handle


def old_checkpoints_first(saved: Checkpoints, *args: Any) -> None:
    for folder in saved._folders():
        layout.remove_tree(folder)
    finish(saved, *args)


def sealed_unseen(folder: Path, noted: dict[str, Any]) -> None:
    layout.write_json(folder / checkpoints._STATE, noted)
    layout.write_json(folder / checkpoints._COMPLETE, {"sizes": {}})


def not_durable(path: Path, text: str, *, durable: bool) -> None:
    write_text(path, text, durable=False)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the fence is removed": (Lease, "check", lambda lease: None),
    "the lease is checked before the lock": (Lease, "undisturbed", check_before_lock),
    "small files are not fsynced": (layout, "write_text", not_durable),
    "objects are not fsynced": (artifacts, "fsync_tree", lambda folder: None),
    "names of objects are not fsynced": (artifacts, "fsync_path", lambda path: None),
    "the record comes before its object": (ArtifactStore, "commit", record_before_object),
    "gc works without the lock": (maintenance, "alone", lambda folder: nullcontext()),
    "checkpoints are sealed before they are on the disk": (checkpoints, "_seal", sealed_unseen),
    "old checkpoints are removed first": (Checkpoints, "_finish", old_checkpoints_first),
}


def test_no_history_breaks_a_promise():
    campaign = simulator.play(range(200))
    assert campaign.broken == {}
    assert {fault for _, fault in campaign.struck.elements()} == set(simulator.FAULTS)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_a_promise_rests_on_is_missed_within_1000_histories(mutant):
    with mock.patch.object(*MUTANTS[mutant]):
        assert simulator.play(range(1000), until_broken=True).broken


def test_a_history_follows_from_its_seed():
    first, second = (simulator.play(range(20)) for _ in range(2))
    assert (first.operations, first.struck) == (second.operations, second.struck)
