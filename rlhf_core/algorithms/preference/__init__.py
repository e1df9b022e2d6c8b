"""Losses on preference data: a class each, with its options, formula and reference.

a = log pi(y_c) - log pi_ref(y_c) of the chosen answer, b likewise for the rejected answer y_r, and h = a - b. All
log-probabilities are sums over an answer.
"""

from rlhf_core.algorithms.methods import methods_in
from rlhf_core.algorithms.preference.base import PreferenceMethod

METHODS = methods_in(
    __name__,
    __path__,
    PreferenceMethod,
    first=(
        "dpo", "cdpo", "robust", "ipo", "hinge", "apo_zero", "apo_down", "sppo", "nca", "exo", "aot", "discopop", "kto", "bco", "dpo_norm", "f_dpo",
        "simpo", "orpo", "custom",
    ),
)  # fmt: skip
"""Every loss in the files of this folder, in the order in which forms list them; unnamed types come last."""
