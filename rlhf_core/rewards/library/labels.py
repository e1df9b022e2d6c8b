"""One judgement per answer that has a label; and packages that a reward needs and an installation may lack."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

from rlhf_core.errors import ConfigError, explain


def against_labels(
    completions: Sequence[str], labels: Sequence[str | None], judge: Callable[[str, str], float | None]
) -> list[float | None]:
    """Return `judge(completion, label)` for each; None where the label is missing or empty.

    >>> against_labels(["4", "5"], ["4", None], lambda text, label: float(text == label))
    [1.0, None]
    """
    pairs = zip(completions, labels, strict=True)
    return [judge(text, label) if label is not None and label.strip() else None for text, label in pairs]


def needed(module: str, package: str) -> ModuleType:
    """Return the module of an optional package; ConfigError names the package where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain("function", module, f"needs {error.name}", f"install it: pip install {package}")
        ) from None
