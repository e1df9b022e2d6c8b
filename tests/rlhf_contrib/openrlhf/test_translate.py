from pathlib import Path
from typing import Any

import pytest

from campaigns.fuzz.scripts import DPO_08, GRPO_09, RM_010, SFT_010, SFT_06
from pipelines.flows.profile import PipelineConfig, load_profile
from rlhf_contrib.openrlhf.flags import COMMANDS, FLAGS
from rlhf_contrib.openrlhf.shell import read_commands
from rlhf_contrib.openrlhf.translate import Translation, translate
from rlhf_core.config.data import Columns
from rlhf_core.config.policy import DynamicSampling, KLInReward
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.placement import layout

PPO_010 = r"""
python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \
   --actor.model_name_or_path models/sft --reward.model_name_or_path models/rm --train.batch_size 128 \
   --rollout.batch_size 512 --data.max_len 3072 --rollout.max_new_tokens 2048 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \
   --critic.lr_warmup_ratio 0.1 --algo.advantage.lambd 0.95 --algo.advantage.gamma 0.99 --critic.freezing_steps 10 \
   --actor.dual_clip 3.0 --reward.clip_range -5 5 --data.prompt_dataset data/prompts.jsonl --data.apply_chat_template \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --train.enable_ema \
   --reward.overlong_buffer_len 512 --train.num_episodes 3 --vllm.enforce_eager
"""
SCRIPTS = {
    "sft-0.6": SFT_06,
    "dpo-0.8": DPO_08,
    "grpo-0.9": GRPO_09,
    "sft-0.10": SFT_010,
    "rm-0.10": RM_010,
    "ppo-0.10": PPO_010,
}
PPO = "python3 -m openrlhf.cli.train_ppo_ray --pretrain models/sft --prompt_data p.jsonl --apply_chat_template "
DPO = "deepspeed --module openrlhf.cli.train_dpo --pretrain models/sft --dataset p.jsonl --apply_chat_template "


def translated(script: str, tmp_path: Path) -> tuple[PipelineConfig, Translation]:
    """Return the profile as `load_profile` reads it, and the account."""
    translation = translate(script, name="there", template_file="there.jinja")
    path = tmp_path / "there.toml"
    path.write_text(translation.profile)
    return load_profile(path), translation


def fates(translation: Translation) -> dict[str, str]:
    return {outcome.flag: outcome.fate for outcome in translation.outcomes}


def dig(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        if isinstance(config, tuple):
            config = config[int(name)]
        else:
            config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


# ---------------------------------------------------------------- nothing is dropped


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_flag_of_a_script_is_in_one_of_the_three_lists(name, tmp_path):
    _, translation = translated(SCRIPTS[name], tmp_path)
    [command] = read_commands(SCRIPTS[name])[0]
    said = [word.partition("=")[0] for word in (*command.launcher, *command.words) if word.startswith("--")]
    written = sorted(flag for flag in said if flag not in ("--", "--module"))
    assert sorted(outcome.flag for outcome in translation.outcomes) == written
    assert all(
        outcome.what and "this program does not use it" not in outcome.what[0] for outcome in translation.outcomes
    )


@pytest.mark.parametrize("command", sorted(set(COMMANDS.values())))
@pytest.mark.parametrize("dotted", [False, True])
def test_every_flag_that_openrlhf_knows_has_a_fate(command, dotted):
    values = {"adam_betas": "0.8 0.9", "critic.adam.betas": "0.8 0.9", "reward_clip_range": "-1 1"}
    values |= {"eps_clip_low_high": "0.1 0.2", "dynamic_filtering_reward_range": "0 1", "gamma": "0.9", "lambd": "0.9"}
    values |= {"ema_beta": "0.9", "lr_warmup_ratio": "0.1", "critic.lr_warmup_ratio": "0.1", "label_smoothing": "0.1"}
    values |= {
        "zero_stage": "2",
        "max_len": "64",
        "prompt_max_len": "32",
        "max_new_tokens": "16",
        "eval_task": "generate",
    }
    values |= {
        "pretrain": "models/a",
        "dataset": "a.jsonl",
        "prompt_data": "b.jsonl",
        "num_episodes": "5",
        "top_p": "0.9",
    }
    values |= {"rollout_batch_size": "8", "n_samples_per_prompt": "2", "freezing_actor_steps": "2"}
    values |= {"param_dtype": "bf16"}
    module = [module for module, name in COMMANDS.items() if name == command][-1]
    words = []
    for flag in FLAGS:
        if command not in flag.commands.split():
            continue
        spelt = flag.others[-1] if dotted and flag.others else flag.name
        words += [f"--{spelt}", *([] if flag.kind == "switch" else values.get(flag.name, "1").split())]
    translation = translate(f"python -m openrlhf.cli.{module} {' '.join(words)}", name="x", template_file="x.jinja")
    unread = [outcome.flag for outcome in translation.outcomes if "this program does not use it" in outcome.what[0]]
    assert unread == []
    assert len(translation.outcomes) == sum(word.startswith("--") for word in words)


# ---------------------------------------------------------------- what the numbers mean


def test_a_batch_is_an_optimizer_step_over_all_ranks(tmp_path):
    config, _ = translated(SFT_06, tmp_path)
    assert config.sft and config.sft.loop.batch_size == 256 and config.runtime.trainer.micro_batch == 2
    assert config.runtime.train_workers == 8


def test_models_on_the_same_gpus_are_a_train_worker_and_an_engine_on_each(tmp_path):
    config, _ = translated(GRPO_09, tmp_path)
    made = layout(config.runtime)
    assert made.train == made.sample == tuple(range(8))
    assert made.bundles == ({"CPU": 2, "GPU": 1},) * 8
    apart, _ = translated(GRPO_09.replace("--vllm_tensor_parallel_size 1", "--vllm_tensor_parallel_size 2"), tmp_path)
    made = layout(apart.runtime)
    assert [made.bundles[one]["GPU"] for one in (*made.train, *made.sample)] == [1] * 8 + [2] * 8


def test_engines_of_two_gpus_stay_on_those_that_train_if_they_use_them_all(tmp_path):
    flags = "--colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --actor_num_gpus_per_node 8"
    config, _ = translated(PPO + flags, tmp_path)
    made = layout(config.runtime)
    assert sum(bundle["GPU"] for bundle in made.bundles) == 8 and config.runtime.lends_gpus


RM = "--reward_pretrain models/rm --reward_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --ref_num_gpus_per_node 3 "
POOLS = {
    "": {"ref": (3, ("reference",)), "critic": (2, ("value_model",)), "reward": (2, ("reward_model",))},
    "--colocate_actor_ref --colocate_critic_reward": {"critic": (2, ("value_model", "reward_model"))},
    "--colocate_all_models": {},
    "--colocate_all_models --async_train": {},
    "--colocate_all_models --colocate_critic_reward": {"critic": (2, ("value_model", "reward_model"))},
    # no value model, so OpenRLHF does not read the flag
    "--colocate_actor_ref --colocate_critic_reward --advantage_estimator rloo --n_samples_per_prompt 4": {
        "reward": (2, ("reward_model",))
    },
}


@pytest.mark.parametrize("flags", POOLS)
def test_models_are_placed_as_openrlhf_places_them(flags, tmp_path):
    config, _ = translated(PPO + RM + "--vllm_num_engines 8 " + flags, tmp_path)
    runtime = config.runtime
    assert {name: (pool.workers, pool.roles) for name, pool in runtime.pools.items()} == POOLS[flags]
    assert runtime.shares_gpus == ("--colocate_all_models" in flags and "--async_train" not in flags)


@pytest.mark.parametrize("head", ["actor", "ref", "critic"])
def test_counts_below_one_are_refused_before_they_are_multiplied(head):
    flags = f"--{head}_num_nodes -1 --{head}_num_gpus_per_node -4"
    with pytest.raises(ConfigError, match=f"--{head}_num_nodes = '-1': must be at least 1"):
        translate(PPO + flags, name="there", template_file="there.jinja")


def test_rollouts_are_prompts_times_samples_and_are_split_into_optimizer_steps(tmp_path):
    config, _ = translated(GRPO_09, tmp_path)
    assert config.ppo
    assert (config.ppo.prompts_per_step, config.ppo.samples_per_prompt) == (64, 8)
    assert config.ppo.minibatches == 4  # 64 * 8 / 128
    assert config.ppo.steps == 200  # 2 * 6400 / 64
    assert config.prepare_data.data.max_rows == 6400


def test_bounds_on_rewards_win_over_their_running_normalisation(tmp_path):
    flags = "--normalize_reward --advantage_estimator rloo --n_samples_per_prompt 4 --dynamic_filtering"
    config, translation = translated(PPO + flags, tmp_path)
    assert config.ppo and isinstance(config.ppo.ahead, DynamicSampling) and config.ppo.rewards.normalize == "none"
    assert fates(translation)["--normalize_reward"] == "not translatable"


def test_fewer_rollouts_than_a_batch_are_one_optimizer_step_and_that_is_said(tmp_path):
    config, translation = translated(PPO + "--rollout_batch_size 16 --train_batch_size 64", tmp_path)
    assert config.ppo and config.ppo.minibatches == 1
    assert fates(translation)["--train_batch_size"] == "not translatable"


@pytest.mark.parametrize(
    ("flags", "prompt", "answer"),
    [
        ("--prompt_max_len 512 --generate_max_len 1536", 512, 1536),
        ("--data.max_len 3072 --rollout.max_new_tokens 2048", 1024, 2048),
        ("--max_len 3072 --max_new_tokens 2048", 1024, 2048),
        ("--data.max_len 2048", 1024, 1024),
    ],
)
def test_limits_of_both_generations_come_to_prompt_answer_and_sum(flags, prompt, answer, tmp_path):
    config, _ = translated(PPO + flags, tmp_path)
    assert config.ppo and config.ppo.sampling.max_tokens == answer
    assert (config.prepare_data.max_prompt_tokens, config.prepare_data.max_tokens) == (prompt, prompt + answer)
    assert config.runtime.sampler.max_model_len == prompt + answer


@pytest.mark.parametrize(
    ("flags", "kl_in", "estimator"),
    [
        ("--kl_estimator k1", "reward", "translated"),
        ("--kl_estimator k3", "reward", "not translatable"),
        ("--use_kl_loss --kl_estimator k2", "loss", "translated"),
        ("--use_kl_loss --kl_estimator k3", "loss", "translated"),
        ("--algo.kl.use_loss --algo.kl.estimator k1", "loss", "not translatable"),
        ("--advantage_estimator group_norm --n_samples_per_prompt 4 --kl_estimator k1", "loss", "not translatable"),
    ],
)
def test_the_penalty_is_k1_in_the_reward_or_k2_in_the_loss(flags, kl_in, estimator, tmp_path):
    config, translation = translated(PPO + flags + " --init_kl_coef 0.03", tmp_path)
    assert config.ppo and (config.ppo.kl.in_, config.ppo.kl.coef) == (kl_in, 0.03)
    assert (
        next(fate for flag, fate in fates(translation).items() if flag.replace(".", "_").endswith("kl_estimator"))
        == estimator
    )


@pytest.mark.parametrize(
    ("estimator", "flags", "said"),
    [
        ("rloo", "", True),
        ("reinforce_baseline", "", True),
        ("dr_grpo", "", True),
        ("rloo", "--use_kl_loss", False),
        ("gae", "", False),
    ],
)
def test_a_penalty_beside_a_group_comes_after_the_baseline(estimator, flags, said, tmp_path):
    script = f"{PPO} --advantage_estimator {estimator} --n_samples_per_prompt 4 --init_kl_coef 0.03 {flags}"
    config, translation = translated(script, tmp_path)
    assert config.ppo
    if isinstance(config.ppo.kl, KLInReward):
        assert config.ppo.kl.credit == "token"
    assert ("credit = " in translation.profile) is said


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gae", "gae"),
        ("reinforce", "reinforce++"),
        ("rloo", "rloo"),
        ("reinforce_baseline", "reinforce++-baseline"),
        ("group_norm", "grpo"),
        ("dr_grpo", "dr_grpo"),
        ("flash_reinforce", "flash_reinforce"),
    ],
)
def test_estimators_have_their_names_here(theirs, ours, tmp_path):
    flags = f"--advantage_estimator {theirs} --n_samples_per_prompt 4 --gamma 0.9 --lambd 0.8"
    config, translation = translated(PPO + flags, tmp_path)
    assert config.ppo and config.ppo.advantage.type == ours
    assert fates(translation)["--gamma"] == ("translated" if theirs in ("gae", "reinforce") else "ignored")
    assert fates(translation)["--lambd"] == ("translated" if theirs == "gae" else "ignored")


def test_an_estimator_that_we_have_not_names_the_nearest(tmp_path):
    config, translation = translated(PPO + "--advantage_estimator remax", tmp_path)
    assert config.ppo and config.ppo.advantage.type == "reinforce++"
    assert fates(translation)["--advantage_estimator"] == "not translatable"


PRM = "deepspeed --module openrlhf.cli.train_prm --pretrain m --dataset d.jsonl --placeholder_token x --reward_tokens + - "
KD = "deepspeed --module openrlhf.cli.train_kd --pretrain m --teacher_model t --dataset d.jsonl --apply_chat_template "
LORA = "deepspeed --module openrlhf.cli.train_sft --pretrain m --save_path l --dataset d.jsonl --apply_chat_template --lora_rank 8\n"
MERGED = "python -m openrlhf.cli.lora_combiner --model_path m --lora_path l --output_path o\n"
TEXTS = "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl --input_key text --pretrain_mode"
FLASH = (
    PPO + "--algo.advantage.estimator flash_reinforce --algo.advantage.is_correction_level seq --algo.kl.init_coef 0 "
    "--algo.advantage.is_correction_gating binary_kl --algo.advantage.is_correction_threshold 5e-3 "
    "--actor.loss_agg_mode seq-mean-token-mean --ckpt.save_hf --ckpt.save_steps 50 --rollout.batch_size 128 "
)
"""The options of OpenRLHF's own script of FlashREINFORCE (0.11.2)."""
EVALUATED = PPO + "--eval_dataset e.jsonl --eval_steps 5 "
TWO_SERVERS = ("http://a:1/get_reward", "http://b:1/get_reward")
CLIPPED = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip"
SETTINGS = [
    (GRPO_09, "ppo.loss.clip_low", 0.2),
    (GRPO_09, "ppo.loss.clip_high", 0.28),
    (GRPO_09, "ppo.advantage.eps", 1e-9),
    (GRPO_09, "ppo.correction.level", "off"),
    (GRPO_09, "ppo.ahead.low", 0.0),
    (GRPO_09, "ppo.ahead.high", 1.0),
    (GRPO_09, "ppo.rewards.terms.remote.function", "reward_func.py:reward_func"),
    (PPO + "--remote_rm_url http://a:1/get_reward,http://b:1/get_reward", "ppo.rewards.terms.remote.urls", TWO_SERVERS),
    (PPO + "--agent_func_path agent.py", "ppo.agent.file", "agent.py"),
    (PPO + "--agent_func_path agent.py", "ppo.rewards.terms.episode.type", "episode"),
    (PPO + "--async_train --async_queue_size 2 --enable_vllm_is_correction", "ppo.ahead.steps", 2),
    (PPO + "--async_train --async_queue_size 2", "ppo.ahead.steps", 1),
    (DPO_08, "runtime.trainer.sequence_parallel", 2),
    (PPO + "--use_liger_kernel", "runtime.trainer.liger", True),
    (PPO + "--aux_loss_coef 0.01", "runtime.trainer.router_aux_coef", 0.01),
    (PPO + "--load_in_4bit --lora_rank 8", "ppo.lora.quantize", "nf4"),
    (GRPO_09, "runtime.train_workers", 8),
    (GRPO_09, "runtime.gpus_per_train_worker", 0.5),
    (GRPO_09, "runtime.gpus_per_engine", 0.5),
    (GRPO_09, "runtime.sampler.engines", 8),
    (GRPO_09, "runtime.sampler.sleep", True),
    (GRPO_09, "runtime.trainer.sleep", False),
    (GRPO_09.replace("--vllm_enable_sleep", "--deepspeed_enable_sleep"), "runtime.trainer.sleep", True),
    (PPO_010 + " --ds.enable_sleep", "runtime.trainer.sleep", False),
    (GRPO_09, "runtime.sampler.enforce_eager", False),
    (GRPO_09, "runtime.sampler.dtype", "bfloat16"),
    (PPO_010, "runtime.gpus_per_engine", 2.0),
    (PPO_010, "runtime.sampler.tensor_parallel", 2),
    (PPO_010, "runtime.sampler.enforce_eager", True),
    (PPO_010, "runtime.trainer.micro_batch", 1),
    (PPO_010, "ppo.advantage.gae_lambda", 0.95),
    (PPO_010, "ppo.advantage.gamma", 0.99),
    (PPO_010, "ppo.loss.dual_clip", 3.0),
    (PPO_010, "ppo.value.warmup_steps", 10),
    (PPO_010, "ppo.value.clip", 0.5),
    (PPO_010, "ppo.rewards.clip", 5.0),
    (PPO_010, "ppo.rewards.overlong.max_tokens", 2048),
    (PPO_010, "ppo.rewards.overlong.buffer_tokens", 512),
    (PPO_010, "ppo.correction.mode", "mask"),
    (PPO_010, "ppo.correction.low", 0.5),
    (PPO_010, "ppo.correction.cap", 5.0),
    (PPO_010, "ppo.optimizer.ema_decay", 0.992),
    (PPO_010, "ppo.optimizer.learning_rate", 5e-7),
    (PPO_010, "ppo.optimizer.warmup_fraction", 0.03),
    (PPO_010, "ppo.value.optimizer.learning_rate", 9e-6),
    (PPO_010, "ppo.value.optimizer.warmup_fraction", 0.1),
    (DPO_08, "dpo.loss.type", "ipo"),
    (DPO_08, "dpo.loss.length_average", False),
    (DPO_08, "dpo.loss.beta", 0.2),
    (DPO_08, "dpo.lora.rank", 16),
    (DPO_08, "dpo.lora.alpha", 32.0),
    (DPO_08, "dpo.lora.target_modules", ("q_proj", "v_proj")),
    (DPO_08, "dpo.max_length", 2048),
    (DPO_08, "runtime.trainer.zero_stage", 3),
    (DPO_08, "runtime.trainer.offload_optimizer", True),
    (DPO_08, "seed", 7),
    (SFT_06, "sft.packing", True),
    (SFT_06, "runtime.trainer.gradient_checkpointing", True),
    (SFT_06, "sft.optimizer.schedule", "cosine"),
    (SFT_06, "sft.optimizer.min_lr_fraction", 0.1),
    (SFT_06, "sft.optimizer.warmup_fraction", 0.03),
    (SFT_06, "sft.loop.checkpoint_every", 50),
    (SFT_010, "sft.optimizer.schedule", "linear"),
    (SFT_010, "sft.optimizer.min_lr_fraction", 0.0),
    (SFT_010, "sft.optimizer.betas", (0.9, 0.999)),
    (SFT_010, "sft.optimizer.weight_decay", 0.01),
    (SFT_010, "sft.loop.checkpoint_every", 100),
    (SFT_010, "sft.loop.eval_every", 50),
    (SFT_010, "sft.loop.epochs", 3),
    (SFT_010, "runtime.train_workers", 4),
    (PRM, "process_reward_model.optimizer.learning_rate", 1e-6),
    (PRM, "prepare_data.data.sources.0.use.steps", 1.0),
    (KD, "distill.kl_weight", 0.4),
    (KD, "distill.external.teacher.path", "t"),
    (KD, "distill.divergence.top_k", 0),
    (LORA + KD.replace("teacher_model t", "teacher_model l"), "distill.teacher", "sft"),
    (LORA + MERGED + DPO.replace("models/sft", "o"), "dpo.start_from", "sft"),
    (EVALUATED, "ppo.evaluate.every", 5),
    (EVALUATED, "ppo.evaluate.export", "last"),
    (EVALUATED + "--best_metric_key x", "ppo.evaluate.export", "best"),
    (EVALUATED + "--best_metric_key x --enable_ema", "ppo.evaluate.export", "last"),
    (FLASH, "ppo.advantage.type", "flash_reinforce"),
    (FLASH, "ppo.correction.level", "sequence"),
    (FLASH, "ppo.correction.mode", "mask"),
    (FLASH, "ppo.correction.gate", "kl"),
    (FLASH, "ppo.correction.max_divergence", 0.005),
    (FLASH, "ppo.loss.aggregation", "seq_mean_token_mean"),
    (FLASH.replace("binary_kl", "tv"), "ppo.correction.gate", "tv"),
    (FLASH.replace("is_correction_level seq", "is_correction_level token"), "ppo.correction.level", "token"),
    (FLASH.replace("binary_kl", "ratio"), "ppo.correction.cap", 0.005),
    (PPO + "--algo.advantage.is_correction_level token", "ppo.correction.mode", "mask"),
    (PPO + CLIPPED, "ppo.correction.mode", "truncate"),
    (FLASH + "--data.max_samples 12800", "ppo.export_every", 50),
    (FLASH + "--data.max_samples 6400", "ppo.export_every", 0),  # 6400 / 128 = 50 steps: the last one
    (FLASH, "ppo.export_every", 50),  # of a guess of 100 steps
    (PPO + "--save_steps 50", "ppo.export_every", 0),
    (PPO + "--use_dynamic_batch", "runtime.trainer.micro_tokens", 16192),
    (PPO + "--use_dynamic_batch --train_max_tokens_per_gpu 8192", "runtime.trainer.micro_tokens", 8192),
    (PPO + "--train_max_tokens_per_gpu 8192", "runtime.trainer.micro_tokens", 0),
    (PPO + "--use_wandb 0123abcd", "track.also", ("wandb",)),
    (PPO + "--logger.tensorboard_dir runs --logger.wandb.key 0123abcd", "track.also", ("wandb", "tensorboard")),
    (LORA.strip() + " --use_tensorboard t\n" + DPO + "--use_wandb 0", "track.also", ("wandb", "tensorboard")),
    (PPO + "--vllm_num_engines 0", "runtime.sampler.type", "hf"),
    (PPO + "--enable_prefix_caching", "runtime.sampler.prefix_caching", True),
    (PPO + "--use_kl_loss --kl_estimator k3", "ppo.kl.estimator", "k3_direct"),
    (PPO + "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient", "ppo.kl.estimator", "k3"),
    (PPO + "--reward.stop_properly_penalty_coef 0.5", "ppo.rewards.truncated.type", "scale"),
    (PPO + "--reward.stop_properly_penalty_coef -2", "ppo.rewards.truncated.amount", -2.0),
    (PPO + "--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis", "ppo.correction.token_cap", 5.0),
    (TEXTS, "sft.train_on", "all"),
    (TEXTS, "sft.window_overlap", 1),
    (TEXTS, "sft.max_length", 2048),
    (TEXTS, "prepare_data.max_tokens", 100_000_000),
    (TEXTS + " --apply_chat_template --output_key o", "prepare_data.data.sources.0.format", "text"),
    (RM_010, "prepare_data.data.sources.0.use.preferences", 1.0),
    (RM_010, "prepare_data.data.sources.1.use.eval_preferences", 1.0),
    (RM_010, "prepare_data.data.sources.1.path", "data/test.jsonl"),
    (DPO + "--eval_dataset a.jsonl,b.jsonl --eval_split test", "prepare_data.data.sources.2.split", "test"),
    (DPO + "--eval_dataset a.jsonl,p.jsonl", "prepare_data.data.sources.1.use.eval_preferences", 1.0),
    (LORA.strip() + " --eval_dataset e.jsonl", "prepare_data.data.sources.1.use.eval_demonstrations", 1.0),
    (PRM + "--eval_dataset e.jsonl", "prepare_data.data.sources.1.use.eval_steps", 1.0),
    (KD + "--eval_dataset e.jsonl", "prepare_data.data.sources.1.use.eval_demonstrations", 1.0),
    (RM_010, "reward_model.lora.rank", 8),
    (PRM + "--lora_rank 4", "process_reward_model.lora.rank", 4),
    (PPO + "--lora_rank 4 --advantage_estimator gae", "ppo.lora.rank", 4),
    (PPO + "--lora_rank 4 --advantage_estimator gae", "ppo.value.lora.rank", 4),
    (PPO + "--lora_rank 4 --advantage_estimator reinforce", "ppo.value.lora", None),
    (RM_010, "reward_model.use_margin", True),
    (RM_010, "reward_model.max_length", 8192),
    (RM_010, "runtime.trainer.attention", "flash_attention_2"),
]


@pytest.mark.parametrize(("script", "key", "value"), SETTINGS)
def test_a_setting_has_its_value_in_the_profile(script, key, value, tmp_path):
    config, _ = translated(script, tmp_path)
    found = dig(config, key)
    assert (
        found.removeprefix(f"{tmp_path}/./") if isinstance(found, str) else found
    ) == value  # from the profile's folder


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        (PPO + "--async_train --partial_rollout", "--partial_rollout"),
        (DPO_08, "--lora_dropout"),
        (RM_010.replace("data/test.jsonl", "data/pairs.parquet"), "--eval.dataset"),
        (PPO_010, "--train.num_episodes"),
        (PPO + "--kl_target 6", "--kl_target"),
        (PPO + "--top_p 0.9", "--top_p"),
        (PPO + "--load_in_4bit", "--load_in_4bit"),
        (PPO + "--param_dtype fp16", "--param_dtype"),
        (PPO + "--reward_clip_range -5 10", "--reward_clip_range"),
        (DPO + "--lr_scheduler polynomial", "--lr_scheduler"),
        (PRM, "--placeholder_token"),
        (FLASH.replace("save_steps 50", "save_steps 100"), "--ckpt.save_hf"),
        (LORA.strip() + " --save_steps 5 --save_hf_ckpt", "--save_hf_ckpt"),
        (DPO + "--save_steps 5 --save_hf_ckpt", "--save_hf_ckpt"),
        (FLASH.replace("5e-3", "1e-3 5e-3"), "--algo.advantage.is_correction_threshold"),
        (FLASH + "--algo.advantage.is_correction_mode clip", "--algo.advantage.is_correction_mode"),
        (PPO + "--use_kl_loss --kl_estimator k1", "--kl_estimator"),
    ],
)
def test_what_cannot_be_said_here_has_a_reason_and_the_nearest_thing(script, flag, tmp_path):
    _, translation = translated(script, tmp_path)
    outcome = next(one for one in translation.outcomes if one.flag == flag)
    assert outcome.fate == "not translatable" and "; nearest: " in outcome.what[0]


def test_a_reference_and_reward_models_from_elsewhere_are_steps_of_a_recipe(tmp_path):
    dpo, outcomes = translated(DPO + "--ref_pretrain ./models/other", tmp_path)
    (tmp_path / "there.toml").rename(tmp_path / "dpo.toml")
    steps = {step.label: step for step in dpo.steps()}
    assert fates(outcomes)["--ref_pretrain"] == "translated"
    assert dig(steps["reference"].config, "model.path").endswith("models/other")
    assert (steps["dpo"].inputs["policy"], steps["dpo"].inputs["reference"]) == ("base", "reference")
    ppo, outcomes = translated(PPO + "--reward_pretrain ./models/a,./models/b", tmp_path)
    assert {step.label: step.inputs for step in ppo.steps()}["ppo"]["reward_models"] == {
        "reward_model": "reward_model",
        "reward_model_2": "reward_model_2",
    }
    flags = "--advantage_estimator gae --reward_pretrain ./models/a --critic_pretrain "
    flags = flags.replace("./models/a", "./models/a,./models/b")
    others = (("./models/critic", "critic"), ("./models/a", ""), ("./models/b", "reward_model_2"))
    for path, name in (("models/sft", "base"), *others):
        other, outcomes = translated(PPO + flags + path, tmp_path)
        assert {step.label: step.inputs for step in other.steps()}["ppo"]["critic"] == name
        assert fates(outcomes)["--critic_pretrain"] == ("translated" if name else "ignored")
    assert ppo.ppo is not None and [term.weight for term in ppo.ppo.rewards.terms.values()] == [1.0, 1.0]
    with pytest.raises(
        ConfigError, match=r"dpo\.reference = 'refrence': there is no such step; did you mean reference"
    ):
        load_profile(tmp_path / "dpo.toml", ["dpo.reference=refrence"])


@pytest.mark.parametrize(("dtype", "fate"), [("bf16", "ignored"), ("fp16", "not translatable")])
def test_adapters_are_merged_in_the_precision_of_training(dtype, fate):
    for flag in ("--param_dtype", "--ds.param_dtype"):
        script = f"{LORA}{MERGED.strip()} {flag} {dtype}"
        [found] = [one for one in translate(script, name="x", template_file="x.jinja").outcomes if one.flag == flag]
        assert (found.command, found.fate) == ("lora_combiner", fate)


def test_words_without_a_value_are_no_error_where_flags_may_be_in_them():
    translation = translate(DPO + "--bf16 $MORE --seed 3 $OTHERS", name="x", template_file="x.jinja")
    assert [one.flag for one in translation.outcomes if "flags in it are not read" in one.what[0]] == [
        "$MORE",
        "$OTHERS",
    ]
    assert "seed = 3" in translation.profile


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("", "dpo"), ("--label_smoothing 0", "dpo"), ("--label_smoothing 0.1", "cdpo"), ("--ipo", "ipo")],
)
def test_preference_losses(flags, kind, tmp_path):
    config, _ = translated(DPO + flags, tmp_path)
    assert config.dpo and config.dpo.loss.type == kind and config.dpo.start_from == "base"


def test_kto_is_a_loss_of_dpo_on_judged_answers(tmp_path):
    script = (
        "deepspeed --module openrlhf.cli.train_kto --pretrain m --dataset d.csv --input_key instruction "
        "--output_key response --label_key score --undesirable_loss_weight 1.5"
    )
    config, _ = translated(script, tmp_path)
    assert config.dpo and config.dpo.loss.model_dump() == {
        "type": "kto",
        "beta": 0.01,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.5,
    }
    [source] = config.prepare_data.data.sources
    assert source.format == "unpaired_preference"
    assert source.columns == Columns(prompt="instruction", completion="response", label="score")
