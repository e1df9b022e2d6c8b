"""Look after a store (`rlhf store verify`, `restore`, `pin`, `unpin`, `share`, `gc`, `push` and `pull`)."""

import argparse

from pipelines.cli.common import print_line, store_folder
from pipelines.cli.store_lists import report_empty
from pipelines.flows.inputs import find_artifact, parts
from pipelines.flows.profile import load_profile
from pipelines.flows.run_rules import ProjectConfig
from rlhf_core.errors import ConfigError
from rlhf_core.store import audit, collection, roots
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.collection import KEEP_DAYS, check_days
from rlhf_core.store.opening import store_root
from rlhf_core.types import ArtifactRef


def look_after_store(options: argparse.Namespace) -> int:
    """Run `rlhf store VERB`, except for `ls`, which is a list."""
    return look_after(ArtifactStore(store_folder(options)), options)


def look_after(store: ArtifactStore, options: argparse.Namespace) -> int:
    """Verify or share the store, pin or unpin an artifact, or remove unused ones; return 1 if damage was found."""
    if options.store_verb == "gc":
        check_days(KEEP_DAYS if options.keep_days is None else options.keep_days)
    if options.store_verb in ("verify", "gc") and report_empty(store.shared):
        return 0
    if options.store_verb == "verify":
        return _verify(store, options)
    if options.store_verb == "restore":
        collection.restore(store.shared, options.key)
        audit.note(store.shared, "restore", options.key)
        print_line(f"restored {options.key}")
    elif options.store_verb == "pin":
        store.pin(options.target, note=options.note)
        audit.note(store.shared, "pin", options.target, options.note)
        print_line(f"pinned {options.target}")
    elif options.store_verb in ("push", "pull"):
        transfer(store, options)
    elif options.store_verb == "share":
        store.share(options.group)
        print_line(f"shared {store.root} with the group {options.group}")
    elif options.store_verb == "unpin":
        roots.unpin(store.shared, options.target)
        audit.note(store.shared, "unpin", options.target)
        print_line(f"unpinned {options.target}")
    else:
        _collect(store, options)
    return 0


def _verify(store: ArtifactStore, options: argparse.Namespace) -> int:
    damage = store.verify(set_aside=options.set_aside)
    for found in damage:
        print_line(str(found))
    if damage and options.set_aside:
        audit.note(store.shared, "verify", f"{len(damage)} set aside")
        said = f"{len(damage)} damaged, now set aside; the next run makes them again"
    else:
        said = f"{len(damage)} damaged: run `rlhf store verify --set-aside` to make them again"
    print_line(said if damage else "no damage found")
    return int(bool(damage))


def transfer(store: ArtifactStore, options: argparse.Namespace) -> None:
    """Copy an artifact with its record to another store (`push`), or from there (`pull`)."""
    other = ArtifactStore(store_root(options.other))
    source, target = (store, other) if options.store_verb == "push" else (other, store)
    if source.shared.folder_is_shared and not source.root.is_dir():
        raise ConfigError("store", str(source.root), "does not exist", "name a store that has the artifact")
    ref = find_artifact(source, ArtifactRef, options.target, outside=False)
    record = next(one for one in source.records() if ref in (one.handle, *parts(one.handle)))
    is_new = target.adopt(record, source.shared.fetch(object_digest(record.handle)))
    said = "copied" if is_new else "has a result of this key already"
    if (there := target.record(record.key)) is not None and there.handle.digest != record.handle.digest:
        said += f", which is another, {there.handle.digest[:12]}, and stays"
    print_line(f"{record.label} {record.handle.digest[:12]}: {said}")


def _collect(store: ArtifactStore, options: argparse.Namespace) -> None:
    project = load_profile(options.profile).project if options.profile else ProjectConfig()
    wanted = [days for days in (options.keep_days, project.keep_days, KEEP_DAYS) if days is not None]
    report = store.gc(options.dry_run, keep_days=wanted[0], project=project.name)
    if not report.dry_run and report.items:
        whose = f" of project {project.name}" if project.name else ""
        audit.note(store.shared, "gc", f"{len(report.items)} items{whose}", f"unused for {wanted[0]:g} days")
    for item in report.items:
        print_line(str(item))
    for what, why in report.kept if report.dry_run else ():
        print_line(f"kept       {what}: {why}")
    for found in report.held_back:
        print_line(f"not readable: {found}")
    if report.held_back:
        rule = "the results that these need are unknown, so records and objects are kept"
        print_line(f"{rule}: run `rlhf store verify --set-aside` first")
    verb = "would free" if options.dry_run else "freed"
    removed = [item for item in report.items if item.kind != "marked"]
    print_line(f"{verb} {report.bytes / 2**20:.1f} MiB in {len(removed)} items")
