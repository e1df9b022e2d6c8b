"""A profile small enough for the engines of this process, and a pipeline of toy stages for what needs no engine."""

from pathlib import Path

from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig
from rlhf_core.types import PolicyRef
from tests.support.toy_stage import ToyConfig, toy_spec

MINI = """
name = "mini"
[runtime]
type = "local"
trainer = {engine = "torch"}
sampler = {type = "hf"}
[prepare_data]
data = {type = "support", demonstrations = 48, preferences = 48, prompts = 8, eval_demonstrations = 8, \
eval_preferences = 8, eval_prompts = 4}
model = {type = "init", vocab_size = 400, hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, intermediate_size = 64}
[sft]
loop = {batch_size = 16, epochs = 1}
[ppo]
steps = 1
prompts_per_step = 4
sampling = {max_tokens = 8}
rewards = {terms = {finished = {type = "function", function = "rlhf_core.rewards.verifiable:finished"}}}
[evaluate]
generate = {samples_per_prompt = 2, sampling = {max_tokens = 8}}
evaluate = {gold = "rlhf_contrib.worlds.support:gold_reward"}
"""


def write_mini(folder: Path, extra: str = "") -> Path:
    """Write the profile and return its path."""
    path = folder / "mini.toml"
    path.write_text(MINI + extra)
    return path


def two_toys(config: PipelineConfig, stages: Stages) -> None:
    """A pipeline of two toy stages, the second of which reads the first; the seed is the configuration's."""
    first = stages.run_stage(toy_spec(ToyConfig(), label="first", seed=config.seed), PolicyRef)
    second = toy_spec(ToyConfig(kl_coef=0.1), label="second", seed=config.seed, inputs={"policy": first})
    stages.run_stage(second, PolicyRef)
