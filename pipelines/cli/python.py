"""Run a pipeline from Python: `from pipelines import run`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.cli.run_command import shown_run
from pipelines.execution.request import RunRequest
from pipelines.flows.profile_text import toml_literal
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class StageResult:
    """The result of one stage of a run."""

    path: Path
    """Folder of the artifact; read-only."""
    digest: str
    decision: str
    """`HIT` if it was in the store, `ATTACH` if another process computed it; else `RUN` or `RESUME`."""
    reason: str
    metrics: Mapping[str, float]


def run(
    profile: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    until: str = "",
    force: Sequence[str] = (),
    home: str | Path | None = None,
) -> dict[str, StageResult]:
    """Run a profile as `rlhf run` does; return the results by stage, in the order in which the stages ended.

    `overrides` maps dotted keys to values (None takes a key away), `until` ends after a stage, `force` runs stages even
    if finished, and `home` is the state folder (default: `RLHF_HOME`, else `.rlhf` in the current folder). Raises
    RlhfError with the texts of the command line. A run that waits for people, is blocked by a gate or has spent its budget
    raises a subclass of `rlhf_core.stage.stopping.RunHalted`, which, like Ctrl-C, is a KeyboardInterrupt.
    """
    if not isinstance(overrides or {}, Mapping):
        raise ConfigError("overrides", overrides, "must map keys to values", 'for example {"sft.loop.max_steps": 5}')
    if isinstance(force, str):
        raise ConfigError("force", force, "must be a list of stages", f"[{force!r}]")
    changes = {key: "none" if value is None else toml_literal(value) for key, value in (overrides or {}).items()}
    request = RunRequest(str(profile), tuple(f"{key}={text}" for key, text in changes.items()), until, tuple(force))
    with _environment(home):
        store, refs, tally, _ = shown_run(request, Home.here().make())
        found: dict[str, StageResult] = {}
        for label, ref in refs.items():
            decision, metrics = tally.decisions[label], tally.metrics_of[label]
            found[label] = StageResult(store.path(ref), ref.digest, decision.action, decision.reason, metrics)
        return found


@contextmanager
def _environment(home: str | Path | None) -> Iterator[None]:
    """Set the state folder, and restore all variables afterwards: a run sets variables for its Prefect server."""
    before = dict(os.environ)
    if home is not None:
        os.environ["RLHF_HOME"] = str(home)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
