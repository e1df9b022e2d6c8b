"""Count updates that were skipped because of a non-finite loss or gradient, and end the stage after too many.

The process of a stage imports this module, and neither models nor engines, which are for the workers.
"""

import logging
from collections.abc import Sequence

from rlhf_core.errors import TrainingError
from rlhf_core.interfaces import Metrics

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 5  # one bad batch is a chance; five in a row are a diverged model


def count_skipped(so_far: int, metrics: Metrics, *, label: str, step: int) -> int:
    """Number of updates in a row that were skipped for a non-finite gradient.

    Raises TrainingError, naming the stage and the step, after five in a row.
    """
    if not metrics["skipped"]:
        return 0
    logger.warning("%s: skipping step %d, because the loss or the gradient is not finite", label, step)
    if so_far + 1 >= MAX_SKIPPED_IN_A_ROW:
        rule = f"{MAX_SKIPPED_IN_A_ROW} updates in a row had a non-finite loss or gradient"
        raise TrainingError(f"{label}.step", step, rule, "lower the learning rate, or check the samples of this step")
    return so_far + 1


def check_updated(history: Sequence[Metrics], *, label: str, step: int) -> None:
    """Raise TrainingError if every update of a model was skipped in a step, because it then no longer learns."""
    for model in ("policy", "value"):
        skipped = [metrics[f"{model}/skipped"] for metrics in history if f"{model}/skipped" in metrics]
        if skipped and all(skipped):
            rule = f"every update of the {model} had a non-finite loss or gradient"
            raise TrainingError(f"{label}.step", step, rule, "lower the learning rate, or clip the rewards")
