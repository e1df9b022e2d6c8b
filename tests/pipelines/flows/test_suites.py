"""Suites in a pipeline: which stages there are, whose answers they share, and what a profile may say."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.flows.profile import PipelineConfig, load_profile, parse
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef
from stages import evaluate_harness
from stages.report_suites import ReportSuitesConfig

GOLD = "rlhf_contrib.worlds.support:gold_reward"
SMALL = [f"{name}=none" for name in ("rejection_sampling", "iterative_dpo", "publish", "evaluate.evaluate.parents")]


def profile(suites: list[dict[str, Any]], *more: str, baselines: list[dict[str, Any]] | None = None) -> PipelineConfig:
    """Return tiny/full with base, sft and ppo, these suites and these baselines."""
    tree = load_profile("tiny/full", [*SMALL, "ppo.start_from=sft", *more]).model_dump(mode="json", exclude_none=True)
    tree["evaluate"] |= {"suites": suites} | ({"baselines": baselines} if baselines else {})
    return parse(tree, origin="test")


def planned(tmp_path: Path, config: PipelineConfig) -> dict[str, PlannedStage]:
    return {stage.label: stage for stage in plan_stages(config, ArtifactStore(tmp_path / "store"))}


def made_by(stage: PlannedStage, name: str) -> str:
    value = stage.spec.inputs[name]
    assert isinstance(value, ArtifactRef)
    return value.uri.removeprefix("pending://")


@pytest.fixture
def rows(tmp_path) -> str:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "safe"}\n')
    return str(tmp_path / "rows.jsonl")


def test_suites_read_the_answers_that_there_are_and_draw_others_once(tmp_path, rows):
    own = {"prompts": {"path": rows}, "generate": {"samples_per_prompt": 4}}
    suites: list[dict[str, Any]] = [
        {"name": "gold", "type": "gold", "function": GOLD},
        {"name": "passes", "type": "pass_at_k", "function": GOLD, "k": [1, 4], **own},
        {"name": "safety", "type": "refusal", **own},
    ]
    plain, stages = planned(tmp_path, profile([])), planned(tmp_path, profile(suites))
    new = [label for label in stages if label not in plain]
    assert new == [
        *(f"evaluate/suites/gold/{name}" for name in ("base", "sft", "ppo")),
        "evaluate/suites/passes/prompts",
        *(f"evaluate/suites/passes/{name}/generate" for name in ("base", "sft", "ppo")),
        *(f"evaluate/suites/passes/{name}" for name in ("base", "sft", "ppo")),
        *(f"evaluate/suites/safety/{name}" for name in ("base", "sft", "ppo")),
        "evaluate/suites",
    ]
    assert {label: stage.decision.key for label, stage in stages.items() if label in plain} == {
        label: stage.decision.key for label, stage in plain.items()
    }
    assert made_by(stages["evaluate/suites/gold/ppo"], "generations") == "evaluate/ppo/generate"
    assert made_by(stages["evaluate/suites/safety/ppo"], "generations") == "evaluate/suites/passes/ppo/generate"
    assert set(stages["evaluate/suites"].spec.inputs["results"]) == {
        f"{suite}/{name}" for suite in ("gold", "passes", "safety") for name in ("base", "sft", "ppo")
    }


def test_training_rows_are_compared_with_the_prompts_of_suites_that_have_some(tmp_path, rows):
    suites: list[dict[str, Any]] = [
        {"name": "gold", "type": "gold", "function": GOLD},
        {"name": "safety", "type": "refusal", "prompts": {"path": rows}},
    ]
    plain, stages = (
        planned(tmp_path, profile(suites)),
        planned(tmp_path, profile(suites, "prepare_data.suite_ngram=13")),
    )
    assert list(stages)[:2] == ["prepare_data/suites/safety", "prepare_data"]
    prompts = stages["prepare_data"].spec.inputs["suites"]
    assert {name: ref.uri for name, ref in prompts.items()} == {"safety": "pending://prepare_data/suites/safety"}
    keys = [{label: stage.decision.key for label, stage in one.items()} for one in (plain, stages)]
    assert keys[1]["prepare_data/suites/safety"] == keys[0]["evaluate/suites/safety/prompts"]
    assert keys[1]["prepare_data"] != keys[0]["prepare_data"]
    with pytest.raises(ConfigError, match=r"prepare_data\.suite_ngram = 13: no suite has prompts of its own"):
        planned(tmp_path, profile(suites[:1], "prepare_data.suite_ngram=13"))


def test_a_judge_compares_with_the_parent_and_leaves_out_who_has_none(tmp_path):
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    suites = [
        {"name": "j", "type": "judge", "judge": judge},
        {"name": "b", "type": "judge", "judge": judge, "against": "base"},
    ]
    config = profile(suites, "evaluate.evaluate.parents={sft='base'}")
    stages = planned(tmp_path, config)
    opponents = {
        label.removeprefix("evaluate/suites/"): made_by(stage, "opponent")
        for label, stage in stages.items()
        if stage.spec.name == "evaluate_suite"
    }
    assert opponents == {
        "j/base": "evaluate/sft/generate",
        "j/sft": "evaluate/base/generate",
        "j/ppo": "evaluate/sft/generate",
        "b/sft": "evaluate/base/generate",
        "b/ppo": "evaluate/base/generate",
    }
    about = stages["evaluate/suites"].spec.config
    assert isinstance(about, ReportSuitesConfig)
    assert about.opponents == {"j/base": "sft", "j/sft": "base", "j/ppo": "sft", "b/sft": "base", "b/ppo": "base"}


def test_baselines_take_part_in_every_suite_and_not_in_the_report_of_evaluate(tmp_path):
    (tmp_path / "tasks").mkdir()
    suites = [
        {"name": "gold", "type": "gold", "function": GOLD},
        {"name": "h", "type": "lm_eval", "tasks": ["t"], "include_path": str(tmp_path / "tasks")},
    ]
    baselines = [{"name": "outside", "model": {"path": str(tmp_path)}}]
    stages = planned(tmp_path, profile(suites, baselines=baselines))
    assert made_by(stages["evaluate/outside/generate"], "policy") == "evaluate/outside/import"
    assert made_by(stages["evaluate/suites/gold/outside"], "generations") == "evaluate/outside/generate"
    assert made_by(stages["evaluate/suites/h/outside"], "policy") == "evaluate/outside/import"
    assert set(stages["evaluate"].spec.inputs["generations"]) == {"base", "sft", "ppo"}
    assert set(stages["evaluate/suites/h/ppo"].spec.engines["files"]) == {"lm_eval", "include_path"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            {"type": "pass_at_k", "function": GOLD, "k": [2]},
            r"k = \[2\]: needs 2 answers to each prompt, and there are 1",
        ),
        ({"type": "judge", "judge": {"url": "http://h/v1", "model": "m"}, "against": "dpo"}, "there is no such policy"),
        (
            {"type": "judge", "judge": {"url": "http://h/v1", "model": "m"}, "against": "champion"},
            r"\[publish.challenge\]",
        ),
        ({"type": "refusal", "phrases": ["No"]}, r"evaluate\.suites\.0\.phrases = 'No': must be text in lower case"),
        ({"type": "custom", "function": GOLD, "measure": "prompts"}, r"measure = 'prompts': must not be the name of"),
        (
            {"type": "pass_at_k", "function": GOLD, "threshold": float("nan")},
            "threshold = nan: must be finite",
        ),
        (
            {"type": "pass_at_k", "function": GOLD, "k": [1, 1]},
            r"evaluate\.suites\.0\.k = \[1, 1\]: must be different numbers of at least 1; name each once",
        ),
    ],
)
def test_a_suite_that_cannot_work_is_refused_with_the_profile(change, rule):
    with pytest.raises(ConfigError, match=rule):
        profile([{"name": "s"} | change])


def test_k_is_at_most_what_best_of_draws():
    suite = {"name": "s", "type": "pass_at_k", "function": GOLD, "k": [4]}
    draws = ("evaluate.generate.samples_per_prompt=4", "evaluate.evaluate.best_of={sft=2}")
    with pytest.raises(ConfigError, match="needs 4 answers to each prompt, and there are 2"):
        profile([suite], *draws)
    profile([suite | {"generate": {"samples_per_prompt": 5}}], *draws)


def test_names_are_given_once():
    gold = {"name": "g", "type": "gold", "function": GOLD}
    with pytest.raises(ConfigError, match=r"suites\[1\]\.name = 'g': is the name of two suites"):
        profile([gold, gold])
    with pytest.raises(ConfigError, match="'ppo': is a name of the pipeline; give it another"):
        profile([gold], baselines=[{"name": "ppo", "model": {"path": "x"}}])
    with pytest.raises(ConfigError, match="'prompts': is a name of the pipeline; give it another"):
        profile([gold], baselines=[{"name": "prompts", "model": {"path": "x"}}])
    with pytest.raises(ConfigError, match="only suites measure them; add"):
        profile([], baselines=[{"name": "x", "model": {"path": "x"}}])


def test_a_reward_model_that_no_section_makes_is_missed_when_planning(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.suites\.rm\.model = 'other': this profile makes reward_model"):
        planned(tmp_path, profile([{"name": "rm", "type": "reward_model", "model": "other"}]))


def test_the_example_of_the_page_is_a_profile(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    tree = tomllib.loads(example[1])["evaluate"]
    monkeypatch.chdir(tmp_path)
    for name in ("math", "instructions", "safety"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "a"}))
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(evaluate_harness, "version", lambda name: "0.4.13")
    config = profile(tree["suites"], baselines=tree["baselines"])
    types = [suite.type for suite in config.evaluate.suites]
    assert types == ["gold", "pass_at_k", "instructions", "refusal", "judge", "lm_eval"]
    kinds = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) - {"type"}
    assert kinds == {*types, "reward_model", "custom"}
