"""The walk of a prompt: the page is the trace of a real step, and names functions that exist."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.measure_walk import ROOT, trace_step
from docs.generate_walk import OTHER_WAYS, page, paths_of_a_setting


def names_in(file: Path) -> set[str]:
    """Return the functions and classes of a file, methods as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    inner = {f"{node.name}.{one.name}" for node in found for one in node.body if isinstance(one, kinds)}
    return inner | {node.name for node in found}


def test_every_function_that_the_page_names_by_hand_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", OTHER_WAYS)
    assert len(named) == 7
    assert [one for one in named if one[1] not in names_in(ROOT / one[0])] == []


@pytest.mark.slow
def test_the_page_is_the_trace_of_a_step() -> None:
    trace = trace_step()
    assert trace.switches() > len(trace.files()) > 20
    written = page(trace)
    steps = [
        written.find(f"`{name}`: ")
        for name in ("measure", "LocalTrainer.logprobs", "estimate_step", "LocalTrainer.optim_step")
    ]
    assert steps == sorted(steps) and steps[0] > 0, "the steps of PPO in their order"
    assert "`ClipLoss.loss`: " in written


SOURCES = {
    "pipelines/flow.py": "def run(profile):\n    return profile.ppo\n",
    "rlhf_contrib/flags.py": "kl_coef = 1\n",
    "stages/ppo.py": "def run(config):\n    return config.kl\n",
    "rlhf_core/penalty.py": "def penalty(kl_coef): ...\n",
    "rlhf_core/other.py": "kl = 1  # kl_coef\n",
    "rlhf_core/config/policy.py": "class PPOConfig(Config):\n    kl: float\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_on_the_way_of_a_setting_name_it_in_code(tree: Path) -> None:
    """A run needs no topic of contrib, and a comment or an unrelated variable `kl` is no use of the setting."""
    off = {"rlhf_contrib/flags.py", "rlhf_core/other.py"}
    assert paths_of_a_setting(tree).keys() == SOURCES.keys() - off


def test_a_tree_without_the_setting_is_an_error(tree: Path) -> None:
    (tree / "rlhf_core/config/policy.py").write_text("x = 1\n")
    with pytest.raises(LookupError, match="no class has the field kl"):
        paths_of_a_setting(tree)
