"""Count the Python code: files and lines by package, the longest file, the longest function.

python -m benchmarks.code_size
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipelines", "stages", "rlhf_core", "benchmarks", "tests")


def main() -> int:
    print("| folder | files | lines | longest file | longest function |\n|---|--:|--:|---|---|")
    for folder in FOLDERS:
        print(row(folder))
    return 0


def row(folder: str) -> str:
    """Return a line of the table."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}
    lines = {str(path.relative_to(ROOT)): len(text.splitlines()) for path, text in texts.items()}
    functions = {
        f"{path.relative_to(ROOT)}:{name}": count for path, text in texts.items() for name, count in lengths(text)
    }
    longest, function = max(lines, key=lines.__getitem__), max(functions, key=functions.__getitem__)
    return (
        f"| `{folder}` | {len(lines)} | {sum(lines.values())} | `{longest}`, {lines[longest]} "
        f"| `{function}`, {functions[function]} |"
    )


def lengths(text: str) -> list[tuple[str, int]]:
    """Return name and lines, signature and docstring included, of every function.

    >>> lengths("def twice(x):\\n    return 2 * x\\n")
    [('twice', 2)]
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions)
    ]


if __name__ == "__main__":
    sys.exit(main())
