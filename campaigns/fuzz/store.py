"""Damage files in a store with finished, killed and running stages, and run the verbs on it."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

from campaigns.fuzz.campaign import Wrong
from campaigns.fuzz.mutations import changed, damaged, odd, written
from pipelines.cli import main as cli
from pipelines.execution.plan import ReachedUntil, placeholder
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from pipelines.services.reconcile import reconcile_store
from rlhf_core.errors import RlhfError
from rlhf_core.stage.checkpoints import Checkpoints, damaged_archive
from rlhf_core.stage.decision import Target as KeyTarget
from rlhf_core.stage.decision import remember, target_of
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.store import attempts, roots
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import MANIFEST
from rlhf_core.store.leases import name_of, ourselves
from rlhf_core.store.protocol import update
from rlhf_core.store.records import Provenance
from rlhf_core.types import ArtifactRef

R = TypeVar("R", bound=ArtifactRef)

PROFILE = "tiny/rlvr"
FINISHED = ("prepare_data", "sft")
KILLED = "ppo"
VERBS = 4
"""Number of verbs run on each damaged store; some of them repair it, which the next ones then see."""
TABLES = "tables"
"""Folder of a store whose files begin with a line that is the checksum of the rest."""
GONE = 2**22 + 1
"""A process id that no machine has; the kernel's maximum is 2**22."""


class Target:
    """Stores with damaged files."""

    def __init__(self, folder: Path) -> None:
        self._sound, self._root, self._outside = folder / "sound", folder / "store", folder / "outside"
        os.environ["RLHF_HOME"] = str(folder / "home")
        make_store(ArtifactStore(self._sound), self._outside)
        self._verbs = self._make_verbs()
        self._files = sorted(path.relative_to(self._sound) for path in self._sound.rglob("*") if path.is_file())

    def attempt(self, rng: random.Random) -> None:
        """Damage one to three files and run some of the verbs on the store, one after the other."""
        self._copy()
        touched = [self._damage(rng.choice(self._files), rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        refused: list[Exception] = []
        with redirect_stdout(io.StringIO()):
            for verb in rng.sample(self._verbs, k=VERBS):
                try:
                    verb()
                except RlhfError as error:
                    refused.append(error)
        self._check_sound(touched)
        if refused:
            raise refused[0]

    def _copy(self) -> None:
        """Replace the last store by a copy of the valid one; the copy has no read-only files."""
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._sound, self._root)

    def _damage(self, name: Path, rng: random.Random) -> Path:
        path = self._root / name
        sound = (self._sound / name).read_bytes()
        kind = rng.randrange(8)
        if kind == 0:
            path.unlink(missing_ok=True)
        elif kind == 1:
            path.write_bytes((self._sound / rng.choice(self._files)).read_bytes())
        elif kind < 5 and path.suffix == ".json":
            checksum, _, table = sound.rpartition(b"\n") if TABLES in name.parts else (b"", b"", sound)
            text = written(json.dumps(changed(json.loads(table), rng)))
            path.write_bytes(checksum + b"\n" * bool(checksum) + text.encode())
        elif kind == 5 and path.suffix == ".json":
            path.write_bytes(written(json.dumps(odd(rng))).encode())
        else:
            path.write_bytes(damaged(sound, rng))
        return name

    def _make_verbs(self) -> list[Callable[[], object]]:
        store, place = ["--store", str(self._root)], ["--set", f"store={json.dumps(str(self._root))}"]
        lines: Sequence[Sequence[str]] = (
            ["plan", PROFILE, *place],
            ["explain", "sft", "--profile", PROFILE, *place],
            ["explain", KILLED, "--profile", PROFILE, *place],
            ["runs", *store],
            ["store", "ls", *store],
            ["store", "verify", *store],
            ["store", "gc", "--dry-run", *store],
            ["store", "gc", "--keep-days", "0", *store],
        )
        parsed = [cli._parser().parse_args(line) for line in lines]
        return [*(partial(cli._verb(one), one) for one in parsed), self._reconcile, self._latest]

    def _reconcile(self) -> None:
        list(reconcile_store(ArtifactStore(self._root)))

    def _latest(self) -> None:
        """Read the data that later runs read, in addition to the verbs."""
        store = ArtifactStore(self._root)
        store.latest("sft")
        roots.pins(store.shared)
        store.external(ArtifactRef, self._outside)
        for folder in sorted(store.layout.attempts.glob("*")):
            checkpoints = Checkpoints(attempts.checkpoints(store.attempts(folder.name)), keep_best=1)
            checkpoints.to_resume(damaged_archive)
            checkpoints.best()

    def _check_sound(self, touched: Sequence[Path]) -> None:
        """Raise Wrong if a changed object counts as valid."""
        try:
            store = ArtifactStore(self._root)
            store.verify()
            records = store.records()
        except RlhfError:
            return
        for record in records:
            sound, found = self._sound / "objects", store.path(record.handle)
            for path in sorted(found.rglob("*")):
                original = sound / path.relative_to(self._root / "objects")
                if path.name != MANIFEST and path.is_file() and path.read_bytes() != original.read_bytes():
                    raise Wrong(f"{path} counts as sound after damage to {touched}")


# ---------------------------------------------------------------- a sound store


@dataclass
class Builder:
    """A `RunStage` that gives some stages a made-up result, and one stage a history."""

    store: ArtifactStore

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        target = target_of(self.store, spec, strict=Strictness())
        if spec.label in FINISHED:
            return _finish(self.store, spec, target, kind)
        if spec.label == KILLED:
            _leave(self.store, spec, target)
            raise ReachedUntil
        return placeholder(spec, kind)


def make_store(store: ArtifactStore, outside: Path) -> None:
    """Fill `store` with at least one file of each kind that a store may contain."""
    config = load_profile(PROFILE)
    with suppress(ReachedUntil):
        lifecycle(config, Stages(Builder(store), seed=config.seed, runtime=config.runtime))
    record = store.records()[0]
    store.pin(record.key, note="kept")
    found = store.shared.read(name_of(record.key))
    assert found is not None  # it was just recorded
    aside = {"record": found.value["record"], "problem": "is of another key"}
    store.shared.write(name_of("1" * 64), {"aside": aside}, None)
    outside.mkdir()
    (outside / "config.json").write_text("{}", encoding="utf-8")
    os.utime(outside / "config.json", (1e9, 1e9))
    store.external(ArtifactRef, outside)
    for path in (store.root, *store.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _finish(store: ArtifactStore, spec: StageSpec, target: KeyTarget, kind: type[R]) -> R:
    """Commit a made-up artifact of `kind` with a file in each of its parts."""
    out = store.root.parent / "out"
    parts = {
        name: (name, one)
        for name, field in kind.model_fields.items()
        for one in get_args(field.annotation)
        if isinstance(one, type) and issubclass(one, ArtifactRef)
    }
    for name in ["", *parts]:
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "content.txt").write_text(f"{spec.label} {name}\n", encoding="utf-8")
    provenance = Provenance(
        label=spec.label,
        stage=spec.name,
        payload=target.payload,
        inputs=tuple(ref.uri for ref in spec.refs()),
        code=target.code,
        metrics={"loss": 0.5},
        engines={},
        environment={"python": "3.11"},
        started="2026-01-02T03:04:05+00:00",
        seconds=1.5,
        tracking={"run": "abc"},
        attempts=1,
        resumed_from=None,
    )
    with store.lease(target.key) as lease:
        folder = store.attempts(target.key, lease)
        attempt = attempts.begin(folder, label=spec.label, resumed_from=None, code=target.code)
        attempts.end(folder, attempt, label=spec.label, status="committed", failure="", seconds=1.5)
        handle = store.commit(lease, out, kind, children=parts, record=provenance)
    remember(store, spec, target)
    return handle


def _leave(store: ArtifactStore, spec: StageSpec, target: KeyTarget) -> None:
    """Leave the remains of a killed process: a lease, a running attempt, checkpoints and unfinished work."""
    with store.lease(target.key) as lease:
        folder = store.attempts(target.key, lease)
        attempt = attempts.begin(folder, label=spec.label, resumed_from=None, code=target.code)
    (attempts.output(folder, attempt) / "half.txt").write_text("half", encoding="utf-8")
    (attempts.work(folder, attempt) / "shard-0.txt").write_text("a shard", encoding="utf-8")
    checkpoints = Checkpoints(attempts.checkpoints(folder), keep_best=2)
    for step in (1, 2):
        with checkpoints.saving(step, {"cursor": step}, metric=0.5 * step) as path:
            (path / "weights.txt").write_text(f"step {step}", encoding="utf-8")
    checkpoints.settle()
    owner = replace(ourselves(), pid=GONE, pid_started=1)
    for key in (target.key, "2" * 64):
        update(store.shared, name_of(key), lambda value: value | {"lease": asdict(owner)})
    remember(store, spec, target)
