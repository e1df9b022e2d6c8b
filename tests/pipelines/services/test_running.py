from __future__ import annotations

from pipelines.services.home import Home
from pipelines.services.running import Services, running
from rlhf_core.tracking import mlflow_client


def test_services_of_a_dead_supervisor_are_not_running(home: Home) -> None:
    assert running(home) is None
    alive = Services(mlflow_client.tags(), 4200, 5000, ready=True)
    alive.write(home)
    assert running(home) == alive
    Services(mlflow_client.tags() | {"owner.pid_started": "1"}, 4200, 5000, ready=True).write(home)
    assert running(home) is None


def test_servers_of_the_user_take_the_place_of_ours_and_secrets_are_not_printed(home: Home) -> None:
    found = Services(
        mlflow_client.tags(),
        0,
        0,
        ready=True,
        prefect_api="http://me:hunter2@p:4200/api",
        mlflow_uri="https://me:hunter2@m",
    )
    found.write(home)
    assert home.services.stat().st_mode & 0o777 == 0o600
    assert running(home) == found and found.health == {} and found.well(home)
    assert (found.prefect_url, found.mlflow_url) == ("http://***@p:4200", "https://***@m")
    assert found.environment(home)["PREFECT_API_URL"] == "http://me:hunter2@p:4200/api"
    assert found.tracking_uri == "https://me:hunter2@m"
    assert not (home.root / "prefect_address").exists()
