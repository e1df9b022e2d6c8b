"""What exists after large imports is left out of collections; what is made later is collected as ever."""

import subprocess
import sys

import pytest

# Each in a process of its own, because what is frozen stays so.
IMPORTS = """
import gc
from rlhf_core.processes.large_imports import large_imports

class Node:
    def __init__(self):
        self.itself = self

with large_imports():
    assert not gc.isenabled()
    early = Node()
late = Node()
assert gc.isenabled()
seen = gc.get_objects()
print(any(one is early for one in seen), any(one is late for one in seen))
del late, seen
print(gc.collect() > 0)
"""
FAILED = """
import gc
from rlhf_core.processes.large_imports import large_imports

gc.disable()
try:
    with large_imports():
        raise ImportError("no such library")
except ImportError as error:
    print(error, gc.isenabled())
"""
HIDDEN = """
import sys
from importlib.util import find_spec
from rlhf_core.processes.large_imports import large_imports

with large_imports():
    print(find_spec("sklearn"))
print(find_spec("sklearn") is not None)
sys.modules["sklearn"] = sys  # a package that is imported already stays
with large_imports():
    pass
print(sys.modules["sklearn"] is sys)
"""
ENDING = """
import atexit, gc
from rlhf_core.processes.large_imports import skip_last_collections

atexit.register(lambda: print(gc.get_freeze_count() > 0))  # handlers run in reverse: after all of them
skip_last_collections()
skip_last_collections()
atexit.register(lambda: print(gc.get_freeze_count() > 0))
"""


def printed(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], check=True, text=True, stdout=subprocess.PIPE).stdout.split()


def test_collections_leave_out_what_imports_made_and_nothing_else():
    assert printed(IMPORTS) == ["False", "True", "True"]


def test_a_failed_import_leaves_the_collector_as_it_was():
    assert printed(FAILED) == ["no", "such", "library", "False"]


def test_a_package_that_only_other_libraries_would_use_is_hidden_from_them_alone():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert printed(HIDDEN) == ["None", "True", "True"]


def test_objects_are_left_alone_after_the_handlers_of_all_libraries():
    assert printed(ENDING) == ["False", "True"]
