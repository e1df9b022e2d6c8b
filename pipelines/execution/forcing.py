"""Remember which stages a run has forced before it waits: when it goes on, they are not forced again.

The note belongs to the last run of a configuration. It is written when that run waits for people or for a higher budget, and
removed when it has finished, or is blocked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pipelines.execution.executor import RunOptions
from pipelines.flows.profile import PipelineConfig
from rlhf_core.schema.base import keyed
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import write_json
from rlhf_core.store.typed_json import Stored, read_stored

logger = logging.getLogger(__name__)


class ForcedStages(Stored):
    """The stages that a run which waits has forced and finished."""

    run: str
    labels: list[str]


def still_forced(options: RunOptions, config: PipelineConfig, store: ArtifactStore, *, say: bool = False) -> RunOptions:
    """Return the options without the stages that this run has forced before it waited; `say` logs which they are."""
    note = read_stored(_path(config, store), ForcedStages)
    done = () if note is None else tuple(label for label in options.force if label in note.labels)
    left = tuple(label for label in options.force if label not in done)
    for label in done if say else ():
        logger.info("%s: forced before it waited; not forced again", label)
    return replace(options, force=left, forced=tuple(dict.fromkeys((*options.forced, *done))))


def note_forced(
    options: RunOptions,
    config: PipelineConfig,
    store: ArtifactStore,
    *,
    finished: Collection[str],
    ended: BaseException | None,
) -> None:
    """Write down which stages need not be forced again if the run waits; forget them if it has come to its end.

    After a failure or an interruption they stay as they were: what was forced before the last wait is done.
    """
    done = [*options.forced, *(label for label in options.force if label in finished)]
    waits = isinstance(ended, (StageWaiting, RunOverBudget))
    if waits and done:
        write_json(_path(config, store), ForcedStages(run=config.name, labels=done).model_dump())
    elif waits or ended is None or isinstance(ended, RunBlocked):
        _path(config, store).unlink(missing_ok=True)


def _path(config: PipelineConfig, store: ArtifactStore) -> Path:
    # A higher budget, another gate or more workers do not make it another run.
    identity = json.dumps(keyed(config), sort_keys=True, default=str)
    return store.root / "roots" / "forced" / f"{sha256_text(identity)}.json"
