"""Keeps the services of `rlhf up` alive: `python -m pipelines.supervisor STATE_FOLDER`."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.home import Home, client_environment
from pipelines.services import (
    MLFLOW_PORT,
    PREFECT_PORT,
    SERVER_TIMEOUT_S,
    Services,
    await_health,
    claim_port,
    mlflow_command,
    prefect_command,
    running,
    start_leashed,
    stop_process,
)
from rlhf_core.tracking import owner

logger = logging.getLogger("rlhf.supervisor")

RESTART_PAUSE_S = 2.0
DEPLOYED_MARK = "deployments.ready"


@dataclass
class Child:
    """A service: how to start it, where it says that it is well, and its process."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    health: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = start_leashed(self.command, self.environment, log)

    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process)


def supervise(home: Home) -> None:
    """Start the services, note their addresses, restart what dies, and stop them all on SIGTERM or Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if running(home) is not None:
        logger.error("services of %s are already running", home.root)
        return
    home.make()
    prefect_port, mlflow_port = claim_port(PREFECT_PORT), claim_port(MLFLOW_PORT)
    services = Services(owner.tags(), prefect_port, mlflow_port, ready=False)
    services.write(home)
    environment = os.environ | client_environment(home, prefect_port=prefect_port)
    mark = home.root / DEPLOYED_MARK
    mark.unlink(missing_ok=True)
    servers = [
        Child(
            "prefect",
            prefect_command(prefect_port),
            environment,
            services.health[0],
            home.logs / "prefect.log",
        ),
        Child(
            "mlflow",
            mlflow_command(home, mlflow_port),
            environment,
            services.health[1],
            home.logs / "mlflow.log",
        ),
    ]
    deployments = Child(
        "deployments",
        [sys.executable, "-m", "pipelines.deployments", str(mark)],
        environment,
        "",
        home.logs / "deployments.log",
    )
    try:
        _start(servers, deployments, mark, stop)
        if not stop.is_set():
            replace(services, ready=True).write(home)
            logger.warning("ready: Prefect %s, MLflow %s", services.prefect_url, services.mlflow_url)
        _keep_alive([*servers, deployments], stop)
    finally:
        for child in [deployments, *servers]:
            child.stop()
        mark.unlink(missing_ok=True)
        home.services.unlink(missing_ok=True)


def _start(servers: list[Child], deployments: Child, mark: Path, stop: threading.Event) -> None:
    for child in servers:
        child.start()
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(_await, servers))
    deployments.start()
    deadline = time.monotonic() + SERVER_TIMEOUT_S
    while not mark.exists() and not stop.wait(0.1):
        if deployments.dead() or time.monotonic() > deadline:
            raise RuntimeError(f"the deployments were not served; read {deployments.log}")


def _await(child: Child) -> None:
    assert child.process is not None
    await_health(child.health, child.process, SERVER_TIMEOUT_S, child.log)


def _keep_alive(children: list[Child], stop: threading.Event) -> None:
    while not stop.wait(RESTART_PAUSE_S):
        for child in children:
            if child.dead():
                logger.warning("%s ended; started again", child.name)
                child.stop()
                child.start()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    supervise(Home(Path(sys.argv[1])))
