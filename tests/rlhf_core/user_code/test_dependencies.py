import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.types import Completion, Generation, Message, Prompt
from rlhf_core.user_code.dependencies import (
    check_file_digests,
    check_functions,
    unseen_reads,
    user_code,
    user_code_digest,
)
from rlhf_core.user_code.modules import load_callable

REWARD = '''
"""Rewards."""
import json
import numpy as np
from rules import weigh

def reward(x):
    """Judge this."""
    from package.late import bonus
    return weigh(x) + bonus()
'''


@pytest.fixture
def folder(tmp_path) -> Path:
    """A reward file that reaches a module beside it, that module's own import, and a package, inside a function."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rules.py").write_text("from constants import WEIGHT\ndef weigh(x): return WEIGHT\n")
    (tmp_path / "constants.py").write_text("WEIGHT = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "late.py").write_text("from .deep import VALUE\ndef bonus(): return VALUE\n")
    (tmp_path / "package" / "deep.py").write_text("VALUE = 1\n")
    (tmp_path / "unused.py").write_text("x = 1\n")
    return tmp_path


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return change


def test_the_users_own_modules_are_found_and_no_others(folder):
    found = user_code(f"{folder}/reward.py:reward")
    assert list(found) == ["constants", "package", "package.deep", "package.late", "reward.py", "rules"]


@pytest.mark.parametrize(
    "change",
    [
        edit("reward.py", "weigh(x) + bonus()", "weigh(x) - bonus()"),
        edit("reward.py", '"""Judge this."""', '"""Judge that."""'),
        edit("reward.py", "def reward", "@memoized\ndef reward"),
        edit("rules.py", "return WEIGHT", "return 2 * WEIGHT"),
        edit("constants.py", "1", "2"),
        edit("package/deep.py", "1", "2"),
        edit("package/__init__.py", "", "import os\n"),
    ],
    ids=["function", "docstring", "decorator", "helper", "constant of a helper", "late import", "package"],
)
def test_whatever_the_function_reaches_counts(folder, change):
    spec = f"{folder}/reward.py:reward"
    before = user_code_digest(spec)
    change(folder)
    assert user_code_digest(spec) != before


def test_comments_unused_files_and_the_place_do_not_count(folder, monkeypatch):
    before = user_code_digest(f"{folder}/reward.py:reward")
    edit("reward.py", "return weigh", "# a remark\n    return weigh")(folder)
    edit("unused.py", "1", "2")(folder)
    assert user_code_digest(f"{folder}/reward.py:reward") == before
    monkeypatch.chdir(folder)
    assert user_code_digest("reward.py:reward") == before
    moved = folder.rename(folder.with_name("moved"))
    assert user_code_digest(f"{moved}/reward.py:reward") == before


def test_a_module_on_the_path_counts_like_a_file(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    found = user_code("package.late:bonus")
    assert list(found) == ["package", "package.deep", "package.late"]
    edit("package/deep.py", "1", "2")(folder)
    assert user_code("package.late:bonus")["package.deep"] != found["package.deep"]


def test_installed_and_own_functions_count_with_their_own_file_alone():
    assert list(user_code("rlhf_core.rewards.verifiable:exact_match")) == ["rlhf_core.rewards.verifiable"]
    assert list(user_code("math_verify:verify")) == ["math_verify"]


def test_a_function_in_a_module_of_an_installed_package_is_found(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "team_of_ours" / "rewards"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "style.py").write_text("from .words import polite\ndef reward(x): return polite(x)\n")
    (package / "words.py").write_text("def polite(x): return 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    spec = "team_of_ours.rewards.style:reward"
    found = user_code(spec)
    assert list(found) == ["team_of_ours.rewards.style"]  # the rest of a package counts by its version
    assert load_callable("function", spec)("x") == 1
    with pytest.raises(ConfigError, match=r"style has no rewrd; did you mean reward\?"):
        user_code("team_of_ours.rewards.style:rewrd")
    (package / "style.py").write_text("def reward(x): return 2\n")
    assert user_code(spec) != found


def test_what_a_module_declares_counts(folder, monkeypatch):
    (folder / "answers.json").write_text("[1]")
    (folder / "tables").mkdir()
    (folder / "tables" / "a.csv").write_text("1")
    (folder / "reward.py").write_text(
        'DEPENDS_ON = ("answers.json", "tables", "env:JUDGE_MODEL")\nimport os\ndef reward(x): return os.environ\n'
    )
    spec = f"{folder}/reward.py:reward"
    monkeypatch.delenv("JUDGE_MODEL", raising=False)
    digests = {user_code_digest(spec)}
    for change in (
        lambda: (folder / "answers.json").write_text("[2]"),
        lambda: (folder / "tables" / "a.csv").write_text("2"),
        lambda: monkeypatch.setenv("JUDGE_MODEL", ""),
        lambda: monkeypatch.setenv("JUDGE_MODEL", "large"),
    ):
        change()
        digests.add(user_code_digest(spec))
    assert len(digests) == 5
    assert "large" not in str(user_code(spec))  # a variable may hold a secret
    assert unseen_reads(spec) == []


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        ('DEPENDS_ON = ("gone.json",)', "depends on gone.json, which is not in"),
        ("DEPENDS_ON = [os.name]", "must be a plain list of texts"),
        ('DEPENDS_ON = "answers.json"', "must be a plain list of texts"),
        ('DEPENDS_ON: tuple[str, ...] = ("gone.json",)', "depends on gone.json, which is not in"),
        ('DEPENDS_ON = ()\nDEPENDS_ON += ("gone.json",)', "must be a plain list of texts"),
        ('if True:\n    DEPENDS_ON = ("gone.json",)', "must be a plain list of texts"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(folder, declaration, text):
    (folder / "reward.py").write_text(f"import os\n{declaration}\ndef reward(x): return 1\n")
    with pytest.raises(ConfigError, match=text):
        user_code_digest(f"{folder}/reward.py:reward")


def test_modules_that_import_each_other_are_read_once(folder):
    edit("constants.py", "WEIGHT", "import rules\nimport reward\nWEIGHT")(folder)
    assert len(user_code(f"{folder}/reward.py:reward")) == 6


def test_a_helper_that_this_python_cannot_read_counts_with_its_bytes(folder):
    (folder / "rules.py").write_text("def weigh(:\n")
    before = user_code_digest(f"{folder}/reward.py:reward")
    (folder / "rules.py").write_text("def weigh(: # other\n")
    assert user_code_digest(f"{folder}/reward.py:reward") != before
    (folder / "reward.py").write_text("def reward(:\n")
    with pytest.raises(ConfigError, match=r"reward\.py"):
        user_code_digest(f"{folder}/reward.py:reward")


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import no_such_package\nexcept ImportError:\n    def reward(x): return 1",
        "if True:\n    from math import sqrt as reward",
        "reward, other = len, max",
    ],
)
def test_a_function_need_not_be_defined_at_the_margin(folder, code):
    (folder / "reward.py").write_text(code)
    assert list(user_code(f"{folder}/reward.py:reward")) == ["reward.py"]
    (folder / "reward.py").write_text("def other():\n    reward = 1")
    with pytest.raises(ConfigError, match="has no reward"):
        user_code(f"{folder}/reward.py:reward")


def test_packages_without_an_init_are_followed(folder):
    (folder / "space" / "deep").mkdir(parents=True)
    (folder / "space" / "deep" / "rules.py").write_text("X = 1\n")
    imports = "import space.deep.rules\nimport google.cloud.storage\n"
    (folder / "reward.py").write_text(f"{imports}def reward(x): return 1\n")
    assert list(user_code(f"{folder}/reward.py:reward")) == ["reward.py", "space.deep.rules"]


def test_compiled_modules_of_the_user_count(folder):
    library = folder / f"fast{EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"\x7fELF one")
    (folder / "reward.py").write_text("import fast\ndef reward(x): return fast.f(x)\n")
    before = user_code(f"{folder}/reward.py:reward")
    assert list(before) == ["fast", "reward.py"]
    library.write_bytes(b"\x7fELF two")
    assert user_code(f"{folder}/reward.py:reward")["fast"] != before["fast"]


def test_a_package_of_an_editable_install_is_the_users(folder, monkeypatch):
    """Such an install brings a finder instead of an entry of the path."""
    root = folder / "src" / "mine"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "r.py").write_text("from mine.c import X\ndef f(x): return X\n")
    (root / "c.py").write_text("X = 1\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            found = spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
            return found if name == "mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert list(user_code("mine.r:f")) == ["mine", "mine.c", "mine.r"]
    (folder / "reward.py").write_text("from mine.r import f as reward\n")
    assert list(user_code(f"{folder}/reward.py:reward")) == ["mine", "mine.c", "mine.r", "reward.py"]


def test_files_that_were_loaded_before_change_no_digest(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    other = folder / "other"
    other.mkdir()
    (other / "rules.py").write_text("def weigh(x): return 7\n")
    (other / "loaded.py").write_text("def f(x): return 1\n")
    before = user_code(f"{folder}/reward.py:reward")
    load_callable("function", f"{other}/loaded.py:f")
    assert user_code(f"{folder}/reward.py:reward") == before


def test_code_that_is_nested_deeply_has_a_digest(folder):
    chain = "".join(f"    elif x == {number}:\n        return {number}\n" for number in range(600))
    (folder / "rules.py").write_text(f"def weigh(x):\n    if x is None:\n        return 0\n{chain}")
    assert len(user_code(f"{folder}/reward.py:reward")["rules"]) == 64


def test_a_module_is_read_once_until_it_changes(folder, monkeypatch):
    monkeypatch.setattr("rlhf_core.user_code.syntax.ANALYSES", {})  # other tests may have edited it in the same way
    user_code(f"{folder}/reward.py:reward")
    monkeypatch.setattr("rlhf_core.user_code.sources._code_digest", lambda content: 1 / 0)
    user_code(f"{folder}/reward.py:reward")
    edit("constants.py", "1", "2")(folder)
    with pytest.raises(ZeroDivisionError):
        user_code(f"{folder}/reward.py:reward")


@pytest.mark.parametrize(
    "spec", ["os.path", "json:missing", "no.where:f", "/nowhere.py:f", ":f", "reward.py:not a name"]
)
def test_a_function_that_is_not_there_is_refused(spec):
    with pytest.raises(ConfigError, match=r"callable = "):
        user_code_digest(spec)


def test_nothing_of_the_users_is_run(folder):
    (folder / "constants.py").write_text(f"WEIGHT = open({str(folder / 'ran')!r}, 'w')\n")
    user_code_digest(f"{folder}/reward.py:reward")
    assert not os.path.lexists(folder / "ran")


def test_code_is_checked_against_the_digest_that_it_had(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("import part\ndef reward(generations):\n    return part.VALUES\n")
    (tmp_path / "part.py").write_text("VALUES = [1]\n")
    spec = f"{file}:reward"
    had = {spec: user_code_digest(spec)}
    check_functions(had, key="function")
    (tmp_path / "part.py").write_text("VALUES = [2]\n")
    with pytest.raises(
        ConfigError, match=r"function = .*reward\.py:reward': its code, or what it depends on, has changed"
    ):
        check_functions(had, key="function")
    (tmp_path / "part.py").write_text("VALUES = [1]  # again\n")
    check_functions(had, key="function")


def test_a_file_is_checked_against_the_digest_that_it_had(tmp_path):
    file = tmp_path / "agent.sh"
    file.write_text("echo 1")
    had = {str(file): hash_file(file)}
    check_file_digests(had, key="agent")
    file.write_text("echo 2")
    with pytest.raises(ConfigError, match=r"agent = .*agent\.sh': its code"):
        check_file_digests(had, key="agent")
    file.unlink()
    with pytest.raises(ConfigError, match="has changed since the stage began"):
        check_file_digests(had, key="agent")


@pytest.mark.parametrize("shadowed", [False, True])
def test_the_key_and_the_process_find_the_same_modules(tmp_path, monkeypatch, shadowed):
    """The console script has not the working folder on its path."""
    (tmp_path / "rewards").mkdir()
    file = tmp_path / "rewards" / "mine.py"
    file.write_text(
        "from lib_of_mine import VALUE\n\ndef reward(generations):\n    return [VALUE] * len(generations)\n"
    )
    (tmp_path / "lib_of_mine.py").write_text("VALUE = 1.0\n")
    first = tmp_path / "first"
    first.mkdir()
    if shadowed:  # by a folder of this process's own path
        (first / "lib_of_mine.py").write_text("VALUE = 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(first), *(entry for entry in sys.path if entry)])
    spec = "rewards/mine.py:reward"
    before = user_code_digest(spec)
    prompt = Prompt("p", (Message("user", "hi"),), "", "test")
    answer = Generation(prompt, (1,), Completion((2,), (-1.0,), "yes", "stop", 0, 0))
    settings = WorkerSettings(code={spec: before})
    with IsolatedReward("mine", spec, timeout_s=60.0, settings=settings) as reward:
        assert reward([answer]) == [2.0 if shadowed else 1.0]
    (first / "lib_of_mine.py" if shadowed else tmp_path / "lib_of_mine.py").write_text("VALUE = 3.0\n")
    assert user_code_digest(spec) != before
