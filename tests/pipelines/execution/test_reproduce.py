"""Artifacts that are made again by their profile in an empty store, on the engines of this process."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import diff_verb
from pipelines.cli.main import EXIT_REFUSED, main
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini

REWARD = "def mine(generations):\n    return [float(len(one.completion.text)) for one in generations]\n"
Reproduced = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Home]:
    """Return a profile, and the state folder in which it has run as far as its policy optimization."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "reward.py").write_text(REWARD)
    terms = f'{{own = {{type = "function", function = "{folder / "reward.py"}:mine"}}}}'
    profile, home = write_mini(folder), Home(folder / "home").make()
    profile.write_text(re.sub(r"rewards = .*", f"rewards = {{terms = {terms}}}", profile.read_text()))
    config = load_profile(profile)
    with open_run(
        config, lifecycle, RunOptions(until="ppo"), home=home, tracker=MemoryTracker(), listener=Notes()
    ) as run:
        run_stages(run, lifecycle, run.directly, tags={})
    return profile, home


@pytest.fixture
def again(made: tuple[Path, Home], monkeypatch, capsys) -> Reproduced:
    profile, home = made
    monkeypatch.setenv("RLHF_HOME", str(home.root))

    def run(*words: str) -> tuple[int, str]:
        status = main(["reproduce", *words, "--profile", str(profile)])
        printed = capsys.readouterr()
        return status, printed.err if status == EXIT_REFUSED else printed.out

    return run


def digest_of(made: tuple[Path, Home], label: str) -> str:
    record = ArtifactStore(made[1].store).latest(label)
    return record.handle.digest


def test_a_policy_is_made_again_byte_by_byte(made, again, tmp_path):
    digest = digest_of(made, "ppo")
    status, said = again(digest, "--into", str(tmp_path / "empty"))
    assert status == 0, said
    assert said.startswith(f"{digest}: {digest[:12]}, made again in {tmp_path / 'empty'}\n")
    assert "stages: 3 of 3 are the same" in said and said.splitlines()[-1] == "reproduced: the same bytes"
    there = ArtifactStore(tmp_path / "empty")
    record = there.latest("ppo")
    assert record is not None and record.handle.digest == digest and there.path(record.handle).is_dir()
    assert ArtifactStore(made[1].store).latest("ppo") == ArtifactStore(made[1].store).record(record.key)

    status, said = again(digest, "--into", str(tmp_path / "empty"))
    assert status == EXIT_REFUSED and "is not empty; name another folder, or remove this one" in said


def test_the_first_stage_with_other_bytes_is_named(made, again, tmp_path, monkeypatch):
    monkeypatch.setattr(diff_verb, "_check_same", lambda *_: None)
    status, said = again("prepare_data", "--into", str(tmp_path / "empty"), "--set", "seed=18")
    assert status == 1 and "prepare_data: seed: 17 -> 18" in said
    assert said.splitlines()[-1] == "not reproduced: the first stage with other bytes is prepare_data"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nothing"], "artifact = 'nothing': is neither label nor digest of an artifact"),
        (["sft", "--into", "STORE"], "is in a store; name an empty folder"),
        (["sft", "--into", "STORE/again"], "is in a store; name an empty folder"),
        (["sft", "--into", "PROFILES"], "is not empty; name another folder, or remove this one"),
        (["sft", "--set", "runtme.type=ray"], "did you mean runtime?"),
        (["sft", "--set", "seed=18"], "does not make the stages that were recorded: prepare_data: seed: 17 -> 18"),
        (["ppo", "--set", "ppo.steps=2"], "does not make the stages that were recorded: ppo: ppo.steps: 1 -> 2"),
    ],
)
def test_what_cannot_be_made_again_is_refused(made, again, words, error):
    places = {"STORE": made[1].store, "STORE/again": made[1].store / "again", "PROFILES": made[0].parent}
    status, said = again(*(str(places.get(word, word)) for word in words))
    assert status == EXIT_REFUSED and error in said
    assert not (made[1].store / "again").exists() and not (made[1].root / "reproduced").exists()


def test_a_function_that_has_changed_is_refused(made, again):
    reward = made[0].parent / "reward.py"
    reward.write_text(REWARD.replace("text", "token_ids"))
    try:
        status, said = again("ppo")
    finally:
        reward.write_text(REWARD)
    assert status == EXIT_REFUSED and "does not make the stages that were recorded: ppo: ppo.rewards.terms.own" in said
