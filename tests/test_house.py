"""The shape of the code: import layers, sizes, names, and where tests and fixtures are."""

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(sorted(file.parent.name for file in ROOT.glob("*/__init__.py")))
CORE = ("pipelines/", "stages/", "rlhf_core/")
LONG_FUNCTION, LONG_FILE = 60, 650  # lines
LONG_STRING = 2000  # characters

HELD = {
    "class names used twice": 1,
    "function names in several modules": 59,
    "tokens per line": 6.8,
    "tokens of the core": 502_000,
}
"""Figure of the packages -> its limit. Lower a limit when the figure falls; never raise it."""
# The core's limit is its size when topics moved to rlhf_contrib, plus 10,000, and 3,300 for router replay and adapters of
# experts. What the lifecycle does not need goes to rlhf_contrib.
SLACK = 0.03
"""A figure may be below its limit by this fraction, so that branches which lower it can be merged."""
ENTRY_POINTS = ("main", "run")
"""Functions that are found by name: of a command, of a stage."""
NAMES_OF_BUCKETS = re.compile(r"\bbuckets?\b|\bmirrors?\b|s3://", re.IGNORECASE)
OTHER_BUCKETS = {
    "pipelines/cli/options.py": "help of options that name the address of a store",
    "pipelines/flows/recipe.py": "help of the option `store`",
    "rlhf_core/algorithms/distillation.py": "of probabilities",
    "rlhf_core/models/parameter_sources.py": "the verb",
    "rlhf_core/models/piece_sizes.py": "of gradients, in DeepSpeed",
    "rlhf_core/runtime": "of weights, in Ray's object store",
    "rlhf_core/training/engines/deepspeed_setup.py": "of gradients, in DeepSpeed",
}
"""File or folder outside of the store -> the meaning of "bucket" or "mirror" there."""
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # from Python 3.12 on; 3.11 makes one token of an f-string
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
NO_FSTRING = re.compile(r"[rbu]*['\"]", re.IGNORECASE)

FIXTURES_OF_ALL = ("policy", "store", "home")
OF_THEIR_OWN = {
    ("gpu/conftest.py", "policy"): "heads as wide as the kernels of a GPU want them",
    ("pipelines/conftest.py", "home"): "the one place where it is defined",
    ("rlhf_core/store/test_index.py", "store"): "with two artifacts in it",
    ("stages/test_invariants_engines.py", "policy"): "heads as wide as vLLM's kernels want them",
}
"""(file, fixture) -> why it is not the one of tests/conftest.py."""


@dataclass(frozen=True)
class Module:
    """A Python file: its size and the public names that it defines."""

    path: str
    lines: int
    tokens: int
    classes: tuple[str, ...]
    functions: tuple[str, ...]
    long_functions: tuple[str, ...]


def read_module(path: str, text: str) -> Module:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node for node in tree.body if not getattr(node, "name", "_").startswith("_")]
    return Module(
        path,
        lines=len(text.splitlines()),
        tokens=count_tokens(text, nodes),
        classes=tuple(node.name for node in public if isinstance(node, ast.ClassDef)),
        functions=tuple(node.name for node in public if not isinstance(node, ast.ClassDef)),
        long_functions=tuple(node.name for node in functions if node.end_lineno - node.lineno >= LONG_FUNCTION),
    )


def count_tokens(text: str, nodes: Iterable[ast.AST]) -> int:
    """Tokens without comments, docstrings and layout, so that formatting cannot change the number.

    A long string counts one token per four characters: it may be code in another language.
    """
    texts = {
        (node.lineno, node.col_offset)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == FSTRING_START:
            count += depth == 0
            depth += 1
        elif token.type == FSTRING_END:
            depth -= 1
        elif not depth and token.type not in LAYOUT and token.start not in texts:
            long = len(token.string) > LONG_STRING and NO_FSTRING.match(token.string)
            count += len(token.string) // 4 if long else 1
    return count


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the packages. Syntax trees are not kept: together they take hundreds of megabytes."""
    return tuple(
        read_module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    )


def class_names_used_twice(found: Iterable[Module]) -> list[str]:
    return repeated([(name, module.path) for module in found for name in module.classes])


def function_names_in_several_modules(found: Iterable[Module]) -> list[str]:
    names = {(name, module.path) for module in found for name in module.functions}
    return repeated([(name, path) for name, path in names if name not in ENTRY_POINTS])


def repeated(places: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each name that has several places: "name (place, place)"."""
    found = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return [f"{name} ({', '.join(sorted(where))})" for name, where in sorted(found.items()) if len(where) > 1]


def tokens_per_line(found: Iterable[Module]) -> float:
    found = list(found)
    return round(sum(module.tokens for module in found) / sum(module.lines for module in found), 1)


def held_figure(name: str, found: Iterable[Module]) -> tuple[float, str]:
    """A figure of `HELD`, and how to lower it."""
    if name == "tokens per line":
        return tokens_per_line(found), "write fewer things into one line"
    if name == "tokens of the core":
        core = [module.tokens for module in found if module.path.startswith(CORE)]
        return sum(core), "make something else smaller, or write a topic of rlhf_contrib"
    names = class_names_used_twice(found) if name.startswith("class") else function_names_in_several_modules(found)
    return len(names), f"give the new one another name: {'; '.join(names)}"


@pytest.mark.parametrize("name", HELD)
def test_figures_of_names_and_density_only_fall(name):
    figure, remedy = held_figure(name, modules())
    assert figure <= HELD[name], f"{name} = {figure}: must be at most {HELD[name]}; {remedy}"
    assert figure >= HELD[name] * (1 - SLACK), f"{name} = {figure}: less than its limit; lower the limit in HELD"


def test_functions_and_files_are_short():
    long = [f"{module.path} {name}" for module in modules() for name in module.long_functions]
    assert long == [], f"functions above {LONG_FUNCTION} lines"
    assert [module.path for module in modules() if module.lines > LONG_FILE] == [], f"files above {LONG_FILE} lines"


SAMPLE = '''"""A module."""
from typing import overload

class Place:  # a comment
    """A class."""
    x: int
    """An attribute."""

def _private(): ...

@overload
def load(a: int): ...

@overload
def load(a: str): ...

def load(a): return f"{a!r} {f'{a}'}" "b"

def main():
    def load(): pass
'''


def test_names_and_tokens_are_counted_as_a_reader_counts_them():
    """Overloads of a function are one name. An f-string is one token, whatever stands in its braces."""
    one = read_module("one.py", SAMPLE)
    assert (one.lines, one.classes, one.long_functions) == (20, ("Place",), ())
    # By line: import 4; class Place: 3; x: int 3; def _private(): ... 6; twice @overload 2 and def load(a: int): ... 9;
    # def load(a): return f"" "b" 9; def main(): 5; def load(): pass 6.
    assert one.tokens == 4 + 3 + 3 + 6 + 2 * (2 + 9) + 9 + 5 + 6
    assert class_names_used_twice([one]) == function_names_in_several_modules([one]) == []
    two = read_module("two.py", SAMPLE)
    assert class_names_used_twice([one, two]) == ["Place (one.py, two.py)"]
    assert function_names_in_several_modules([two, one]) == ["load (one.py, two.py)"]
    assert read_module("one.py", f"x = '{'a' * LONG_STRING}'").tokens == 2 + (LONG_STRING + 2) // 4
    assert class_names_used_twice([read_module("one.py", "class A: ...\nclass A: ...")]) == ["A (one.py, one.py)"]


@pytest.mark.parametrize(("statements", "long"), [(LONG_FUNCTION - 1, ()), (LONG_FUNCTION, ("f",))])
def test_the_line_of_def_counts_as_one_of_the_function(statements, long):
    assert read_module("one.py", "def f():\n" + "    pass\n" * statements).long_functions == long


def test_no_import_leads_back_to_its_module():
    """Imports inside functions count; imports for type checkers do not."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) - {name} for name in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"{' <- '.join(error.args[1])}: modules import each other; move what they share below both")


def test_every_folder_has_a_layer():
    """`make lint` finds a folder without a layer if the contract of its package is exhaustive."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [contract for contract in settings["contracts"] if contract["type"] == "layers"]
    exhaustive = {name for contract in layers if contract.get("exhaustive") for name in contract["containers"]}
    assert exhaustive >= {"pipelines", "rlhf_core"}
    assert sorted(settings["root_packages"]) == list(PACKAGES)
    assert any(set(contract["layers"]) == set(PACKAGES) for contract in layers)


def test_no_file_outside_of_the_store_knows_a_bucket():
    """Stages and commands get folders and names of objects. Whether these lie on a disk is known to the store alone."""
    files = [file for part in CORE for file in (ROOT / part).rglob("*.py")]
    named = {
        file.relative_to(ROOT).as_posix() for file in files if NAMES_OF_BUCKETS.search(file.read_text(encoding="utf-8"))
    }
    rooms = ("rlhf_core/store", *OTHER_BUCKETS)
    assert [name for name in sorted(named) if not name.startswith(rooms)] == []


def test_tests_stand_in_the_room_that_they_test():
    """`rlhf_core/store/leases.py` is tested in `tests/rlhf_core/store/`, in a separate file or with related modules."""
    found = [Path(module.path) for module in modules() if not module.path.endswith("__init__.py")]
    rooms = {str("stages" if file.match("stages/*/*.py") else file.parent) for file in found}
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


WITH_TEXT = ("read_text", "write_text", "FileHandler")
MAY_OPEN = re.compile(rf"\b({'|'.join(WITH_TEXT)}|open|fdopen)\b")  # parse no file without such a call
TEXT_MODES = ("r", "w", "a", "x", "rt", "wt", "r+", "w+", "a+")


def calls_without_encoding(text: str) -> list[int]:
    """Lines of the calls that open a text file in the encoding of the machine that runs them."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if depends_on_machine(call)]


def depends_on_machine(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name in ("open", "fdopen"):
        return any(isinstance(mode, ast.Constant) and mode.value in TEXT_MODES for mode in call.args[:2])
    ours = isinstance(call.func, ast.Name) and name == "write_text"  # of rlhf_core.store.layout: always UTF-8
    return name in WITH_TEXT and not ours


def test_text_files_are_read_and_written_in_utf_8():
    """Ruff's PLW1514 misses calls on values whose type it cannot tell."""
    folders = (*PACKAGES, "benchmarks", "campaigns", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}
    found = {path: calls_without_encoding(text) for path, text in texts.items() if MAY_OPEN.search(text)}
    assert [f"{path}:{line}" for path, lines in found.items() for line in lines] == []


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("path.read_text()", [1]),
        ("path.read_text(encoding='utf-8')", []),
        ("path.write_text(text)", [1]),
        ("write_text(path, text)", []),
        ("open(path, 'w')", [1]),
        ("path.open('a')", [1]),
        ("path.open('wb')", []),
        ("os.fdopen(number, 'r')", [1]),
        ("logging.FileHandler(path)", [1]),
    ],
)
def test_calls_without_an_encoding_are_found(call, found):
    assert calls_without_encoding(call) == found
