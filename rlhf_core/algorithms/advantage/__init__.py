"""Advantage estimators: a class each, with its options, formula and reference."""

from rlhf_core.algorithms.advantage.base import AdvantageMethod
from rlhf_core.algorithms.methods import methods_in

METHODS = methods_in(
    __name__,
    __path__,
    AdvantageMethod,
    first=(
        "gae", "reinforce++", "reinforce++-baseline", "rloo", "grpo", "dr_grpo", "opo", "remax", "maxrl", "pass@k", "flash_reinforce", "custom",
    ),
)  # fmt: skip
"""Every estimator in the files of this folder, in the order in which forms list them; unnamed types come last."""
