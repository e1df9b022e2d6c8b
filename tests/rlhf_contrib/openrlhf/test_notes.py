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
from rlhf_contrib.openrlhf.flags import MISSING
from rlhf_contrib.openrlhf.translate import translate

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
