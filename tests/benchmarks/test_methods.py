"""The table of methods has a row for everything that a profile can choose, and is made of stored lines."""

import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.method_rows import facts_in, methods, passed, policy_sections, preference_sections
from benchmarks.method_steps import STEPPED
from benchmarks.methods import Result, print_tables
from benchmarks.seeds import keep, read
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from rlhf_contrib.worlds.support import facts_of, make_tables
from rlhf_core.config.data import SupportWorld
from rlhf_core.config.policy import Advantage, PolicyLoss, PreferenceLoss
from rlhf_core.schema.base import CustomFunction
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import ArtifactRef, Completion, Generation, PolicyRef, PreparedDataRef
from stages.distill import DistillConfig
from stages.sft import SFTConfig
from tests.support.starts import imagined_start, made

FIGURES = {"gold": 1.5, "before": 0.25, "kl": 2.0, "seconds": 10.0}
STEPS = {"accuracy": 0.9, "first_error_accuracy": 0.8, "f1": 0.8, "sft": 0.2, "best": 0.5, "any": 0.6, "imitator": 0.4}


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


def test_the_verifiable_reward_reads_the_facts_that_training_prompts_do_not_carry() -> None:
    tables, _ = make_tables(SupportWorld(prompts=200, eval_prompts=200), seed=5)
    assert [facts_in(prompt.messages[-1].content) for prompt in tables.eval_prompts] == [
        facts_of(prompt) for prompt in tables.eval_prompts
    ]
    assert not any(prompt.label for prompt in tables.prompts)
    prompt = tables.prompts[0]
    facts = facts_in(prompt.messages[-1].content)
    replies = [f"Hello {facts.name}, I am sorry to hear that. Thank you for writing.", "Thank you for writing."]
    answers = [Generation(prompt, (1,), Completion((2,), (0.0,), text, "stop", 0, 0)) for text in replies]
    assert passed(answers) == [1.0, 0.0]


def test_every_policy_method_samples_as_many_rollouts_a_step() -> None:
    sections = policy_sections(load_profile("tiny/full"), 10)
    rollouts = {one.prompts_per_step * one.samples_per_prompt for one in sections.values()}
    assert rollouts == {48}


def test_the_judge_of_steps_runs_on_the_engines_of_the_others() -> None:
    ours, theirs = load_profile("tiny/prm", STEPPED).runtime, load_profile("tiny/full").runtime
    assert (ours.type, ours.trainer.engine, ours.sampler.type) == (
        theirs.type,
        theirs.trainer.engine,
        theirs.sampler.type,
    )


def test_the_table_is_printed_from_the_latest_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "methods.jsonl"
    assert read(file, Result) == []
    first = Result("dpo/dpo", 0, "pairs=512", FIGURES)
    other_seed = replace(first, seed=1, figures=FIGURES | {"gold": 2.5})
    for one in (
        replace(first, figures=FIGURES | {"gold": 9.0}),
        first,
        other_seed,
        replace(other_seed, conditions="pairs=0", figures=FIGURES | {"gold": 7.0}),
        Result("prm", 0, "pairs=512", STEPS | {"seconds": 60.0}),
    ):
        keep(one, file)
    print_tables(read(file, Result), ["dpo/dpo", "dpo/ipo", "prm"], "pairs=512")
    printed = capsys.readouterr().out
    assert "| dpo/dpo | +1.75 | +1.25, +2.25 | 2.00 | 10 |" in printed
    assert "| 0 | 0.90 | 0.80 | 0.80 | 0.20 | 0.50 | 0.60 | 0.40 | 60 |" in printed
    assert "not run: dpo/ipo" in printed
    assert "other conditions than pairs=512: pairs=0" in printed


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
