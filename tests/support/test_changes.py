import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.support.changes import (
    ALWAYS,
    BY_CHANGE,
    EVERYTHING,
    ROOT,
    LeftOut,
    base_revision,
    changed_files,
    reaches,
    unchanged_tests,
)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit with a module and a page."""
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "module.py").write_text('"""A docstring."""\n\nONE = 1  # a comment\n')
    (tmp_path / "page.md").write_text("text\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def commit(repository: Path, name: str, text: str) -> str:
    (repository / name).write_text(text)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", name)
    return git(repository, "rev-parse", "HEAD")


def test_without_history_there_is_no_base_and_everything_runs(repository: Path, tmp_path: Path) -> None:
    assert base_revision({}, repository) is None
    assert base_revision({"CI_BASE": "HEAD"}, repository) is None
    (tmp_path / "export").mkdir()
    commit(repository, "a.py", "A = 1\n")
    assert base_revision({}, tmp_path / "export") is None, "the history around it is of other files"
    assert base_revision({"GIT_CEILING_DIRECTORIES": "/"}, Path("/")) is None


def test_the_base_is_the_given_one_else_where_the_branch_began_else_the_commit_before(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    second = commit(repository, "a.py", "A = 1\n")
    commit(repository, "b.py", "B = 1\n")
    assert base_revision({}, repository) == second
    git(repository, "update-ref", "refs/remotes/origin/main", first)
    assert base_revision({}, repository) == first
    assert base_revision({"CI_BASE": second}, repository) == second
    assert base_revision({"CI_BASE": "HEAD~1"}, repository) == second
    assert base_revision({"CI_BASE": "HEAD"}, repository) == first, "HEAD is no base"
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert base_revision({}, repository) == second, "nor is a main that is HEAD"
    with pytest.raises(ValueError, match="CI_BASE = 'nowhere': no such revision; name a commit"):
        base_revision({"CI_BASE": "nowhere"}, repository)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('"""Another docstring."""\nONE = 1\n', False),
        ("ONE = 2\n", True),
        ("ONE = 1\nTWO = 2\n", True),
        ('"""Another docstring."""\nONE = 1\nprint(__doc__)\n', True),
    ],
)
def test_a_module_has_changed_if_its_code_has(repository: Path, text: str, changed: bool) -> None:
    (repository / "module.py").write_text(text)
    assert changed_files("HEAD", repository) == ({"module.py"} if changed else set())


def test_a_docstring_that_the_module_reads_is_code(repository: Path) -> None:
    commit(repository, "module.py", '"""Help."""\nprint(__doc__)\n')
    (repository / "module.py").write_text('"""Other help."""\nprint(__doc__)\n')
    assert changed_files("HEAD", repository) == {"module.py"}


def test_new_removed_renamed_and_other_files_have_changed(repository: Path) -> None:
    (repository / "new.py").write_text("")
    (repository / "page.md").write_text("other text\n")
    git(repository, "mv", "module.py", "moved.py")
    assert changed_files("HEAD", repository) == {"new.py", "page.md", "module.py", "moved.py"}


def test_names_of_any_characters_are_found(repository: Path) -> None:
    names = {"two words.toml", "Grüße.toml", "line\nbreak.toml"}
    for name in names:
        commit(repository, name, "1")
    for name in names:
        (repository / name).write_text("2")
    assert changed_files("HEAD", repository) == names


def test_names_begin_at_the_project_if_it_is_a_folder_of_a_repository(repository: Path) -> None:
    (repository / "project").mkdir()
    for name in ("one.py", "other.py"):
        commit(repository, f"project/{name}", "ONE = 1\n")
    (repository / "project/one.py").write_text("ONE = 1  # a comment\n")
    (repository / "project/other.py").write_text("ONE = 2\n")
    (repository / "module.py").write_text("ONE = 2\n")
    assert changed_files("HEAD", repository / "project") == {"other.py"}


@pytest.mark.parametrize(
    ("content", "changed"),
    [
        (b"# coding: latin-1\nONE = '\xfc'  # other\n", False),
        (b"# coding: latin-1\nONE = '\xe4'\n", True),
        (b"ONE = (\n", True),
    ],
)
def test_code_in_another_encoding_or_with_an_error_is_compared(repository: Path, content: bytes, changed: bool) -> None:
    (repository / "a.py").write_bytes(b"# coding: latin-1\nONE = '\xfc'\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository / "a.py").write_bytes(content)
    assert changed_files("HEAD", repository) == ({"a.py"} if changed else set())


def test_a_link_that_points_elsewhere_has_changed(repository: Path) -> None:
    (repository / "link.py").symlink_to("./module.py")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository / "link.py").unlink()
    (repository / "link.py").symlink_to("module.py")
    assert changed_files("HEAD", repository) == {"link.py"}


def test_changes_that_git_cannot_name_are_an_error(repository: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        changed_files("0" * 40, repository)


def test_a_change_of_comments_in_a_test_is_a_change(repository: Path) -> None:
    (repository / "tests").mkdir()
    commit(repository, "tests/test_a.py", "ONE = 1  # why\n")
    (repository / "tests/test_a.py").write_text("ONE = 1\n")
    assert changed_files("HEAD", repository) == {"tests/test_a.py"}


CAMPAIGN, BENCHMARK = "tests/campaigns/test_fuzz.py", "tests/benchmarks/test_portable.py"
TOPIC = "tests/rlhf_contrib/openrlhf/test_shell.py"


@pytest.mark.parametrize(
    ("file", "changed", "reached"),
    [
        (CAMPAIGN, CAMPAIGN, True),
        (CAMPAIGN, "campaigns/fuzz/mutations.py", True),
        (CAMPAIGN, "campaigns/fuzz/profiles.py", True),  # by a name made at run time
        (CAMPAIGN, "benchmarks/portable.py", False),
        (BENCHMARK, "benchmarks/portable.py", True),
        (BENCHMARK, "rlhf_core/algorithms/merging.py", False),
        ("tests/campaigns/test_takeovers.py", "rlhf_core/store/leases.py", True),
        ("tests/campaigns/test_takeovers.py", "campaigns/durability/checks.py", True),
        ("tests/campaigns/test_campaign.py", "campaigns/durability/reward.py", True),  # named by small.toml next to it
        ("tests/campaigns/test_campaign.py", "pipelines/cli/plan_verbs.py", True),  # "module:function" in a table
        ("tests/benchmarks/test_measure_walk.py", "rlhf_core/rewards/verifiable.py", True),
        (TOPIC, "rlhf_contrib/openrlhf/syntax.py", True),
        (TOPIC, "rlhf_core/errors.py", True),
        (TOPIC, "rlhf_core/algorithms/merging.py", False),
        ("tests/stages/test_ppo.py", "rlhf_core/algorithms/advantage/group.py", True),  # by the package's `__path__`
        ("tests/pipelines/execution/test_gates.py", "stages/distill/run.py", True),  # by the table of stages
        ("tests/rlhf_core/store/test_histories.py", "rlhf_core/algorithms/advantage/group.py", False),
        ("tests/pipelines/test_own_deployments.py", "pipelines/services/supervisor.py", True),  # by a fixture
        (
            "tests/rlhf_core/store/test_artifacts.py",
            "tests/support/workshop.py",
            False,
        ),  # of a fixture that it does not use
        ("tests/rlhf_contrib/environments/test_external_agents.py", "tests/stages/programs/http_agent.py", True),
        ("tests/rlhf_contrib/environments/test_external_agents.py", "tests/stages/programs/trl_reward.py", False),
        ("tests/rlhf_contrib/ray_jobs/test_ray_jobs.py", "rlhf_contrib/ray_jobs/executor.py", True),
        ("tests/rlhf_core/sampling/test_hf_sampler.py", "rlhf_contrib/ray_jobs/executor.py", False),
        ("tests/test_newcomer.py", "docs/tutorial/own_data.md", True),
        ("tests/pipelines/test_wheel.py", "pipelines/cli/main.py", True),  # by the command `rlhf`
    ],
)
def test_a_test_is_reached_by_files_that_it_imports_directly_or_not(file: str, changed: str, reached: bool) -> None:
    assert (ROOT / changed).is_file()
    assert reaches(file, {changed}) is reached


def test_a_page_reaches_the_tests_that_name_it(repository: Path) -> None:
    assert reaches(BENCHMARK, {".ci/run"})
    assert not reaches(BENCHMARK, {"docs/nobody_names_this.md"})


@pytest.mark.parametrize("name", EVERYTHING)
def test_changes_of_what_all_tests_depend_on_select_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.changes.base_revision", lambda: "base")
    monkeypatch.setattr("tests.support.changes.changed_files", lambda base: {name})
    assert unchanged_tests().files == ()
    assert (ROOT / name).exists()


@pytest.mark.parametrize(
    ("name", "everything"),
    [
        ("tests/benchmarks/conftest.py", True),
        ("tests/pipelines/conftest.py", True),
        ("rlhf_core/removed.py", True),
        ("rlhf_core/types.py", False),
        ("pipelines/cli/judge.html", True),
        ("docs/keys.md", False),
    ],
)
def test_fixtures_of_a_folder_data_and_removed_files_select_everything(
    name: str, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.changes.base_revision", lambda: "base")
    monkeypatch.setattr("tests.support.changes.changed_files", lambda base: {name})
    assert (unchanged_tests().files == ()) is everything


def test_slow_tests_and_all_of_campaigns_benchmarks_and_contrib_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.changes.base_revision", lambda: "base")
    monkeypatch.setattr("tests.support.changes.changed_files", lambda base: set())
    left_out = unchanged_tests()
    files = {f.relative_to(ROOT).as_posix() for f in (ROOT / "tests").rglob("test_*.py")}
    assert {*left_out.files} == {file for file in files if file.startswith(BY_CHANGE)} and left_out.since == "base"
    assert {*left_out.slow} == files - {*left_out.files} - {*ALWAYS} and files >= {*ALWAYS}


class Item:
    """An item of pytest, as far as the selection reads it."""

    fixturenames = ()

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.path, self._marks = nodeid, ROOT / nodeid.partition("::")[0], set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None

    def add_marker(self, name: str) -> None:
        self._marks.add(name)


def test_of_a_file_in_part_the_quick_tests_and_one_run_of_each_engine_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        Item("a.py::quick"),
        Item("a.py::recorded"),
        Item("a.py::slow", "slow"),
        Item("a.py::smoke", "slow", "smoke"),
        Item("b.py::slow", "slow"),
    ]
    recorded = {"files": {}, "tests": {"a.py::recorded": 0.5}, "fixtures": {}}
    monkeypatch.setattr("tests.conftest.read_recorded", lambda: recorded)
    said: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: said.extend(items))
    config = SimpleNamespace(hook=hook, stash={conftest.LEFT_OUT: LeftOut(slow=("a.py",))})
    conftest.pytest_collection_modifyitems(config, items)
    assert [one.nodeid for one in items] == ["a.py::quick", "a.py::smoke", "b.py::slow"]
    assert [one.nodeid for one in said] == ["a.py::recorded", "a.py::slow"]
