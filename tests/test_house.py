"""What was won in reading stays won: figures that may not get worse, and how the tests are laid out."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import measure

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipelines", "stages", "rlhf_core")

FIXTURES_OF_ALL = ("policy", "store", "home")
OF_THEIR_OWN = {
    ("gpu/conftest.py", "policy"): "heads as wide as the kernels of a GPU want them",
    ("pipelines/conftest.py", "home"): "the one place where it is defined",
    ("rlhf_core/store/test_index.py", "store"): "with two artifacts in it",
    ("stages/test_invariants_engines.py", "policy"): "heads as wide as vLLM's kernels want them",
}
"""(file, fixture) -> why it is not the one of tests/conftest.py."""


def modules() -> list[str]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py"]


@pytest.mark.slow
def test_no_figure_is_worse_than_the_one_in_house_json():
    """`python -m benchmarks.measure --hold` writes better ones there; a worse one needs a line in the changelog."""
    held = json.loads(measure.HELD.read_text(encoding="utf-8"))
    assert set(held) == {one.name for one in measure.MEASURES} | {name for name, _ in measure.WALK}
    assert measure.worse(measure.figures_in(ROOT), held) == []


def test_a_figure_that_is_held_is_not_written_worse(tmp_path):
    lower, higher = "their files", "comments per 100 lines"
    file = tmp_path / "house.json"
    measure.hold({lower: 340, higher: 4.0}, file)
    measure.hold({lower: 341, higher: 4.1}, file)
    assert json.loads(file.read_text()) == {lower: 340, higher: 4.1}
    assert measure.worse({lower: 341, higher: 4.0}, json.loads(file.read_text())) == [
        "their files: 341, and it was 340",
        "comments per 100 lines: 4.0, and it was 4.1",
    ]
    assert measure.worse({lower: "not measured"}, {lower: 340}) == ["their files: not measured, and it was 340"]


def test_tests_stand_in_the_room_that_they_test():
    """`rlhf_core/store/leases.py` is tested in `tests/rlhf_core/store/`, in a file of its own or with what belongs to it."""
    rooms = {str(Path(module).parent) for module in modules()}
    files = [path for package in PACKAGES for path in (ROOT / "tests" / package).rglob("test_*.py")]
    tested = {path.parent.relative_to(ROOT / "tests").as_posix() for path in files}
    assert tested - rooms <= set(PACKAGES)
    untested = {room for room in rooms if not any(found == room or found.startswith(f"{room}/") for found in tested)}
    assert untested == set()


@pytest.mark.parametrize("name", FIXTURES_OF_ALL)
def test_fixtures_that_many_tests_need_are_defined_once(name):
    files = [path for path in (ROOT / "tests").rglob("*.py") if f"def {name}(" in path.read_text()]
    owners = Counter(path.relative_to(ROOT / "tests").as_posix() for path in files if defines_fixture(path, name))
    allowed = {file for file, fixture in OF_THEIR_OWN if fixture == name} | {"conftest.py"}
    assert set(owners) <= allowed


def defines_fixture(path: Path, name: str) -> bool:
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == name
        and any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.parse(path.read_text()).body
    )


def without_encoding(module: str) -> list[str]:
    """Return the calls in a module that open a file of text in the encoding of whoever runs it."""
    found = []
    for call in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and not any(keyword.arg == "encoding" for keyword in call.keywords):
            name = ast.unparse(call.func).rpartition(".")[2]
            modes = [mode.value for mode in call.args[:2] if isinstance(mode, ast.Constant)]
            text = any(str(mode) in ("r", "w", "a", "x", "rt", "wt", "r+", "w+", "a+") for mode in modes)
            ours = ast.unparse(call.func) == "write_text"  # of rlhf_core.store.layout, in UTF-8
            if (name in ("read_text", "write_text", "FileHandler") and not ours) or (
                name in ("open", "fdopen") and text
            ):
                found.append(f"{module}:{call.lineno}")
    return found


def test_files_of_text_are_in_utf_8_wherever_we_run():
    """Ruff's PLW1514 sees only those whose paths it can tell to be paths."""
    others = [
        path.relative_to(ROOT).as_posix()
        for name in ("benchmarks", "campaigns", "docs")
        for path in (ROOT / name).rglob("*.py")
    ]
    assert [call for module in (*modules(), *others) for call in without_encoding(module)] == []
