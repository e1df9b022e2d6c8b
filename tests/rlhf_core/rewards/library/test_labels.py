"""Labels that are missing, packages that are missing."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.library.labels import against_labels, needed


def test_only_answers_with_a_label_are_judged() -> None:
    values = against_labels(["a", "b", "c"], ["a", "  ", None], lambda text, label: float(text == label))
    assert values == [1.0, None, None]


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install no-such-thing"):
        needed("no_such_module_at_all", "no-such-thing")
