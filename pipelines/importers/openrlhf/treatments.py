"""List the flags that need no rule: those without effect here, and those without an equivalent. Data only, no rules."""

from __future__ import annotations

from typing import NamedTuple

_STORE = "results are artifacts of the store"
_RESUME = "every stage saves and resumes; `checkpoint_every` says how often"
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
    "csft_prompt": "[conditional_sft.condition] asks for the best level",
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
    "critic.optim": Missing("adam", "the optimizer is AdamW", "value_optimizer.learning_rate of AdamW"),
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
        "", "the level that a prompt asks for is part of [conditional_sft]", "[conditional_sft.condition]"
    ),
}
"""Flag -> the missing feature; a switch has no value that means "off"."""
