"""Correct the state of runs of killed processes in stores, MLflow and Prefect (`rlhf reconcile`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.services.handover import kept_prefect
from pipelines.services.home import Home, has_prefect_database
from pipelines.services.links import update_links
from pipelines.services.running import ServiceError, proven, running, wait_for
from pipelines.services.servers import SERVER_TIMEOUT_S, PrivateServer, private_server
from pipelines.services.user_servers import connect_user_prefect, tracking_uri, user_prefect
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import sweep_temporaries
from rlhf_core.store.leases import is_gone, owner_in
from rlhf_core.tracking import mlflow
from rlhf_core.tracking.mlflow_client import is_missing_database


def reconcile_all(home: Home, stores: list[ArtifactStore]) -> Iterator[str]:
    """Reconcile `stores`, MLflow and Prefect; yield a line for every change."""
    for store in stores:
        yield from reconcile_store(store)
    yield from reconcile_mlflow(home)
    if was_used(home):
        with some_prefect(home):
            # Prefect reads its settings when it is imported, and `some_prefect` has just made them.
            from pipelines.services.flow_runs import reconcile_flow_runs

            yield from map(str, reconcile_flow_runs())
            services = running(home)
            if services is not None:
                yield from update_links(home, services)


def reconcile_store(store: ArtifactStore) -> Iterator[str]:
    """Remove leases whose owner is gone and end the attempts of such owners; yield a line for every change."""
    with store.shared.snapshot():
        for table in store.shared.tables("keys/", damaged=[]):
            key, owner = table.name.rpartition("/")[2], owner_in(table.value)
            ended = store.tidy(key)
            if owner is not None and is_gone(owner):
                yield f"lease {key[:12]} of {owner} -> removed: its owner is gone"
            if ended is not None:
                label, attempt = ended
                yield f"attempt {attempt.number} at {label} ({key[:12]}) -> {attempt.status}: {attempt.failure}"
    for path in sweep_temporaries(store.root):
        yield f"file {path.relative_to(store.root)} -> removed: its writer was killed"


def reconcile_mlflow(home: Home) -> Iterator[str]:
    """End the RUNNING runs of dead processes of this machine in all experiments; yield a line for each."""
    uri = tracking_uri(home)
    if is_missing_database(uri):
        return
    for run in mlflow.end_all_dead_runs(uri):
        yield f"MLflow {run.experiment}/{run.name} ({run.run_id}) -> KILLED: its {run.owner} ended without reporting a result"


def was_used(home: Home) -> bool:
    """Whether Prefect may know runs of this state folder. Nothing is started or queried to find out."""
    if not home.root.exists():
        return False
    theirs = user_prefect(home) or has_prefect_database()
    return bool(theirs) or running(home) is not None or (home.prefect / "prefect.db").exists()


@contextmanager
def some_prefect(home: Home) -> Iterator[bool]:
    """Connect Prefect's client to the user's server, to the server of `rlhf up`, or to a temporary one for this block.

    Yields whether `rlhf up` serves deployments there. Raises ServiceError if a server that should run does not answer.
    """
    services = running(home)
    served = services is not None and user_prefect(home) in ("", services.prefect_api)
    with prefect_server(home, patience_s=0.0) as server:
        if server is not None:
            server.wait()
        yield served


@contextmanager
def prefect_server(home: Home, *, patience_s: float = SERVER_TIMEOUT_S) -> Iterator[PrivateServer | None]:
    """Connect Prefect's client to the user's server, to the server of `rlhf up`, or to a temporary one for this block.

    Yields the last one, which may still be starting, else None. The server of `rlhf up` may take `patience_s` to answer.
    """
    services = running(home)
    theirs = user_prefect(home) or (services.prefect_api if services is not None else "")
    if theirs:
        connect_user_prefect(home, theirs)
        yield None
    elif services is not None:
        auth = home.prefect_auth_string
        with kept_prefect(home, services):
            if not wait_for(lambda: proven(services.health["prefect"], auth), patience_s):
                rule, remedy = "does not answer", f"read the logs in {home.logs}, or stop the services with `rlhf down`"
                raise ServiceError(f"{services.prefect_url}: {rule}; {remedy}")
            yield None
    else:
        with private_server(home) as server:
            os.environ.update(server.environment)
            yield server
