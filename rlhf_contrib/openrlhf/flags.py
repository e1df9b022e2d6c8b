"""List the flags of OpenRLHF's commands, 0.6 to 0.11.2, and their defaults. Data only, no rules."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rlhf_contrib.openrlhf.redaction import is_secret
from rlhf_contrib.openrlhf.shell import Command
from rlhf_core.errors import ConfigError
from rlhf_core.secrets.redaction import HIDDEN

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
"""Command that is not translated -> the equivalent of this project."""

OFFLINE = "sft rm dpo kto prm kd"
TRAIN = f"{OFFLINE} ppo"
ROWS = f"{OFFLINE} infer"
ALL = f"{TRAIN} infer"
MODELS = f"{ALL} serve"


Kind: TypeAlias = Literal["switch", "value", "many"]


class Flag(NamedTuple):
    """One flag: its name here (the older one if there are two spellings), and its other spellings."""

    name: str
    others: tuple[str, ...]
    commands: str
    kind: Kind


_FLAGS: Mapping[tuple[str, Kind], str] = {
    (ALL, "value"): """
        seed=train.seed local_rank zero_stage=ds.zero_stage
        pretrain=model.model_name_or_path=actor.model_name_or_path input_template=data.input_template
        max_samples=data.max_samples
    """,
    (MODELS, "value"): """
        max_len=data.max_len attn_implementation=ds.attn_implementation value_head_prefix=ds.value_head_prefix
    """,
    (f"{MODELS} combine", "value"): "param_dtype=ds.param_dtype",
    (f"{MODELS} combine", "switch"): "bf16",
    (MODELS, "switch"): "flash_attn disable_fast_tokenizer=data.disable_fast_tokenizer use_ms",
    (ALL, "switch"): "apply_chat_template=data.apply_chat_template full_determinism=train.full_determinism_enable",
    (TRAIN, "value"): """
        save_path=ckpt.output_dir save_steps=ckpt.save_steps logging_steps=logger.logging_steps
        eval_steps=eval.steps ckpt_path=ckpt.path max_ckpt_num=ckpt.max_num max_ckpt_mem=ckpt.max_mem
        micro_train_batch_size=train.micro_batch_size train_batch_size=train.batch_size
        max_norm=max_norm=actor.max_norm zpg=ds.zpg grad_accum_dtype=ds.grad_accum_dtype
        max_epochs=train.max_epochs aux_loss_coef=model.aux_loss_coef=actor.aux_loss_coef
        lr_warmup_ratio=actor.lr_warmup_ratio lr_scheduler=actor.lr_scheduler min_lr_ratio=actor.min_lr_ratio
        l2=adam.weight_decay=actor.adam.weight_decay adam.eps=actor.adam.eps lora_rank=ds.lora.rank
        lora_alpha=ds.lora.alpha lora_dropout=ds.lora.dropout eval_dataset=eval.dataset eval_split=eval.split
        use_wandb=logger.wandb.key wandb_org=logger.wandb.org wandb_group=logger.wandb.group
        wandb_project=logger.wandb.project wandb_run_name=logger.wandb.run_name
        use_tensorboard=logger.tensorboard_dir ring_attn_size=ds.ring_attn_size
        ring_head_stride=ds.ring_attn_head_stride ds_tensor_parallel_size=ds.tensor_parallel_size
        dataloader_num_workers=data.dataloader_num_workers ds.experts_implementation optim=actor.optim
        muon.lr=actor.muon.lr muon.momentum=actor.muon.momentum muon.ns_steps=actor.muon.ns_steps
    """,
    (TRAIN, "many"): "adam_betas=adam.betas=actor.adam.betas target_modules=ds.lora.target_modules",
    (TRAIN, "switch"): """
        muon.nesterov=actor.muon.nesterov muon.no_nesterov=actor.muon.no_nesterov save_hf_ckpt=ckpt.save_hf
        disable_ds_ckpt=ckpt.disable_ds load_checkpoint=ckpt.load_enable
        gradient_checkpointing=model.gradient_checkpointing_enable=actor.gradient_checkpointing_enable
        gradient_checkpointing_use_reentrant=model.gradient_checkpointing_reentrant=actor.gradient_checkpointing_reentrant
        adam_offload=ds.adam_offload overlap_comm=ds.overlap_comm torch_compile deepcompile=ds.deepcompile
        use_ds_universal_ckpt=ds.use_universal_ckpt use_liger_kernel=ds.use_liger_kernel
    """,
    (f"{TRAIN} serve", "switch"): "load_in_4bit=ds.load_in_4bit packing_samples=ds.packing_samples",
    (OFFLINE, "value"): "learning_rate=adam.lr",
    (ROWS, "value"): """
        dataset=data.dataset dataset_probs=data.dataset_probs dataset_split=train_split=data.dataset_split
    """,
    ("sft rm dpo", "value"): "tokenizer_chat_template=data.tokenizer_chat_template",
    ("sft kto prm kd ppo infer", "value"): "input_key=data.input_key",
    ("sft kto kd infer", "value"): "output_key=data.output_key",
    ("sft kd", "switch"): "pretrain_mode=model.pretrain_mode_enable",
    ("sft", "switch"): "multiturn=data.multiturn",
    ("rm dpo", "value"): "prompt_key=data.prompt_key chosen_key=data.chosen_key rejected_key=data.rejected_key",
    ("rm", "value"): "loss=model.loss_type",
    ("rm", "switch"): "compute_fp32_loss=model.compute_fp32_loss_enable margin_loss=model.margin_loss_enable",
    ("dpo kto", "value"): "beta=model.beta",
    ("dpo kto ppo", "switch"): "ref_offload=ref.offload",
    ("dpo", "value"): """
        label_smoothing=model.label_smoothing nll_loss_coef=model.nll_loss_coef
        ref_pretrain=ref.model_name_or_path
    """,
    ("dpo", "switch"): "ipo=model.ipo_enable",
    ("kto", "value"): "desirable_loss_weight undesirable_loss_weight",
    ("kto prm ppo", "value"): "label_key=data.label_key",
    ("ppo infer", "value"): """
        rollout_batch_size=rollout.batch_size prompt_max_len max_new_tokens=rollout.max_new_tokens
        top_p=rollout.top_p temperature=rollout.temperature
    """,
    ("ppo infer serve", "switch"): "normalize_reward=reward.normalize_enable",
    ("ppo infer", "switch"): "enable_prefix_caching=vllm.enable_prefix_caching",
    ("prm", "value"): "placeholder_token",
    ("prm", "many"): "reward_tokens",
    ("kd", "value"): "teacher_model kd_coef",
    ("kd", "switch"): "teacher_offload",
    ("serve", "value"): "host port batch_size",
    ("combine", "value"): "model_path lora_path",
    ("combine", "switch"): "is_rm",
    ("infer", "value"): """
        eval_task micro_batch_size repetition_penalty best_of_n post_processor tp_size max_num_seqs iter
        reward_template csft_prompt
    """,
    ("infer combine", "value"): "output_path",
    ("infer", "switch"): "greedy_sampling enable_csft",
    ("ppo", "value"): """
        generate_max_len num_episodes=train.num_episodes micro_rollout_batch_size=rollout.micro_batch_size
        n_samples_per_prompt=rollout.n_samples_per_prompt
        vllm_generate_batch_size=rollout.vllm_generate_batch_size
        rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu train_max_tokens_per_gpu=train.max_tokens_per_gpu
        ptx_coef pretrain_data pretrain_data_probs pretrain_split eps_clip=actor.eps_clip
        dual_clip=actor.dual_clip value_clip=critic.value_clip policy_loss_type=actor.policy_loss_type
        actor.loss_agg_mode entropy_loss_coef=actor.entropy_coef lambd=algo.advantage.lambd
        gamma=algo.advantage.gamma advantage_estimator=algo.advantage.estimator init_kl_coef=algo.kl.init_coef
        kl_target=algo.kl.target kl_horizon=algo.kl.horizon kl_estimator=algo.kl.estimator
        vllm_is_correction_type=algo.advantage.is_correction_type algo.advantage.is_correction_level
        algo.advantage.is_correction_mode algo.advantage.is_correction_gating
        overlong_buffer_len=reward.overlong_buffer_len overlong_penalty_factor=reward.overlong_penalty_factor
        stop_properly_penalty_coef=reward.stop_properly_penalty_coef ema_beta=train.ema_beta
        freezing_actor_steps=critic.freezing_steps actor_learning_rate=actor.adam.lr
        critic_learning_rate=critic.adam.lr critic.adam.weight_decay critic.adam.eps critic.lr_scheduler
        critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm critic.optim critic.muon.lr
        critic.muon.momentum critic.muon.ns_steps critic_pretrain=critic.model_name_or_path
        remote_rm_url=reward.remote_url agent_func_path=train.agent_func_path prompt_data=data.prompt_dataset
        prompt_data_probs=data.prompt_probs prompt_split=data.prompt_split eval_temperature=eval.temperature
        eval_n_samples_per_prompt=eval.n_samples_per_prompt best_metric_key=ckpt.best_metric_key
        actor_num_nodes=actor.num_nodes actor_num_gpus_per_node=actor.num_gpus_per_node
        critic_num_nodes=critic.num_nodes critic_num_gpus_per_node=critic.num_gpus_per_node
        ref_num_nodes=ref.num_nodes ref_num_gpus_per_node=ref.num_gpus_per_node
        reward_num_nodes=reward.num_nodes reward_num_gpus_per_node=reward.num_gpus_per_node
        vllm_num_engines=vllm.num_engines vllm_tensor_parallel_size=vllm.tensor_parallel_size
        vllm_gpu_memory_utilization=vllm.gpu_memory_utilization vllm_sync_backend=vllm.sync_backend
        async_queue_size=train.async_queue_size data.image_key data.max_images_per_prompt
    """,
    ("ppo serve", "value"): "reward_pretrain=reward.model_name_or_path",
    ("ppo", "many"): """
        eps_clip_low_high=actor.eps_clip_low_high reward_clip_range=reward.clip_range
        dynamic_filtering_reward_range=algo.dynamic_filtering_range
        vllm_is_truncated_threshold=algo.advantage.is_correction_threshold critic.adam.betas
    """,
    ("ppo", "switch"): """
        critic.muon.nesterov critic.muon.no_nesterov use_kl_loss=algo.kl.use_loss use_kl_estimator_k3
        algo.kl.unbiased_gradient no_advantage_std_norm=algo.advantage.no_std_norm
        enable_vllm_is_correction=algo.advantage.is_correction_enable use_icepop
        dynamic_filtering=algo.dynamic_filtering_enable enable_ema=train.enable_ema
        save_value_network=critic.save_value_network use_dynamic_batch=train.dynamic_batch_enable
        async_train=train.async_enable partial_rollout=train.partial_rollout_enable
        colocate_actor_ref=train.colocate_actor_ref colocate_critic_reward=train.colocate_critic_reward
        colocate_all_models=train.colocate_all vllm_sync_with_ray=vllm.sync_with_ray
        enforce_eager=vllm.enforce_eager vllm_enable_sleep=vllm.enable_sleep
        deepspeed_enable_sleep=ds.enable_sleep ref_reward_offload=reward.offload actor_init_on_gpu
        actor.freeze_visual_encoder perf
    """,
}
"""(commands, kind) -> flags of these commands, each followed by its other spellings after `=`."""

FLAGS = tuple(
    Flag(name, tuple(others), commands, kind)
    for (commands, kind), flags in _FLAGS.items()
    for name, *others in (flag.split("=") for flag in flags.split())
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
        "train_max_tokens_per_gpu": "16192",
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
        "ref_num_nodes": "1",
        "ref_num_gpus_per_node": "8",
        "critic_num_nodes": "1",
        "critic_num_gpus_per_node": "8",
        "reward_num_nodes": "1",
        "reward_num_gpus_per_node": "8",
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
        """The value as written; empty for a switch."""
        return " ".join(self.words)

    @property
    def shown(self) -> str:
        """The value as reports print it, with secrets hidden."""
        return HIDDEN if is_secret(self.flag) else self.text


@dataclass(frozen=True)
class Arguments:
    """The flags of one command: those OpenRLHF reads (by name), unknown flags, and flags that are repeated later."""

    module: str
    command: str
    given: dict[str, Given]
    repeated: tuple[Given, ...]
    unknown: tuple[Given, ...]
    launcher: tuple[Given, ...]

    @property
    def dotted(self) -> bool:
        """Whether the command uses the dotted flags of 0.10.2 and later."""
        return any("." in given.flag for given in self.given.values())

    def default(self, name: str) -> str | None:
        """OpenRLHF's default; None if the flag has none that a profile must repeat."""
        for group in ("ppo dotted" if self.dotted and self.command == "ppo" else "", self.command, "all"):
            if group in DEFAULTS and name in DEFAULTS[group]:
                return DEFAULTS[group][name]
        return None

    def spelling(self, name: str) -> str:
        """The flag as spelled in the script, or as the command's version of OpenRLHF spells it."""
        if name in self.given:
            return self.given[name].flag
        others = [other for flag in FLAGS if flag.name == name for other in flag.others if "." in other]
        own = [other for other in others if not other.startswith("actor.") or self.command == "ppo"]
        return f"--{own[-1] if self.dotted and own else name}"


def read_arguments(command: Command, *, lenient: bool) -> Arguments:
    """Read the flags of a command. Raises ConfigError for words that OpenRLHF would reject, unless `lenient`."""
    name = COMMANDS[command.module]
    known = {spelled: flag for flag in FLAGS if name in flag.commands.split() for spelled in _spellings(flag)}
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
            raise ConfigError(found.flag, found.shown, rule, f"{_remedy(found.flag, list(known))}, or --lenient")
    launcher = tuple(_split(command.launcher, {}))
    return Arguments(command.module, name, given, tuple(repeated), tuple(unknown), launcher)


def _spellings(flag: Flag) -> list[str]:
    return [f"--{spelled}" for spelled in (flag.name, *flag.others)]


def _remedy(flag: str, known: list[str]) -> str:
    """The remedy for an unknown flag: the closest known flag, or the commands that have it."""
    owners = {name for one in FLAGS if flag in _spellings(one) for name in one.commands.split()}
    if modules := [module for module, name in COMMANDS.items() if name in owners]:
        return f"it is one of {', '.join(modules)}: remove it"
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "remove it"


def _without_unknown_values(flag: Flag, given: Given) -> tuple[Given, list[Given]]:
    """Separate surplus words such as `$EXTRA` from a flag, since they may hold flags. Returns flag and words."""
    room = {"switch": 0, "value": 1, "many": len(given.words)}[flag.kind]
    extra = [word for word in given.words[room:] if word.startswith("$")]
    kept = tuple(word for at, word in enumerate(given.words) if at < room or not word.startswith("$"))
    return Given(given.flag, kept), [Given(word, ()) for word in extra]


def _split(words: Sequence[str], known: dict[str, Flag]) -> list[Given]:
    """Split words into flags, each with the words up to the next one. Launcher flags (not `known`) have at most one."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        flag, separator, value = word.partition("=")
        if word in LAUNCHER_SWITCHES and not known:
            found.append((word, []))
        elif word.startswith("--"):
            found.append((flag, [value] if separator else []))
        elif known and not found:
            found.append((word, []))
        elif found and (known or not (found[-1][1] or found[-1][0] in LAUNCHER_SWITCHES)):
            found[-1][1].append(word)
    return [Given(flag, tuple(values)) for flag, values in found if known or flag not in SYNTAX]


def _check_words(flag: Flag, given: Given) -> None:
    if flag.kind == "switch" and given.words:
        raise ConfigError(given.flag, given.shown, "is a switch and takes no value", "remove the value")
    if flag.kind != "switch" and not given.words:
        raise ConfigError(given.flag, "", "needs a value", "add it")
    if flag.kind == "value" and len(given.words) > 1:
        raise ConfigError(given.flag, given.shown, "takes one value", "quote it, or remove the others")


# ---------------------------------------------------------------- treatments

_WITHOUT_EFFECT = {
    "results are artifacts of the store": "save_path",
    "every stage saves and resumes; `checkpoint_every` sets the interval": """
        disable_ds_ckpt ckpt_path max_ckpt_num max_ckpt_mem load_checkpoint use_ds_universal_ckpt
    """,
    "runs are named by profile and stage": "wandb_org wandb_group wandb_project wandb_run_name",
    "timings are always tracked": "perf",
    "the runtime starts the workers": "local_rank",
    "every seed is derived from `seed`": "full_determinism",
    'same attention, by PyTorch; set runtime.trainer.attention = "flash_attention_2" where it is installed': """
        flash_attn
    """,
    "changes speed, not the result": """
        packing_samples overlap_comm torch_compile deepcompile ds.experts_implementation dataloader_num_workers
        gradient_checkpointing_use_reentrant
    """,
    "gradients are summed in float32": "grad_accum_dtype",
    "the runtime places the models; outside of ppo the reference's log-probs are computed once": "ref_offload",
    "the runtime places the models": "ref_reward_offload teacher_offload actor_init_on_gpu",
    "forward passes take the trainer's micro_batch too": "micro_rollout_batch_size",
    "scores are computed in batches of the trainer's micro_batch": "micro_batch_size",
    "a step samples all its prompts at once": "vllm_generate_batch_size",
    "weights go to the sampler as the runtime does it": "vllm_sync_backend vllm_sync_with_ray",
    "losses are computed in float32": "compute_fp32_loss",
    "every assistant turn of a conversation is trained": "multiturn",
    "DeepSpeed ignores it too": """
        muon.nesterov muon.no_nesterov muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov
        critic.muon.ns_steps
    """,
    "is read only with images": "data.image_key",
    "rounds are part of the profile": "iter",
    "one engine a GPU; runtime.sampler.tensor_parallel splits a model that is too large for one": "tp_size",
    "[conditional_sft.condition] template writes the reward into the prompt": "reward_template",
    "[conditional_sft.condition] requests the best level": "csft_prompt",
}
"""Reason why flags have no effect here -> these flags."""
IGNORED = {flag: reason for reason, flags in _WITHOUT_EFFECT.items() for flag in flags.split()}


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
    "save_value_network": Missing("", "the value model is not an artifact", "the reward model, which is"),
    "actor.freeze_visual_encoder": Missing("", "models read text only", "a text model"),
    "data.max_images_per_prompt": Missing("0", "models read text only", "a text model"),
    "enable_csft": Missing(
        "", "the level that a prompt requests is part of [conditional_sft]", "[conditional_sft.condition]"
    ),
}
"""Flag -> the missing feature; a switch has no value that means "off"."""
