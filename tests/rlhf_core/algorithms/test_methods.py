"""A method is one file: it is found by its `type`, and its docstring has its formula and its reference."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from docs.generate_reference import method_row
from rlhf_core.algorithms import advantage, policy, preference
from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards
from rlhf_core.algorithms.methods import methods_in, one_of
from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod
from rlhf_core.stage.code import module_digests

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = (preference, policy, advantage)
METHODS = [kind for family in FAMILIES for kind in family.METHODS]


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_a_method_has_a_formula_and_a_reference(kind):
    line = method_row(kind)
    assert re.search(r"arXiv \d{4}\.\d{4,5}|, (19|20)\d\d|docs/custom\.md", line.rsplit("|", 2)[1])


def test_every_method_is_found_and_forms_list_the_usual_ones_first():
    assert [kind.model_fields["type"].default for kind in advantage.METHODS][:2] == ["gae", "reinforce++"]
    for family in FAMILIES:
        names = [kind.model_fields["type"].default for kind in family.METHODS]
        assert len(set(names)) == len(names)


def test_the_methods_of_the_page_are_found_and_compute_what_they_say(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "custom.md").read_text(), flags=re.DOTALL)[1:]
    package = tmp_path / "methods_of_the_page"
    package.mkdir()
    files = {
        "rankboost": blocks[0],
        "centered_ranks": blocks[1],
        "another": blocks[0].replace('"rankboost"', '"another"'),
    }
    files |= {"__init__": "", "table": "from rlhf_core.algorithms.preference.dpo import DPOLoss\n"}
    for name, block in files.items():
        (package / f"{name}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    found = methods_in("methods_of_the_page", [str(package)], PreferenceMethod, first=("rankboost",))
    loss, another = found  # the one that is not named first comes last, and what a file imports is not its own
    assert TypeAdapter(one_of(found)).validate_python({"type": "another", "beta": 0.2}) == another(beta=0.2)
    (estimator,) = methods_in("methods_of_the_page", [str(package)], GroupAdvantage, first=())
    assert [method_row(kind).count("|") for kind in (loss, estimator)] == [5, 5]

    chosen, rejected, ref_chosen, ref_rejected = (torch.tensor([value]) for value in (-10.0, -21.0, -12.0, -20.0))
    one = torch.ones(1)
    pairs = PairBatch(
        chosen_logprobs=chosen, rejected_logprobs=rejected, ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected, chosen_lengths=one, rejected_lengths=one, pairs=1.0, tokens=1.0,
    )  # fmt: skip
    # log-ratios 2 and -1: h = 3
    assert loss(beta=0.1).loss(pairs).loss.item() == pytest.approx(math.exp(-0.3), rel=1e-6)
    groups = GroupRewards(rewards=torch.tensor([[1.0, 5.0, 1.0], [2.0, 2.0, 2.0]]), lengths=torch.ones(2, 3))
    assert estimator().compare(groups).tolist() == [[-0.25, 0.5, -0.25], [0.0, 0.0, 0.0]]


def test_the_code_of_a_method_is_part_of_the_code_of_its_stage():
    found = module_digests("stages.dpo.run")
    assert {f"rlhf_core.algorithms.preference.{name}" for name in ("dpo", "answers", "base")} <= set(found)
    assert "rlhf_core.algorithms.advantage.group" in module_digests("stages.ppo.run")


def test_options_are_read_without_torch():
    program = (
        "import sys; from rlhf_core.config import policy, policy as preference; import stages.dpo\n"
        "assert policy.PPOConfig(loss='cispo').loss.clip_high == 4.0\n"
        "assert 'torch' not in sys.modules\n"
        "from rlhf_core.algorithms.token_math import loaded_torch\n"
        "assert loaded_torch() is sys.modules['torch']\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
