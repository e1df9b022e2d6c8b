from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.execution.plan import plan
from pipelines.execution.ray_job import JobSpec, read_spec, restore_stage, stored_stage, write_spec
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ArtifactError
from rlhf_core.stage.key import Strictness, key_payload
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import toy_spec


@pytest.mark.parametrize("profile", ["tiny/full", "tiny/rlvr"])
def test_every_stage_of_a_pipeline_keeps_its_key_on_the_way_through_a_file(profile: str, tmp_path: Path) -> None:
    planned = plan(load_profile(profile), ArtifactStore(tmp_path))
    assert len(planned) > 3
    for stage in planned:
        restored = restore_stage(json.loads(json.dumps(stored_stage(stage.spec))))
        assert restored == stage.spec
        assert key_payload(restored) == key_payload(stage.spec)


def test_a_job_comes_back_from_its_file(tmp_path: Path) -> None:
    job = JobSpec(
        job_id="rlhf-toy-a1",
        key="ab" * 32,
        stage=toy_spec(),
        config=load_profile(write_mini(tmp_path)),
        store=tmp_path,
        force=True,
        strict=Strictness(env=True),
        tracking="token",
    )
    write_spec(tmp_path / "spec.json", job)
    assert read_spec(tmp_path / "spec.json") == job
    stored = json.loads((tmp_path / "spec.json").read_text())
    assert (stored["strict_code"], stored["strict_env"]) == (False, True)


def test_a_file_that_is_not_there_is_refused_with_what_is_probably_wrong(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError,
        match="cannot be read here; make the store available to the flow and to the cluster under the same",
    ):
        read_spec(tmp_path / "spec.json")


def test_a_class_that_is_no_configuration_is_refused() -> None:
    stored = stored_stage(toy_spec())
    stored["config"]["type"] = "pathlib:Path"
    with pytest.raises(ArtifactError, match=r"stage.config.type = 'pathlib:Path': is not a configuration class"):
        restore_stage(stored)
