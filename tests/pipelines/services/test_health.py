from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.services.health import ServiceError, await_health


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(ServiceError, match=r"ended with status 3; read .*server\.log"):
        await_health("http://127.0.0.1:9/", process, 5.0, tmp_path / "server.log")
