"""The table of methods has a row for everything that a profile can choose, and is made of stored lines."""

import importlib
import inspect
from typing import Any, get_args

from benchmarks.method_rows import methods, policy_sections, preference_sections
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from rlhf_core.config.policy import Advantage, PolicyLoss, PreferenceLoss
from rlhf_core.schema.base import CustomFunction
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import ArtifactRef, PolicyRef, PreparedDataRef
from stages.distill import DistillConfig
from stages.sft import SFTConfig
from tests.support.starts import imagined_start, made


def types_of(annotation: Any) -> set[str]:
    """Return the values of `type` in a union of configuration classes; a user's own function is no method of ours."""
    members = get_args(get_args(annotation)[0])
    return {member().type for member in members if not issubclass(member, CustomFunction)}


def test_every_loss_and_estimator_has_a_row() -> None:
    config = load_profile("tiny/full")
    pairs, policies = preference_sections(config).values(), policy_sections(config, 10).values()
    assert {one.loss.type for one in pairs} == types_of(PreferenceLoss)
    assert {one.advantage.type for one in policies} == types_of(Advantage)
    assert {one.loss.type for one in policies} == types_of(PolicyLoss)
    assert {f"sft/{loss}" for loss in get_args(SFTConfig.model_fields["loss"].annotation)} <= set(methods(config, 10))
    assert DistillConfig.model_fields["on_policy"].annotation is bool  # two rows: on demonstrations, on own answers
    rows = {"distill/forward", "distill/own answers", "distill/two teachers", "distill/cross-tokenizer"}
    assert rows | {"sft/conditional"} <= set(methods(config, 10))


def test_every_method_is_wired_to_stages_that_take_what_it_gives() -> None:
    called: list[str] = []

    def run_stage(spec: StageSpec, kind: type[ArtifactRef]) -> ArtifactRef:
        parameters = inspect.signature(importlib.import_module(spec.module).run).parameters
        assert set(spec.inputs) <= set(parameters), spec.label
        called.append(spec.name)
        if kind is PreparedDataRef:
            return PreparedDataRef(uri=spec.label, digest=spec.label, base=made(PolicyRef, "another base"))
        return made(kind, spec.label)

    config = load_profile("tiny/full")
    for name, method in methods(config, 10).items():
        called.clear()
        learnt = method(config, Stages(run_stage, 17, config.runtime), imagined_start())
        assert isinstance(learnt.policy, PolicyRef) and called, name
        assert (learnt.asked is not None) == (name == "sft/conditional")
