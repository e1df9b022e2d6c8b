"""Write docs/reference/walk.md: the way of a prompt through a PPO step, and of a setting from a profile to its use.

    python -m docs.generate_walk

The calls are traced in a real step (`benchmarks.measure_walk`), and each line is the first line of a docstring. `make docs` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure_walk import PACKAGES, ROOT, Call, CallTrace, trace_step

PAGE = ROOT / "docs" / "reference" / "walk.md"
KEY, USED_AS = "kl", "kl_coef"
"""The setting that the page follows, as a profile has it and as the code below the stage names it."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

INTRODUCTION = """# Where a prompt goes

One PPO step, from the policy's weights to its update, as a trace of a real step shows it. Read `run` in `stages/ppo/run.py` first: its
loop is the whole step in order, and it makes the outermost calls below. The step is of one prompt with `runtime.type = "local"`, whose
engines run in the calling process, GAE and one reward function. `python -m docs.generate_walk` writes this page.

## The prompt

Each function stands where it is called first, below its caller, with the first line of its docstring. The file is named where it
changes. Left out are functions without one.

"""

OTHER_WAYS = """
## Other ways to sample and score

`rlhf_core/rollouts/scored_step.py` `open_rollouts` chooses the first three by `[ppo.ahead]` when the stage starts; the loop makes
the same calls.

- `rlhf_core/rollouts/answers.py` `AheadSampler`: samples later steps in a thread while the policy trains, with `staleness`.
- `rlhf_core/rollouts/answers.py` `PartialAnswers`: continues unfinished answers in a later step, with `partial`.
- `rlhf_core/rollouts/scored_step.py` `DynamicScoring`: replaces groups without a gradient, with `dynamic`.
- `rlhf_core/agents/episodes.py` `play_episodes`: makes every answer an episode with an environment, with `ppo.agent`.
- `rlhf_core/runtime/handles.py` `RaySampler`, `rlhf_core/runtime/handles.py` `RayTrainer`: make the same calls in other processes, with
  `runtime.type = "ray"`.
"""

WAY = """
## `ppo.{key}.coef`

The code that names the key, or passes on a table that holds it, from the TOML file to the loss; in the order of the layers, and below
them of the walk.

"""


def page(trace: CallTrace) -> str:
    """Return the whole page for the trace of a step."""
    steps = "".join(step_lines(trace))
    return INTRODUCTION + steps + OTHER_WAYS + WAY.format(key=KEY) + "".join(way_lines(trace))


# ---------------------------------------------------------------- the prompt


def step_lines(trace: CallTrace) -> Iterator[str]:
    """Yield a line per function that has a description, nested by callers; what has none passes its callees up."""
    called: dict[Call | None, list[Call]] = {}
    for call, caller in trace.callers.items():
        called.setdefault(caller, []).append(call)
    file = ""
    waiting = [(call, 0) for call in reversed(called[None])]
    while waiting:
        call, depth = waiting.pop()
        text = trace.docs[call] or _class_line(call)
        if text:
            yield _line(depth, "" if call[0] == file else call[0], call[1], text)
            file = call[0]
        waiting += [(below, depth + bool(text)) for below in reversed(called[call] if call in called else [])]


def _class_line(call: Call) -> str:
    """Return the first line of the docstring of a method's class, "" for what is private or not a method."""
    file, (owner, _, name) = call[0], call[1].rpartition(".")
    if not owner or "<" in owner or owner.startswith("_") or name.startswith("_"):
        return ""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return next(
        (_first_line(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner), ""
    )


def _first_line(node: Function | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _line(depth: int, file: str, name: str, text: str) -> str:
    """Return an item of a list.

    >>> _line(1, "a.py", "f", "Return x < y.")
    '    - `a.py` `f`: Return x &lt; y.\\n'
    """
    shown = re.sub(r"<(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", "&lt;", text)  # in code it is shown as it is
    return f"{'    ' * depth}- {f'`{file}` ' * bool(file)}`{name}`: {shown}\n"


# ---------------------------------------------------------------- the setting

_LAYERS = ("pipelines/flows", "rlhf_core/config", "rlhf_core/stage", "pipelines", "stages", "rlhf_core")
"""Where a profile is read, checked and put into keys, and where its stages run."""


def way_lines(trace: CallTrace) -> Iterator[str]:
    """Yield a line per class and function on the way of the setting, after one for the profile."""
    former = f"its former name, `ppo.{USED_AS}`, becomes this one in `rlhf_core/config/former_names.py` (`renamed`)"
    yield f"1. a profile (TOML), or `--set`; {former}\n"
    entered = trace.files()
    places = paths_of_a_setting(ROOT)

    def place(path: str) -> tuple[int, int]:
        layer = next(number for number, layer in enumerate(_LAYERS) if path.startswith(f"{layer}/"))
        return layer, entered.index(path) if path in entered else -1

    for number, path in enumerate(sorted(places, key=lambda path: (place(path), path)), start=2):
        yield f"{number}. `{path}`\n"
        for name, text in users(ROOT / path, places[path]):
            if text:
                yield _line(1, "", name, text)


def users(file: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the classes with one of the fields and the functions with one of the identifiers, with their first lines."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            if any(identifiers(one) & names for one in fields):
                yield node.name, _first_line(node)
            for inner in node.body:
                if isinstance(inner, Function) and identifiers(inner) & names:
                    yield f"{node.name}.{inner.name}", _first_line(inner)
        elif isinstance(node, Function) and identifiers(node) & names:
            yield node.name, _first_line(node)


def paths_of_a_setting(root: Path) -> dict[str, set[str]]:
    """Path -> the identifiers by which a file counts as one on the way of `KEY`.

    A file counts if its code reads `KEY` from a configuration, defines a table with that field, or has the identifier
    `USED_AS`. In `pipelines`, which passes whole tables on, it also counts with the attribute `.ppo` or the name of such a
    table. Texts and comments do not count.
    """
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    trees = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in files}
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
    """Attributes that code reads from a `config`, or from its table `ppo`.

    >>> sorted(options_read(ast.parse("config.a; f(run.ppo.b); point.c")))
    ['a', 'b']
    """
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {ast.Name: "id", ast.Attribute: "attr"}
    kept = [node for node in read if type(node.value) in owners]
    return {node.attr for node in kept if getattr(node.value, owners[type(node.value)]) in ("config", "ppo")}


def tables_with(field: str, trees: list[ast.Module]) -> set[str]:
    """Names of the configuration classes that define a field, and of their subclasses."""
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
    """Classes and all classes that inherit from them.

    >>> sorted(descendants({"A"}, {"B": {"A"}, "C": {"B"}, "D": set()}))
    ['A', 'B', 'C']
    """
    found = names | {name for name, parents in bases.items() if parents & names}
    return found if found == names else descendants(found, bases)


def identifiers(tree: ast.AST) -> set[str]:
    """Variables, attributes, arguments, keywords and classes in code.

    >>> sorted(identifiers(ast.parse("def f(a):\\n    'text'\\n    return g(b=a.c)")))
    ['a', 'b', 'c', 'g']
    """
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.ClassDef: "name"}
    return {getattr(node, fields[type(node)]) for node in ast.walk(tree) if type(node) in fields} - {None}


def main() -> int:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(trace_step()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
