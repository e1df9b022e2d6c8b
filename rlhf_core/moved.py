"""Let the former name of a module that moved to `rlhf_contrib` work for one release, with a warning."""

import sys
import warnings
from importlib import import_module
from pkgutil import iter_modules


def moved(former: str, present: str) -> None:
    """Make the module `former`, which is being imported, the module `present`, with the modules below it.

    A former name gives the same module object, so that classes are equal under both names.
    """
    warnings.warn(f"{former} is now {present}; the former name works until 0.4", FutureWarning, stacklevel=3)
    sys.modules[former] = module = import_module(present)
    for inner in iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{former}.{inner.name}"] = import_module(f"{present}.{inner.name}")
