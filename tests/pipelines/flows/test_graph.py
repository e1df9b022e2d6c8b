import re
from typing import Any, TypeVar

import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.graph import Stages, agent_digests, inputs_of, reward_functions
from pipelines.flows.profile import load_profile
from rlhf_core.algorithms.preference.dpo import ORPOLoss, SimPOLoss
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    GenerationsRef,
    PolicyRef,
    PreferencesRef,
    PromptsRef,
    RewardModelRef,
)
from stages.distill import DistillConfig
from stages.dpo import DPOConfig, dpo
from stages.generate import GenerateConfig
from stages.ppo import ppo
from stages.publish import PublishConfig
from stages.score import ScoreConfig
from stages.sft import SFTConfig
from stages.table import STAGES
from tests.support.small_pipeline import write_mini

R = TypeVar("R", bound=ArtifactRef)


def test_engines_enter_the_spec_of_the_stages_that_lease_them(tmp_path):
    stages = {stage.label: stage.spec for stage in plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path))}
    assert set(stages["ppo"].engines) == {"trainer", "sampler"}
    assert set(stages["evaluate/sft/generate"].engines) == {"sampler"}
    assert stages["prepare_data"].engines == {}


def test_float32_heads_are_in_the_keys_of_stages_with_rewards_under_bfloat16_alone(tmp_path):
    def marked(dtype: str) -> set[str]:
        stages = plan_stages(load_profile("tiny/full", [f"runtime.trainer.dtype={dtype}"]), ArtifactStore(tmp_path))
        return {stage.label.rsplit("/", 1)[-1] for stage in stages if "scalar_heads" in stage.spec.engines}

    assert marked("float32") == set()
    assert marked("bfloat16") >= {"reward_model", "ppo", "score"}
    assert marked("bfloat16").isdisjoint({"prepare_data", "sft", "dpo", "generate"})


def test_a_reference_that_nothing_asks_is_in_no_key():
    def inputs(config: PPOConfig | DPOConfig, reference: str) -> dict[str, Any]:
        specs: list[StageSpec] = []

        def kept(spec: StageSpec, kind: type[ArtifactRef]) -> Any:
            specs.append(spec)

        stages = Stages(kept, seed=17, runtime=RuntimeConfig())
        policy, other = handle(PolicyRef, "policy"), handle(PolicyRef, reference)
        if isinstance(config, PPOConfig):
            prompts, judges = handle(PromptsRef, "prompts"), {"reward_model": handle(RewardModelRef, "judge")}
            stages.run(ppo, "ppo", config, policy=policy, reference=other, prompts=prompts, reward_models=judges)
        else:
            pairs = handle(PreferencesRef, "pairs")
            stages.run(dpo, "dpo", config, policy=policy, reference=other, preferences=pairs)
        return specs[0].inputs

    free = [PPOConfig(kl={"coef": 0.0}), DPOConfig(loss=SimPOLoss()), DPOConfig(loss=ORPOLoss())]
    assert [inputs(config, "one") == inputs(config, "other") for config in free] == [True] * 3
    assert [inputs(config, "one") == inputs(config, "other") for config in (PPOConfig(), DPOConfig())] == [False] * 2


def test_a_reward_model_that_only_judges_held_out_answers_must_be_there_too():
    def no_stage(spec: StageSpec, kind: type[ArtifactRef]) -> Any:
        raise AssertionError("the stage was not refused")

    config = PPOConfig.model_validate(
        {"evaluate": {"independent": {"terms": {"judge": {"type": "reward_model", "model": "other"}}}}}
    )
    policy, judge = handle(PolicyRef, "policy"), handle(RewardModelRef, "judge")
    with pytest.raises(ConfigError, match=r"ppo\.evaluate\.independent\.terms\.judge\.model = 'other'"):
        Stages(no_stage, seed=17, runtime=RuntimeConfig()).run(
            ppo,
            "ppo",
            config,
            policy=policy,
            reference=policy,
            prompts=handle(PromptsRef, "prompts"),
            reward_models={"reward_model": judge},
        )


def handle(kind: type[R], name: str) -> R:
    return kind(uri=f"store://{name}", digest=name)


def test_the_number_of_workers_is_no_part_of_a_spec_and_the_precision_is(tmp_path):
    def trainer(*overrides: str) -> object:
        stages = plan_stages(load_profile("tiny/full", overrides), ArtifactStore(tmp_path), until="sft")
        return stages[-1].spec.engines["trainer"]

    assert trainer() == trainer("runtime.train_workers=2", "runtime.trainer.micro_batch=3")
    assert trainer() != trainer("runtime.trainer.dtype=bfloat16")


def test_episodes_that_may_outgrow_the_sampler_are_refused_in_the_plan(tmp_path):
    agent = 'ppo.agent={type = "program", command = ["true"], max_episode_tokens = %d}'
    with pytest.raises(
        ConfigError, match=r"ppo\.agent\.max_episode_tokens = 257: the sampler takes at most 256 tokens; lower"
    ):
        plan_stages(load_profile("tiny/full", [agent % 257]), ArtifactStore(tmp_path))
    assert plan_stages(load_profile("tiny/full", [agent % 256]), ArtifactStore(tmp_path))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            "",
            r"ppo\.lora = None: there are no adapters, which runtime\.sampler\.lora_sync = .adapter. would send; give it",
        ),
        ('{variant = "dora"}', r"ppo\.lora\.variant = 'dora': vLLM does not scale rows to norms; use"),
        (
            '{target_parameters = ["experts.down_proj"]}',
            r"ppo\.lora\.target_parameters = .*: vLLM is sent adapters of linear",
        ),
        ('{quantize = "nf4"}', r"ppo\.lora\.quantize = 'nf4': the sampler has the weights before they were rounded"),
        ("{rank = 17}", r"ppo\.lora\.rank = 17: runtime\.sampler\.max_lora_rank is 16; raise that, or lower this"),
    ],
)
def test_adapters_that_cannot_be_sent_alone_are_refused_in_the_plan(tmp_path, lora, message):
    changed = ["runtime.sampler.lora_sync=adapter", *([f"ppo.lora={lora}"] if lora else [])]
    with pytest.raises(ConfigError, match=message):
        plan_stages(load_profile("tiny/full", changed), ArtifactStore(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [],
            r"ppo\.router_replay = True: the sampler \(vllm\) does not record experts; set runtime\.sampler\.routed_exp",
        ),
        (
            ["runtime.sampler.routed_experts=true", "runtime.trainer.sequence_parallel=2", "runtime.train_workers=2"],
            r"ppo\.router_replay = True: train workers that share rows .* cannot replay experts",
        ),
    ],
)
def test_experts_that_are_not_recorded_or_not_replayed_are_refused_in_the_plan(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_stages(load_profile("tiny/full", ["ppo.router_replay=true", *changes]), ArtifactStore(tmp_path))


def test_4_bit_weights_that_zero_3_cannot_partition_are_refused_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.execution.packages.find_spec", lambda name: name)  # as if all were installed
    quantized = 'sft.lora={quantize = "nf4"}'
    message = (
        r"sft\.lora\.quantize = 'nf4': ZeRO 3 cannot partition 4-bit weights; use runtime\.trainer\.zero_stage <= 2"
    )
    with pytest.raises(ConfigError, match=message):
        plan_stages(load_profile("tiny/full", [quantized, "runtime.trainer.zero_stage=3"]), ArtifactStore(tmp_path))
    assert plan_stages(load_profile("tiny/full", [quantized, "runtime.trainer.zero_stage=2"]), ArtifactStore(tmp_path))


def test_adapters_alone_are_another_result_and_their_largest_rank_is_not(tmp_path):
    def sampler(*overrides: str) -> object:
        stages = plan_stages(load_profile("tiny/full", ["ppo.lora={}", *overrides]), ArtifactStore(tmp_path))
        return next(one.spec.engines["sampler"] for one in stages if one.label == "ppo")

    assert sampler() == sampler("runtime.sampler.lora_sync=merged")
    alone = sampler("runtime.sampler.lora_sync=adapter")
    assert sampler() != alone == sampler("runtime.sampler.lora_sync=adapter", "runtime.sampler.max_lora_rank=64")


def test_the_functions_of_users_are_found_wherever_they_stand():
    config = PPOConfig.model_validate(
        {
            "rewards": {
                "terms": {"a": {"type": "function", "function": "m:f"}, "b": {"type": "function", "function": "n.py:g"}}
            }
        }
    )
    assert reward_functions(config, "ppo") == {
        "ppo.rewards.terms.a.function": "m:f",
        "ppo.rewards.terms.b.function": "n.py:g",
    }


def test_the_environment_and_the_tools_of_an_agent_are_among_them():
    config = PPOConfig.model_validate({"agent": {"type": "tools", "tools": ["m:add", "n.py:sub"]}})
    named = {"ppo.agent.tools[0]": "m:add", "ppo.agent.tools[1]": "n.py:sub"}
    assert reward_functions(config, "ppo") == named
    environment = {"type": "environment", "environment": "worlds.py:Echo"}
    assert reward_functions(PPOConfig.model_validate({"agent": environment}), "ppo") == {
        "ppo.agent.environment": "worlds.py:Echo"
    }


def test_the_gold_reward_of_an_evaluation_is_one_of_them(tmp_path):
    config = load_profile(write_mini(tmp_path))
    assert reward_functions(config.evaluate.evaluate, "evaluate") == {
        "evaluate.gold": "rlhf_contrib.worlds.support:gold_reward"
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "rlhf_core.rewards.verifiable:finl_number",
            "rlhf_core.rewards.verifiable has no finl_number; did you mean final_number?",
        ),
        ("my/reward.py:score", "my/reward.py does not exist; fix the module name or the path"),
    ],
)
def test_a_missing_reward_function_is_noticed_before_the_first_stage(tmp_path, function, message):
    config = load_profile("tiny/rlvr", [f"ppo.rewards.terms.correct.function={function}"])
    with pytest.raises(
        ConfigError, match=rf"^ppo.rewards.terms.correct.function = '{function}': {re.escape(message)}$"
    ):
        plan_stages(config, ArtifactStore(tmp_path))


def test_the_files_of_an_agent_program_belong_to_a_stages_key(tmp_path):
    script = tmp_path / "agent.py"
    config = PPOConfig.model_validate({"agent": {"type": "program", "command": ["python", str(script), "--fast"]}})
    with pytest.raises(ConfigError, match="there is no such file"):
        agent_digests(config, "ppo")
    digests = []
    for text in ("one", "two"):
        script.write_text(text)
        digests.append(agent_digests(config, "ppo")[str(script)])
    assert digests[0] != digests[1] and agent_digests(PPOConfig(), "ppo") == {}


def test_the_modules_of_a_verifiers_environment_decide_what_it_does(tmp_path):
    agent = {"type": "verifiers", "python": "python", "environment": "digits", "folders": [str(tmp_path)]}
    config = PPOConfig.model_validate({"agent": agent})
    module = tmp_path / "digits" / "rules.py"
    module.parent.mkdir()
    digests = []
    for text in ("one", "two"):
        module.write_text(text)
        digests.append(agent_digests(config, "ppo")[str(module)])
    assert digests[0] != digests[1]


def test_inputs_that_are_not_those_of_the_row_are_refused():
    policy, prompts = handle(PolicyRef, "policy"), handle(PromptsRef, "prompts")
    score, sft, publish = STAGES["score"], STAGES["sft"], STAGES["publish"]
    with pytest.raises(TypeError, match="sft: the input demonstrations is missing"):
        inputs_of(sft, SFTConfig(), {"policy": policy})
    with pytest.raises(TypeError, match="sft: the input demonstrations must be DemonstrationsRef, not PromptsRef"):
        inputs_of(sft, SFTConfig(), {"policy": policy, "demonstrations": prompts})
    with pytest.raises(TypeError, match="score: the input reward_models must be a table of ModelRef"):
        answers = handle(GenerationsRef, "answers")
        inputs_of(score, ScoreConfig(), {"generations": answers, "reward_models": handle(RewardModelRef, "judge")})
    with pytest.raises(TypeError, match="publish: has no input prompts"):
        inputs_of(publish, PublishConfig(), {"policy": policy, "prompts": prompts})


def test_only_what_the_configuration_asks_for_is_an_input():
    given = {
        "policy": handle(PolicyRef, "student"),
        "teacher": handle(PolicyRef, "teacher"),
        "demonstrations": handle(DemonstrationsRef, "texts"),
        "prompts": handle(PromptsRef, "prompts"),
    }
    on_policy, off_policy = DistillConfig(on_policy=True), DistillConfig()
    assert list(inputs_of(STAGES["distill"], on_policy, given)) == ["policy", "teacher", "prompts"]
    assert list(inputs_of(STAGES["distill"], off_policy, given)) == ["policy", "teacher", "demonstrations"]
    several = given | {"teachers": {"one": given["teacher"]}}
    assert list(inputs_of(STAGES["distill"], DistillConfig(teachers={"one": 1.0}), several)) == [
        "policy",
        "teachers",
        "demonstrations",
    ]
    answers = {"policy": given["policy"], "prompts": given["prompts"], "asked": None}
    assert list(inputs_of(STAGES["generate"], GenerateConfig(), answers)) == ["policy", "prompts"]
