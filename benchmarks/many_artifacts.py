"""Measure how long `plan`, `runs`, `store ls` and `store verify` take on a store with thousands of artifacts.

python -m benchmarks.many_artifacts --artifacts 10000
python -m benchmarks.many_artifacts --artifacts 10000 --beside OTHER_CHECKOUT

Every stage of `tiny/full` has its record, so the plan is one of hits; the rest are records of the same kind. Each command
is a process of its own. With `--beside`, the same command of another checkout runs in turn, on a store of its own. The
output is the minimum and the median of the repeats, in seconds of wall clock and of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from rlhf_core.stage.decision import target_of
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.stage.versions import environment
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.earlier import stored_record
from rlhf_core.store.fingerprint import FileEntry, sha256_text, tree_digest
from rlhf_core.store.layout import MANIFEST, make_read_only
from rlhf_core.store.protocol import pack
from rlhf_core.store.records import KeyRecord, Provenance
from rlhf_core.types import ArtifactRef, PreparedDataRef

R = TypeVar("R", bound=ArtifactRef)

ROOT = Path(__file__).resolve().parents[1]
PROFILE = "tiny/full"
COMMANDS = {
    "plan": ("plan", PROFILE),
    "ls": ("store", "ls"),
    "runs": ("runs",),
    "verify": ("store", "verify"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifacts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", default="", metavar="CHECKOUT", help="another version, timed in turn with this one")
    parser.add_argument("--fill", default="", metavar="STORE", help="only make the store")
    options = parser.parse_args(arguments)
    if options.fill:
        fill(ArtifactStore(Path(options.fill)), options.artifacts)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sides = {"here": (ROOT, Path(folder) / "here")}
        if options.beside:
            sides["beside"] = (Path(options.beside).resolve(), Path(folder) / "beside")
        for checkout, home in sides.values():  # each with its own code, so that the keys are those that it plans
            filling = [sys.executable, __file__, "--artifacts", str(options.artifacts), "--fill", str(home / "store")]
            subprocess.run(filling, cwd=checkout, env=_environment(checkout, home), check=True)
        print(
            "| command | side | least wall s | median wall s | least CPU s | median CPU s |\n|---|---|--:|--:|--:|--:|"
        )
        for name, command in COMMANDS.items():
            taken: dict[str, list[Taken]] = {side: [] for side in sides}
            for _ in range(options.repeats):
                for side, (checkout, place) in sides.items():
                    taken[side].append(timed(command, checkout, place))
            for side, times in taken.items():
                print(row(name, side, times), flush=True)
    return 0


@dataclass(frozen=True)
class Taken:
    wall: float
    cpu: float


def timed(command: Sequence[str], checkout: Path, home: Path) -> Taken:
    """Run one command of a checkout in a process of its own; return how long it took."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "pipelines.cli.main", *command]
    subprocess.run(command, cwd=checkout, env=_environment(checkout, home), check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _environment(checkout: Path, home: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTHON"))}
    return inherited | {"PYTHONPATH": str(checkout), "RLHF_HOME": str(home)}


def row(name: str, side: str, taken: Sequence[Taken]) -> str:
    """Return a line of the table.

    >>> row("ls", "here", [Taken(2.0, 1.0), Taken(4.0, 1.5)])
    '| ls | here | 2.00 | 3.00 | 1.00 | 1.25 |'
    """
    columns = [[item.wall for item in taken], [item.cpu for item in taken]]
    cells = [f"{value:.2f}" for column in columns for value in (min(column), statistics.median(column))]
    return f"| {name} | {side} | {' | '.join(cells)} |"


def fill(store: ArtifactStore, count: int) -> None:
    """Give every stage of the profile its record, and add records like theirs until there are `count`."""
    store.create()
    config = load_profile(PROFILE)
    made: list[KeyRecord] = []

    def made_up(spec: StageSpec, kind: type[R]) -> R:
        target = target_of(store, spec, strict=Strictness())
        provenance = _provenance(spec, target.payload, target.code)
        made.append(_write(store, target.key, kind, provenance))
        handle: R = made[-1].handle  # type: ignore[assignment]  # of the kind that we asked for
        return handle

    lifecycle(config, Stages(made_up, seed=config.seed, runtime=config.runtime))
    for number in range(count - len(made)):
        pattern = made[number % len(made)]
        fields = {name: getattr(pattern, name) for name in Provenance.model_fields}
        _write(store, sha256_text(f"made up {number}"), type(pattern.handle), Provenance(**fields))


def _provenance(spec: StageSpec, payload: dict[str, Any], code: dict[str, str]) -> Provenance:
    return Provenance(
        label=spec.label,
        stage=spec.name,
        payload=payload,
        inputs=tuple(ref.uri for ref in spec.refs()),
        code=code,
        metrics={f"eval/measure_{number}": 0.5 for number in range(20)} | {"loss": 1.25},
        engines={"torch": "2"},
        environment=environment(),
        started="2026-01-01T00:00:00.000+00:00",
        seconds=60.0,
        tracking={"run_id": "0" * 32},
        attempts=1,
        resumed_from=None,
    )


def _write(store: ArtifactStore, key: str, kind: type[R], provenance: Provenance) -> KeyRecord:
    """Write an object of three small files and its record, without waiting for the disk as a commit does."""
    contents = {"config.json": f'"{key}"', "weights.bin": key * 16, "base/tokenizer.json": key[:8]}
    entries = {path: FileEntry(len(text), sha256_text(text)) for path, text in contents.items()}
    digest = tree_digest(entries)
    folder = store.layout.object(digest)
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    listed = {path: {"size": entry.size, "sha256": entry.sha256} for path, entry in entries.items()}
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "files": listed}), encoding="utf-8")
    make_read_only(folder)
    record = KeyRecord(key=key, handle=_handle(kind, digest), **dict(provenance))
    place = store.root / "tables" / "keys" / f"{key}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(pack({"record": stored_record(json.loads(json.dumps(record.to_json())))}))
    return record


def _handle(kind: type[R], digest: str) -> R:
    uri = f"store://{digest}"
    parts = {}
    if kind is PreparedDataRef:
        for name, field in PreparedDataRef.model_fields.items():
            types = [part for part in getattr(field.annotation, "__args__", ()) if part is not type(None)]
            if types and isinstance(types[0], type) and issubclass(types[0], ArtifactRef):
                parts[name] = types[0](uri=f"{uri}/base", digest=sha256_text(digest + name))
    return kind(uri=uri, digest=digest, **parts)


if __name__ == "__main__":
    sys.exit(main())
