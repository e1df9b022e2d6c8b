"""A sweep: what it computes, keeps, says and asks; once on the engines of this process, else with stages of toys."""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.main import EXIT_BLOCKED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_WAITING, main
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.plan import Pipeline, all_specs
from pipelines.execution.request import RunRequest
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile, profile_digest
from pipelines.services.home import Home
from rlhf_contrib.sweep import verb as sweep_verb
from rlhf_contrib.sweep.points import goal_of
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

OF_EACH_POINT = ("ppo", "evaluate/ppo/generate", "evaluate")
SHARED = ("prepare_data", "sft", "reward_model", "evaluate/base/generate", "evaluate/sft/generate")
REWARDED = """
[reward_model]
loop = {batch_size = 16, epochs = 1}
probe_answers = 0
"""
"""A reward model in the place of the functions of the profile, each of which starts a process."""
FOUR = "ppo.kl_coef=0.01,0.02,0.05,0.1"


def toys(config: PipelineConfig, stages: Stages) -> None:
    assert config.ppo is not None
    first = stages.run_stage(toy_spec(ToyConfig(), label="first", seed=config.seed), PolicyRef)
    second = ToyConfig(kl_coef=config.ppo.kl.coef)
    stages.run_stage(toy_spec(second, label="second", seed=config.seed, inputs={"policy": first}), PolicyRef)


class Runs:
    """Runs of points without Prefect and MLflow; `trackers` has the one of each run, `died` stops one of them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.trackers: list[MemoryTracker] = []
        self.sweeps: list[MemoryTracker] = []
        self.errors: dict[str, BaseException] = {}
        self.pipeline: Pipeline = lifecycle
        patch.setenv("RLHF_HOME", str(folder / "home"))
        patch.setattr(sweep_verb, "run_recorded", self.run)
        patch.setattr(sweep_verb, "prefect_server", lambda home: nullcontext())
        patch.setattr(sweep_verb, "open_tracker", lambda config, home: self.opened(self.sweeps))

    def use_toys(self, patch: pytest.MonkeyPatch) -> None:
        """Let every run be two toy stages, of which only the second reads `ppo.kl_coef`."""
        for module in (sweep_verb, sweep_verb):
            patch.setattr(module, "lifecycle", toys)
        self.pipeline = toys

    def opened(self, among: list[MemoryTracker]) -> MemoryTracker:
        among.append(MemoryTracker())
        return among[-1]

    def run(
        self,
        config: PipelineConfig,
        planned: Any,
        wanted: RunOptions,
        options: Any,
        home: Home,
        listener: Any,
        **kept: Any,
    ) -> PipelineRun:
        for override in wanted.overrides:
            if override in self.errors:
                raise self.errors[override]
        tracker = self.opened(self.trackers)
        with open_run(
            config, self.pipeline, wanted, home=home, tracker=tracker, listener=listener, runtime=kept["runtime"]
        ) as run:
            run_stages(run, self.pipeline, run.directly, tags={})
            return run

    def computed(self) -> Counter[str]:
        return Counter(stage.label for tracker in self.trackers for stage in tracker.stages.values())


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


@pytest.mark.slow
def test_points_share_what_they_can_and_the_table_says_so(runs, tmp_path, capsys):
    # Two steps: in the first one the policy is the reference, and a penalty for the distance changes nothing.
    words = ["sweep", str(write_mini(tmp_path, REWARDED)), "--set", "ppo.steps=2", "--grid", FOUR]
    words += ["--set", 'ppo.rewards.terms={reward_model={type="reward_model"}}', "--set", "evaluate.evaluate.gold=none"]
    assert main(words) == 0
    assert runs.computed() == dict.fromkeys(OF_EACH_POINT, 4) | dict.fromkeys(SHARED, 1)
    out = capsys.readouterr().out
    assert "computed 17 stages (prepare_data 1, sft 1, reward_model 1, ppo 4," in out and "; 15 were hits" in out
    assert "best: ppo.kl_coef=" in out
    (folder,) = (tmp_path / "home" / "sweeps").iterdir()
    points = json.loads((folder / "sweep.json").read_text())["points"]
    assert [len(point["hits"]) for point in points] == [0, 5, 5, 5]
    scores = [point["measures"]["evaluate"]["ppo/reward_model"] for point in points]
    assert all(one["low"] <= one["mean"] <= one["high"] for one in scores)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")

    (sweep,) = runs.sweeps
    assert {tracker.tags["mlflow.parentRunId"] for tracker in runs.trackers} == {sweep.run_id}
    assert [tracker.tags["sweep.ppo.kl_coef"] for tracker in runs.trackers] == ["0.01", "0.02", "0.05", "0.1"]
    assert runs.trackers[1].tags["name"].endswith(" ppo.kl_coef=0.02")
    ((_, numbers),) = runs.trackers[0].parent.points
    assert numbers["evaluate/ppo/reward_model"] == scores[0]["mean"] and numbers["run/hits"] == 0
    assert sweep.tags["sweep.best"].startswith("ppo.kl_coef=") and sweep.status == "FINISHED"
    assert ("", "sweep.png") in sweep.parent.files and len(sweep.parent.tables["sweep"][1]) == 4

    again = Counter(runs.computed())
    assert main(words) == 0
    assert "computed 0 stages (none); 32 were hits" in capsys.readouterr().out
    assert runs.computed() == again and len(runs.sweeps) == 1  # nothing to record: nothing was computed


def test_the_table_is_printed_and_an_old_plot_removed_before_a_plot_that_fails(small, tmp_path, monkeypatch, capsys):
    words = swept(tmp_path, grid="ppo.kl_coef=0.1,0.2")
    assert main(words) == 0
    (folder,) = (tmp_path / "home" / "sweeps").iterdir()
    assert (folder / "sweep.png").is_file()
    capsys.readouterr()

    def failing(*_: object) -> bytes:
        raise OSError("no font")

    monkeypatch.setattr(sweep_verb, "plot", failing)
    with pytest.raises(OSError, match="no font"):
        main(words)
    assert "ppo.kl_coef=0.2" in capsys.readouterr().out and not (folder / "sweep.png").exists()


def test_the_command_that_publishes_keeps_the_strict_options_and_few_points_are_said(small, tmp_path, capsys):
    profile = write_mini(tmp_path, "[publish]\n")
    words = ["sweep", str(profile), "--random", "9", "--range", "seed=1..2", "--metric", "second:total"]
    assert main([*words, "--strict-code"]) == 0
    out = capsys.readouterr().out
    assert "--random 9: only 2 different points were drawn" in out
    assert "to publish the best: rlhf run " in out and " --strict-code\n" in out and "--strict-env" not in out


@pytest.fixture
def small(runs: Runs, monkeypatch) -> Runs:
    runs.use_toys(monkeypatch)
    return runs


def swept(folder: Path, *more: str, grid: str = "ppo.kl_coef=0.1,0.2,0.3") -> list[str]:
    metric = () if "--metric" in more else ("--metric", "second:total")
    return ["sweep", str(write_mini(folder)), "--grid", grid, *metric, *more]


def dies_after(count: int, run: Any) -> Any:
    """Return `run` of a sweep, which is interrupted after so many points."""
    ran: list[Any] = []

    def dying(sweep: Any, point: Any, listener: Any) -> Any:
        if len(ran) == count:
            raise KeyboardInterrupt
        ran.append(point)
        return run(sweep, point, listener)

    return dying


def test_a_search_without_the_number_that_decides_ends_after_its_first_point(small, tmp_path, capsys):
    words = ["sweep", str(write_mini(tmp_path)), "--optuna", "5", "--range", "ppo.kl_coef=log:0.01..0.5"]
    assert main([*words, "--metric", "second:totl"]) == EXIT_REFUSED
    assert "--metric = 'totl': second has no such metric; it has total" in capsys.readouterr().err
    assert small.computed() == {"first": 1, "second": 1}


def test_optuna_chooses_the_points_and_a_killed_search_finds_its_own_again(small, tmp_path, capsys, monkeypatch):
    words = ["sweep", str(write_mini(tmp_path)), "--optuna", "5", "--range", "ppo.kl_coef=log:0.01..0.5"]
    words += ["--metric", "second:total"]
    with monkeypatch.context() as patch:
        patch.setattr(sweep_verb.Sweep, "_run", dies_after(3, sweep_verb.Sweep._run))
        assert main(words) == EXIT_INTERRUPTED
    assert small.computed() == {"first": 1, "second": 3} and small.sweeps[0].status == "KILLED"
    capsys.readouterr()
    assert main(words) == 0
    first = capsys.readouterr().out
    assert small.computed() == {"first": 1, "second": 5} and small.sweeps[1].status == "FINISHED"
    assert "computed 2 stages (second 2); 8 were hits" in first
    assert "point 5 of 5: ppo.kl_coef=" in first and "best: ppo.kl_coef=" in first
    assert main(words) == 0
    again = capsys.readouterr().out
    assert "computed 0 stages (none); 10 were hits" in again
    assert [line for line in again.splitlines() if line.startswith("best: ")] == [
        line for line in first.splitlines() if line.startswith("best: ")
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--optuna", "3", "--random", "2"], "--optuna = 3: chooses its points itself; leave --random out"),
        (["--optuna", "3", "--range", "ppo.kl_coef=-1..1"], "ppo.kl.coef = -1"),
        (["--grid", "ppo.kl_coef=0.1", "--sweep-seed", "3"], "--sweep-seed = 3: a grid draws nothing"),
        (["--optuna", "3", "--range", "ppo.kl_coef=0.1..1", "--set", "ppo.kl_coef=0.2"], "this key is swept"),
        (["--range", "ppo.kl_coef=0.1..1"], "needs --random N or --optuna N"),
    ],
)
def test_a_search_that_cannot_run_is_refused_before_the_first_point(small, tmp_path, capsys, words, error):
    assert main(["sweep", str(write_mini(tmp_path)), *words]) == EXIT_REFUSED
    assert error in " ".join(capsys.readouterr().err.split()) and not small.trackers


def test_a_sweep_that_was_killed_goes_on_where_it_was(small, tmp_path, capsys):
    small.errors = {"ppo.kl_coef=0.3": KeyboardInterrupt()}
    assert main(swept(tmp_path)) == EXIT_INTERRUPTED
    assert small.computed() == {"first": 1, "second": 2} and small.sweeps[0].status == "KILLED"
    small.errors = {}
    assert main(swept(tmp_path)) == 0
    assert small.computed() == {"first": 1, "second": 3}
    assert "computed 1 stages (second 1); 5 were hits" in capsys.readouterr().out


def test_a_point_that_fails_loses_no_other_one(small, tmp_path, capsys):
    small.errors = {"ppo.kl_coef=0.2": ValueError("the disk is full, says hf_abcdefghijklmnopqrstuvwxyz0123456789")}
    assert main(swept(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "no result: ppo.kl_coef=0.2: ValueError: the disk is full" in out and "hf_abc" not in out
    assert small.computed() == {"first": 1, "second": 2}


def test_what_cannot_be_swept_is_refused_before_anything_runs(small, tmp_path, capsys):
    refused = {
        ("--set", "ppo.kl_coef=0.5"): "--set = 'ppo.kl_coef=0.5': this key is swept; leave it out",
        ("--metric", "secnd:total"): "--metric = 'secnd:total': the runs have no stage 'secnd'; did you mean second?",
        (
            "--range",
            "seed=1..9",
        ): "--range = 'seed=1..9': needs --random N or --optuna N; give the number of points to draw",
    }
    for words, error in refused.items():
        assert main(swept(tmp_path, *words)) == EXIT_REFUSED
        assert capsys.readouterr().err == f"{error}\n"
    assert main(swept(tmp_path, grid="ppo.kl_coef=0.1,-1")) == EXIT_REFUSED
    assert capsys.readouterr().err.startswith("ppo.kl.coef = -1: ")
    assert small.trackers == []


def test_what_the_best_point_could_not_be_run_with_is_refused_before_anything_runs(small, tmp_path, capsys):
    profile = write_mini(tmp_path, "[publish]\n")
    words = ["sweep", str(profile), "--grid", "ppo.kl_coef=0.1,0.2", "--metric", "second:total"]
    assert main([*words, "--set", "publish.polcy=ppo"]) == EXIT_REFUSED
    assert "publish.polcy = 'ppo': unknown key; did you mean publish.policy?" in capsys.readouterr().err
    assert main([*words, "--grid", "publish.policy=ppo,pppo"]) == EXIT_REFUSED
    assert "publish.policy = 'pppo': this profile makes base, sft, ppo" in capsys.readouterr().err
    assert small.trackers == []


@pytest.mark.parametrize("grid", ["ppo.kl_coef=0.1,0.10", "seed=1,1.0", "publish.policy=sft,ppo"])
def test_points_that_are_the_same_run_are_refused(grid, small, tmp_path, capsys):
    profile, (key, _, values) = write_mini(tmp_path, "[publish]\n"), grid.partition("=")
    first, second = (f"{key}={value}" for value in values.split(","))
    assert main(["sweep", str(profile), "--grid", grid, "--metric", "second:total"]) == EXIT_REFUSED
    error = capsys.readouterr().err
    assert error.startswith(f"--grid = {second!r}: is the same run as {first}") and small.trackers == []


def test_policies_that_only_some_points_make_can_decide():
    configs = [load_profile("tiny/online", [f"online.rounds={rounds}"]) for rounds in (1, 2)]
    assert [config.policies()[-1] for config in configs] == ["online_1", "online_2"]
    assert sweep_verb.policies_at(configs) == configs[1].policies()
    runs = [all_specs(config, lifecycle) for config in reversed(configs)]
    goal = goal_of("online_2/gold", "max", runs=runs, policies=sweep_verb.policies_at(configs))
    assert str(goal) == "online_2/gold"


def test_the_best_goes_on_once_a_person_has_approved_it(small, tmp_path, monkeypatch, capsys):
    went: list[RunRequest] = []
    monkeypatch.setattr(sweep_verb, "run_request", went.append)
    words = swept(tmp_path, "--approve", "--set", "seed=3")
    assert main([*words, "--force", "second"]) == EXIT_REFUSED
    assert "--force = 'second': would be computed again" in capsys.readouterr().err
    small.errors = {"ppo.kl_coef=0.3": ValueError("no")}
    assert main([*words, "--until", "second"]) == EXIT_WAITING and not went
    assert "the best of 3 points; tied with it: ppo.kl_coef=0.2; no result: ppo.kl_coef=0.3" in capsys.readouterr().err
    small.errors = {}
    assert main(words) == EXIT_WAITING and not went
    asked = capsys.readouterr().err
    assert (
        "WAITING at gate sweep: second:total 1.5 with ppo.kl_coef=0.1, the best of 3 points" in asked
        and "no result" not in asked
    )
    (request,) = GateDecisions(ArtifactStore(tmp_path / "home" / "store").shared).requests()
    assert {one.profile for one in request.askers} == {profile_digest(load_profile(tmp_path / "mini.toml"))}
    answer = [str(tmp_path / "mini.toml"), "sweep", "--reason", "as expected"]
    assert main(["approve", *answer]) == 0
    assert main([*words, "--until", "second"]) == 0
    assert went == [RunRequest(str(tmp_path / "mini.toml"), ("seed=3", "ppo.kl_coef=0.1"))]
    assert main(["reject", *answer]) == 0
    assert main(words) == EXIT_BLOCKED and len(went) == 1
