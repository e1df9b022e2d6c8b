"""An MLflow database, migrated once per session and copied for every test."""

import shutil
from pathlib import Path

import pytest

from rlhf_core.tracking.mlflow_client import create_database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path) -> Path:
    return Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))
