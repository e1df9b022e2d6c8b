"""Whole runs of a tiny pipeline that publish, with a registry on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import find_model
from pipelines.cli.main import main
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run, open_tracker, store_of
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.inputs import Opponents
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.prefect_flows import stage_flows
from pipelines.services.home import Home
from pipelines.services.user_servers import tracking_uri
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec
from rlhf_core.tracking.champions import read_champions
from rlhf_core.types import PolicyRef
from stages.publish import PublishConfig
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini

PUBLISH = """
[publish]
name = "support"
policy = "sft"
challenge = {metric = "gold"}
least_prompts = 4
[[gates]]
after = "sft"
metric = "steps"
op = ">"
value = 0
"""


def run_once(folder: Path, home: Home, *overrides: str) -> tuple[dict[str, object], dict[str, Any], str]:
    """Run the pipeline; return the decisions by label, gate.json and the model card."""
    notes = Notes()
    config = load_profile(write_mini(folder, PUBLISH), ["ppo=none", "evaluate.evaluate.parents=none", *overrides])
    tracker = open_tracker(config, home)
    with open_run(config, lifecycle, RunOptions(), home=home, tracker=tracker, listener=notes) as run:
        results = run_stages(run, lifecycle, run.directly, tags={})
    published = store_of(config, home).path(results["publish"])
    decided = {str(label): action for label, action in notes.of("started")}
    return decided, json.loads((published / "gate.json").read_text()), (published / "README.md").read_text()


@pytest.mark.slow
def test_a_challenger_that_does_not_win_leaves_the_champion_and_rollback_needs_one_before(
    tmp_path, home, monkeypatch, capsys
):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    decided, gate, card = run_once(tmp_path, home)
    assert gate["registry"] == {"name": "support", "version": "1", "aliases": ["candidate", "champion"]}
    assert gate["checks"] == [] and "evaluate/champion/generate" not in decided  # the first one has no opponent
    assert "| sft | steps 3 > 0 | passed |" in card

    decided, gate, _ = run_once(tmp_path, home)  # the champion is no opponent of itself
    assert set(decided.values()) == {"HIT"}

    decided, gate, card = run_once(tmp_path, home, "publish.policy=base")
    assert decided["evaluate/champion/generate"] == "HIT" and decided["evaluate"] == "RUN"
    (check,) = gate["checks"]
    assert (check["metric"], check["op"], check["threshold"], check["pass"]) == (
        "gold_over_champion/low",
        ">",
        0,
        False,
    )
    assert gate["registry"] == {"name": "support", "version": "2", "aliases": ["candidate"]}
    found = read_champions(tracking_uri(home), "support")
    assert found is not None and found.current == "1" and len(found.moves) == 1

    assert main(["champion"]) == 0
    said = capsys.readouterr().out
    assert "support: champion version 1" in said and "publish by" in said
    assert main(["rollback", "--reason", "no"]) == 2
    assert "has no champion before the current one" in capsys.readouterr().err

    _, gate, _ = run_once(tmp_path, home, "publish.policy=base", "publish.challenge=none")
    assert gate["registry"]["aliases"] == ["candidate", "champion"]
    assert main(["rollback", "support", "--reason", "base is no assistant"]) == 0
    assert "support: champion is version 1, before version 2: base is no assistant" in capsys.readouterr().out
    # What was published once stays rolled back: its stage is a hit.
    decided, _, _ = run_once(tmp_path, home, "publish.policy=base", "publish.challenge=none")
    assert decided["publish"] == "HIT"
    # Nor does a new key of the stage give it the alias again.
    decided, gate, _ = run_once(tmp_path, home, "publish.policy=base", "publish.challenge=none", "publish.license=MIT")
    assert decided["publish"] == "RUN" and gate["registry"]["aliases"] == ["candidate"]
    assert [check["metric"] for check in gate["checks"]] == ["was rolled back"]
    found = read_champions(tracking_uri(home), "support")
    assert found is not None and found.current == "1"


def test_a_champion_whose_weights_are_elsewhere_is_refused_before_anything_is_computed(tmp_path, home, monkeypatch):
    monkeypatch.setattr("rlhf_core.tracking.champions.champion_digests", lambda *_: ("ab" * 32, ""))
    with pytest.raises(
        ConfigError, match=r"publish.challenge = 'support': the champion of support \(abababababab\) is not in"
    ):
        run_once(tmp_path, home)


@pytest.mark.parametrize(
    ("policy", "challenge", "given", "found"),
    [
        ("ppo", None, "", None),
        ("ppo", {}, "", "current"),
        ("current", {}, "", "before"),  # the champion itself, made again, against the one that it has beaten
        ("ppo", {}, "other", "other"),
    ],
)
def test_the_deployment_of_the_stage_alone_looks_the_champion_up_too(
    home, monkeypatch, policy, challenge, given, found
):
    config = PublishConfig.model_validate({"name": "support", "challenge": challenge})
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr("rlhf_core.tracking.champions.champion_digests", lambda *_: ("current", "before"))
    for module in ("execution.gates", "prefect_flows.stage_flows"):
        monkeypatch.setattr(f"pipelines.{module}.find_artifact", lambda _, kind, name: kind(uri=name, digest=name))
    specs: list[StageSpec] = []

    def run_served(config: PipelineConfig, pipeline: Any, options: RunOptions) -> dict[str, str]:
        stages = Stages(
            lambda spec, kind: specs.append(spec) or kind(uri="x", digest="x"), seed=1, runtime=config.runtime
        )
        pipeline(config, stages)
        return {}

    monkeypatch.setattr("pipelines.prefect_flows.stage_flows.run_served", run_served)
    stage_flows.STAGE_FLOWS["publish"].fn(config, stage_flows.Settings(), policy=policy, champion=given)
    (spec,) = specs
    assert (spec.inputs["champion"].digest if "champion" in spec.inputs else None) == found


def test_a_champion_made_again_is_compared_as_before():
    old, new = (PolicyRef(uri=name, digest=name) for name in "on")
    assert Opponents(old).of(new) == old  # the run that wins
    assert Opponents(new, old).of(new) == old  # the same run once more: the same inputs, so a hit
    assert Opponents(new).of(new) is None


def test_without_models_there_is_no_name_to_guess(home, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    with pytest.raises(ConfigError, match="no model has a champion yet"):
        find_model.model_name(tracking_uri(home), "")
