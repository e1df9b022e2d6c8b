from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.execution.executor import RunContext, RunOptions
from pipelines.execution.local import LocalExecutor
from pipelines.execution.opening import open_executor, store_of
from pipelines.execution.ray_job import RayJobExecutor
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini


@pytest.mark.parametrize(("execution", "kind"), [("inline", LocalExecutor), ("ray-job", RayJobExecutor)])
def test_the_executor_is_the_one_that_the_runtime_names(tmp_path: Path, home: Home, execution: str, kind: type) -> None:
    config = load_profile(write_mini(tmp_path), [f"runtime.execution={execution}"])
    context = RunContext(config, RunOptions(), store_of(config, home), MemoryTracker(), Notes())
    assert type(open_executor(context)) is kind


def test_the_store_is_the_profiles_or_the_state_folders(tmp_path: Path, home: Home) -> None:
    config = load_profile(write_mini(tmp_path))
    assert store_of(config, home).root == home.store
    elsewhere = load_profile(write_mini(tmp_path), [f"store={tmp_path}/elsewhere"])
    assert store_of(elsewhere, home).root == tmp_path / "elsewhere"
