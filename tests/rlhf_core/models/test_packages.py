"""Where a model inside a Python package lies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.models.packages import package_folder


def test_a_package_names_its_folder() -> None:
    assert (package_folder("package:rlhf_core/models") / "loading.py").is_file()
    assert (package_folder("package:rlhf_core") / "types.py").is_file()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package:no_such_package_at_all", "is not installed; pip install no_such_package_at_all"),
        ("package:json/absent", "no folder 'absent'"),
    ],
)
def test_a_package_or_a_folder_that_is_not_there_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        package_folder(path)


def test_finding_a_package_loads_no_torch() -> None:
    code = "import sys, rlhf_core.models.packages; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
