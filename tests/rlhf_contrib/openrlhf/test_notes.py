"""What the importer calls untranslatable, or without effect, against the options that profiles have.

A new option whose name shares a word with such a flag fails here. Translate the flag, or list the option below as another
thing.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from pipelines.flows.profile import PipelineConfig
from rlhf_contrib.openrlhf.flags import FLAGS, IGNORED, MISSING, Flag
from rlhf_contrib.openrlhf.translate import translate

EVERYWHERE = "actor algo all batch critic data ds enable eval key logger max model n name num of path per size steps train type use value vllm"
"""Words that say which model or phase a flag is for, and not what it does."""
SYNONYMS = {
    "attn": "attention",
    "ckpt": "checkpoint",
    "comm": "communication",
    "grad": "gradient",
    "images": "image",
    "iter": "round",
    "lr": "learning",
    "mem": "memory",
    "optim": "optimizer",
    "ref": "reference",
    "rounds": "round",
    "save": "export",
    "tp": "tensor",
    "wandb": "tracker",
    "also": "tracker",
}
OTHER_THINGS = {
    "actor_init_on_gpu": "gpu gpu_hours gpu_memory_fraction on_failure on_policy train_on",
    "ckpt_path": "checkpoint_every",
    "compute_fp32_loss": "fp32_lm_head fp32_reduce loss",
    "critic.muon.lr": "learning_rate learning_rate_factor min_lr_fraction",
    "critic.optim": "offload_optimizer optimizer",
    "csft_prompt": "max_prompt_tokens pairs_per_prompt prompt samples_per_prompt",
    "data.max_images_per_prompt": "max_prompt_tokens pairs_per_prompt prompt samples_per_prompt",
    "dataloader_num_workers": "train_workers workers",
    "disable_ds_ckpt": "checkpoint_every",
    "ds.experts_implementation": "routed_experts",
    "flash_attn": "attention attention_fraction min_attention",
    "grad_accum_dtype": "dtype gradient_checkpointing max_grad_norm",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing max_grad_norm",
    "iter": "max_rounds round rounds",
    "load_checkpoint": "checkpoint_every load_timeout_s",
    "local_rank": "max_lora_rank rank",
    "lora_dropout": "lora lora_sync max_lora_rank",
    "max_ckpt_mem": "checkpoint_every gpu_memory_fraction memory_mb",
    "max_ckpt_num": "checkpoint_every",
    "micro_batch_size": "micro_batch micro_tokens",
    "micro_rollout_batch_size": "micro_batch micro_tokens",
    "muon.lr": "learning_rate learning_rate_factor min_lr_fraction",
    "optim": "offload_optimizer optimizer",
    "overlap_comm": "overlap window_overlap",
    "packing_samples": "packing samples samples_per_prompt samples_shown",
    "ref_offload": "offload_optimizer reference reference_steps reference_sync",
    "ref_reward_offload": "first_reward_model import_reward_model needs_reward offload_optimizer process_reward_model reference reference_steps reference_sync reward reward_model reward_models reward_start reward_weight",
    "reward_template": "apply_chat_template chat_template chat_template_kwargs first_reward_model import_reward_model needs_reward process_reward_model reward reward_model reward_models reward_start reward_weight template",
    "save_path": "checkpoint_every export export_every",
    "save_value_network": "export export_every",
    "teacher_offload": "offload_optimizer teacher",
    "tp_size": "tensor_parallel",
    "use_ds_universal_ckpt": "checkpoint_every",
    "value_head_prefix": "fp32_lm_head prefix_caching",
    "vllm_generate_batch_size": "generate",
    "vllm_sync_backend": "lora_sync reference_sync",
    "vllm_sync_with_ray": "lora_sync reference_sync",
    **dict.fromkeys(("wandb_group", "wandb_org", "wandb_run_name"), "also"),
    "wandb_project": "also project",
}
"""Flag that no profile can say, or that has no effect here -> the options of profiles with a word of it, reviewed."""

PPO = "python -m openrlhf.cli.train_ppo_ray --pretrain a --prompt_data b.jsonl --n_samples_per_prompt 2 "
CORRECTED = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 5 "
CHOICES = {
    "--algo.advantage.estimator": "gae reinforce rloo reinforce_baseline group_norm dr_grpo flash_reinforce",
    "--actor.policy_loss_type": "ppo gspo",
    "--actor.loss_agg_mode": "token-mean seq-mean-token-mean",
    CORRECTED + "--algo.advantage.is_correction_mode": "mask clip",
    CORRECTED + "--algo.advantage.is_correction_gating": "ratio binary_kl tv",
    "--algo.advantage.is_correction_level": "off token seq",
    "--vllm_is_correction_type": "tis icepop seq-mask-tis",
    "--algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.estimator": "k1 k2 k3",
    "--ds.param_dtype": "bf16 fp16",
    "--ds.attn_implementation": "eager sdpa flash_attention_2 flash_attention_3",
    "--actor.lr_scheduler": "cosine_with_min_lr cosine linear constant constant_with_warmup polynomial",
}
"""The choices of OpenRLHF 0.11.2 and its users' schedules, after the flags that they need."""
UNSAYABLE = {"fp16", "flash_attention_3", "polynomial"}


def fields(annotation: Any, seen: set[type]) -> Iterator[str]:
    """The names of all options below a type, of each model once."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.add(annotation)
            for name, field in annotation.model_fields.items():
                yield name
                yield from fields(field.annotation, seen)
    else:
        for part in get_args(annotation):
            yield from fields(part, seen)


OPTIONS = set(fields(PipelineConfig, set()))


def words(*names: str) -> set[str]:
    split = {word for name in names for word in re.split(r"[._]", name)}
    return {SYNONYMS.get(word, word) for word in split} - set(EVERYWHERE.split())


def like(flag: Flag) -> set[str]:
    return {name for name in OPTIONS if words(name) & words(flag.name, *flag.others)}


@pytest.mark.parametrize("flag", [one for one in FLAGS if one.name in {*MISSING, *IGNORED}], ids=lambda one: one.name)
def test_an_option_with_a_word_of_an_untranslated_flag_is_known_to_be_another_thing(flag):
    assert like(flag) - set(OTHER_THINGS.get(flag.name, "").split()) == set(), (
        "translate the flag into this option, or list it in OTHER_THINGS"
    )


def test_the_words_find_the_options_that_were_overlooked():
    """`--save_hf_ckpt`, `--use_wandb` and the token budgets were said to be untranslatable, or without effect."""
    flags = {one.name: one for one in FLAGS}
    assert "export_every" in like(flags["save_hf_ckpt"]) and "also" in like(flags["use_wandb"])
    assert "micro_tokens" in like(flags["train_max_tokens_per_gpu"])
    assert {"save_hf_ckpt", "use_wandb", "use_tensorboard", "train_max_tokens_per_gpu"}.isdisjoint({*MISSING, *IGNORED})


@pytest.mark.parametrize(
    ("flags", "choice"), [(flags, choice) for flags, choices in CHOICES.items() for choice in choices.split()]
)
def test_every_choice_of_a_flag_is_translated_unless_no_profile_has_it(flags, choice):
    translation = translate(f"{PPO}{flags} {choice}", name="x", template_file="x.jinja")
    [fate] = [one.fate for one in translation.outcomes if one.flag == flags.split()[-1]]
    assert (fate == "not translatable") is (choice in UNSAYABLE)


@pytest.mark.parametrize("flag", sorted(MISSING))
def test_a_note_names_only_options_that_profiles_have(flag):
    named = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", MISSING[flag].nearest)
    assert {part for key in named for part in key.split(".")} <= OPTIONS | {"score", "weight"}
