"""Unfinished work in a bucket, from which another node resumes: the newest checkpoint and the files next to it.

While a stage runs, a thread uploads each new checkpoint. It makes links to the files first, because a checkpoint is removed when
the next one is complete. On a disk all nodes see the work folder, and nothing is copied.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.store.attempts import AttemptFolder, drop_replaced, work_numbers
from rlhf_core.store.checkpoint_parts import parts_elsewhere
from rlhf_core.store.fingerprint import list_files
from rlhf_core.store.layout import CHECKPOINTS, fsync_tree, make_folder, remove_tree, write_json
from rlhf_core.store.leases import Lease, Lost
from rlhf_core.store.protocol import Damaged, Gone, Unreachable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often the folder of a running stage is checked for a new checkpoint."""
HOLDER = ".lease.json"
"""File in the attempt folder of this node: the token of the lease, for uploads by workers (`rlhf_core.store.node_folders`)."""


@contextmanager
def keeping(lease: Lease, number: int, work: Path) -> Iterator[None]:
    """Upload the checkpoints of attempt `number` while it runs in the block; if it fails, also the last one."""
    if lease.store.folder_is_shared:
        yield
        return
    keeper = _Keeper(lease, number, work)
    thread = threading.Thread(target=keeper.watch, name=f"keeping {lease.key[:8]}", daemon=True)
    thread.start()
    is_done = False
    try:
        yield
        is_done = True
    finally:
        keeper.stop.set()
        thread.join()
        if not is_done:
            keeper.look()


def note_holder(lease: Lease, folder: Path) -> None:
    """Write down the token of the lease for uploads by workers on other nodes."""
    if not lease.store.folder_is_shared:
        write_json(folder / HOLDER, {"token": lease.token}, durable=False)


def bring_work(folder: AttemptFolder) -> None:
    """Move the work of a later attempt on another node into the attempt folder of this node, replacing older work.

    Raises Lost, Gone, Damaged or Unreachable if this node cannot read it: a new beginning would replace a good checkpoint.
    """
    assert folder.lease is not None
    if folder.store.folder_is_shared:
        return
    drop_replaced(folder)
    work = folder.lease.latest().value.get("work")
    if not work or work["attempt"] <= max(work_numbers(folder), default=0):
        return
    brought = folder.lease.load_work(work)
    make_folder(folder.path)
    fsync_tree(brought)
    brought.rename(folder.path / f"work-{work['attempt']}")
    logger.info("got the work of attempt %d at %s from another node", work["attempt"], folder.key[:12])


class _Keeper:
    """Uploads the newest checkpoint of an attempt, and the files next to it."""

    def __init__(self, lease: Lease, number: int, work: Path) -> None:
        self.lease, self.number, self.work, self.stop = lease, number, work, threading.Event()
        self._uploaded = ""
        """Name of the checkpoint that was uploaded last."""

    def watch(self) -> None:
        """Look for a new checkpoint until the attempt ends."""
        while not self.stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Upload the newest checkpoint if it is new. An unreachable bucket costs the copy, which is logged, not the stage."""
        newest = max((path.name for path in (self.work / CHECKPOINTS).glob("step-*")), default="")
        if newest in ("", self._uploaded):
            return
        links = self.work.parent / f".keep-{self.number}"
        remove_tree(links)
        try:
            self._link(newest, links)
            # Also parts of older checkpoints that are kept, which would be deleted otherwise.
            self.lease.save_work(links, attempt=self.number, apart=parts_elsewhere(self.work))
            self._uploaded = newest
        except FileNotFoundError:  # removed meanwhile, because a newer one is complete: the next look finds that
            return
        except Lost:
            self.stop.set()
        except (Unreachable, Damaged, Gone, OSError) as error:
            logger.warning("could not upload a checkpoint of %s: %s", self.lease.key[:12], error)
        finally:
            remove_tree(links)

    def _link(self, newest: str, links: Path) -> None:
        """Links to the files of a checkpoint, and copies of the files next to the checkpoints, which may grow."""
        inside = {f"{CHECKPOINTS}/{newest}/{name}": os.link for name in list_files(self.work / CHECKPOINTS / newest)}
        beside = {
            name: shutil.copyfile for name in list_files(self.work) if not name.startswith((f"{CHECKPOINTS}/", "."))
        }
        for name, take in (inside | beside).items():
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            take(self.work / name, links / name)
