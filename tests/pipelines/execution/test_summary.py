"""What MLflow is told of a whole run."""

import json
from pathlib import Path

import pytest

from pipelines.execution.executor import RunContext, RunOptions, Silent, StageOutcome
from pipelines.execution.record import record_results
from pipelines.execution.summary import (
    LONGEST_NAME,
    description,
    headline_metrics,
    run_headline,
    run_name,
    shown_overrides,
)
from pipelines.flows.profile import load_profile, profile_names
from pipelines.flows.profile_text import as_toml
from rlhf_contrib.sweep.points import named
from rlhf_core.stage.decision import Decision
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PublishedRef, ReportRef, RewardModelRef
from tests.pipelines.execution.test_measures import REPORT
from tests.support.small_pipeline import write_mini


def outcomes(store: ArtifactStore, folder: Path) -> dict[str, StageOutcome]:
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "report.json").write_text(json.dumps(REPORT))
    (folder / "report" / "report.html").write_text("<h1>Evaluation</h1><p>")
    samples = {"columns": ["prompt", "answer"], "data": [["p", "a"]]}
    (folder / "report" / "samples.json").write_text(json.dumps(samples))
    (folder / "published").mkdir()
    registry = {"name": "desk", "version": "3", "aliases": ["candidate", "champion"]}
    (folder / "published" / "gate.json").write_text(json.dumps({"digest": "d1", "registry": registry}))
    (folder / "published" / "README.md").write_text("# desk\n\n## Configuration\n\n{}")
    (folder / "model").mkdir()
    model = store.external(RewardModelRef, folder / "model")
    report = store.external(ReportRef, folder / "report")
    published = store.external(PublishedRef, folder / "published")
    metrics = {
        "held_out/accuracy": 0.7,
        "held_out/accuracy_low": 0.6,
        "held_out/accuracy_high": 0.8,
        "train_pairs": 40.0,
    }
    return {
        "reward_model": StageOutcome(model, Decision("HIT", "", "k1", None), metrics, 0.0, [], "http://m/#/runs/1"),
        "evaluate": StageOutcome(report, Decision("RUN", "", "k2", None), {}, 1800.0, [], "http://m/#/runs/2"),
        "publish": StageOutcome(published, Decision("RUN", "", "k3", None), {}, 0.0, [], ""),
    }


def test_a_run_has_the_numbers_of_its_stages_and_what_it_cost(store, tmp_path):
    found = headline_metrics(outcomes(store, tmp_path), store)
    assert sorted(found)[:6] == [f"_result/{name}{end}" for name in ("gold", "kl") for end in ("", "_high", "_low")]
    assert {name: value for name, value in found.items() if not name.startswith("_result")} == {
        "reward_model/held_out/accuracy": 0.7,
        "reward_model/held_out/accuracy_low": 0.6,
        "reward_model/held_out/accuracy_high": 0.8,
        "evaluate/ppo/gold": 2.0,
        "evaluate/ppo/gold_low": 1.0,
        "evaluate/ppo/gold_high": 3.0,
        "evaluate/ppo/kl": 0.5,
        "evaluate/ppo/kl_low": 0.4,
        "evaluate/ppo/kl_high": 0.6,
        "run/hits": 1.0,
        "run/computed": 2.0,
        "run/hours": 0.5,
    }


def test_its_description_has_the_result_and_links_to_the_runs_that_made_its_stages(store, tmp_path):
    found = outcomes(store, tmp_path)
    model, report, published = (outcome.ref.digest[:12] for outcome in found.values())
    assert run_headline(found, store) == "ppo gold 2 [1, 3]; champion v3"
    assert description(found, store).splitlines() == [
        "**ppo gold 2 [1, 3]; champion v3**",
        "",
        "| policy | gold reward | KL |",
        "|---|---|---|",
        "| ppo | 2.00 [1.00, 3.00] | 0.50 |",
        "",
        "held-out prompts: mean [95% interval]; win rate against the parent",
        "",
        f"- [reward_model](http://m/#/runs/1): HIT, `{model}`",
        f"- [evaluate](http://m/#/runs/2): RUN, `{report}`",
        f"- publish: RUN, `{published}`",
    ]


def test_the_tracking_run_of_a_pipeline_has_its_results_its_report_its_profile_and_describes_the_model(store, tmp_path):
    config = load_profile(write_mini(tmp_path), ["seed=18"])
    tracker, links = MemoryTracker(), {"prefect.url": "http://p/runs/1", "mlflow.url": "http://m/#/runs/3"}
    context = RunContext(config, RunOptions(profile="<mini>"), store, tracker, Silent())
    page = tmp_path / "page.html"
    found = outcomes(store, tmp_path)
    assert record_results(context, found, name="mini (3f2a)", links=links, page=page) == description(found, store)
    assert tracker.tags["result"] == "ppo gold 2 [1, 3]; champion v3"
    assert tracker.parent.points == [(0, headline_metrics(found, store))]
    assert tracker.parent.files == [("", "profile.toml"), ("", "report.html")]
    assert tracker.parent.tables["results"] == (("policy", "gold reward", "KL"), [("ppo", "2.00 [1.00, 3.00]", "0.50")])
    assert tracker.parent.tables["samples"] == (("prompt", "answer"), [("p", "a")])
    assert tracker.descriptions == {("desk", "d1"): "Made by [mini (3f2a)](http://m/#/runs/3)\n\n# desk\n"}
    head = page.read_text().removeprefix('<h1>Evaluation</h1>\n<p class="small soft">')
    assert head.startswith("mini (3f2a) · &lt;mini&gt; · 20") and " · seed 18 · <a href=" in head
    assert 'href="http://p/runs/1"' in head and 'href="http://m/#/runs/3"' in head and head.endswith("</p><p>")


@pytest.mark.parametrize("profile", profile_names())
def test_a_profile_that_was_written_is_read_as_the_same(profile, tmp_path):
    config = load_profile(profile)
    (tmp_path / "profile.toml").write_text(as_toml(config))
    again = load_profile(tmp_path / "profile.toml").model_dump_json()
    assert again.replace(f"{tmp_path}/./", "") == config.model_dump_json()  # paths are read from the profile's folder


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
