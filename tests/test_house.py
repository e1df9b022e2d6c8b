"""What was won in reading stays won: figures that may not get worse, and how the tests are laid out."""

import ast
import subprocess
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


def house() -> measure.House:
    return measure.House.read(measure.HELD.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_no_figure_is_worse_than_the_one_in_house_json():
    """`python -m benchmarks.measure --hold` writes better ones there; a worse one needs `--because`."""
    assert set(house().held) == {one.name for one in measure.MEASURES} | {name for name, _ in measure.WALK}
    assert measure.worse(measure.figures_in(ROOT), house().held) == []


def test_a_figure_worse_than_its_best_or_its_goal_has_a_reason():
    assert measure.unexplained(house()) == []


def test_no_earlier_revision_held_a_better_figure_than_the_best():
    """Where there is a history: a figure that is loosened by hand is found in it."""
    git = ["git", "-C", str(ROOT)]
    log = subprocess.run([*git, "log", "--format=%H", "--", str(measure.HELD)], capture_output=True, text=True)
    for revision in log.stdout.split():
        shown = subprocess.run([*git, "show", f"{revision}:tests/house.json"], capture_output=True, text=True)
        if shown.returncode == 0:  # else the file was removed there
            before = measure.House.read(shown.stdout)
            figures = {name: one for name, one in (before.held | before.best).items() if name in house().best}
            assert measure.worse(house().best, figures) == [], revision


def test_a_worse_figure_is_written_with_a_reason_alone(tmp_path):
    lower, higher = "their files", "comments with reasons per 100 lines"
    file = tmp_path / "house.json"
    measure.hold({lower: 340, higher: 4.0}, file)
    measure.hold({lower: 341, higher: 4.1}, file)
    found = measure.House.read(file.read_text())
    assert found.held == found.best == {lower: 340, higher: 4.1} and found.reasons == {}
    now = {lower: 342, higher: 4.1}
    assert measure.worse(now, found.held) == ["their files: 342, and it was 340"]
    measure.hold(now, file, because="a stage")
    found = measure.House.read(file.read_text())
    assert (found.held[lower], found.best[lower], found.reasons) == (342, 340, {lower: "a stage"})
    assert measure.unexplained(found) == []
    assert measure.unexplained(measure.House(found.held, found.best, {})) == [lower]
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
