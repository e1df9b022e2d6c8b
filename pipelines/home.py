"""The state folder of one project on one machine, and the environment that its services share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Home:
    """Paths below the state folder.

    >>> Home(Path("/tmp/x")).store
    PosixPath('/tmp/x/store')
    """

    root: Path

    @classmethod
    def here(cls) -> Home:
        """Return the state folder: `RLHF_HOME`, or `.rlhf` in the current folder."""
        return cls(Path(os.environ["RLHF_HOME"] if "RLHF_HOME" in os.environ else ".rlhf").resolve())

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow_uri(self) -> str:
        """Address of MLflow's database, for a client without a server."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def services(self) -> Path:
        """What `rlhf up` left for others to find: process ids and addresses."""
        return self.root / "services.json"

    def make(self) -> Home:
        for folder in (self.store, self.prefect, self.mlflow_artifacts, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self


def quiet_environment(home: Home) -> dict[str, str]:
    """Return the settings of every process: state under `home`, nothing reported to anyone.

    PREFECT_HOME alone does not move results and the memo store (Prefect 3.7), so each is named.
    """
    past = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)][:1]
    direct = ",".join([*past, LOOPBACK, "localhost"])
    return {
        "no_proxy": direct,
        "NO_PROXY": direct,
        "RLHF_HOME": str(home.root),
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home.prefect / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home.prefect / "memo.toml"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home.prefect / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_ENABLE_AI_GATEWAY": "false",
        "MLFLOW_MODEL_CATALOG_URI": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def client_environment(home: Home, *, prefect_port: int) -> dict[str, str]:
    """Return the settings of a process that talks to the Prefect server on `prefect_port`."""
    return quiet_environment(home) | {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{prefect_port}/api",
        # With five retries of the client a server may be away for a minute, or hang for three, and be started again.
        "PREFECT_API_REQUEST_TIMEOUT": "20",
        # Prefect's pages keep every log line; the terminal belongs to our own display.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rlhf_core,stages,pipelines",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
