"""Write metrics to further trackers besides MLflow, offline: event files of TensorBoard, runs of Weights & Biases.

MLflow stays the record, so a further tracker that fails is a warning, and no error. Nothing here reaches a server:
`wandb sync` uploads the offline runs when a user wants to.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 8


@dataclass(frozen=True)
class StageRun:
    """Identity of a run: the folder of its pipeline, the pipeline, the stage and its key; `params` hold no secrets."""

    folder: Path
    pipeline: str
    label: str
    key: str
    params: Mapping[str, str]

    @property
    def name(self) -> str:
        """A name that differs for each key, so that a resumed stage continues its run."""
        return f"{self.label}-{self.key[:SHOWN_DIGITS]}"


class TensorBoardWriter:
    """Event files in `tensorboard/<stage>-<key>`. A resumed stage removes values that it had written of later steps."""

    def __init__(self, run: StageRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard" / run.name
        self._goes_on = folder.is_dir()
        self._writer = EventFileWriter(str(folder))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values as scalars."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        if self._goes_on:  # readers drop the points of this step and later ones that came before a START
            self._writer.add_event(Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START)))
            self._goes_on = False
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Flush the events to disk."""
        self._writer.close()


class WandbWriter:
    """An offline run in `wandb/offline-run-*`; each attempt at a stage is a run in the group of its key."""

    def __init__(self, run: StageRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports of crashes go to a server, offline too
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run: Any = wandb.init(
            project=run.pipeline, group=run.name, name=run.label, job_type=run.label, config=dict(run.params),
            dir=str(run.folder), mode="offline", reinit="create_new", settings=settings,
        )  # fmt: skip

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run, which writes its file."""
        self._run.finish()


MetricWriter: TypeAlias = TensorBoardWriter | WandbWriter
"""A run of one stage in a further tracker."""
WRITERS: Mapping[str, type[MetricWriter]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}
"""Name in `track.also`, which is the name of the package too -> writer."""


class FurtherTrackers:
    """The further trackers of a run. Writers open with the first metrics of a stage and close with it."""

    def __init__(self, names: Sequence[str] = (), folder: Path = Path(), pipeline: str = "") -> None:
        self._names, self._folder, self._pipeline = names, folder, pipeline
        self._runs: dict[str, StageRun] = {}
        self._open: dict[tuple[str, str], MetricWriter] = {}
        self._failed: set[str] = set()

    def stage(self, label: str, key: str, params: Mapping[str, str]) -> None:
        """Name the run of a stage."""
        self._runs[key] = StageRun(self._folder, self._pipeline, label, key, params)

    def metrics(self, key: str, step: int, values: Mapping[str, float]) -> None:
        """Write finite values of a stage to each tracker that has not failed."""
        for name in self._names if key in self._runs else ():  # not of a run that another process opened
            self._tried(name, partial(self._write, name, key, step, values))

    def close(self, key: str = "") -> None:
        """End the runs of a stage; without a key, all of them. Later metrics are dropped."""
        for name, of in [pair for pair in self._open if key in ("", pair[1])]:
            self._tried(name, self._open.pop((name, of)).close)
        self._runs = {of: run for of, run in self._runs.items() if key not in ("", of)}

    def _write(self, name: str, key: str, step: int, values: Mapping[str, float]) -> None:
        if (name, key) not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[name, key] = WRITERS[name](self._runs[key])
        self._open[name, key].metrics(step, values)

    def _tried(self, name: str, act: Callable[[], None]) -> None:
        """Call an action of a tracker; after an error, that tracker is skipped for the rest of this run."""
        if name in self._failed:
            return
        try:
            act()
        except Exception as error:
            self._failed.add(name)
            logger.warning("tracking: %s gets no more metrics of this run, MLflow has them: %r", name, error)
