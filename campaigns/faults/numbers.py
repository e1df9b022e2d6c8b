"""Make a training diverge: non-finite updates are skipped and counted, and too many in a row end the stage."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.small import Small
from pipelines.execution.executor import Silent
from rlhf_core.errors import TrainingError
from rlhf_core.training.skipped import MAX_SKIPPED_IN_A_ROW

EXPLODING = (
    'runtime={type = "local"}',
    'runtime.trainer.engine="torch"',
    'runtime.sampler={type = "hf"}',
    "sft={loop = {batch_size = 4, epochs = 2}, optimizer = {learning_rate = 1e30}}",
)
DEADLINE_S = 60.0


def _never_finite_again(folder: Path) -> Outcome:
    place = folder / "numbers"
    place.mkdir()
    counted = _Counted()
    logger = logging.getLogger("rlhf_core.training.trainer")
    logger.addHandler(counted)
    began = time.monotonic()
    try:
        Small(place, EXPLODING).run(Silent())
    except TrainingError as error:
        said = str(error)
    else:
        return Outcome("not handled", None, None, "the stage ended as if nothing were wrong")
    finally:
        logger.removeHandler(counted)
    named = "sft.step" in said and f"{MAX_SKIPPED_IN_A_ROW} updates in a row" in said
    if not named or counted.warnings != MAX_SKIPPED_IN_A_ROW:
        return Outcome("not handled", None, None, f"{said} ({counted.warnings} were counted)")
    return Outcome("one error", time.monotonic() - began, None, said)


class _Counted(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings += 1


FAULTS: list[Fault] = [Fault("loss not finite from the first update on", DEADLINE_S, _never_finite_again)]
