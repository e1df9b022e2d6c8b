"""Files outside of `include_path` that tasks of the harness name: each of them is in the key."""

import shutil
from pathlib import Path

import pytest

from stages.evaluate_harness import HarnessSuite, content_digests
from stages.harness_files import outside_files

FILES = {
    "tasks/sums.yaml": "include: [inside, ../shared/base]\ntask: sums\nprocess_docs: !function utils.docs\n",
    "tasks/inside": "include: ../shared/deep/other.yaml\n",
    "tasks/utils.py": "def docs(rows): return rows\n",
    "tasks/broken.yaml": "task: [\n",
    "tasks/group.yaml": "group: all\ntask:\n- {task: two, dataset_path: ROOT/rows}\n- {task: three, dataset_path: org/hub,"
    " dataset_kwargs: {data_files: '*.jsonl', data_dir: ROOT/extra}}\n",
    "shared/base": "include: base\ndataset_path: json\ndataset_kwargs: {data_files: {test: ROOT/data/*.jsonl}}\n"
    "doc_to_text: !function text.tools.ask\n",
    "shared/text/tools.py": "def ask(row): return row['q']\n",
    "shared/deep/other.yaml": "dataset_kwargs: {data_files: [unread.jsonl]}\ndoc_to_target: !function math.floor\n",
    "data/a.jsonl": "{}\n",
    "data/b.jsonl": "{}\n",
    "rows/test.jsonl": "{}\n",
    "extra/test.jsonl": "{}\n",
    "unread.jsonl": "{}\n",
    "shared/unnamed.yaml": "task: four\n",
}
READ = (
    *("shared/base", "shared/text/tools.py", "shared/deep/other.yaml", "data/a.jsonl", "data/b.jsonl"),
    *("rows/test.jsonl", "extra/test.jsonl"),
)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("ROOT", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digests(root: Path) -> dict[str, str]:
    return content_digests(HarnessSuite(name="sums", tasks=("sums",), include_path=str(root / "tasks")))


@pytest.mark.parametrize("name", READ)
def test_a_file_outside_that_a_task_names_changes_the_key(root, name):
    before = digests(root)
    (root / name).write_text(f"{(root / name).read_text()}\n")
    after = digests(root)
    assert after["include_path.outside"] != before["include_path.outside"]
    assert after["include_path"] == before["include_path"]


@pytest.mark.parametrize("name", ["unread.jsonl", "shared/unnamed.yaml"])
def test_what_no_task_names_is_not_in_the_key(root, name):
    before = digests(root)
    (root / name).write_text("other")
    assert digests(root) == before


def test_names_are_the_references_so_that_a_folder_can_move(root):
    found = outside_files(root / "tasks")
    assert set(found) == {
        "sums.yaml: ../shared/base",
        "sums.yaml: ../shared/base: base",  # a cycle, followed once
        "sums.yaml: ../shared/base: text/tools.py",
        "sums.yaml: inside: ../shared/deep/other.yaml",
        f"sums.yaml: {root}/data/a.jsonl",
        f"sums.yaml: {root}/data/b.jsonl",
        f"group.yaml: {root}/rows",
        f"group.yaml: {root}/extra",
    }
    (root / "moved").mkdir()
    for name in ("tasks", "shared"):
        shutil.copytree(root / name, root / "moved" / name)
    assert outside_files(root / "moved" / "tasks") == found


ELSEWHERE = {
    "a folder and files in it": ("dataset_kwargs: {data_dir: ROOT/d, data_files: ../e/*.jsonl}", "e/rows.jsonl"),
    "a folder in that of the dataset": ("dataset_kwargs: {data_dir: sub, data_files: ../../e/*}", "e/rows.jsonl"),
    "the folder of the user": ("dataset_kwargs: {data_dir: ~/x}", "home/x/rows.jsonl"),
    "an address of a file": ("dataset_kwargs: {data_files: {test: 'file://ROOT/a*.jsonl'}}", "ab.jsonl"),
    "a bracket": ("dataset_kwargs: {data_files: 'ROOT/d[1]/x.jsonl'}", "d[1]/x.jsonl"),
    "a cache": ("include: __pycache__/base", "tasks/__pycache__/base"),
    "a function of a cache": ("doc_to_text: !function __pycache__.b.ask", "tasks/__pycache__/b.py"),
    "a table that holds itself": ("x: &a [*a, {&b y: *a}]\ndataset_kwargs: {data_files: &c [*c, ROOT/r]}", "r"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_rows_are_found_where_datasets_looks_for_them(case, tmp_path, monkeypatch):
    task, file = ELSEWHERE[case]
    dataset = tmp_path / "rows" if "dataset" in case else "json"
    for name in ("tasks/a.yaml", "rows/sub/test.jsonl", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x: 1\n")
    (tmp_path / "d").mkdir(exist_ok=True)
    text = f"task: a\ndataset_path: {dataset}\n{task}\n"
    (tmp_path / "tasks/a.yaml").write_text(text.replace("ROOT", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = digests(tmp_path)
    (tmp_path / file).write_text("x: 2\n")
    assert digests(tmp_path) != before


def test_a_file_that_the_harness_skips_is_skipped(root):
    expected = outside_files(root / "tasks")
    for number, text in enumerate(("metadata: {version: 2024-13-45}", "x: !!int ''", "x: !!timestamp now")):
        (root / "tasks" / f"skipped{number}.yaml").write_text(f"task: a\n{text}\ninclude: ../shared/unnamed.yaml\n")
    assert outside_files(root / "tasks") == expected


def test_a_folder_that_names_nothing_outside_keeps_the_key_that_it_had(root):
    for name in ("sums.yaml", "group.yaml", "inside"):
        (root / "tasks" / name).unlink()
    (root / "tasks" / "one.yaml").write_text("task: one\ninclude: utils_missing\nprocess_docs: !function utils.docs\n")
    assert set(digests(root)) == {"lm_eval", "include_path"}


@pytest.mark.slow
def test_the_harness_reads_the_same_files(root):
    from lm_eval.tasks._yaml_loader import load_yaml

    # the loader of the harness refuses a cycle, which ours only does not follow
    base = root / "shared/base"
    base.write_text(base.read_text().removeprefix("include: base\n"))
    config = load_yaml(root / "tasks/sums.yaml")
    assert config["dataset_kwargs"] == {"data_files": {"test": f"{root}/data/*.jsonl"}}
    assert config["doc_to_text"].__code__.co_filename == str(root / "shared/text/tools.py")
    assert config["doc_to_target"](1.5) == 1
