"""Build an artifact again in an empty store, and say whether it is the same bytes (`rlhf reproduce`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelines.cli.common import console, store_folder
from pipelines.cli.display import PlainDisplay
from pipelines.execution.reproduce import Rebuilt, Workshop, ancestors, changes, claim_folder, rebuild_all
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.stage.stopping import on_signals
from rlhf_core.store.artifacts import ArtifactStore

EXIT_DIFFERENT = 1
SHOWN_FILES = 5


def reproduce(options: argparse.Namespace) -> int:
    """Run the stages that led to an artifact again; return 1 if the bytes differ."""
    source, runtime = ArtifactStore(store_folder(options)), _runtime(options)
    records = ancestors(options.artifact, source)
    target = records[-1].handle.digest
    folder = Path(options.into).expanduser() if options.into else Home.here().root / "reproduced" / target[:12]
    claim_folder(folder, records, source=source.root, home_store=Home.here().store)
    _say(f"{options.artifact}: {target[:12]}, {len(records)} stages, made again in {folder}")
    found = [f"{record.label}: {change}" for record in records for change in changes(record)]
    for line in found or ["code and packages: as they were"]:
        _say(line)
    display, workshop = PlainDisplay(console), Workshop(source, ArtifactStore(folder), runtime)
    with on_signals():
        rebuilt = rebuild_all(
            records, workshop, keep_going=options.keep_going, progress=display.progress, done=_say_stage
        )
    return _say_end(rebuilt, len(records))


def _runtime(options: argparse.Namespace) -> RuntimeConfig:
    if options.profile:
        return load_profile(options.profile, options.overrides).runtime
    if options.overrides:
        rule = "changes a profile, and none is named"
        raise ConfigError(explain("--set", options.overrides[0], rule, "add --profile PROFILE, or leave it out"))
    return RuntimeConfig()


def _say_stage(one: Rebuilt) -> None:
    said = "the same bytes" if one.same else f"DIFFERENT: {one.digest[:12]} is {one.found[:12]} now"
    more = f" and {len(one.files) - SHOWN_FILES} more" if len(one.files) > SHOWN_FILES else ""
    files = f" ({', '.join(one.files[:SHOWN_FILES])}{more})" if one.files else ""
    when = "made by the earlier attempt in this folder" if one.earlier else f"{one.seconds:.1f} s"
    _say(f"{one.label}: {said}{files}, {when}")


def _say_end(rebuilt: list[Rebuilt], count: int) -> int:
    differing = [one.label for one in rebuilt if not one.same]
    if not differing:
        earlier = sum(one.earlier for one in rebuilt)
        _say(
            f"reproduced: all stages are the same bytes{f' ({earlier} made by the earlier attempt)' if earlier else ''}"
        )
        return 0
    left = count - len(rebuilt)
    rest = f"; {left} stages after it were not run: --keep-going runs them" if left else ""
    end = "" if rebuilt[-1].same else "the artifact is not; "
    _say(f"not reproduced: {end}the first that differs is {differing[0]}{rest}")
    return EXIT_DIFFERENT


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
