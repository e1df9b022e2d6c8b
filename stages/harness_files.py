"""Find the files outside of `include_path` that harness tasks read, by `include`, `!function` or rows of data.

Paths resolve as in lm_eval 0.4: `include` and `!function` are relative to the YAML file with the reference. Rows are
relative to the folder of `dataset_path`, or to the working directory if that is not a folder.
"""

from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from rlhf_core.store.fingerprint import hash_file, hash_tree, list_files, tree_digest

PYCACHE = "__pycache__"
"""Folders with this name are not in the digest of `include_path`."""
TASKS = ".yaml"
"""The harness looks for tasks in files with this suffix; a file that they include may have any name."""


def outside_files(folder: Path) -> dict[str, str]:
    """Digest each local file outside of `folder` that a task in it refers to, directly or through an include.

    Keys are the paths of the YAML files in `folder`, followed by the references exactly as written. A folder that is
    moved together with its referenced files keeps its digests. Missing files, Hub datasets and modules of installed
    packages are left out.
    """
    reader = _Reader(folder.resolve())
    for name in list_files(folder):
        if name.endswith(TASKS):
            reader.follow(folder / name, name)
    return reader.digests


class _Reader:
    """Collects the digests of referenced files."""

    def __init__(self, folder: Path) -> None:
        self.digests: dict[str, str] = {}
        self._folder = folder

    def follow(self, file: Path, name: str) -> None:
        """Record the files that a task file and its includes name."""
        merged = self._merged(file, name, frozenset())
        for rows in _rows(merged, "", set()):
            self._note(Path(rows), f"{name}: {rows}")

    def _merged(self, file: Path, name: str, above: frozenset[Path]) -> dict[str, Any]:
        """Merge the content of a YAML file over the files that it includes, in the order of the harness."""
        file = file.resolve()
        if not file.is_file() or file in above:
            return {}
        content, functions = _read(file)
        for function in functions:
            module = function.rpartition(".")[0].replace(".", "/") + ".py"
            self._note(file.parent / module, f"{name}: {module}")
        merged: dict[str, Any] = {}
        included = content.pop("include", [])
        for one in included if isinstance(included, list) else [included]:
            self._note(file.parent / str(one), f"{name}: {one}")
            merged |= self._merged(file.parent / str(one), f"{name}: {one}", above | {file})
        return merged | content

    def _note(self, path: Path, name: str) -> None:
        path = path.resolve()
        if path.is_relative_to(self._folder) and PYCACHE not in path.relative_to(self._folder).parts:
            return  # all other files there are in the key
        if path.is_file():
            self.digests[name] = hash_file(path)
        elif path.is_dir():
            self.digests[name] = tree_digest(hash_tree(path))


def _read(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Load a YAML file, and the functions that it refers to; both are empty if the harness cannot read the file."""
    # Not a package of ours: lm_eval needs it, and is installed where a suite of this type is planned.
    import yaml

    functions: list[str] = []

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen by the build
        """YAML with the harness's tag."""

    def function(loader: Any, node: Any) -> str:
        functions.append(str(node.value))
        return str(node.value)

    Loader.add_constructor("!function", function)
    try:
        content = yaml.load(file.read_bytes(), Loader=Loader)  # a safe loader with one more tag
    except Exception:  # as the harness, which skips the file: impossible dates raise ValueError, for example
        return {}, functions
    return (dict(content) if isinstance(content, Mapping) else {}), functions


def _rows(config: Any, dataset: str, seen: set[tuple[int, str]]) -> Iterator[str]:
    """Yield local files and folders with rows that a task names, or a group in the tasks that it lists.

    `seen` are the identities of lists and tables, each with its dataset: an alias of YAML may repeat one, or hold itself.
    """
    if not isinstance(config, Mapping | list) or (id(config), dataset) in seen:
        return
    seen.add((id(config), dataset))
    if isinstance(config, list):
        for one in config:
            yield from _rows(one, dataset, seen)
        return
    dataset = str(config.get("dataset_path") or dataset)
    if "dataset_path" in config and Path(dataset).exists():
        yield dataset
    options = config.get("dataset_kwargs")
    if isinstance(options, Mapping):
        yield from _named_rows(dataset, options)
    yield from (file for value in config.values() for file in _rows(value, dataset, seen))


def _named_rows(dataset: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files of `data_dir` and of `data_files` in it: the library `datasets` joins them."""
    base = Path(dataset) if Path(dataset).is_dir() else Path()
    of_hub = "/" in dataset and not Path(dataset).exists()
    folder = options.get("data_dir")
    if isinstance(folder, str):
        base = (base / folder).expanduser()
        if not of_hub or base.is_absolute():
            yield from _matches(base)
    for named in _texts(options.get("data_files"), set()):
        file = named.removeprefix("file://")
        if not of_hub or Path(file).is_absolute():
            yield from _matches(base / file)


def _matches(pattern: Path) -> list[str]:
    """Files and folders that match a pattern, including one whose literal name is the pattern."""
    found = glob(str(pattern), recursive=True)  # noqa: PTH207  # absolute patterns, too
    return sorted({*found, str(pattern)} if pattern.exists() else found)


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield every text in a text, a list or a mapping of splits; `seen` has the identities of visited containers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list) and id(value) not in seen:
        seen.add(id(value))
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one, seen)
