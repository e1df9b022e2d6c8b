"""Policy losses: a class each, with its options, formula and reference.

rho = pi / pi_old of a token, A its advantage, w its importance weight.
"""

from rlhf_core.algorithms.methods import methods_in
from rlhf_core.algorithms.policy.clip import PolicyMethod

METHODS = methods_in(
    __name__, __path__, PolicyMethod, first=("clip", "gspo", "cispo", "sapo", "gmpo", "dppo", "clip_cov", "custom")
)
"""Every loss in the files of this folder, in the order in which forms list them; unnamed types come last."""
