"""Verify a bucket against its manifests, and remove from it what no record leads to."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_core.store.index import Unreadable
from rlhf_core.store.layout import object_of
from rlhf_core.store.maintenance import KEEP_DAYS, Damage, GcItem, GcReport, roots_of
from rlhf_core.store.object_check import object_damage, set_aside_record
from rlhf_core.store.places.mirror import DAY_SECONDS, Mirror, files_of
from rlhf_core.store.records import KeyRecord


def verify_mirror(mirror: Mirror, records: Sequence[KeyRecord], unreadable: Sequence[Unreadable]) -> list[Damage]:
    """Compare the files in the bucket with the manifests, and hash those that this node has; return the damage found.

    Records that lead to a damaged object are set aside. A damaged copy on this node is removed, and fetched when needed.
    """
    damages = [Damage("", str(found), ()) for found in unreadable]
    for found in unreadable:
        set_aside_record(mirror.layout, found.path.stem, f"its record {found.problem}")
    blobs = {Path(name).name: size for name, size, _ in mirror.objects.listed("blobs/")}
    users: dict[str, list[KeyRecord]] = {}
    for record in records:
        users.setdefault(object_of(record.handle.uri), []).append(record)
    for digest, made in users.items():
        here = mirror.layout.object(digest)
        problem = object_damage(here, deep=True) if here.exists() else ""
        if problem:
            mirror.drop(digest, problem)
        lost = _lost(mirror, digest, blobs)
        for record in made if lost else ():
            set_aside_record(mirror.layout, record.key, lost)
        if lost:
            mirror.condemn(digest, "", lost)
        if problem or lost:
            labels = tuple(sorted({record.label for record in made}))
            damages.append(Damage(digest, lost or f"{problem} on this node; it is fetched again", labels))
    return damages


def _work(mirror: Mirror, name: str) -> list[tuple[str, int, float]]:
    return list(mirror.objects.listed(f"work/{Path(name).stem}/"))


def _lost(mirror: Mirror, digest: str, blobs: dict[str, int]) -> str:
    manifest = mirror.manifest(digest)
    if manifest is None:
        return f"its object is gone from {mirror.bucket.uri}"
    for name, (size, sha) in files_of(manifest).items():
        if blobs.get(sha) != size:
            return f"{name} is missing" if sha not in blobs else f"{name} has {blobs[sha]} bytes, not {size}"
    return ""


def collect_mirror(mirror: Mirror, records: Iterable[KeyRecord], found: GcReport) -> GcReport:
    """Remove (or only list, in a dry run) manifests and files of the bucket that no record leads to, older than a day.

    What is younger may belong to a commit whose record is not written yet; an upload makes an old file that it needs young.
    `found` is what was removed of the records, whose objects go, too; nothing is removed if it was held back.
    """
    if found.held_back:
        return found
    removed = {item.path.stem for item in found.items if item.kind == "record"}
    kept = [record for record in records if record.key not in removed]
    live = {object_of(uri) for record in kept for uri in (record.handle.uri, *record.inputs)}
    live |= {root.target for root in roots_of(mirror.layout)[0]}
    young, items, needed = time.time() - DAY_SECONDS, [], set()
    for name, size, at in list(mirror.objects.listed("objects/")):
        digest = Path(name).stem
        if digest in live or at > young:
            manifest = mirror.manifest(digest)
            needed |= {sha for _, sha in files_of(manifest).values()} if manifest is not None else set()
        else:
            items.append(GcItem("manifest", Path(name), size, "", "no record leads to it"))
    for name, size, at in list(mirror.objects.listed("blobs/")):
        if Path(name).name not in needed and at <= young:
            items.append(GcItem("file", Path(name), size, "", "no object has it"))
    kept_keys = {record.key for record in kept}
    for name, _, at in list(mirror.unfinished.versions()):
        if Path(name).stem in kept_keys or at < time.time() - KEEP_DAYS * DAY_SECONDS:
            items += [
                GcItem("work", Path(file), size, "", "nobody goes on with it") for file, size, _ in _work(mirror, name)
            ]
    for item in () if found.dry_run else items:
        mirror.objects.delete(item.path.as_posix())
        mirror.forget(item.path.stem)
    return replace(found, items=(*found.items, *items))
