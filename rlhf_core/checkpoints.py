"""Checkpoint folders of one stage. A new one is whole and on the disk before an old one goes."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, ConfigError, explain
from rlhf_core.fingerprint import list_files
from rlhf_core.store_layout import fsync_path, fsync_tree, naming_a_full_disk, read_json, remove_tree, write_json

logger = logging.getLogger(__name__)

_STATE = "state.json"
_COMPLETE = "COMPLETE"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: `state` is what the stage noted, the folder `path` holds what it wrote."""

    step: int
    path: Path
    state: dict[str, Any]
    metric: float | None


class Checkpoints:
    """The checkpoints in `root`: the newest `keep_last` and the `keep_best` with the largest metric stay."""

    def __init__(self, root: Path, *, keep_last: int = 1, keep_best: int = 0) -> None:
        if keep_last < 1:
            raise ConfigError(explain("keep_last", keep_last, "must be >= 1", "keep at least the newest checkpoint"))
        if keep_best < 0:
            raise ConfigError(explain("keep_best", keep_best, "must be >= 0", "use 0 to keep none for its metric"))
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_best = keep_best

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; unreadable ones are skipped with a warning."""
        for folder in sorted(self._folders(), reverse=True):
            checkpoint = _read(folder)
            if checkpoint is not None:
                return checkpoint
        return None

    def best(self) -> Checkpoint | None:
        """Return the whole checkpoint with the largest metric (the newest of equals); None if none has a metric."""
        ranked = _by_metric(self._readable())
        return ranked[0] if ranked else None

    @contextmanager
    def saving(self, step: int, state: Mapping[str, Any], *, metric: float | None = None) -> Iterator[Path]:
        """Yield an empty folder to write into; on a clean exit it becomes the checkpoint of `step`.

        `state` must be JSON-able. Larger metrics are better. An exception leaves the older checkpoints as they were.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob(".saving-*"):
            remove_tree(stale)
        folder = self.root / f".saving-{step:010d}-{secrets.token_hex(4)}"
        try:
            with naming_a_full_disk(self.root):
                folder.mkdir()
                yield folder
                _seal(folder, step, state, metric)
                folder.rename(self.root / f"step-{step:010d}-{time.time_ns():020d}")
                fsync_path(self.root)
        except BaseException:
            remove_tree(folder)
            raise
        self._evict()

    def _folders(self) -> list[Path]:
        return [path for path in self.root.glob("step-*") if path.is_dir()]

    def _readable(self) -> list[Checkpoint]:
        found = [_read(folder) for folder in sorted(self._folders(), reverse=True)]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def _evict(self) -> None:
        newest_first = self._readable()
        keep = {checkpoint.path for checkpoint in newest_first[: self.keep_last]}
        keep |= {checkpoint.path for checkpoint in _by_metric(newest_first)[: self.keep_best]}
        for folder in self._folders():
            if folder not in keep:
                remove_tree(folder)


def _by_metric(newest_first: list[Checkpoint]) -> list[Checkpoint]:
    measured = [item for item in newest_first if item.metric is not None and not math.isnan(item.metric)]
    return sorted(measured, key=lambda item: -float(item.metric or 0.0))


def _seal(folder: Path, step: int, state: Mapping[str, Any], metric: float | None) -> None:
    try:
        write_json(folder / _STATE, {"step": step, "metric": metric, "state": dict(state)})
    except TypeError as error:
        remedy = "write tensors and random states into the folder"
        raise ArtifactError(
            explain("checkpoint.state", sorted(state), f"is not JSON-able ({error})", remedy)
        ) from error
    sizes = {path: (folder / path).stat().st_size for path in list_files(folder)}
    fsync_tree(folder)
    write_json(folder / _COMPLETE, {"sizes": sizes})


def _read(folder: Path) -> Checkpoint | None:
    problem = _problem(folder)
    if problem:
        logger.warning("checkpoint %s is skipped: %s", folder, problem)
        return None
    table = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return Checkpoint(step=table["step"], path=folder, state=table["state"], metric=table["metric"])


def _problem(folder: Path) -> str:
    marker = read_json(folder / _COMPLETE)
    if marker is None or "sizes" not in marker:
        return f"it has no {_COMPLETE} marker"
    for path, size in marker["sizes"].items():
        file = folder / path
        if not file.is_file():
            return f"{path} is missing"
        if file.stat().st_size != size:
            return f"{path} has {file.stat().st_size} bytes, not {size}"
    state = read_json(folder / _STATE)
    return "" if state is not None and {"step", "state", "metric"} <= set(state) else f"{_STATE} cannot be read"
