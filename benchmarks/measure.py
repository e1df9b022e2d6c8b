"""Compute measures of how easy this code is to read and to extend.

    python -m benchmarks.measure
    python -m benchmarks.measure --before v0.1.0
    python -m benchmarks.measure --hold
    python -m benchmarks.measure --hold --because "recipes: steps by name, in 900 lines"

`--before` checks out a git revision beside this one, measures it with this file, and adds a column. `--hold` writes the
figures that are better than those in tests/house.json there: tests/test_house.py fails when one gets worse. With `--because`
worse ones are written, too, with the reason, which stays until the figure is as good as it ever was.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
import tomllib
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("benchmarks", "campaigns", "docs", "tests")
"""Packages that are no part of the product."""
LONG_FUNCTION, LONG_FILE, LONG_LINE = 60, 650, 140
MARKS = ("noqa", "type:", "fmt:", "mypy:", "pragma:", "---")
"""Beginnings of comments that no reader learns from."""
HELD = ROOT / "tests" / "house.json"
"""The figures that later changes are held to, the best that each ever had, and why it is worse than that or than its goal."""
KEY, USED_AS = "kl", "kl_coef"
"""The setting whose way from a profile to its use is followed."""
GENERATED = ("code_map.md", "walk.md", "reference/*")
"""Pages that a command writes from the code, below `docs/`."""
TRANSLATORS = "pipelines/importers"
"""Turns settings of other programs into profiles, so no setting of a profile passes through it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Figure = float | int | str


# ---------------------------------------------------------------- the measures


def product_lines(root: Path) -> int:
    """Count the lines of the packages."""
    return sum(lines(path) for path in modules(root))


def lines(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def product_modules(root: Path) -> int:
    """Count the Python files of the packages."""
    return len(modules(root))


def median_file(root: Path) -> int:
    """Return the lines of the middle one of all files that have any code."""
    return int(statistics.median(filter(None, map(lines, modules(root)))))


def lines_of_tests(root: Path) -> int:
    """Count the lines of the tests and of what they import from beside them."""
    return sum(lines(path) for path in (root / "tests").rglob("*.py"))


def lines_beside(root: Path) -> int:
    """Count the lines of the benchmarks and of the campaigns of kills, faults and damaged inputs."""
    return sum(lines(path) for folder in ("benchmarks", "campaigns") for path in (root / folder).rglob("*.py"))


def long_lines(root: Path) -> int:
    """Count the lines of the packages that are longer than `LONG_LINE` characters."""
    return sum(
        len(line) > LONG_LINE for path in modules(root) for line in path.read_text(encoding="utf-8").splitlines()
    )


def comments(root: Path) -> float:
    """Return the comments, each of one line, per 100 lines of the packages; separators and marks for tools do not count."""
    found = 0
    for path in modules(root):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        found += sum(
            token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(MARKS) for token in tokens
        )
    return round(100 * found / product_lines(root), 2)


def options(root: Path) -> int:
    """Count the keys that a profile can set: the fields of all its tables, each once where it is defined."""
    return len(fields_of_profiles())


def fields_of_profiles() -> set[tuple[str, str]]:
    """Return (table, key) of everything that a profile of the packages on the path can set.

    An inherited key is one of the table that defines it: sections and steps of a recipe have those of their stage.
    """
    from pipelines.flows.profile import PipelineConfig

    found: set[tuple[str, str]] = set()
    seen: list[typing.Any] = []
    waiting: list[typing.Any] = [PipelineConfig]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if not isinstance(kind, type) or not hasattr(kind, "model_fields") or kind in seen:
            continue
        seen.append(kind)
        for name, field in kind.model_fields.items():
            owner = next(parent for parent in reversed(kind.__mro__) if name in getattr(parent, "__annotations__", {}))
            found.add((owner.__name__, name))
            waiting.append(field.annotation)
    return found


def words_of_docs(root: Path) -> int:
    """Count the words of the pages of the documentation, the generated ones left out, and of README.md."""
    docs = root / "docs"
    pages = [page for page in docs.rglob("*.md") if not any(map(page.relative_to(docs).match, GENERATED))]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in [root / "README.md", *pages])


def loose_modules(root: Path) -> int:
    """Count the modules directly in `rlhf_core`, outside any folder."""
    return len([path for path in (root / "rlhf_core").glob("*.py") if path.name != "__init__.py"])


def late_imports(root: Path) -> int:
    """Count the imports inside functions and classes of the packages: not per line, or deleted lines would make it worse.

    A statement counts once, whatever it imports from whatever package; statements below `if TYPE_CHECKING` do not.
    """
    return sum(late_imports_of(path.read_text(encoding="utf-8")) for path in modules(root))


def late_imports_of(source: str) -> int:
    """Count the imports inside functions and classes, those by name included.

    >>> late_imports_of("import os\\ndef f():\\n    import torch\\n    def g(): from torch import nn, optim")
    2
    >>> late_imports_of("class A:\\n    import os\\ndef f(): return importlib.import_module('torch')")
    2
    """
    bodies = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function | ast.ClassDef | ast.Lambda)]
    return len({node for body in bodies for node in run_nodes(body) if imports(node)})


def imports(node: ast.AST) -> bool:
    """Return whether a node is an import statement, or a call that imports a module by its name."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    return isinstance(node, ast.Import | ast.ImportFrom)


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it but the bodies of `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from run_nodes(child)


def readme_lines(root: Path) -> int:
    """Count the lines of README.md."""
    return len((root / "README.md").read_text(encoding="utf-8").splitlines())


def modules_in_no_layer(root: Path) -> int:
    """Count the modules and folders of the containers in pyproject.toml's layer contracts that no layer names.

    The packages of a contract without containers are taken as one container: `rlhf_core` counts where none names it.
    """
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers: dict[str, set[str]] = {package: set() for package in ("pipelines", "rlhf_core")}
    for contract in contracts:
        for container in contract["containers"] if "containers" in contract else ():
            names = " | ".join(contract["layers"]).replace(":", "|").split("|")
            layers.setdefault(container, set()).update(name.strip(" ()") for name in names)
    return sum(len(members(root / container.replace(".", "/")) - named) for container, named in layers.items())


def members(folder: Path) -> set[str]:
    """Return the names of the modules and packages in a folder."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}


def import_cycles(root: Path) -> int:
    """Count the groups of modules that import each other, late imports included and type-checking ones not."""
    import grimp
    import networkx

    graph = grimp.build_graph(*packages(root), exclude_type_checking_imports=True, cache_dir=None)
    edges = [(name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name)]
    return sum(len(group) > 1 for group in networkx.strongly_connected_components(networkx.DiGraph(edges)))


def long_functions(root: Path) -> int:
    """Count the functions of the packages longer than `LONG_FUNCTION` lines, signature and docstring included."""
    functions = [
        node
        for path in modules(root)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    ]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 > LONG_FUNCTION for node in functions)


def long_files(root: Path) -> int:
    """Count the files of the packages longer than `LONG_FILE` lines."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) > LONG_FILE for path in modules(root))


def files_of_a_setting(root: Path) -> int:
    """Count the files between a profile and the use of `ppo.kl.coef`, the profile included."""
    return 1 + len(paths_of_a_setting(root))


def paths_of_a_setting(root: Path) -> dict[str, set[str]]:
    """Return path -> the identifiers by which the file counts as one on the way of `KEY`.

    A file counts if its code reads `KEY` off a configuration, defines a table with that field, or has the identifier
    `USED_AS`; in `pipelines`, which passes whole tables on, also if it has the attribute `.ppo` or the name of such a table.
    Texts and comments do not count. The importers are left out: they write profiles and read none.
    """
    trees = {
        path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"))
        for path in modules(root)
        if not path.relative_to(root).is_relative_to(TRANSLATORS)
    }
    tables = tables_with(KEY, list(trees.values()))
    if not tables:
        raise LookupError(f"no class has the field {KEY}")
    names = {path: {USED_AS} | ({"ppo", *tables} if path.parts[0] == "pipelines" else set()) for path in trees}
    on_the_way = [
        path
        for path, tree in trees.items()
        if identifiers(tree) & names[path] or KEY in options_read(tree) or tables_with(KEY, [tree]) & tables
    ]
    return {path.as_posix(): {KEY, *names[path]} for path in on_the_way}


def options_read(tree: ast.AST) -> set[str]:
    """Return the attributes that code reads off a `config`, or off its table `ppo`.

    >>> sorted(options_read(ast.parse("config.a; f(run.ppo.b); point.c")))
    ['a', 'b']
    """
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {ast.Name: "id", ast.Attribute: "attr"}
    kept = [node for node in read if type(node.value) in owners]
    return {node.attr for node in kept if getattr(node.value, owners[type(node.value)]) in ("config", "ppo")}


def tables_with(field: str, trees: list[ast.Module]) -> set[str]:
    """Return the names of the configuration classes that define a field, and of their subclasses."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    configs = descendants({"Config"}, bases)
    owners = {
        node.name
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == field
    }
    return descendants(owners & configs, bases)


def descendants(names: set[str], bases: dict[str, set[str]]) -> set[str]:
    """Return classes and all that inherit from them.

    >>> sorted(descendants({"A"}, {"B": {"A"}, "C": {"B"}, "D": set()}))
    ['A', 'B', 'C']
    """
    found = names | {name for name, parents in bases.items() if parents & names}
    return found if found == names else descendants(found, bases)


def identifiers(tree: ast.AST) -> set[str]:
    """Return the variables, attributes, arguments, keywords and classes of code.

    >>> sorted(identifiers(ast.parse("def f(a):\\n    'text'\\n    return g(b=a.c)")))
    ['a', 'b', 'c', 'g']
    """
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.ClassDef: "name"}
    return {getattr(node, fields[type(node)]) for node in ast.walk(tree) if type(node) in fields} - {None}


def walk(root: Path) -> tuple[int, int]:
    """Return the files that one prompt enters in a PPO step, and the switches between them, by `measure_walk`."""
    path = Path(__file__).with_name("measure_walk.py")
    if not path.is_file():
        raise FileNotFoundError("benchmarks/measure_walk.py")
    spec = importlib.util.spec_from_file_location("measure_walk", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["ROOT"] = root
    files, switches = module.walk()
    return files, switches


def modules(root: Path) -> list[Path]:
    """Return the Python files of the packages."""
    return sorted(path for package in packages(root) for path in (root / package).rglob("*.py"))


def packages(root: Path) -> list[str]:
    """Return the packages of the product: all at the root but those in `BESIDE`."""
    return sorted(file.parent.name for file in root.glob("*/__init__.py") if file.parent.name not in BESIDE)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Measure:
    """A row of the table: what is counted, how, its goal, and whether more of it is better."""

    name: str
    count: Callable[[Path], Figure]
    goal: str
    more: bool = False


MEASURES = (
    Measure("lines of the packages", product_lines, "<= 55000"),
    Measure("their files", product_modules, "<= 340"),
    Measure("lines of the median file", median_file, ">= 140", more=True),
    Measure("lines of `tests/`", lines_of_tests, "<= 42000"),
    Measure("lines of `benchmarks/` and `campaigns/`", lines_beside, "held"),
    Measure("keys that a profile can set", options, "<= 750"),
    Measure("comments with reasons per 100 lines", comments, ">= 4", more=True),
    Measure("words of the documentation and of README.md", words_of_docs, "<= 30000"),
    Measure("loose modules in `rlhf_core/`", loose_modules, "3"),
    Measure("late imports (inside functions and classes)", late_imports, "<= 110"),
    Measure("lines of README.md", readme_lines, "<= 150"),
    Measure("modules and folders in no import layer", modules_in_no_layer, "0"),
    Measure("import cycles, late imports included", import_cycles, "0"),
    Measure(f"functions longer than {LONG_FUNCTION} lines", long_functions, "0"),
    Measure(f"files longer than {LONG_FILE} lines", long_files, "0"),
    Measure(f"lines longer than {LONG_LINE} characters", long_lines, "held"),
    Measure(f"files from TOML to the use of `ppo.{KEY}.coef`", files_of_a_setting, "<= 6"),
)
WALK = (
    ("files that one prompt enters in a PPO step, in one process", "<= 28"),
    ("switches between files on that way", "<= 160"),
)


def worse(now: dict[str, Figure], held: dict[str, Figure]) -> list[str]:
    """Return a line for each figure that is worse than the held one, or was not measured.

    >>> worse({"import cycles, late imports included": 1}, {"import cycles, late imports included": 0})
    ['import cycles, late imports included: 1, and it was 0']
    """
    more = {measure.name for measure in MEASURES if measure.more}
    return [
        f"{name}: {now.get(name)}, and it was {before}"
        for name, before in held.items()
        if not is_as_good(now.get(name), before, more=name in more)
    ]


def is_as_good(figure: Figure | None, other: Figure, *, more: bool) -> bool:
    """Return whether a figure is a number that is as good as another, or better.

    >>> is_as_good(3, 2, more=True), is_as_good(3, 2, more=False), is_as_good("not measured", 2, more=False)
    (True, False, False)
    """
    if isinstance(figure, str) or isinstance(other, str) or figure is None:
        return False
    return figure >= other if more else figure <= other


def meets(figure: Figure | None, goal: str) -> bool:
    """Return whether a figure reaches its goal; one without a goal is only held.

    >>> meets(3, "<= 4"), meets(3, ">= 4"), meets(1, "0"), meets(9, "held")
    (True, False, False, True)
    """
    bound, more = int(goal.strip("<>= ") if goal != "held" else 0), goal.startswith(">=")
    return goal == "held" or is_as_good(figure, bound, more=more)


def unexplained(house: House) -> list[str]:
    """Return the figures without a reason that miss their goal, or, without a goal, are worse than at their best."""
    goals = {one.name: one.goal for one in MEASURES} | dict(WALK)
    worse_than_best = {line.partition(":")[0] for line in worse(house.held, house.best)}
    missed = {
        name
        for name, figure in house.held.items()
        if not meets(figure, goals[name]) or (goals[name] == "held" and name in worse_than_best)
    }
    return sorted(name for name in missed if not house.reasons.get(name, "").strip())


@dataclass(frozen=True)
class House:
    """The content of tests/house.json."""

    held: dict[str, Figure]
    best: dict[str, Figure]
    reasons: dict[str, str]

    @staticmethod
    def read(text: str) -> House:
        """Return what the file holds; its first form had the held figures alone."""
        table = json.loads(text)
        return House(**table) if "held" in table else House(table, {}, {})


def hold(now: dict[str, Figure], file: Path = HELD, because: str = "") -> None:
    """Write the figures that are better than those in the file, and with a reason those that are worse."""
    house = House.read(file.read_text(encoding="utf-8")) if file.exists() else House({}, {}, {})
    more = {measure.name for measure in MEASURES if measure.more}

    def better(figure: Figure, name: str, other: dict[str, Figure]) -> Figure:
        return other[name] if name in other and not is_as_good(figure, other[name], more=name in more) else figure

    held = {name: figure if because else better(figure, name, house.held) for name, figure in now.items()}
    best = {name: better(figure, name, house.best) for name, figure in now.items()}
    reasons = {name: house.reasons[name] for name in now if name in house.reasons}
    reasons |= {line.partition(":")[0]: because for line in worse(now, house.held) if because}
    kept = House(held, best, dict(sorted(reasons.items())))
    file.write_text(json.dumps(asdict(kept), indent=1) + "\n", encoding="utf-8")


def figures(root: Path) -> dict[str, Figure]:
    """Return name -> figure for a tree of this repository; a text says why there is none."""
    found: dict[str, Figure] = {}
    for measure in MEASURES:
        try:
            found[measure.name] = measure.count(root)
        except (LookupError, OSError, SyntaxError, ImportError) as error:
            found[measure.name] = f"not measured ({error})"
    return found | walked(root)


def walked(root: Path) -> dict[str, Figure]:
    """Return the figures of the walk; code of another revision may lack what the walk imports."""
    names = [name for name, _ in WALK]
    try:
        return dict(zip(names, walk(root), strict=True))
    except FileNotFoundError:
        return dict.fromkeys(names, "not measured")
    except Exception as error:  # whatever another revision's code raises is the answer
        return dict.fromkeys(names, f"cannot run there ({type(error).__name__}: {error})")


def figures_in(root: Path) -> dict[str, Figure]:
    """Return the figures of a tree, measured by a process that imports the packages from there."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--json", "--root", str(root)]
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, Figure] = json.loads(done.stdout.splitlines()[-1])
    return measured


@contextmanager
def tree_at(revision: str) -> Iterator[Path]:
    """Yield a worktree of a git revision, which lives as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder) / "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            yield Path(tree)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def figures_at(revision: str) -> dict[str, Figure]:
    """Return the figures of a git revision."""
    with tree_at(revision) as tree:
        return figures_in(tree)


def table(now: dict[str, Figure], before: dict[str, Figure] | None, revision: str) -> str:
    """Return the figures as a table, with a column for a revision if there is one.

    >>> print(table({"import cycles, late imports included": 0}, None, ""))
    | measure | now | goal |
    |---|--:|--:|
    | import cycles, late imports included | 0 | 0 |
    """
    goals = {measure.name: measure.goal for measure in MEASURES} | dict(WALK)
    heads = ["measure", *([f"before ({revision})"] if before else []), "now", "goal"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, figure in now.items():
        cells = [name, *([str(before[name])] if before else []), str(figure), goals[name]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", metavar="REVISION", default="", help="a git revision to compare with")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help="write what is better to tests/house.json")
    parser.add_argument("--because", metavar="REASON", default="", help="with --hold: write what is worse, too")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    given = parser.parse_args(arguments)
    if given.json:
        print(json.dumps(figures(given.root)))
        return 0
    now = figures_in(ROOT)
    if given.hold:
        hold(now, because=given.because)
    print(table(now, figures_at(given.before) if given.before else None, given.before))
    for name, reason in House.read(HELD.read_text(encoding="utf-8")).reasons.items():
        print(f"\n{name}: {reason}")
    return 0


if __name__ == "__main__":
    logging.disable()
    sys.exit(main())
