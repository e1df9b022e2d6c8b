"""torch, imported at its first use and not when a module of ours is.

The file of a method holds its options beside its formula. Options are read wherever a pipeline is planned or a form is shown,
and importing torch takes longer than all of that. `importlib.util.LazyLoader` would put its stand-in into `sys.modules`, where
every other library would find it; this one is seen only by those who import it from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
    Tensor = Any

__all__ = ["torch", "Tensor"]
