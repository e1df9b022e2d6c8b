"""Declare `ppo`; its options are in `rlhf_core.config.policy`."""

from collections.abc import Mapping
from typing import Annotated

from rlhf_core.config.policy import PPOConfig
from rlhf_core.types import DemonstrationsRef, ModelRef, PolicyRef, PromptsRef
from stages import measured
from stages.declaration import From, stage


@stage(version=5, code="warn", engines=("trainer", "sampler"), section="ppo", page="ppo.md", metrics=measured.ppo)
def ppo(
    config: PPOConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    reference: Annotated[PolicyRef, From("sft", when=lambda config: config.uses_reference, instead="policy")],
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    reward_models: Annotated[Mapping[str, ModelRef], From({"reward_model": "reward_model"})],
    demonstrations: Annotated[
        DemonstrationsRef | None, From("prepare_data.demonstrations", when=lambda config: config.ptx is not None)
    ] = None,
    teachers: Annotated[
        Mapping[str, PolicyRef] | None, From({"sft": "sft"}, when=lambda config: config.distill is not None)
    ] = None,
    critic: Annotated[ModelRef | None, From("")] = None,
) -> PolicyRef:
    """Policy optimization of `policy` on `prompts`, kept close to `reference`, which is not needed if no setting uses it.

    `demonstrations` are for `config.ptx`, `teachers` for `config.distill`; a value model starts from `critic` if it is given."""
