import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from campaigns.durability import checks, edits, processes
from campaigns.durability.checks import StageResult
from campaigns.durability.instants import AtOperation, Census, Instant
from campaigns.durability.lives import Peace
from campaigns.durability.pipeline import LOG, REWARD, EventLog, Setup, read_events
from rlhf_core.stage.key import StageSpec
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.toy_runs import run_toy
from tests.support.toy_stage import ToyConfig, toy_spec


def new_setup(home: Path) -> Setup:
    home.mkdir()
    shutil.copy(REWARD, home)
    return Setup(home, mlflow=False)


def spec_of(setup: Setup, **changes: object) -> StageSpec:
    function = f"{setup.reward}:brief"
    return toy_spec(ToyConfig(names=(function,), **changes), callables=(function,))


def run(setup: Setup, *, instant: Instant | None = None, **changes: object) -> processes.End:
    return processes.run(partial(run_toy, setup, spec_of(setup, **changes), instant=instant), setup.home / LOG).how


@pytest.fixture(scope="module")
def peace(tmp_path_factory) -> Peace:
    made: list[dict[str, StageResult]] = []
    for name in ("old", "edited"):
        setup = new_setup(tmp_path_factory.mktemp("twins") / name)
        if name == "edited":
            edits.edit(setup.reward, "result")
        assert run(setup) == "completed"
        made.append(checks.results(setup.home))
    return Peace(made[0], made[1], Census(), Census(), (), Path())


def killed_and_edited(tmp_path: Path, what: edits.Edit) -> Setup:
    """Kill a run after its first checkpoint, edit the file, and run again."""
    setup = new_setup(tmp_path / "home")
    assert run(setup, instant=AtOperation("checkpoint: rename and evict", 2)) == "killed"
    edits.edit(setup.reward, what)
    EventLog(setup.events).note("edited")
    assert run(setup) == "completed"
    return setup


def test_after_a_comment_a_killed_run_goes_on_from_its_checkpoint(tmp_path, peace):
    setup = killed_and_edited(tmp_path, "comment")
    assert [event["action"] for event in read_events(setup.events) if event["event"] == "started"] == ["RUN", "RESUME"]
    assert edits.wrong_decisions(setup, peace, "comment") == []
    assert checks.problems(setup.home, peace.results) == [] and checks.leftovers(setup.home) == []


def test_after_another_result_a_killed_run_takes_nothing_of_the_old_attempt(tmp_path, peace):
    setup = killed_and_edited(tmp_path, "result")
    assert edits.wrong_decisions(setup, peace, "result") == []
    assert checks.problems(setup.home, peace.edited) == [] and edits.mixtures(setup.home, peace) == []
    old = ArtifactStore(setup.home / "store").attempts(peace.results["toy"].key)
    assert attempts.checkpoints(old).is_dir(), "it waits for whoever brings the old file back"
    assert checks.leftovers(setup.home) != []
    assert checks.leftovers(setup.home, unfinished={old.key}) == []


def test_a_file_that_is_edited_while_its_stage_runs_makes_no_mixture(tmp_path, peace):
    setup = new_setup(tmp_path / "home")
    child = processes.start(
        partial(run_toy, setup, spec_of(setup, trouble=f"wait:{tmp_path / 'go'}")), setup.home / LOG
    )
    deadline = time.monotonic() + 30.0
    while not read_events(setup.events):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    edits.edit(setup.reward, "result")
    (tmp_path / "go").touch()
    assert processes.finish(child, kill_after_s=None)[0] == "completed"
    assert checks.results(setup.home)["toy"].key == peace.results["toy"].key
    assert edits.mixtures(setup.home, peace) == []


def test_what_goes_on_from_another_file_and_what_is_made_twice_is_named(tmp_path, peace):
    setup = new_setup(tmp_path / "home")
    log = EventLog(setup.events)
    log.note("finished", label="sft")
    log.note("edited")
    log.note("started", label="toy", action="RESUME")
    log.note("started", label="sft", action="RUN")
    assert edits.wrong_decisions(setup, peace, "result") == ["sft: RUN after the edit", "toy: RESUME after the edit"]
    assert run(setup) == "completed"
    twice = Peace(peace.edited, peace.edited, Census(), Census(), (), Path())
    assert [line.split(": ")[1] for line in edits.mixtures(setup.home, twice)] == ["in no twin"]


def test_a_policy_that_was_published_before_the_edit_has_the_first_version():
    """So that of the edited file has the second one in its card, and the twin, which has the first, is no measure."""
    began = {"event": "started", "label": "publish", "action": "RUN"}
    assert edits.published_before([began, {"event": "edited"}])
    assert not edits.published_before([{"event": "edited"}, began])
    assert not edits.published_before([{"event": "started", "label": "ppo", "action": "RUN"}, {"event": "edited"}])
