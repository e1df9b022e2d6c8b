"""List the flags of OpenRLHF's commands, 0.6 to 0.11.2, and their defaults. Data only, no rules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipelines.importers.openrlhf.shell import Command
from rlhf_core.errors import ConfigError, explain

COMMANDS = {
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo",
    "train_prm": "prm",
    "train_kd": "kd",
    "batch_inference": "infer",
    "serve_rm": "serve",
    "lora_combiner": "combine",
}
"""Module of `openrlhf.cli` -> its name in the table of flags."""

OTHER_COMMANDS = {
    "interactive_chat": "`rlhf chat` talks to a policy",
}
"""Command that is not translated -> its equivalent here."""

OFFLINE = "sft rm dpo kto prm kd"
TRAIN = f"{OFFLINE} ppo"
ROWS = f"{OFFLINE} infer"
ALL = f"{TRAIN} infer"
MODELS = f"{ALL} serve"


class Flag(NamedTuple):
    """One flag: its name here (the older spelling, if there are two), and its other spellings."""

    name: str
    others: str
    commands: str
    kind: Literal["switch", "value", "many"]


FLAGS = (
    Flag("seed", "train.seed", ALL, "value"),
    Flag("local_rank", "", ALL, "value"),
    Flag("zero_stage", "ds.zero_stage", ALL, "value"),
    Flag("pretrain", "model.model_name_or_path actor.model_name_or_path", ALL, "value"),
    Flag("input_template", "data.input_template", ALL, "value"),
    Flag("max_samples", "data.max_samples", ALL, "value"),
    Flag("max_len", "data.max_len", MODELS, "value"),
    Flag("attn_implementation", "ds.attn_implementation", MODELS, "value"),
    Flag("param_dtype", "ds.param_dtype", MODELS, "value"),
    Flag("value_head_prefix", "ds.value_head_prefix", MODELS, "value"),
    Flag("bf16", "", f"{MODELS} combine", "switch"),
    Flag("flash_attn", "", MODELS, "switch"),
    Flag("disable_fast_tokenizer", "data.disable_fast_tokenizer", MODELS, "switch"),
    Flag("apply_chat_template", "data.apply_chat_template", ALL, "switch"),
    Flag("use_ms", "", MODELS, "switch"),
    Flag("full_determinism", "train.full_determinism_enable", ALL, "switch"),
    Flag("save_path", "ckpt.output_dir", TRAIN, "value"),
    Flag("save_steps", "ckpt.save_steps", TRAIN, "value"),
    Flag("logging_steps", "logger.logging_steps", TRAIN, "value"),
    Flag("eval_steps", "eval.steps", TRAIN, "value"),
    Flag("ckpt_path", "ckpt.path", TRAIN, "value"),
    Flag("max_ckpt_num", "ckpt.max_num", TRAIN, "value"),
    Flag("max_ckpt_mem", "ckpt.max_mem", TRAIN, "value"),
    Flag("micro_train_batch_size", "train.micro_batch_size", TRAIN, "value"),
    Flag("train_batch_size", "train.batch_size", TRAIN, "value"),
    Flag("max_norm", "max_norm actor.max_norm", TRAIN, "value"),
    Flag("zpg", "ds.zpg", TRAIN, "value"),
    Flag("grad_accum_dtype", "ds.grad_accum_dtype", TRAIN, "value"),
    Flag("max_epochs", "train.max_epochs", TRAIN, "value"),
    Flag("aux_loss_coef", "model.aux_loss_coef actor.aux_loss_coef", TRAIN, "value"),
    Flag("lr_warmup_ratio", "actor.lr_warmup_ratio", TRAIN, "value"),
    Flag("lr_scheduler", "actor.lr_scheduler", TRAIN, "value"),
    Flag("min_lr_ratio", "actor.min_lr_ratio", TRAIN, "value"),
    Flag("l2", "adam.weight_decay actor.adam.weight_decay", TRAIN, "value"),
    Flag("adam.eps", "actor.adam.eps", TRAIN, "value"),
    Flag("lora_rank", "ds.lora.rank", TRAIN, "value"),
    Flag("lora_alpha", "ds.lora.alpha", TRAIN, "value"),
    Flag("lora_dropout", "ds.lora.dropout", TRAIN, "value"),
    Flag("eval_dataset", "eval.dataset", TRAIN, "value"),
    Flag("eval_split", "eval.split", TRAIN, "value"),
    Flag("use_wandb", "logger.wandb.key", TRAIN, "value"),
    Flag("wandb_org", "logger.wandb.org", TRAIN, "value"),
    Flag("wandb_group", "logger.wandb.group", TRAIN, "value"),
    Flag("wandb_project", "logger.wandb.project", TRAIN, "value"),
    Flag("wandb_run_name", "logger.wandb.run_name", TRAIN, "value"),
    Flag("use_tensorboard", "logger.tensorboard_dir", TRAIN, "value"),
    Flag("ring_attn_size", "ds.ring_attn_size", TRAIN, "value"),
    Flag("ring_head_stride", "ds.ring_attn_head_stride", TRAIN, "value"),
    Flag("ds_tensor_parallel_size", "ds.tensor_parallel_size", TRAIN, "value"),
    Flag("dataloader_num_workers", "data.dataloader_num_workers", TRAIN, "value"),
    Flag("ds.experts_implementation", "", TRAIN, "value"),
    Flag("optim", "actor.optim", TRAIN, "value"),
    Flag("muon.lr", "actor.muon.lr", TRAIN, "value"),
    Flag("muon.momentum", "actor.muon.momentum", TRAIN, "value"),
    Flag("muon.ns_steps", "actor.muon.ns_steps", TRAIN, "value"),
    Flag("adam_betas", "adam.betas actor.adam.betas", TRAIN, "many"),
    Flag("target_modules", "ds.lora.target_modules", TRAIN, "many"),
    Flag("muon.nesterov", "actor.muon.nesterov", TRAIN, "switch"),
    Flag("muon.no_nesterov", "actor.muon.no_nesterov", TRAIN, "switch"),
    Flag("save_hf_ckpt", "ckpt.save_hf", TRAIN, "switch"),
    Flag("disable_ds_ckpt", "ckpt.disable_ds", TRAIN, "switch"),
    Flag("load_checkpoint", "ckpt.load_enable", TRAIN, "switch"),
    Flag(
        "gradient_checkpointing",
        "model.gradient_checkpointing_enable actor.gradient_checkpointing_enable",
        TRAIN,
        "switch",
    ),
    Flag(
        "gradient_checkpointing_use_reentrant",
        "model.gradient_checkpointing_reentrant actor.gradient_checkpointing_reentrant",
        TRAIN,
        "switch",
    ),
    Flag("adam_offload", "ds.adam_offload", TRAIN, "switch"),
    Flag("overlap_comm", "ds.overlap_comm", TRAIN, "switch"),
    Flag("load_in_4bit", "ds.load_in_4bit", f"{TRAIN} serve", "switch"),
    Flag("torch_compile", "", TRAIN, "switch"),
    Flag("deepcompile", "ds.deepcompile", TRAIN, "switch"),
    Flag("use_ds_universal_ckpt", "ds.use_universal_ckpt", TRAIN, "switch"),
    Flag("use_liger_kernel", "ds.use_liger_kernel", TRAIN, "switch"),
    Flag("packing_samples", "ds.packing_samples", f"{TRAIN} serve", "switch"),
    Flag("learning_rate", "adam.lr", OFFLINE, "value"),
    Flag("dataset", "data.dataset", ROWS, "value"),
    Flag("dataset_probs", "data.dataset_probs", ROWS, "value"),
    Flag("dataset_split", "train_split data.dataset_split", ROWS, "value"),
    Flag("tokenizer_chat_template", "data.tokenizer_chat_template", "sft rm dpo", "value"),
    Flag("input_key", "data.input_key", "sft kto prm kd ppo infer", "value"),
    Flag("output_key", "data.output_key", "sft kto kd infer", "value"),
    Flag("pretrain_mode", "model.pretrain_mode_enable", "sft kd", "switch"),
    Flag("multiturn", "data.multiturn", "sft", "switch"),
    Flag("prompt_key", "data.prompt_key", "rm dpo", "value"),
    Flag("chosen_key", "data.chosen_key", "rm dpo", "value"),
    Flag("rejected_key", "data.rejected_key", "rm dpo", "value"),
    Flag("loss", "model.loss_type", "rm", "value"),
    Flag("compute_fp32_loss", "model.compute_fp32_loss_enable", "rm", "switch"),
    Flag("margin_loss", "model.margin_loss_enable", "rm", "switch"),
    Flag("beta", "model.beta", "dpo kto", "value"),
    Flag("ref_offload", "ref.offload", "dpo kto ppo", "switch"),
    Flag("label_smoothing", "model.label_smoothing", "dpo", "value"),
    Flag("nll_loss_coef", "model.nll_loss_coef", "dpo", "value"),
    Flag("ref_pretrain", "ref.model_name_or_path", "dpo", "value"),
    Flag("ipo", "model.ipo_enable", "dpo", "switch"),
    Flag("desirable_loss_weight", "", "kto", "value"),
    Flag("undesirable_loss_weight", "", "kto", "value"),
    Flag("label_key", "data.label_key", "kto prm ppo", "value"),
    Flag("rollout_batch_size", "rollout.batch_size", "ppo infer", "value"),
    Flag("prompt_max_len", "", "ppo infer", "value"),
    Flag("max_new_tokens", "rollout.max_new_tokens", "ppo infer", "value"),
    Flag("top_p", "rollout.top_p", "ppo infer", "value"),
    Flag("temperature", "rollout.temperature", "ppo infer", "value"),
    Flag("normalize_reward", "reward.normalize_enable", "ppo infer serve", "switch"),
    Flag("enable_prefix_caching", "vllm.enable_prefix_caching", "ppo infer", "switch"),
    Flag("placeholder_token", "", "prm", "value"),
    Flag("reward_tokens", "", "prm", "many"),
    Flag("teacher_model", "", "kd", "value"),
    Flag("kd_coef", "", "kd", "value"),
    Flag("teacher_offload", "", "kd", "switch"),
    Flag("host", "", "serve", "value"),
    Flag("port", "", "serve", "value"),
    Flag("batch_size", "", "serve", "value"),
    Flag("model_path", "", "combine", "value"),
    Flag("lora_path", "", "combine", "value"),
    Flag("is_rm", "", "combine", "switch"),
    Flag("eval_task", "", "infer", "value"),
    Flag("micro_batch_size", "", "infer", "value"),
    Flag("output_path", "", "infer combine", "value"),
    Flag("repetition_penalty", "", "infer", "value"),
    Flag("best_of_n", "", "infer", "value"),
    Flag("post_processor", "", "infer", "value"),
    Flag("tp_size", "", "infer", "value"),
    Flag("max_num_seqs", "", "infer", "value"),
    Flag("iter", "", "infer", "value"),
    Flag("reward_template", "", "infer", "value"),
    Flag("csft_prompt", "", "infer", "value"),
    Flag("greedy_sampling", "", "infer", "switch"),
    Flag("enable_csft", "", "infer", "switch"),
    Flag("generate_max_len", "", "ppo", "value"),
    Flag("num_episodes", "train.num_episodes", "ppo", "value"),
    Flag("micro_rollout_batch_size", "rollout.micro_batch_size", "ppo", "value"),
    Flag("n_samples_per_prompt", "rollout.n_samples_per_prompt", "ppo", "value"),
    Flag("vllm_generate_batch_size", "rollout.vllm_generate_batch_size", "ppo", "value"),
    Flag("rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu", "ppo", "value"),
    Flag("train_max_tokens_per_gpu", "train.max_tokens_per_gpu", "ppo", "value"),
    Flag("ptx_coef", "", "ppo", "value"),
    Flag("pretrain_data", "", "ppo", "value"),
    Flag("pretrain_data_probs", "", "ppo", "value"),
    Flag("pretrain_split", "", "ppo", "value"),
    Flag("eps_clip", "actor.eps_clip", "ppo", "value"),
    Flag("dual_clip", "actor.dual_clip", "ppo", "value"),
    Flag("value_clip", "critic.value_clip", "ppo", "value"),
    Flag("policy_loss_type", "actor.policy_loss_type", "ppo", "value"),
    Flag("actor.loss_agg_mode", "", "ppo", "value"),
    Flag("entropy_loss_coef", "actor.entropy_coef", "ppo", "value"),
    Flag("lambd", "algo.advantage.lambd", "ppo", "value"),
    Flag("gamma", "algo.advantage.gamma", "ppo", "value"),
    Flag("advantage_estimator", "algo.advantage.estimator", "ppo", "value"),
    Flag("init_kl_coef", "algo.kl.init_coef", "ppo", "value"),
    Flag("kl_target", "algo.kl.target", "ppo", "value"),
    Flag("kl_horizon", "algo.kl.horizon", "ppo", "value"),
    Flag("kl_estimator", "algo.kl.estimator", "ppo", "value"),
    Flag("vllm_is_correction_type", "algo.advantage.is_correction_type", "ppo", "value"),
    Flag("algo.advantage.is_correction_level", "", "ppo", "value"),
    Flag("algo.advantage.is_correction_mode", "", "ppo", "value"),
    Flag("algo.advantage.is_correction_gating", "", "ppo", "value"),
    Flag("overlong_buffer_len", "reward.overlong_buffer_len", "ppo", "value"),
    Flag("overlong_penalty_factor", "reward.overlong_penalty_factor", "ppo", "value"),
    Flag("stop_properly_penalty_coef", "reward.stop_properly_penalty_coef", "ppo", "value"),
    Flag("ema_beta", "train.ema_beta", "ppo", "value"),
    Flag("freezing_actor_steps", "critic.freezing_steps", "ppo", "value"),
    Flag("actor_learning_rate", "actor.adam.lr", "ppo", "value"),
    Flag("critic_learning_rate", "critic.adam.lr", "ppo", "value"),
    Flag("critic.adam.weight_decay", "", "ppo", "value"),
    Flag("critic.adam.eps", "", "ppo", "value"),
    Flag("critic.lr_scheduler", "", "ppo", "value"),
    Flag("critic.lr_warmup_ratio", "", "ppo", "value"),
    Flag("critic.min_lr_ratio", "", "ppo", "value"),
    Flag("critic.max_norm", "", "ppo", "value"),
    Flag("critic.optim", "", "ppo", "value"),
    Flag("critic.muon.lr", "", "ppo", "value"),
    Flag("critic.muon.momentum", "", "ppo", "value"),
    Flag("critic.muon.ns_steps", "", "ppo", "value"),
    Flag("critic_pretrain", "critic.model_name_or_path", "ppo", "value"),
    Flag("reward_pretrain", "reward.model_name_or_path", "ppo serve", "value"),
    Flag("remote_rm_url", "reward.remote_url", "ppo", "value"),
    Flag("agent_func_path", "train.agent_func_path", "ppo", "value"),
    Flag("prompt_data", "data.prompt_dataset", "ppo", "value"),
    Flag("prompt_data_probs", "data.prompt_probs", "ppo", "value"),
    Flag("prompt_split", "data.prompt_split", "ppo", "value"),
    Flag("eval_temperature", "eval.temperature", "ppo", "value"),
    Flag("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", "ppo", "value"),
    Flag("best_metric_key", "ckpt.best_metric_key", "ppo", "value"),
    Flag("actor_num_nodes", "actor.num_nodes", "ppo", "value"),
    Flag("actor_num_gpus_per_node", "actor.num_gpus_per_node", "ppo", "value"),
    Flag("critic_num_nodes", "critic.num_nodes", "ppo", "value"),
    Flag("critic_num_gpus_per_node", "critic.num_gpus_per_node", "ppo", "value"),
    Flag("ref_num_nodes", "ref.num_nodes", "ppo", "value"),
    Flag("ref_num_gpus_per_node", "ref.num_gpus_per_node", "ppo", "value"),
    Flag("reward_num_nodes", "reward.num_nodes", "ppo", "value"),
    Flag("reward_num_gpus_per_node", "reward.num_gpus_per_node", "ppo", "value"),
    Flag("vllm_num_engines", "vllm.num_engines", "ppo", "value"),
    Flag("vllm_tensor_parallel_size", "vllm.tensor_parallel_size", "ppo", "value"),
    Flag("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization", "ppo", "value"),
    Flag("vllm_sync_backend", "vllm.sync_backend", "ppo", "value"),
    Flag("async_queue_size", "train.async_queue_size", "ppo", "value"),
    Flag("data.image_key", "", "ppo", "value"),
    Flag("data.max_images_per_prompt", "", "ppo", "value"),
    Flag("eps_clip_low_high", "actor.eps_clip_low_high", "ppo", "many"),
    Flag("reward_clip_range", "reward.clip_range", "ppo", "many"),
    Flag("dynamic_filtering_reward_range", "algo.dynamic_filtering_range", "ppo", "many"),
    Flag("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold", "ppo", "many"),
    Flag("critic.adam.betas", "", "ppo", "many"),
    Flag("critic.muon.nesterov", "", "ppo", "switch"),
    Flag("critic.muon.no_nesterov", "", "ppo", "switch"),
    Flag("use_kl_loss", "algo.kl.use_loss", "ppo", "switch"),
    Flag("use_kl_estimator_k3", "", "ppo", "switch"),
    Flag("algo.kl.unbiased_gradient", "", "ppo", "switch"),
    Flag("no_advantage_std_norm", "algo.advantage.no_std_norm", "ppo", "switch"),
    Flag("enable_vllm_is_correction", "algo.advantage.is_correction_enable", "ppo", "switch"),
    Flag("use_icepop", "", "ppo", "switch"),
    Flag("dynamic_filtering", "algo.dynamic_filtering_enable", "ppo", "switch"),
    Flag("enable_ema", "train.enable_ema", "ppo", "switch"),
    Flag("save_value_network", "critic.save_value_network", "ppo", "switch"),
    Flag("use_dynamic_batch", "train.dynamic_batch_enable", "ppo", "switch"),
    Flag("async_train", "train.async_enable", "ppo", "switch"),
    Flag("partial_rollout", "train.partial_rollout_enable", "ppo", "switch"),
    Flag("colocate_actor_ref", "train.colocate_actor_ref", "ppo", "switch"),
    Flag("colocate_critic_reward", "train.colocate_critic_reward", "ppo", "switch"),
    Flag("colocate_all_models", "train.colocate_all", "ppo", "switch"),
    Flag("vllm_sync_with_ray", "vllm.sync_with_ray", "ppo", "switch"),
    Flag("enforce_eager", "vllm.enforce_eager", "ppo", "switch"),
    Flag("vllm_enable_sleep", "vllm.enable_sleep", "ppo", "switch"),
    Flag("deepspeed_enable_sleep", "ds.enable_sleep", "ppo", "switch"),
    Flag("ref_reward_offload", "reward.offload", "ppo", "switch"),
    Flag("actor_init_on_gpu", "", "ppo", "switch"),
    Flag("actor.freeze_visual_encoder", "", "ppo", "switch"),
    Flag("perf", "", "ppo", "switch"),
)

DEFAULTS: dict[str, dict[str, str]] = {
    "all": {
        "train_batch_size": "128",
        "max_epochs": "1",
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": "0.03",
        "min_lr_ratio": "0.1",
        "l2": "0",
        "adam_betas": "0.9 0.95",
        "adam.eps": "1e-8",
        "max_norm": "1.0",
        "zero_stage": "2",
        "param_dtype": "bf16",
        "lora_rank": "0",
        "lora_alpha": "16",
        "dataset_split": "train",
        "prompt_split": "train",
        "eval_split": "train",
        "input_key": "input",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "seed": "42",
        "pretrain": "",
    },
    "sft": {"learning_rate": "5e-6", "micro_train_batch_size": "8", "max_len": "2048", "max_epochs": "2"},
    "rm": {"learning_rate": "9e-6", "micro_train_batch_size": "1", "max_len": "512"},
    "dpo": {"learning_rate": "1e-5", "micro_train_batch_size": "8", "max_len": "512", "beta": "0.1"},
    "kto": {
        "learning_rate": "1e-5",
        "micro_train_batch_size": "8",
        "max_len": "2048",
        "beta": "0.01",
        "label_key": "label",
        "desirable_loss_weight": "1.0",
        "undesirable_loss_weight": "1.0",
    },
    "prm": {"learning_rate": "1e-6", "micro_train_batch_size": "1", "max_len": "2048", "label_key": "label"},
    "kd": {
        "learning_rate": "5e-6",
        "micro_train_batch_size": "8",
        "max_len": "2048",
        "output_key": "output",
        "kd_coef": "0.4",
    },
    "serve": {"host": "0.0.0.0", "port": "5000"},
    "ppo": {
        "actor_learning_rate": "1e-6",
        "critic_learning_rate": "9e-6",
        "critic.adam.betas": "0.9 0.95",
        "critic.adam.eps": "1e-8",
        "critic.adam.weight_decay": "0",
        "critic.lr_scheduler": "cosine_with_min_lr",
        "critic.lr_warmup_ratio": "0.03",
        "critic.min_lr_ratio": "0.1",
        "critic.max_norm": "1.0",
        "micro_train_batch_size": "4",
        "rollout_batch_size": "1024",
        "n_samples_per_prompt": "1",
        "num_episodes": "1",
        "prompt_max_len": "1024",
        "generate_max_len": "1024",
        "temperature": "1.0",
        "eps_clip": "0.2",
        "value_clip": "0.5",
        "policy_loss_type": "ppo",
        "advantage_estimator": "gae",
        "lambd": "1",
        "gamma": "1",
        "init_kl_coef": "0.01",
        "kl_estimator": "k1",
        "reward_clip_range": "-10 10",
        "overlong_penalty_factor": "1",
        "ema_beta": "0.992",
        "freezing_actor_steps": "-1",
        "dynamic_filtering_reward_range": "0 1",
        "vllm_is_truncated_threshold": "0.5 5.0",
        "vllm_is_correction_type": "tis",
        "vllm_tensor_parallel_size": "1",
        "vllm_gpu_memory_utilization": "0.95",
        "actor_num_nodes": "1",
        "actor_num_gpus_per_node": "8",
        "eval_temperature": "0.6",
        "eval_n_samples_per_prompt": "4",
        "ptx_coef": "0.05",
        "pretrain_split": "train",
    },
    "ppo dotted": {"micro_train_batch_size": "1", "max_len": "2048"},
    "infer": {
        "prompt_max_len": "1024",
        "max_new_tokens": "1024",
        "temperature": "1.0",
        "top_p": "1.0",
        "best_of_n": "1",
        "zero_stage": "0",
        "output_key": "output",
        "eval_task": "",
        "output_path": "",
        "post_processor": "",
    },
}
"""Defaults that a profile must repeat, by command; `ppo dotted` is for 0.10.2 and later.

lambd was 0.95 before 0.6.4, value_clip 0.2 before 0.8.3.
"""

# ---------------------------------------------------------------- arguments

SYNTAX = {"--module", "-m", "--"}
"""Words of a launcher that only precede the command."""
LAUNCHER_SWITCHES = {*SYNTAX, "--no_local_rank", "--standalone", "--no-wait", "--verbose", "--overlap", "--exclusive"}


class Given(NamedTuple):
    """One flag as written in the script, with its words."""

    flag: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the value as written; empty for a switch."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Arguments:
    """The flags of one command: by name as OpenRLHF reads them, the unknown ones, and those that are repeated later."""

    module: str
    command: str
    given: dict[str, Given]
    repeated: tuple[Given, ...]
    unknown: tuple[Given, ...]
    launcher: tuple[Given, ...]

    @property
    def dotted(self) -> bool:
        """Return whether the command uses the dotted flags of 0.10.2 and later."""
        return any("." in given.flag for given in self.given.values())

    def default(self, name: str) -> str | None:
        """Return OpenRLHF's default, None if the flag has none that a profile needs."""
        for group in ("ppo dotted" if self.dotted and self.command == "ppo" else "", self.command, "all"):
            if group in DEFAULTS and name in DEFAULTS[group]:
                return DEFAULTS[group][name]
        return None

    def spelling(self, name: str) -> str:
        """Return the flag as the script spells it, or else as the command's version does."""
        if name in self.given:
            return self.given[name].flag
        others = [other for flag in FLAGS if flag.name == name for other in flag.others.split() if "." in other]
        own = [other for other in others if not other.startswith("actor.") or self.command == "ppo"]
        return f"--{own[-1] if self.dotted and own else name}"


def read_arguments(command: Command, *, lenient: bool) -> Arguments:
    """Return the flags of a command; raise ConfigError for words that OpenRLHF would refuse, unless `lenient`."""
    name = COMMANDS[command.module]
    known = {spelt: flag for flag in FLAGS if name in flag.commands.split() for spelt in _spellings(flag)}
    given: dict[str, Given] = {}
    repeated, unknown = [], []
    for found in _split(command.words, known):
        if found.flag in known:
            flag = known[found.flag]
            found, surplus = _without_unknown_values(flag, found)
            unknown += surplus
            _check_words(flag, found)
            repeated += [given.pop(flag.name)] if flag.name in given else []
            given[flag.name] = found
        elif lenient or found.flag.startswith("$"):
            unknown.append(found)
        else:
            rule = f"OpenRLHF's {command.module} has no such flag"
            raise ConfigError(
                explain(found.flag, found.text, rule, f"{_remedy(found.flag, list(known))}, or --lenient")
            )
    launcher = tuple(_split(command.launcher, {}))
    return Arguments(command.module, name, given, tuple(repeated), tuple(unknown), launcher)


def _spellings(flag: Flag) -> list[str]:
    return [f"--{spelt}" for spelt in (flag.name, *flag.others.split())]


def _remedy(flag: str, known: list[str]) -> str:
    """Return the remedy for an unknown flag: the nearest one, or the command that has it."""
    owners = {name for one in FLAGS if flag in _spellings(one) for name in one.commands.split()}
    if modules := [module for module, name in COMMANDS.items() if name in owners]:
        return f"it is one of {', '.join(modules)}: remove it"
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "remove it"


def _without_unknown_values(flag: Flag, given: Given) -> tuple[Given, list[Given]]:
    """Return a flag without words such as `$EXTRA` that it has no use for, since flags may be in them, and those words."""
    room = {"switch": 0, "value": 1, "many": len(given.words)}[flag.kind]
    extra = [word for word in given.words[room:] if word.startswith("$")]
    kept = tuple(word for at, word in enumerate(given.words) if at < room or word not in extra)
    return Given(given.flag, kept), [Given(word, ()) for word in extra]


def _split(words: Sequence[str], known: dict[str, Flag]) -> list[Given]:
    """Return each flag with the words up to the next one. A launcher's flags (not `known`) have at most one word."""
    found: list[Given] = []
    for word in words:
        flag, separator, value = word.partition("=")
        if word in LAUNCHER_SWITCHES and not known:
            found.append(Given(word, ()))
        elif word.startswith("--"):
            found.append(Given(flag, (value,) if separator else ()))
        elif known and not found:
            found.append(Given(word, ()))
        elif found and (known or not (found[-1].words or found[-1].flag in LAUNCHER_SWITCHES)):
            found[-1] = Given(found[-1].flag, (*found[-1].words, word))
    return [one for one in found if known or one.flag not in SYNTAX]


def _check_words(flag: Flag, given: Given) -> None:
    if flag.kind == "switch" and given.words:
        raise ConfigError(explain(given.flag, given.text, "is a switch and takes no value", "remove the value"))
    if flag.kind != "switch" and not given.words:
        raise ConfigError(explain(given.flag, "", "needs a value", "add it"))
    if flag.kind == "value" and len(given.words) > 1:
        raise ConfigError(explain(given.flag, given.text, "takes one value", "quote it, or remove the others"))


# ---------------------------------------------------------------- treatments

_STORE = "results are artifacts of the store"
_RESUME = "every stage saves and resumes; `checkpoint_every` sets the interval"
_TRACKER = "runs are tracked in MLflow"
_SPEED = "changes speed, not the result"
_ONE_GROUP = "all models of a stage share the training workers"
_SYNC = "weights go to the sampler as the runtime does it"

IGNORED = {
    "save_path": _STORE,
    "save_hf_ckpt": "every policy is exported in Hugging Face layout",
    "disable_ds_ckpt": _RESUME,
    "ckpt_path": _RESUME,
    "max_ckpt_num": _RESUME,
    "max_ckpt_mem": _RESUME,
    "load_checkpoint": _RESUME,
    "use_ds_universal_ckpt": _RESUME,
    "use_wandb": _TRACKER,
    "wandb_org": _TRACKER,
    "wandb_group": _TRACKER,
    "wandb_project": _TRACKER,
    "wandb_run_name": _TRACKER,
    "use_tensorboard": _TRACKER,
    "perf": "timings are always tracked",
    "local_rank": "the runtime starts the workers",
    "full_determinism": "every seed is derived from `seed`",
    "flash_attn": 'same attention, by PyTorch; set runtime.trainer.attention = "flash_attention_2" where it is installed',
    "packing_samples": _SPEED,
    "overlap_comm": _SPEED,
    "torch_compile": _SPEED,
    "deepcompile": _SPEED,
    "ds.experts_implementation": _SPEED,
    "grad_accum_dtype": "gradients are summed in float32",
    "dataloader_num_workers": _SPEED,
    "gradient_checkpointing_use_reentrant": _SPEED,
    "ref_offload": "the runtime places the models; outside of ppo the reference's log-probs are computed once",
    "ref_reward_offload": "the runtime places the models",
    "teacher_offload": "the runtime places the models",
    "actor_init_on_gpu": "the runtime places the models",
    "micro_rollout_batch_size": "forward passes take the trainer's micro_batch too",
    "micro_batch_size": "scores are computed in batches of the trainer's micro_batch",
    "vllm_generate_batch_size": "a step samples all its prompts at once",
    "colocate_actor_ref": _ONE_GROUP,
    "colocate_critic_reward": _ONE_GROUP,
    "critic_num_nodes": _ONE_GROUP,
    "critic_num_gpus_per_node": _ONE_GROUP,
    "ref_num_nodes": _ONE_GROUP,
    "ref_num_gpus_per_node": _ONE_GROUP,
    "reward_num_nodes": _ONE_GROUP,
    "reward_num_gpus_per_node": _ONE_GROUP,
    "vllm_sync_backend": _SYNC,
    "vllm_sync_with_ray": _SYNC,
    "compute_fp32_loss": "losses are computed in float32",
    "multiturn": "every assistant turn of a conversation is trained",
    "muon.nesterov": "DeepSpeed ignores it too",
    "muon.no_nesterov": "DeepSpeed ignores it too",
    "muon.ns_steps": "DeepSpeed ignores it too",
    "critic.muon.nesterov": "DeepSpeed ignores it too",
    "critic.muon.no_nesterov": "DeepSpeed ignores it too",
    "critic.muon.ns_steps": "DeepSpeed ignores it too",
    "data.image_key": "is read only with images",
    "iter": "rounds are part of the profile",
    "tp_size": "one engine a GPU; runtime.sampler.tensor_parallel splits a model that is too large for one",
    "reward_template": "[conditional_sft.condition] template writes the reward into the prompt",
    "csft_prompt": "[conditional_sft.condition] requests the best level",
}
"""Flag -> why it has no effect here."""


class Missing(NamedTuple):
    """A missing feature: the value that means "off" (then the flag has no effect), the reason, the nearest feature."""

    off: str
    reason: str
    nearest: str


_MUON = Missing("", "the optimizer is AdamW", "optimizer.learning_rate of AdamW")

MISSING = {
    "zpg": Missing("1", "no hierarchical partition of ZeRO++", "runtime.trainer.zero_stage = 3"),
    "optim": Missing("adam", "the optimizer is AdamW", "optimizer.learning_rate of AdamW"),
    "critic.optim": Missing("adam", "the optimizer is AdamW", "value.optimizer.learning_rate of AdamW"),
    "muon.lr": _MUON,
    "muon.momentum": _MUON,
    "critic.muon.lr": _MUON,
    "critic.muon.momentum": _MUON,
    "lora_dropout": Missing("0", "adapters have no dropout, so that log-probs are repeatable", "a smaller lora.rank"),
    "value_head_prefix": Missing(
        "score", "the head of a reward model is `score`", "its tensor renamed to score.weight"
    ),
    "use_ms": Missing("", "ModelScope is not read", "a local folder as the path"),
    "disable_fast_tokenizer": Missing("", "tokenizers are fast ones", "the fast tokenizer of the same model"),
    "use_dynamic_batch": Missing(
        "", "a budget is of one forward pass, padding included", "runtime.trainer.micro_tokens"
    ),
    "rollout_max_tokens_per_gpu": Missing(
        "", "a budget is of one forward pass, padding included", "runtime.trainer.micro_tokens"
    ),
    "train_max_tokens_per_gpu": Missing(
        "", "a budget is of one forward pass, padding included", "runtime.trainer.micro_tokens"
    ),
    "save_value_network": Missing("", "the value model is not an artifact", "the reward model, which is"),
    "actor.freeze_visual_encoder": Missing("", "models read text only", "a text model"),
    "data.max_images_per_prompt": Missing("0", "models read text only", "a text model"),
    "repetition_penalty": Missing("1", "answers are drawn from the policy as it is", "sampling.temperature"),
    "enable_csft": Missing(
        "", "the level that a prompt requests is part of [conditional_sft]", "[conditional_sft.condition]"
    ),
}
"""Flag -> the missing feature; a switch has no value that means "off"."""
