"""The measures count what they say, on a small tree with known figures, and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import measure

SOURCES = {
    "README.md": "one\ntwo\n",
    "pyproject.toml": """
[[tool.importlinter.contracts]]
name = "rooms"
type = "layers"
containers = ["rlhf_core"]
layers = ["loose | config", "(optional)"]
""",
    "pipelines/__init__.py": "",
    "pipelines/flow.py": "def run(profile):\n    return profile.ppo\n",
    "pipelines/importers/flags.py": "kl = 1\n",
    "stages/__init__.py": "",
    "stages/ppo.py": """from typing import TYPE_CHECKING

def run(config):
    import rlhf_core.loose
    if TYPE_CHECKING:
        import rlhf_core.config.policy
    return config.kl
""",
    "rlhf_core/__init__.py": "",
    "rlhf_core/loose.py": "import rlhf_core.other\n# kl\n",
    "rlhf_core/other.py": "def late():\n    import rlhf_core.loose\n" + "    '''.'''\n" * 59,
    "rlhf_core/config/__init__.py": "",
    "rlhf_core/config/policy.py": "class PPOConfig(Config):\n    kl: float\n" + "x = 1\n" * 399,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_measure_of_a_small_tree_is_what_a_person_counts(tree: Path) -> None:
    figures = measure.figures_in(tree)
    lines = sum(len(text.splitlines()) for name, text in SOURCES.items() if name.endswith(".py"))
    walked = dict.fromkeys((name for name, _ in measure.WALK))
    assert {name: figure for name, figure in figures.items() if name not in walked} == dict(
        zip(
            (one.name for one in measure.MEASURES),
            # The comment of loose.py is the only one, and no class has the keys of profiles. pipelines/flow.py,
            # pipelines/importers and rlhf_core/other.py stand in no layer; loose and other import each other; the profile,
            # flow.py, policy.py and stages/ppo.py are on the way of kl.
            (
                *(lines, 10, 4, 0, 0, "not measured (No module named 'pipelines.flows')", round(100 / lines, 2), 2),
                *(2, 2, 2, 3, 1, 1, 0, 0, 4),
            ),
            strict=True,
        )
    )
    # The walk needs the packages of this repository, and says so where they are not.
    assert all("not measured" in str(figures[name]) or "cannot run there" in str(figures[name]) for name in walked)


def test_a_tree_without_the_setting_is_not_measured(tree: Path) -> None:
    (tree / "rlhf_core/config/policy.py").write_text("x = 1\n")
    with pytest.raises(LookupError, match="no class has the field kl"):
        measure.files_of_a_setting(tree)


def test_the_table_compares_with_a_revision() -> None:
    cycles = "import cycles, late imports included"
    assert measure.table({cycles: 0}, {cycles: 2}, "v1").splitlines()[0] == "| measure | before (v1) | now | goal |"
    assert measure.table({cycles: 0}, {cycles: 2}, "v1").splitlines()[2] == f"| {cycles} | 2 | 0 | 0 |"
