"""Which files of tests can be left out because nothing that they import has changed since a revision.

Only the tests of `campaigns`, `benchmarks` and `rlhf_contrib` are ever left out: no other code depends on what they
exercise, and they cost a tenth of a run.
"""

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_core.stage.code import _syntax
from rlhf_core.user_code.syntax import imported_names

ROOT = Path(__file__).resolve().parents[2]
BY_CHANGE = ("tests/campaigns", "tests/benchmarks", "tests/rlhf_contrib")
EVERYTHING = ("requirements/", "pyproject.toml", "Makefile", ".ci/", "tests/conftest.py", "tests/support/", "profiles/")
"""A change of these selects every test."""


@dataclass(frozen=True)
class LeftOut:
    """Files of tests, as paths from the root, and the revision since which nothing of theirs has changed."""

    files: tuple[str, ...]
    since: str


def unchanged_tests() -> LeftOut:
    """The files of tests below `BY_CHANGE` that a run may leave out; none without a revision to compare with."""
    base = base_revision()
    if base is None:
        return LeftOut((), "")
    changed = changed_files(base)
    if any(map(selects_everything, changed)):
        return LeftOut((), base)
    files = (file.relative_to(ROOT).as_posix() for folder in BY_CHANGE for file in (ROOT / folder).rglob("test_*.py"))
    return LeftOut(tuple(sorted(file for file in files if not reaches(file, changed))), base)


def selects_everything(name: str) -> bool:
    """True for `EVERYTHING`, for fixtures of a folder, and for a removed file: nothing shows any more who used it."""
    return name.startswith(EVERYTHING) or name.endswith("/conftest.py") or not (ROOT / name).exists()


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
        return bool(before) and b"__doc__" not in after and _syntax(ast.parse(before)) == _syntax(ast.parse(after))
    except (SyntaxError, ValueError):  # code that is broken, or the target of a link
        return False


def reaches(file: str, changed: Iterable[str]) -> bool:
    """True if a file or a module that it imports, by way of others too, is among the changed files or names one."""
    reached = set(_reached_from(file))
    others = [os.fsencode(Path(name).name) for name in changed if not name.endswith(".py")]
    if not reached.isdisjoint(changed):
        return True
    return any(name in _content(module) for name in others for module in reached)


def _reached_from(file: str) -> Iterator[str]:
    found, waiting = set(), [file]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
            yield name


@cache
def _content(file: str) -> bytes:
    return (ROOT / file).read_bytes()


@cache
def _imports(file: str) -> tuple[str, ...]:
    """Our files that a file imports or names.

    A string may name a module (`python -m MODULE`, "module:function"), or a module or data file of its folder, and a data
    file names modules. So does every module of a folder count from which modules are imported by names made at run time:
    f"campaigns.fuzz.{name}".
    """
    if not file.endswith(".py"):
        return tuple(_files_named((_content(file).decode(errors="replace"),), file))
    nodes = list(ast.walk(ast.parse(_content(file))))
    package = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    package = package if file.endswith("__init__.py") else package.rpartition(".")[0]
    imported = (found for name in sorted(imported_names(nodes, package)) for found in _files_of(name))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    named = _files_named((node.value for node in constants if isinstance(node.value, str)), file)
    starts = {
        n.values[0].value for n in nodes if isinstance(n, ast.JoinedStr) and isinstance(n.values[0], ast.Constant)
    }
    folders = [
        ROOT / one.replace(".", "/") for one in starts if one.endswith(".") and one[:-1].replace(".", "").isidentifier()
    ]
    inside = [file.relative_to(ROOT).as_posix() for folder in folders for file in sorted(folder.glob("*.py"))]
    return (*imported, *named, *inside)


def _files_named(texts: Iterable[str], file: str) -> Iterator[str]:
    """Our files whose module the texts name, and modules and data files next to `file`."""
    for text in texts:
        for name in set(re.findall(r"[a-z_]\w*(?:\.\w+)+", text)):
            yield from _files_of(name)
        neighbor = Path(file).with_name(text) if re.fullmatch(r"\w+\.(py|toml)", text) else None
        if neighbor and (ROOT / neighbor).is_file():
            yield neighbor.as_posix()


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
