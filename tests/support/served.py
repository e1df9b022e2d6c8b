"""What `rlhf up` starts, for a test, and Prefect's API as its pages use it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from pipelines.services.home import Home
from pipelines.services.running import Services, running

PATIENCE_S = 600.0
STARTS = 2


@contextmanager
def served(home: Home) -> Iterator[Services]:
    """Start Prefect, MLflow and the deployments, as `rlhf up` does; they end with the block."""
    environment = os.environ | {"RLHF_HOME": str(home.root)}
    command = [sys.executable, "-P", "-m", "pipelines.cli.main"]
    for _ in range(STARTS):  # on a busy machine, the second waits for what the first began
        done = subprocess.run(
            [*command, "up"], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        found = running(home)
        assert found is not None
        yield found
    finally:
        subprocess.run([*command, "down"], env=environment, capture_output=True, timeout=300, check=False)


class PrefectAPI:
    """Prefect's API, as its pages use it."""

    def __init__(self, home: Home, services: Services) -> None:
        name, _, word = home.prefect_auth_string.partition(":")
        self._client = httpx.Client(
            base_url=f"{services.prefect_url}/api", auth=(name, word), timeout=60, trust_env=False
        )

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Run a deployment; return the id of the flow run."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        path, deadline = f"/deployments/{self.deployment(deployment)}/create_flow_run", time.monotonic() + PATIENCE_S
        run = self._client.post(path, json=body)
        while run.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(1)  # its database is busy; Prefect's own client asks again, too
            run = self._client.post(path, json=body)
        assert run.is_success, run.text
        return str(run.json()["id"])

    def artifact(self, flow_run: str, key: str) -> str:
        """Return the newest card of a flow run under a key."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self._client.post("/artifacts/filter", json=wanted).json()
            if found:
                return str(found[0]["data"])
            time.sleep(1)
        raise AssertionError(f"flow run {flow_run} has no card {key}")

    def deployment(self, name: str) -> str:
        """Return the id of `rlhf-pipeline/<name>`."""
        found = self._client.get(f"/deployments/name/rlhf-pipeline/{name}")
        assert found.is_success, found.text
        return str(found.json()["id"])

    def ended(self, flow_run: str) -> dict[str, Any]:
        """Return the state of a flow run once its process has ended."""
        deadline = time.monotonic() + PATIENCE_S
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            state = self._client.get(f"/flow_runs/{flow_run}").json()["state"]
            if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                return state
            time.sleep(1)
        raise AssertionError(f"the flow run is still {state}")

    def completed(self, flow_run: str) -> dict[str, Any]:
        """Return the state of a flow run when it is not Waiting anymore, and has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            state = self.ended(flow_run)
            if state["name"] != "Waiting":
                return state
            time.sleep(1)
        raise AssertionError("the waiting run was not resumed")
