import importlib
import subprocess
import sys
import warnings

import pytest

from rlhf_core.moved.names import MOVED_NAMES


@pytest.mark.parametrize("former", MOVED_NAMES)
def test_names_that_a_module_has_lost_work_with_one_warning_each_that_names_the_new_place(former, monkeypatch):
    module = importlib.import_module(former)
    for present, names in MOVED_NAMES[former].items():
        for name in names.split():
            monkeypatch.delitem(vars(module), name, raising=False)  # a module may use what it has lost
            with pytest.warns(FutureWarning, match=f"{former}.{name} is now {present}.{name}; the former name") as said:
                found = getattr(module, name)
            assert found is getattr(importlib.import_module(present), name) and len(said) == 1
            with warnings.catch_warnings(action="error"):
                assert getattr(module, name) is found
            del vars(module)[name]
    with pytest.raises(AttributeError, match=f"module '{former}' has no attribute 'nothing'"):
        _ = module.nothing


def test_the_warning_is_shown_at_the_import_of_the_former_name(tmp_path):
    (tmp_path / "mine.py").write_text("import os\nfrom rlhf_core.store.fingerprint import parse_source\n")
    done = subprocess.run([sys.executable, tmp_path / "mine.py"], capture_output=True, text=True, check=True)
    assert "mine.py:2: FutureWarning: rlhf_core.store.fingerprint.parse_source is now" in done.stderr
    assert done.stderr.count("FutureWarning") == 1
