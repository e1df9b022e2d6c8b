import pytest

from pipelines.execution.plan import engines_needed, plan_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.errors import ConfigError
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.small_pipeline import two_toys, write_mini
from tests.support.toy_stage import NoEngines, RecordingTracker


def make_first(store: ArtifactStore, seed: int) -> None:
    from rlhf_core.types import PolicyRef
    from tests.support.toy_stage import ToyConfig, toy_spec

    spec = toy_spec(ToyConfig(), label="first", seed=seed)
    handle, _ = execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)
    assert isinstance(handle, PolicyRef)


def test_an_empty_store_plans_every_stage_of_the_tiny_pipeline_in_order(tmp_path):
    stages = plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path))
    labels = [stage.label for stage in stages]
    assert labels[:4] == ["prepare_data", "sft", "reward_model", "rejection_sampling/generate"]
    assert labels[-2:] == ["evaluate", "publish"]
    assert {stage.decision.action for stage in stages} == {"RUN"}
    assert stages[0].decision.reason == "first run"
    assert stages[1].decision.reason == "after prepare_data"
    assert engines_needed(stages) == {"trainer", "sampler"}


def test_the_rlvr_pipeline_has_no_reward_model(tmp_path):
    labels = [stage.label for stage in plan_stages(load_profile("tiny/rlvr"), ArtifactStore(tmp_path))]
    assert labels == [
        "prepare_data",
        "sft",
        "ppo",
        "evaluate/base/generate",
        "evaluate/sft/generate",
        "evaluate/ppo/generate",
        "evaluate",
    ]


def test_planning_writes_nothing_into_the_store(tmp_path):
    plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path / "store"))
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_until_ends_the_plan_after_that_stage(tmp_path):
    stages = plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path), until="sft")
    assert [stage.label for stage in stages] == ["prepare_data", "sft"]


@pytest.mark.parametrize("option", ["until", "force"])
def test_a_stage_that_the_pipeline_does_not_have_is_refused(tmp_path, option):
    arguments = {"until": "sfft"} if option == "until" else {"force": ["sfft"]}
    with pytest.raises(
        ConfigError,
        match=rf"--{option} = 'sfft': no such stage; this pipeline has prepare_data, sft.*; did you mean sft\?",
    ):
        plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path), **arguments)


def test_a_stage_that_is_there_is_a_hit_and_the_next_one_is_decided_on_its_content(tmp_path):
    config, store = load_profile(write_mini(tmp_path)), ArtifactStore(tmp_path / "store")
    make_first(store, config.seed)
    first, second = plan_stages(config, store, pipeline=two_toys)
    assert (first.decision.action, second.decision.action) == ("HIT", "RUN")
    assert second.decision.reason == "first run" and len(second.decision.key) == 64
    assert engines_needed([first, second]) == set()


def test_a_forced_stage_runs_and_leaves_those_after_it_open(tmp_path):
    config, store = load_profile(write_mini(tmp_path)), ArtifactStore(tmp_path / "store")
    make_first(store, config.seed)
    first, second = plan_stages(config, store, pipeline=two_toys, force=["first"])
    assert first.decision.reason == "forced"
    assert (second.decision.reason, second.decision.key) == ("after first", "")


def test_the_planner_is_the_only_difference_between_a_plan_and_a_run(tmp_path):
    seen = []

    def pipeline(config: object, stages: Stages) -> None:
        seen.append(type(stages.run_stage.run_stage).__name__)

    plan_stages(load_profile(write_mini(tmp_path)), ArtifactStore(tmp_path / "store"), pipeline=pipeline)
    assert seen == ["Planner"]


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_plans_as_it_is_shipped(profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which has no files
    config = load_profile(profile)
    overrides = []
    if profile.startswith("smollm2/"):  # whose weights are an extra, and the questions of one the reader's own
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        (tmp_path / "questions.jsonl").write_text('{"prompt": "a"}\n')
        overrides = [f"prepare_data.model.path={tmp_path / 'model'}", "prepare_data.model.gguf_file="]
    planned = plan_stages(load_profile(profile, overrides), ArtifactStore(tmp_path / "store"))
    assert planned[0].label == "prepare_data"
    assert {stage.decision.action for stage in planned} == {"RUN"}
    sections = {stage.label.split("/")[0] for stage in planned}
    exported = (f"{step.label}_{number}" for step in config.steps() for number in step.exported)
    tables = {*config.recipe, *config.rounds, *exported}
    assert sections == config.model_fields_set - {"name", "seed", "runtime", "recipe", "rounds"} | tables


@pytest.mark.parametrize(
    ("profile", "after", "wrong", "near"),
    [
        ("tiny/full", "reward_model", "accuracy_lo", "accuracy_low"),
        ("tiny/full", "reward_model", "held_out/acuracy", "held_out/accuracy"),
        ("tiny/full", "sft", "eval/los", "eval/loss"),
        ("tiny/full", "evaluate", "policies/ppo/gold/lwo", "policies/ppo/gold/low"),
        ("tiny/full", "evaluate", "policies/pppo/gold/low", "policies/ppo/gold/low"),
        ("tiny/full", "ppo", "reward/maen", "reward/mean"),
        ("tiny/full", "rejection_sampling/select", "reward/selectd", "reward/selected"),
        ("tiny/online", "online/round_1/compare", "after/accurracy", "after/accuracy"),
        ("tiny/online", "online/round_1/collect", "agreemnt", "agreement"),
        ("tiny/prm", "process_reward_model", "held_out/f2", "held_out/f1"),
    ],
)
@pytest.mark.parametrize("until", ["", "prepare_data"])
def test_a_gate_on_a_number_that_its_stage_does_not_measure_is_refused(tmp_path, profile, after, wrong, near, until):
    for metric in (near, wrong):
        gates = f'gates=[{{after="{after}", metric="{metric}", op=">=", value=0.5}}]'
        config = load_profile(profile, [gates])
        if metric == near:
            assert plan_stages(config, ArtifactStore(tmp_path), until=until)
            continue
        error = rf"gates\[0\]\.metric = '{wrong}': {after} measures no such number; did you mean {near}"
        with pytest.raises(ConfigError, match=error):
            plan_stages(config, ArtifactStore(tmp_path), until=until)


def test_further_trackers_must_be_installed_and_change_no_key(tmp_path, monkeypatch):
    missing = {"tensorboard"}
    monkeypatch.setattr("pipelines.execution.packages.find_spec", lambda name: None if name in missing else name)
    profile, store = write_mini(tmp_path), ArtifactStore(tmp_path / "store")
    config = load_profile(profile, ['track.also=["tensorboard"]'])
    with pytest.raises(ConfigError, match=r"track.also = 'tensorboard': needs the package tensorboard"):
        plan_stages(config, store)
    missing.clear()
    before = plan_stages(load_profile(profile), store)
    assert [one.decision.key for one in plan_stages(config, store)] == [one.decision.key for one in before]
