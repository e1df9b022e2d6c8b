"""Which tests can be left out because nothing that they import has changed since a revision.

Whole files are left out in the tests of `campaigns`, `benchmarks` and `rlhf_contrib` alone: no other code depends on what
they exercise. Elsewhere only slow tests are. The quick ones, which try every module, and one run of each engine remain.
"""

import ast
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_core.user_code.syntax import imported_names
from rlhf_core.user_code.syntax_digest import syntax_text

ROOT = Path(__file__).resolve().parents[2]
BY_CHANGE = ("tests/campaigns/", "tests/benchmarks/", "tests/rlhf_contrib/")
ALWAYS = tuple(f"tests/test_{name}.py" for name in ("configuration_digests", "docs", "docs_site", "doctests", "house"))
"""These read the text of modules and pages, docstrings included."""
EVERYTHING = ("requirements/", "pyproject.toml", "Makefile", ".ci/", "tests/conftest.py", "tests/support/", "profiles/")
"""A change of these selects every test."""
PLUGINS = {
    f"tests/support/{name}.py" for name in ("changes", "full_runs", "process_state", "recorded_seconds", "sharing")
}
"""How tests are run, not part of what they try. A file that uses a fixture of `sharing` imports its type."""
MOVED = "rlhf_core/moved/names.py"
"""Has former names of modules, which are imported only if asked for."""
RAY_JOB = ("rlhf_core/config/runtime.py", "rlhf_contrib/ray_jobs/executor.py")
"""Most tests import the first, and those that run jobs say `ray-job`. It would lead all others to all of `pipelines`."""
PACKAGES = ("rlhf_core/", "stages/", "pipelines/", "rlhf_contrib/")


@dataclass(frozen=True)
class LeftOut:
    """Tests in files, as paths from the root, and the revision since which nothing of theirs has changed."""

    files: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    """Files of which only the slow tests are left out, but those marked `smoke`."""
    since: str = ""


def unchanged_tests() -> LeftOut:
    """The tests that a run may leave out; none without a revision to compare with."""
    base = base_revision()
    if base is None:
        return LeftOut()
    changed = changed_files(base)
    if any(map(selects_everything, changed)):
        return LeftOut(since=base)
    files = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))
    unreached = [file for file in files if not reaches(file, changed)]
    whole = tuple(file for file in unreached if file.startswith(BY_CHANGE))
    return LeftOut(whole, tuple(file for file in unreached if file not in (*whole, *ALWAYS)), base)


def selects_everything(name: str) -> bool:
    """True for `EVERYTHING`, for fixtures of a folder, for data of the product, and for a removed file.

    Data may be found by a folder or by part of its name, and nothing shows any more who used a removed file.
    """
    data = name.startswith(PACKAGES) and not name.endswith(".py")
    return name.startswith(EVERYTHING) or name.endswith("/conftest.py") or data or not (ROOT / name).exists()


def base_revision(environment: os._Environ[str] | dict[str, str] = os.environ, root: Path = ROOT) -> str | None:
    """The revision that a run is compared with: $CI_BASE, else the merge base with origin/main, else HEAD~1.

    A revision that is HEAD itself is no base. None without history, as in an export inside another repository.
    Raises ValueError if $CI_BASE is no revision.
    """
    if not _git(root, "ls-files", "."):
        return None
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if given := environment.get("CI_BASE"):
        found = _git(root, "rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
        if not found:
            raise ValueError(f"CI_BASE = {given!r}: no such revision; name a commit that this clone has, or unset it")
        if found != head:
            return found
    for candidate in (
        _git(root, "merge-base", "HEAD", "origin/main"),
        _git(root, "rev-parse", "--verify", "--quiet", "HEAD~1^{commit}"),
    ):
        if candidate and candidate != head:
            return candidate
    return None


def changed_files(base: str, root: Path = ROOT) -> set[str]:
    """Files that differ between `base` and the working tree, new and removed ones included.

    A module of the product whose comments or docstrings alone differ has not changed for the tests of its importers,
    unless it reads its docstring. Raises CalledProcessError if git cannot say.
    """
    # -z: without it git puts names with other characters than ASCII in quotes. The project may be a folder of a repository.
    names = _git(root, "diff", "--name-only", "-z", "--no-renames", "--relative", base, check=True).split("\0")
    names += _git(root, "ls-files", "--others", "--exclude-standard", "-z", check=True).split("\0")
    return {name for name in names if name and not _same_code(base, name, root)}


def _same_code(base: str, name: str, root: Path) -> bool:
    if not name.endswith(".py") or name.startswith("tests/") or not (root / name).is_file():
        return False
    after, before = (root / name).read_bytes(), os.fsencode(_git(root, "show", f"{base}:./{name}"))
    try:
        return bool(before) and b"__doc__" not in after and _code(before) == _code(after)
    except (SyntaxError, ValueError):  # code that is broken, or the target of a link
        return False


def _code(content: bytes) -> str:
    """Messages count here: tests compare them."""
    return syntax_text(ast.parse(content), docstrings=False)


def reaches(file: str, changed: Collection[str]) -> bool:
    """True if a file or a module that it imports, by way of others too, is among the changed files or names one."""
    if not changed:
        return False
    reached = _reached_from(file)
    if not reached.isdisjoint(changed):
        return True
    named = [os.fsencode(Path(name).name) for name in changed if not name.endswith(".py") or name.startswith("tests/")]
    # Tests may list the folders of pages.
    folders = {os.fsencode(Path(name).parts[0]) for name in changed if name.startswith("docs/")}
    return any(
        any(name in _content(module) for name in named)
        or (module.startswith("tests/") and any(name in _content(module) for name in folders))
        for module in reached
    )


def _reached_from(file: str) -> set[str]:
    found: set[str] = set()
    waiting = [file, *_imports_of_fixtures(file)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return found


def _imports_of_fixtures(file: str) -> Iterator[str]:
    """Our files that the `conftest.py` above a file import for the fixtures that it names, and for those of every test."""
    words = set(re.findall(r"\w+", _content(file).decode(errors="replace")))
    for folder in Path(file).parents:
        conftest = (folder / "conftest.py").as_posix()
        if (ROOT / conftest).is_file():
            body = ast.parse(_content(conftest)).body
            fixtures = [one for one in body if isinstance(one, ast.FunctionDef) and _is_fixture(one)]
            named, more = set(words), True
            while more:
                arguments = {argument.arg for one in fixtures if one.name in named for argument in one.args.args}
                more = not arguments <= named
                named |= arguments
            kept = [one for one in body if one not in fixtures or one.name in named or "autouse" in ast.unparse(one)]
            nodes = [node for one in kept for node in ast.walk(one)]
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            nodes = [
                node
                for node in nodes
                if node not in body
                or not isinstance(node, (ast.Import, ast.ImportFrom))
                or not used.isdisjoint(one.asname or one.name for one in node.names)
            ]
            yield from (name for name in _imports_in(nodes, conftest) if name not in PLUGINS)


def _is_fixture(function: ast.FunctionDef) -> bool:
    return any("fixture" in ast.unparse(one) for one in function.decorator_list)


@cache
def _content(file: str) -> bytes:
    return (ROOT / file).read_bytes()


@cache
def _imports(file: str) -> tuple[str, ...]:
    """Our files that a file imports or names."""
    if not file.endswith(".py"):
        return tuple(_files_named((_content(file).decode(errors="replace"),), file))
    return tuple(_imports_in(list(ast.walk(ast.parse(_content(file)))), file))


def _imports_in(nodes: Sequence[ast.AST], file: str) -> Iterator[str]:
    """Our files that nodes of a file import or name.

    A string may name a module (`python -m MODULE`, "module:function"), or a module or data file of its folder, and a data
    file names modules. So does every module below a folder count from which modules are imported by names made at run time:
    f"campaigns.fuzz.{name}", or those of a package that looks through its own `__path__`.
    """
    package = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    package = package if file.endswith("__init__.py") else package.rpartition(".")[0]
    for name in sorted(imported_names(nodes, package)):
        yield from (one for one in _files_of(name) if not one.endswith("/__main__.py"))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    yield from _files_named((node.value for node in constants if isinstance(node.value, str)), file)
    starts = {
        n.values[0].value for n in nodes if isinstance(n, ast.JoinedStr) and isinstance(n.values[0], ast.Constant)
    }
    folders = [
        ROOT / one.replace(".", "/") for one in starts if one.endswith(".") and one[:-1].replace(".", "").isidentifier()
    ]
    found = [one for folder in folders for one in sorted(folder.rglob("*.py"))]
    if any(isinstance(node, ast.Name) and node.id == "__path__" for node in nodes):
        found += sorted((ROOT / file).parent.glob("*.py"))
    yield from (one.relative_to(ROOT).as_posix() for one in found)


def _files_named(texts: Iterable[str], file: str) -> Iterator[str]:
    """Our files whose module the texts name, and modules and data files next to `file`; for a test also its programs."""
    for text in texts:
        for name in set(re.findall(r"[a-z_]\w*(?:\.\w+)+", text)):
            yield from (one for one in _files_of(name) if file != MOVED and (file, one) != RAY_JOB)
        neighbor = Path(file).with_name(text) if re.fullmatch(r"\w+\.(py|toml)", text) else None
        if neighbor and (ROOT / neighbor).is_file():
            yield neighbor.as_posix()
        if file.startswith("tests/"):
            for module, names in re.findall(r"from ([\w.]+) import ([\w, ]+)", text):
                for name in names.split(","):
                    yield from _files_of(f"{module}.{name.split()[0] if name.split() else ''}")
            if re.fullmatch(r"[\w/]+\.py", text):
                yield from (name for name in _programs() if name.endswith(f"/{text}"))
            if re.search(r"(^|\s)rlhf\s|bin/rlhf", text):  # the command
                yield "pipelines/cli/main.py"
            if "ray-job" in text:
                yield RAY_JOB[1]


@cache
def _programs() -> tuple[str, ...]:
    """The modules of tests that are neither tests nor fixtures."""
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("*.py"))
    return tuple(sorted(file for file in files if not Path(file).name.startswith(("test_", "conftest"))))


@cache
def _files_of(module: str) -> tuple[str, ...]:
    path = module.replace(".", "/")
    if not all(part.isidentifier() for part in module.split(".")):
        return ()
    return tuple(one for one in (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py") if (ROOT / one).is_file())


def _git(root: Path, *words: str, check: bool = False) -> str:
    """Output of a git command; empty if git is missing, or if it fails and `check` is False."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=check)
    except FileNotFoundError:
        return ""
    return os.fsdecode(done.stdout).strip("\n") if done.returncode == 0 else ""
