"""Keep the services of `rlhf up` alive: `python -m pipelines.services.supervisor STATE_FOLDER`.

A service that dies is restarted within seconds, a hanging service within about a minute (see
`pipelines.services.servers`). If the supervisor itself is killed, its services end with it, and the next `rlhf up`
starts new ones.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from pipelines.services.handover import offered
from pipelines.services.home import Home, remote_tracking_uri
from pipelines.services.running import (
    MLFLOW_PORT,
    PREFECT_PORT,
    ServiceError,
    Services,
    bound_port,
    is_free,
    port_of,
    proven,
    read_note,
    running,
    wait_for,
)
from pipelines.services.servers import (
    LOOK_EVERY_S,
    SAFE_PATH,
    START_TIMEOUT_S,
    Child,
    forget,
    keep_alive,
    mlflow_command,
    prefect_command,
    proof_environment,
)
from pipelines.services.user_servers import user_prefect
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.stopping import terminations
from rlhf_core.tracking import mlflow_client

logger = logging.getLogger("rlhf.supervisor")

DEPLOYED_MARK = "deployments.ready"
"""File that the deployments touch as long as they work."""
BEAT_LATE_S = 15.0  # without a sign of life, after which the deployments count as hung
LAST_TIMEOUT_S = 20.0  # until the ports are free again
START_LOOK_S = 0.2
DEPLOYMENTS_PATIENCE_S = 32.0
"""Seconds for the deployments to end: running flows save first."""


def supervise(home: Home) -> None:
    """Start the services, record their addresses, restart dead or hanging ones, and stop all on SIGTERM or Ctrl-C."""
    stop = threading.Event()
    for number in (*terminations(), signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if running(home) is not None:
        logger.error("services of %s are already running", home.root)
        return
    home.make()
    await_end_of_last(home)
    services, listeners = _planned(home)
    services.write(home)
    mark = home.root / DEPLOYED_MARK
    mark.unlink(missing_ok=True)
    servers, deployments = _children(home, services, listeners, mark)
    keepers: list[threading.Thread] = []
    offer = contextlib.ExitStack()
    try:
        if "prefect" in listeners:
            services = replace(services, handover=offer.enter_context(offered(listeners["prefect"])))
            services.write(home)
        _start(servers, keepers, stop)
        _start([deployments], keepers, stop)
        if not stop.is_set():
            replace(services, ready=True).write(home)
            logger.warning("ready: Prefect %s, MLflow %s", services.prefect_url, services.mlflow_url)
        stop.wait()
    finally:
        stop.set()
        for keeper in keepers:
            keeper.join()
        offer.close()  # a run that begins now starts a separate server
        for child in [deployments, *servers]:  # the deployments first: they record the runs that they interrupt
            child.stop()
        mark.unlink(missing_ok=True)
        forget(home)


def await_end_of_last(home: Home) -> None:
    """Wait until the services of a killed supervisor have released their ports; they end soon after it."""
    last = read_note(home)
    if last is not None:
        ports = [] if last.prefect_api else [last.prefect_port]
        ports += [] if last.mlflow_uri else [last.mlflow_port]
        wait_for(lambda: all(is_free(port) for port in ports), LAST_TIMEOUT_S)


def _planned(home: Home) -> tuple[Services, dict[str, socket.socket]]:
    """Decide on the services to start, and open the sockets of ours; the user's own servers need none."""
    prefect_api, mlflow_uri = user_prefect(home), remote_tracking_uri()
    listeners = {} if prefect_api else {"prefect": bound_port(PREFECT_PORT)}
    listeners |= {} if mlflow_uri else {"mlflow": bound_port(MLFLOW_PORT)}
    services = Services(
        mlflow_client.owner_tags(),
        0 if prefect_api else port_of(listeners["prefect"]),
        0 if mlflow_uri else port_of(listeners["mlflow"]),
        ready=False,
        prefect_api=prefect_api,
        mlflow_uri=mlflow_uri,
    )
    return services, listeners


def _children(
    home: Home, services: Services, listeners: dict[str, socket.socket], mark: Path
) -> tuple[list[Child], Child]:
    environment = os.environ | services.environment(home) | SAFE_PATH
    auth = home.prefect_auth_string
    servers = [
        Child(
            name,
            prefect_command(listeners[name]) if name == "prefect" else mlflow_command(home, listeners[name]),
            environment | proof_environment(home),
            lambda url=url: proven(url, auth),  # type: ignore[misc]
            home.logs / f"{name}.log",
            listener=listeners[name],
        )
        for name, url in services.health.items()
    ]
    command = [sys.executable, "-P", "-m", "pipelines.prefect_flows.deployments", str(mark)]
    log = home.logs / "deployments.log"
    deployments = Child("deployments", command, environment, lambda: _beats(mark), log, DEPLOYMENTS_PATIENCE_S)
    if "prefect" in listeners:  # if the supervisor is killed, no other program gets the port before they have ended
        deployments.listener = listeners["prefect"].dup()
    return servers, deployments


def _beats(mark: Path) -> bool:
    try:
        return time.time() - mark.stat().st_mtime < BEAT_LATE_S
    except FileNotFoundError:
        return False


def _start(children: list[Child], keepers: list[threading.Thread], stop: threading.Event) -> None:
    """Start services, keep them alive, and wait until all of them work or `stop` is set.

    Raises ServiceError if a service ends before it has worked. A late service stays, and is restarted if it hangs.
    """
    for child in children:
        child.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while (late := [child for child in children if not child.well()]) and not stop.wait(START_LOOK_S):
        for child in late:
            if child.dead():
                raise ServiceError(f"{child.name}: ended while it started; read {child.log}")
        if time.monotonic() > deadline:
            logger.warning("%s: late, still starting; read %s", late[0].name, late[0].log)
            break
    for child in children:
        keeper = threading.Thread(target=keep_alive, args=(child, stop), kwargs={"answered": child not in late})
        keepers.append(keeper)
        keeper.start()
    while not all(child.well() for child in late) and not stop.wait(LOOK_EVERY_S):
        continue


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    hide_in_logs()
    supervise(Home(Path(sys.argv[1])))
