"""Artifacts that are made again from their records, on the engines of this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.main import EXIT_REFUSED, main
from pipelines.execution import reproduce
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini

REWARD = "def mine(generations):\n    return [float(len(one.completion.text)) for one in generations]\n"
Reproduced = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Home]:
    """Return a profile, and the state folder in which it has run as far as its policy optimization."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "reward.py").write_text(REWARD)
    terms = f'{{own = {{type = "function", function = "{folder / "reward.py"}:mine"}}}}'
    profile, home = write_mini(folder), Home(folder / "home").make()
    config = load_profile(profile, [f"ppo.rewards.terms={terms}"])
    with open_run(
        config, lifecycle, RunOptions(until="ppo"), home=home, tracker=MemoryTracker(), listener=Notes()
    ) as run:
        run_stages(run, lifecycle, lambda spec, kind: run.stage(spec, lambda *_: None).ref, tags={})  # type: ignore[arg-type,return-value]
    return profile, home


@pytest.fixture
def again(made: tuple[Path, Home], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reproduced:
    profile, home = made
    monkeypatch.setenv("RLHF_HOME", str(home.root))

    def run(*words: str) -> tuple[int, str]:
        status = main(["reproduce", *words, "--profile", str(profile)])
        printed = capsys.readouterr()
        return status, printed.err if status == EXIT_REFUSED else printed.out

    return run


def digest_of(made: tuple[Path, Home], label: str) -> str:
    record = ArtifactStore(made[1].store).latest(label)
    assert record is not None
    return record.handle.digest


def test_a_policy_is_made_again_from_its_record_byte_by_byte(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path
) -> None:
    digest = digest_of(made, "ppo")
    status, said = again(digest, "--into", str(tmp_path / "empty"))
    assert status == 0, said
    lines = said.splitlines()
    assert (
        lines[0].endswith(f"3 stages, made again in {tmp_path / 'empty'}")
        and lines[1] == "code and packages: as they were"
    )
    assert [label for label in ("prepare_data", "sft", "ppo") if f"{label}: the same bytes, " in said] == [
        "prepare_data",
        "sft",
        "ppo",
    ]
    assert lines[-1] == "reproduced: all stages are the same bytes"
    there = ArtifactStore(tmp_path / "empty")
    record = there.latest("ppo")
    assert record is not None and record.handle.digest == digest and there.path(record.handle).is_dir()


def test_the_first_stage_that_differs_is_named_and_nothing_after_it_runs(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_seed(store: ArtifactStore, spec: StageSpec, **more: Any) -> Any:
        return execute(store, replace(spec, seed=18), **more)

    monkeypatch.setattr(reproduce, "execute", other_seed)
    status, said = again("ppo", "--into", str(tmp_path / "empty"))
    assert status == 1 and "prepare_data: DIFFERENT: " in said and ".parquet" in said
    end = "not reproduced: the artifact is not; the first that differs is prepare_data"
    assert said.splitlines()[-1].startswith(f"{end}; 2 stages after it were not run")


def test_other_code_and_packages_are_said_first(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (
        path for path in made[1].store.glob("keys/*/*.json") if json.loads(path.read_text())["label"] == "prepare_data"
    )
    kept = path.read_text()
    record = json.loads(kept)
    record["code"]["stages.prepare_data"] = "other"
    record["environment"]["torch"] = "0.1"
    path.write_text(json.dumps(record))
    try:
        status, said = again("prepare_data", "--into", str(tmp_path / "empty"))
    finally:
        path.write_text(kept)
    assert status == 0
    assert said.splitlines()[1] == "prepare_data: code changed: stages.prepare_data"
    assert said.splitlines()[2].startswith("prepare_data: torch: 0.1 -> ")


def test_a_function_that_has_changed_is_refused_before_its_stage_runs(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path
) -> None:
    reward = made[0].parent / "reward.py"
    reward.write_text(REWARD.replace("text", "token_ids"))
    try:
        status, said = again("ppo", "--into", str(tmp_path / "empty"))
    finally:
        reward.write_text(REWARD)
    assert (
        status == EXIT_REFUSED and "is not the stage that was recorded: ppo.rewards.terms.own.function: mine@" in said
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nothing"], "input = 'nothing': no ArtifactRef has this label or digest"),
        (["sft", "--into", "STORE"], "is in the store that has the artifact; name an empty folder"),
        (["sft", "--into", "STORE/again"], "is in the store that has the artifact; name an empty folder"),
        (["sft", "--into", "PROFILES"], "is not empty, and holds no attempt to make this artifact again"),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    made: tuple[Path, Home], again: Reproduced, words: list[str], error: str
) -> None:
    places = {"STORE": made[1].store, "STORE/again": made[1].store / "again", "PROFILES": made[0].parent}
    status, said = again(*(str(places.get(word, word)) for word in words))
    assert status == EXIT_REFUSED and error in said
    assert not (made[1].store / "again").exists()


def test_changes_of_no_profile_are_refused(made: tuple[Path, Home], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "sft", "--store", str(made[1].store), "--set", "runtime.num_workers=2"]) == EXIT_REFUSED
    error = "--set = 'runtime.num_workers=2': changes a profile, and none is named; add --profile PROFILE"
    assert error in capsys.readouterr().err


def test_a_misspelt_key_is_refused_before_the_folder_is_claimed(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path
) -> None:
    status, said = again("sft", "--into", str(tmp_path / "empty"), "--set", "runtme.type=ray")
    assert status == EXIT_REFUSED and "did you mean runtime?" in said and not (tmp_path / "empty").exists()


def test_the_store_of_the_state_folder_is_refused_for_an_artifact_of_another_one(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    status, said = again("prepare_data", "--store", str(made[1].store), "--into", str(Home(tmp_path / "home").store))
    assert status == EXIT_REFUSED and "is in the store of the state folder; name an empty folder" in said


def test_an_attempt_that_was_stopped_goes_on_and_says_what_it_has_not_made_itself(
    made: tuple[Path, Home], again: Reproduced, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    assert again("prepare_data", "--into", str(folder))[0] == 0
    status, said = again("prepare_data", "--into", str(folder))
    assert status == 0 and "prepare_data: the same bytes, made by the earlier attempt in this folder" in said
    assert said.splitlines()[-1] == "reproduced: all stages are the same bytes (1 made by the earlier attempt)"
    status, said = again("sft", "--into", str(folder))
    assert status == EXIT_REFUSED and "holds no attempt to make this artifact again" in said

    note = json.loads((folder / reproduce.NOTE).read_text())
    note["code"]["prepare_data"]["stages.prepare_data"] = "other"
    note["versions"]["torch"] = "0.1"
    (folder / reproduce.NOTE).write_text(json.dumps(note))
    status, said = again("prepare_data", "--into", str(folder))
    rule = "was begun with other code or packages (stages.prepare_data, torch); name another empty folder"
    assert status == EXIT_REFUSED and rule in said
