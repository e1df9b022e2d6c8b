from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.home import Home, client_environment, quiet_environment


def test_the_state_folder_is_here_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_HOME", raising=False)
    assert Home.here().root == tmp_path / ".rlhf"
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "elsewhere"))
    assert Home.here().store == tmp_path / "elsewhere" / "store"


def test_nothing_is_kept_outside_the_state_folder_and_nothing_is_reported(tmp_path: Path) -> None:
    environment = quiet_environment(Home(tmp_path))
    for name in ("PREFECT_HOME", "PREFECT_RESULTS_LOCAL_STORAGE_PATH", "PREFECT_SERVER_MEMO_STORE_PATH"):
        assert Path(environment[name]).is_relative_to(tmp_path)
    assert str(tmp_path) in environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert (environment["DO_NOT_TRACK"], environment["MLFLOW_DISABLE_TELEMETRY"]) == ("1", "true")


def test_clients_talk_to_this_machine(tmp_path: Path) -> None:
    environment = client_environment(Home(tmp_path), prefect_port=4321)
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
