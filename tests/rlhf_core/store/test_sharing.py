"""A store that two Unix users share, each in a process of its own."""

import grp
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.checkpoints import Checkpoints, damaged_archive
from rlhf_core.store import roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.sharing import is_shared, share
from rlhf_core.types import PolicyRef
from tests.support.forks import forked
from tests.support.records import provenance

ALICE, BOB, KEY = 12001, 12002, "a" * 64
GROUP = "daemon"  # of every Unix


@pytest.fixture
def shared() -> Iterator[Path]:
    """The folder of a store that the users may enter; those of pytest are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    root = above / "store"
    ArtifactStore(root).create()
    share(root, GROUP)
    yield root
    shutil.rmtree(above)


def as_user(user: int, root: Path, body: Callable[[ArtifactStore], None]) -> None:
    """Run `body` in a process of the user, who has a umask that keeps the group out."""

    def run() -> None:
        os.setgroups([grp.getgrnam(GROUP).gr_gid])
        os.setgid(user)
        os.setuid(user)
        os.umask(0o077)
        body(ArtifactStore(root))

    child = forked(run)
    child.start()
    child.join()
    assert child.exitcode == 0


def commit(store: ArtifactStore, text: str = "weights") -> None:
    with store.lease(KEY) as lease:
        out = store.layout.attempt(KEY) / "out"
        out.mkdir(parents=True, exist_ok=True)
        (out / "file").write_text(text)
        private(out, text)
        store.commit(lease, out, PolicyRef, children={}, record=provenance())


def private(folder: Path, text: str) -> None:
    """Write as libraries do that do not care for the umask: safetensors' files are for their owner alone."""
    made = Path(tempfile.mkdtemp(dir=folder)).rename(folder / "folder")
    (made / "other").write_text(text)
    (made / "other").chmod(0o600)


def object_of(store: ArtifactStore) -> Path:
    record = store.record(KEY)
    return store.path(record.handle)


def test_each_user_can_hit_repair_and_collect_what_the_other_made(shared):
    as_user(ALICE, shared, commit)
    store = ArtifactStore(shared)
    assert (object_of(store) / "file").stat().st_uid == ALICE
    assert stat.S_IMODE((object_of(store) / "file").stat().st_mode) & 0o222 == 0

    def hit_and_pin(store: ArtifactStore) -> None:
        assert (object_of(store) / "folder" / "other").read_text() == "weights" and store.used(KEY)
        assert store.verify() == []
        store.pin(KEY, note="bob's")
        roots.unpin(store.shared, KEY)

    as_user(BOB, shared, hit_and_pin)
    (object_of(store) / "file").write_text("damage!")  # root's doing

    def repair(store: ArtifactStore) -> None:
        assert [found.problem for found in store.verify()] != []
        commit(store)
        assert store.record(KEY) is not None

    as_user(BOB, shared, repair)
    assert (object_of(store) / "file").stat().st_uid == BOB

    def collect(store: ArtifactStore) -> None:
        os.utime(store.root / "tables" / "keys" / f"{KEY}.json")
        freed = store.gc(dry_run=False, keep_days=0.0)
        assert freed.items and store.record(KEY) is None

    as_user(ALICE, shared, collect)


def test_a_user_goes_on_with_what_another_left(shared):
    def leave(store: ArtifactStore) -> None:
        work = store.layout.attempt(KEY)
        work.mkdir(parents=True)
        (work / "shard").write_text("1")
        checkpoints = Checkpoints(work / "ckpt")
        with checkpoints.saving(1, {}) as folder:
            private(folder, "1")
        checkpoints.settle()

    def go_on(store: ArtifactStore) -> None:
        work = store.layout.attempt(KEY)
        checkpoint = Checkpoints(work / "ckpt").to_resume(damaged_archive)
        assert checkpoint is not None and (checkpoint.path / "folder" / "other").read_text() == "1"
        with (work / "shard").open("a") as stream:
            stream.write("2")
        (work / "shard").replace(work / "renamed")
        commit(store)

    as_user(ALICE, shared, leave)
    as_user(BOB, shared, go_on)


def test_what_a_user_keeps_for_themselves_stays_with_a_warning(shared):
    def leave(store: ArtifactStore) -> None:
        for key in ("k1", "k2"):
            Path(tempfile.mkdtemp(dir=store.layout.attempt(key)), "file").touch()

    def collect(store: ArtifactStore) -> None:
        assert len(store.gc(dry_run=False, keep_days=0.0).items) == 2
        left = list((store.root / "trash").iterdir())
        assert len(left) == 2
        with pytest.raises(ArtifactError, match=r"cannot be removed .* let its owner or root remove the folder"):
            remove_tree(left[0])

    store = ArtifactStore(shared)
    for key in ("k1", "k2"):
        store.layout.attempt(key).mkdir(parents=True)
    share(shared, GROUP)
    as_user(ALICE, shared, leave)
    as_user(BOB, shared, collect)


def test_who_may_not_open_or_make_a_store_gets_one_error(shared):
    def refused(store: ArtifactStore) -> None:
        for root in (closed / "store", shared.with_name("new")):
            with pytest.raises(ArtifactError, match="cannot be written to"):
                ArtifactStore(root).create()

    closed = shared.with_name("closed")
    closed.mkdir(0o700)
    as_user(ALICE, shared, refused)


def test_a_link_to_a_store_shares_the_store(shared):
    shared.chmod(0o700)
    link = shared.with_name("link")
    link.symlink_to(shared)
    share(link, GROUP)
    assert is_shared(shared)


def test_a_group_that_cannot_use_the_store_is_refused(shared):
    with pytest.raises(ArtifactError, match=r"^group = 'no-such-group': there is no such group"):
        share(shared, "no-such-group")
    shared.parent.chmod(0o700)
    with pytest.raises(ArtifactError, match=r"members of daemon cannot enter .*name it as `store` in the profile"):
        share(shared, "daemon")
    assert is_shared(shared)
