"""Read and write the record of running services in the state folder: their addresses, and who supervises them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pipelines.services import user_settings
from pipelines.services.health import proven
from pipelines.services.home import LOOPBACK, Home, client_environment
from rlhf_core.secrets.redaction import shown
from rlhf_core.store.leases import is_gone
from rlhf_core.tracking.owner import from_tags


@dataclass(frozen=True)
class Services:
    """The services that `rlhf up` started: the supervisor's identity, the addresses, and whether all of them answer."""

    owner: dict[str, str]
    """Identity of the supervisor process, so that a recycled process id is not mistaken for it."""
    prefect_port: int
    mlflow_port: int
    ready: bool
    prefect_api: str = ""
    """Address of the API of the user's own Prefect server, used instead of ours. It must not be printed as it is."""
    mlflow_uri: str = ""
    """Address of the user's own MLflow server, used instead of ours. It must not be printed as it is."""
    shared_database: bool = field(default_factory=user_settings.has_prefect_database)
    """Whether our Prefect server uses a database that the user set, in which others may have runs too."""

    @property
    def pid(self) -> int:
        return int(self.owner["owner.pid"])

    @property
    def prefect_url(self) -> str:
        """Return the address for a browser; it contains no password and may be printed."""
        if self.prefect_api:
            return shown(self.prefect_api).removesuffix("/api")
        return f"http://{LOOPBACK}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        """Return the address for a browser; it contains no password and may be printed."""
        return shown(self.mlflow_uri) if self.mlflow_uri else f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def tracking_uri(self) -> str:
        """Return the address for an MLflow client; it may contain a password."""
        return self.mlflow_uri or self.mlflow_url

    @property
    def health(self) -> dict[str, str]:
        """Return, for each service of ours, an address that answers with status 200 while the service works."""
        prefect = {} if self.prefect_api else {"prefect": f"{self.prefect_url}/api/health"}
        return prefect | ({} if self.mlflow_uri else {"mlflow": f"{self.mlflow_url}/health"})

    def well(self, home: Home) -> bool:
        """Return whether everything was started and answers now."""
        return self.ready and all(proven(url, home.prefect_auth_string) for url in self.health.values())

    def environment(self, home: Home) -> dict[str, str]:
        """Return the settings of a process that uses this Prefect server."""
        return client_environment(home, prefect_port=self.prefect_port, prefect_api=self.prefect_api)

    def write(self, home: Home) -> None:
        """Write the record into the state folder, readable by this user only."""
        part = home.services.with_suffix(".part")
        part.touch(mode=0o600)  # an address of the user's may contain a password
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(home.services)
        if not self.prefect_api:
            home.prefect_address.write_text(f"{self.prefect_url}/api", encoding="utf-8")


def running(home: Home) -> Services | None:
    """Return the services of this state folder if their supervisor is alive."""
    services = read_note(home)
    return services if services is not None and alive(services.owner) else None


def read_note(home: Home) -> Services | None:
    """Return the services that were last recorded, running or not; None without a readable record."""
    try:
        return Services(**json.loads(home.services.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def alive(owner: Mapping[str, str]) -> bool:
    """Return whether the process that `rlhf_core.tracking.owner.tags` described still exists."""
    process = from_tags(owner)
    return process is not None and not is_gone(process)
