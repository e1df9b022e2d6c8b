"""A custom loss or estimator that is wrong is refused when the run is planned; a right one is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.execution.plan import all_specs
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ConfigError
from tests.support.small_pipeline import write_mini

RIGHT = Path(__file__).resolve().parents[3] / "docs" / "custom.md"
GIVEN = {
    "loss": "logprobs, old_logprobs, advantages, mask",
    "advantage": "rewards, lengths",
}


def plan(folder: Path, part: str, source: str, arguments: str = "{}") -> None:
    (folder / "mine.py").write_text(source)
    text = f'ppo.{part}={{type = "custom", function = "{folder}/mine.py:f", arguments = {arguments}}}'
    all_specs(load_profile(write_mini(folder), [text, "ppo.samples_per_prompt=4"]), lifecycle)


@pytest.mark.parametrize(
    ("part", "returned", "error"),
    [
        ("loss", "(logprobs * mask).sum()", "ppo.loss.function returned = 'shape ()': must be a tensor of shape (2, 3)"),
        ("loss", "logprobs.T", "ppo.loss.function returned = 'shape (3, 2)': must be a tensor of shape (2, 3)"),
        ("loss", "[0.0]", "ppo.loss.function returned = 'list': must be a tensor"),
        ("loss", "logprobs.detach()", "ppo.loss.function returned = 'a tensor': has no gradient"),
        ("loss", "logprobs.long()", "ppo.loss.function returned = 'a tensor': has no gradient"),
        ("loss", "logprobs / 0", "ppo.loss.function returned = 'a tensor': its loss or gradient is not finite"),
        ("loss", "(logprobs + 1).sqrt()", "ppo.loss.function returned = 'a tensor': its loss or gradient is not finite"),
        ("loss", "logprob", "/mine.py:f': fails on small tensors with NameError"),
        ("advantage", "rewards.mean(dim=1)", "ppo.advantage.function returned = (2,): must be a tensor of shape (2, "),
        ("advantage", "lengths.long()", "ppo.advantage.function returned = 'torch.int64': must be floats"),
        ("advantage", "rewards / (lengths - lengths)", "ppo.advantage.function returned = 'a tensor': contains numbers that"),
    ],
)  # fmt: skip
def test_a_wrong_result_is_refused_at_the_plan(tmp_path, part, returned, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        plan(tmp_path, part, f"def f({GIVEN[part]}):\n    return {returned}\n")


def test_a_wrong_signature_is_refused_at_the_plan(tmp_path):
    with pytest.raises(
        ConfigError, match=r"ppo\.loss\.function = .*unexpected keyword argument 'clip'.*docs/custom\.md"
    ):
        plan(tmp_path, "loss", f"def f({GIVEN['loss']}):\n    return logprobs\n", "{clip = 0.2}")


def test_the_functions_of_the_page_pass(tmp_path):
    (tmp_path / "my_losses.py").write_text(re.findall(r"```python\n(.*?)```", RIGHT.read_text(), flags=re.S)[0])
    parts = re.findall(r"^\[(\w+\.\w+)\].*\ntype.*\nfunction = \"my_losses.py:(\w+)\"(?:\narguments = (.*))?", RIGHT.read_text(), flags=re.M)  # fmt: skip
    assert [name for name, *_ in parts] == ["dpo.loss", "ppo.loss", "ppo.advantage"]
    texts = [
        f'{name.replace("dpo", "iterative_dpo.dpo")}={{type = "custom", function = "{tmp_path}/my_losses.py:{function}", '
        f"arguments = {arguments or '{}'}}}"
        for name, function, arguments in parts
    ]
    profile = load_profile("tiny/full", [*texts, "ppo.samples_per_prompt=4"])
    assert "ppo" in all_specs(profile, lifecycle)


def test_a_plan_without_custom_functions_loads_no_torch():
    code = (
        "import sys; from pipelines.execution.plan import all_specs; from pipelines.flows.full import lifecycle; "
        "from pipelines.flows.profile import load_profile; all_specs(load_profile('tiny/full'), lifecycle); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
