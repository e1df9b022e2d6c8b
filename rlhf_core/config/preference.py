"""Configure the loss on preference pairs: `[dpo.loss] type = "..."`, or `loss = "ipo"` for its defaults.

Each loss is a file of `rlhf_core.algorithms.preference` with its options, formula and reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from rlhf_core.algorithms import preference
from rlhf_core.algorithms.methods import one_of
from rlhf_core.algorithms.preference.base import PreferenceMethod, ReferenceFreeMethod

REFERENCE_FREE = tuple(kind for kind in preference.METHODS if issubclass(kind, ReferenceFreeMethod))
if TYPE_CHECKING:
    PreferenceLoss: TypeAlias = PreferenceMethod
else:
    PreferenceLoss = one_of(preference.METHODS)


def uses_reference(loss: PreferenceLoss) -> bool:
    """Return whether the loss needs a reference policy."""
    return loss.uses_reference
