import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.user_code.dependencies import UserFunction, user_code_digest
from rlhf_core.user_code.modules import UserFile, load_callable, load_callables

BESIDE = {
    "helpers.py": "class Kind: ...\nVALUE = {value}\ndef late():\n    from constants import VALUE\n    return VALUE\n",
    "constants.py": "VALUE = {value}\n",
    "package/__init__.py": "from . import part\nfrom .part import *\n",
    "package/part.py": "from constants import VALUE\n",
    "package/inner/__init__.py": "",
    "package/inner/leaf.py": "from ..part import VALUE\nfrom .. import part as the_part\nassert the_part.VALUE == VALUE\n",
    "package/direct.py": "VALUE = {value}\n",
    "space/leaf.py": "from importlib import import_module\nVALUE = import_module('constants').VALUE\n",
}
"""Files beside a user's file; each folder has another value."""

FUNCTIONS = {
    "import": "import helpers\ndef f(): return helpers.VALUE",
    "from": "from helpers import VALUE\ndef f(): return VALUE",
    "inside the function": "def f():\n    import helpers\n    return helpers.VALUE",
    "inside a function of the helper": "from helpers import late as f",
    "package": "import package.inner.leaf\ndef f(): return package.inner.leaf.VALUE",
    "package, renamed": "import package.inner.leaf as leaf\ndef f(): return leaf.VALUE",
    "star": "from package import *\ndef f(): return VALUE",
    "package, late": "def f():\n    from package.inner import leaf\n    return leaf.VALUE",
    "package without init": "import space.leaf\ndef f(): return space.leaf.VALUE",
    "import_module": "import importlib\ndef f(): return importlib.import_module('package.part').VALUE",
    "import_module, relative": "import importlib\ndef f(): return importlib.import_module('.part', 'package').VALUE",
    "__import__": "def f(): return __import__('helpers').VALUE",
    "exec": "def f():\n    found = {}\n    exec('import helpers; found[0] = helpers.VALUE', globals() | {'found': found})\n    return found[0]",
    "class": "class f:\n    def __new__(cls):\n        import helpers\n        return helpers.VALUE",
    "reload": "import helpers, importlib\ndef f(): return importlib.reload(helpers).VALUE",
    "folder on the path": (
        "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent / 'package'))\n"
        "def f():\n    import part\n    return part.VALUE"
    ),
    "folder on the path once": (
        "import sys, pathlib\nlibrary = str(pathlib.Path(__file__).parent / 'package')\n"
        "if library not in sys.path: sys.path.append(library)\nimport direct\ndef f(): return direct.VALUE"
    ),
}

LOOKED_UP = """
from __future__ import annotations
import pickle, sys, typing
from dataclasses import dataclass, field
from typing import ClassVar
import helpers
@dataclass
class Box:
    kind: helpers.Kind
    count: ClassVar[int] = 3
    many: list[int] = field(default_factory=list)
def f():
    box = pickle.loads(pickle.dumps(Box(helpers.Kind())))
    assert type(box) is Box and type(box.kind) is helpers.Kind and box.many == []
    assert typing.get_type_hints(Box)["kind"] is helpers.Kind
    assert sys.modules[Box.__module__].Box is Box and sys.modules[helpers.Kind.__module__] is helpers
    return helpers.VALUE
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield


def written(folder: Path, code: str, value: int) -> str:
    """Return the function of a file with `code`, with files beside it that hold `value`."""
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("{value}", str(value)))
    (folder / "mine.py").write_text(code)
    return f"{folder}/mine.py:f"


@pytest.mark.parametrize("code", [*FUNCTIONS.values(), LOOKED_UP], ids=[*FUNCTIONS, "pickle, dataclasses, typing"])
def test_files_of_two_folders_have_helpers_of_their_own(tmp_path, code):
    specs = [written(tmp_path / name, code, value) for name, value in (("one", 1), ("two", 2))]
    first, second = (load_callable("function", spec) for spec in specs)
    assert [first(), second(), first()] == [1, 2, 1]
    helper = tmp_path / "one" / "constants.py"
    status = helper.stat()
    for file in (helper, helper.with_name("helpers.py"), helper.with_name("package") / "direct.py"):
        file.write_text(file.read_text().replace("VALUE = 1", "VALUE = 3"))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [load_callable("function", spec)() for spec in specs] == [3, 2]
    assert second() == 2


@pytest.mark.parametrize("first", ["import helpers\ndef f(): return helpers.VALUE", "def f(): return 1"])
@pytest.mark.parametrize("late", [False, True])
def test_what_only_another_file_has_beside_it_is_not_found(tmp_path, first, late):
    lines = "try:\n    from helpers import VALUE\nexcept ModuleNotFoundError as error:\n    VALUE = error.name\n"
    lines = "def f():\n    " + lines.replace("\n", "\n    ") if late else lines + "def f():\n    "
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "mine.py").write_text(lines + "return VALUE\n")
    spec = f"{tmp_path}/alone/mine.py:f"
    before = user_code_digest(spec)
    assert load_callable("function", written(tmp_path / "other", first, 1))() == 1
    assert user_code_digest(spec) == before
    assert load_callable("function", spec)() == "helpers"


def test_what_a_library_has_imported_for_one_file_is_not_that_of_another(tmp_path):
    late = "import pkgutil\ndef f(): return pkgutil.resolve_name('imported_by_a_library:VALUE')\n"
    codes, values = [late, "def f():\n    from imported_by_a_library import VALUE\n    return VALUE\n"], []
    for number, code in enumerate(codes):
        spec = written(tmp_path / str(number), code, number)
        (tmp_path / str(number) / "imported_by_a_library.py").write_text(f"VALUE = {number}\n")
        values.append(load_callable("function", spec)())
    assert values == [0, 1]


def test_a_load_in_another_thread_changes_nothing(tmp_path, monkeypatch):
    gate: Any = ModuleType("gate_of_this_test")
    gate.entered, gate.go = Event(), Event()
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    slowly = f"import {gate.__name__} as gate\ngate.entered.set(), gate.go.wait(60)\n"
    path = "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent / 'package'))\n"
    late = "def f():\n    import direct\n    return direct.VALUE\n"
    slow, fast, other = (
        written(tmp_path / name, code, value)
        for name, code, value in (("one", path + slowly + late, 1), ("two", path + late, 2), ("three", late, 3))
    )
    function, before = load_callable("k", fast), user_code_digest(other)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_callable, "k", slow)
        assert gate.entered.wait(60)
        try:
            found = user_code_digest(other), function()
        finally:
            gate.go.set()
        assert (*found, loading.result()()) == (before, 2, 1)


def test_a_function_of_a_module_is_fresh_too(tmp_path, monkeypatch):
    written(tmp_path, "", 1)
    (tmp_path / "package" / "losses.py").write_text("from .part import VALUE\ndef f(): return VALUE\n")
    monkeypatch.chdir(tmp_path)
    assert load_callable("function", "package.losses:f")() == 1
    (tmp_path / "constants.py").write_text("VALUE = 3\n")
    assert load_callable("function", "package.losses:f")() == 3


def test_late_imports_have_the_bytes_that_were_hashed(tmp_path):
    spec = written(tmp_path, FUNCTIONS["inside the function"], 1)
    function = UserFunction.of(spec, user_code_digest(spec)).load(key="loss.function")
    written(tmp_path, FUNCTIONS["inside the function"], 2)
    assert function() == 1
    assert UserFunction.of(spec, user_code_digest(spec)).load(key="loss.function")() == 2


def test_old_byte_code_is_not_run(tmp_path):
    spec = written(tmp_path, FUNCTIONS["import"], 1)
    status = (tmp_path / "helpers.py").stat()
    py_compile.compile(str(tmp_path / "helpers.py"))
    (tmp_path / "helpers.py").write_text((tmp_path / "helpers.py").read_text().replace("VALUE = 1", "VALUE = 2"))
    os.utime(tmp_path / "helpers.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load_callable("function", spec)() == 2


def test_functions_of_one_file_share_its_modules_and_those_of_two_files_do_not(tmp_path):
    written(tmp_path, "import helpers\ndef f(): return helpers\ndef g(): return helpers\n", 1)
    (tmp_path / "other.py").write_text("import helpers\ndef f(): return helpers\n")
    found: list[Any] = load_callables("k", [f"{tmp_path}/{name}" for name in ("mine.py:f", "mine.py:g", "other.py:f")])
    assert found[0]() is found[1]() is not found[2]()


def test_a_file_that_is_run_again_keeps_what_it_imports(tmp_path):
    """OpenRLHF runs an agent's file for each episode."""
    written(tmp_path, "import helpers\nhelpers.VALUE += 1\ndef f(): return helpers.VALUE\n", 1)
    file, modules = UserFile("agent.file", tmp_path / "mine.py"), set(sys.modules)
    assert [file.run().f(), file.run().f()] == [2, 3]
    assert len(set(sys.modules) - modules) == 2


def test_the_only_load_of_a_process_has_plain_names_that_new_processes_find(tmp_path):
    spec = written(
        tmp_path,
        "from concurrent.futures import ProcessPoolExecutor\nfrom multiprocessing import get_context\nimport helpers\n"
        "def f():\n    with ProcessPoolExecutor(1, get_context('spawn')) as pool:\n"
        "        return pool.submit(helpers.late).result()\n",
        4,
    )
    program = f"from rlhf_core.user_code.modules import load_callable\nif __name__ == '__main__': print(load_callable('k', {spec!r})())\n"
    (tmp_path / "start.py").write_text(program)
    found = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.stdout == "4\n", found.stderr


def test_another_version_of_a_compiled_module_is_refused(tmp_path):
    """The interpreter loads a library once."""
    spec = written(tmp_path, "def f():\n    import fast", 1)
    library = tmp_path / f"fast{EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"one")
    load_callable("loss.function", spec)
    library.write_bytes(b"two, and longer")
    with pytest.raises(ConfigError, match=r"loss\.function.*fast.*this process has loaded another version"):
        load_callable("loss.function", spec)


def test_what_the_program_has_imported_is_not_loaded_again(tmp_path):
    spec = written(tmp_path, "import torch, tests.support.training as support\ndef f(): return torch, support", 1)
    import torch

    from tests.support import training

    assert load_callable("function", spec)() == (torch, training)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rlhf_core.rewards.verifiable:exact_macth", "has no exact_macth; did you mean exact_match"),
        ("rlhf_core.rewards.verifable:exact_match", "no module rlhf_core.rewards.verifable; did you mean verifiable"),
        ("no_such_package.rewards:f", "there is no module no_such_package"),
        ("rlhf_core.rewards.verifiable", "must read module:name"),
        ("{folder}/reward.py:f", r"no file .*reward\.py .*did you mean rewards\.py"),
        ("{folder}/rewards.py:World", "World is a int; name a function or a class"),
        ("{folder}/rewards.py:Wrod", "did you mean Word"),
        ("{folder}/broken.py:World", "importing it fails: .*no_such_package_at_all"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(tmp_path, spec, message):
    (tmp_path / "rewards.py").write_text("World = 3\nclass Word: ...\n")
    (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match=rf"^function = .*{message}"):
        load_callable("function", spec.format(folder=tmp_path))
