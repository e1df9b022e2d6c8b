"""What MLflow is told of a whole run."""

import json
from pathlib import Path

import pytest

from pipelines.execution.executor import StageOutcome
from pipelines.execution.summary import LONGEST_NAME, description, headline_metrics, run_name, shown_overrides
from pipelines.execution.sweep import named
from rlhf_core.stage.decision import Decision
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ReportRef, RewardModelRef
from tests.pipelines.execution.test_measures import REPORT


def outcomes(store: ArtifactStore, folder: Path) -> dict[str, StageOutcome]:
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "report.json").write_text(json.dumps(REPORT))
    (folder / "report" / "report.html").write_text("<html></html>")
    (folder / "model").mkdir()
    model = store.external(RewardModelRef, folder / "model")
    report = store.external(ReportRef, folder / "report")
    metrics = {"held_out/accuracy": 0.7, "held_out/accuracy_low": 0.6, "train_pairs": 40.0}
    return {
        "reward_model": StageOutcome(model, Decision("HIT", "", "k1", None), metrics, 0.0, [], "http://m/#/runs/1"),
        "evaluate": StageOutcome(report, Decision("RUN", "", "k2", None), {}, 1800.0, [], "http://m/#/runs/2"),
    }


def test_a_run_has_the_numbers_of_its_stages_and_what_it_cost(store, tmp_path):
    assert headline_metrics(outcomes(store, tmp_path), store) == {
        "reward_model/held_out/accuracy": 0.7,
        "reward_model/held_out/accuracy_low": 0.6,
        "evaluate/ppo/gold": 2.0,
        "evaluate/ppo/gold_low": 1.0,
        "evaluate/ppo/gold_high": 3.0,
        "evaluate/ppo/kl": 0.5,
        "evaluate/ppo/kl_low": 0.4,
        "evaluate/ppo/kl_high": 0.6,
        "run/hits": 1.0,
        "run/computed": 1.0,
        "run/hours": 0.5,
    }


def test_its_description_links_to_the_runs_that_made_its_stages_and_to_reports(store, tmp_path):
    found = outcomes(store, tmp_path)
    model, report = (outcome.ref.digest[:12] for outcome in found.values())
    page = tmp_path / "report" / "report.html"
    link = "[report](http://m/#/runs/2/artifacts/report.html)"
    assert description(found, store).splitlines() == [
        f"- [reward_model](http://m/#/runs/1): HIT, `{model}`",
        f"- [evaluate](http://m/#/runs/2): RUN, `{report}`, {link} in `{page}`",
    ]


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("ppo.kl_coef=0.1", ["ppo.kl_coef=0.1"]),
        ("notify.url=https://hooks.example/T0/B0/x", []),
        ('notify={url="https://hooks.example/T0"}', []),
        ("ppo.rewards.terms.judge.api_key=hunter2", ["ppo.rewards.terms.judge.api_key=***"]),
        ('ppo.rewards.terms={judge={api_key="hunter2"}}', ["ppo.rewards.terms=***"]),
        ("tracking.uri=postgresql://me:hunter2@db/x", ["tracking.uri=postgresql://***@db/x"]),
        ('ppo.rewards.terms.judge.api_key="env:JUDGE"', ['ppo.rewards.terms.judge.api_key="env:JUDGE"']),
        ('names=["a","b"]', ['names=["a","b"]']),
    ],
)
def test_what_is_shown_of_overrides_has_no_secrets_and_no_addresses_of_notices(override, shown):
    assert shown_overrides([override]) == shown
    assert "hunter2" not in run_name("tiny", [override], "3f2a") and named((override,)).count("hunter2") == 0


def test_the_name_of_a_run_says_what_was_overridden():
    assert run_name("tiny", [], "") == "tiny"
    assert run_name("tiny", ["ppo.kl_coef=0.1", "seed=18"], "3f2a91") == "tiny ppo.kl_coef=0.1 seed=18 (3f2a)"
    long = run_name("tiny", [f"prepare_data.data.sources=[{'x' * 500}]"] * 9, "3f2a91")
    assert len(long) == LONGEST_NAME + len(" (3f2a)")
