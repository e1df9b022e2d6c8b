"""Object stores on 127.0.0.1 for tests: moto (in memory) and SeaweedFS (on a disk)."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from rlhf_core.runtime.cluster import free_port
from tests.support.forks import soon

SERVERS = ("moto", "seaweedfs")
_PROGRAMS: Mapping[str, str] = {"moto": "moto_server", "seaweedfs": "weed"}
_KEY, _SECRET, BUCKET = "tester", "tester-secret", "rlhf"


def environment(address: str) -> dict[str, str]:
    """Return the variables with which a client finds the server."""
    access = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET, "AWS_REGION": "us-east-1"}
    return access | {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}


@contextmanager
def running(server: str, folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the address of a server with an empty bucket `rlhf`; skip the test where it is not installed."""
    with Server(server, folder, host) as one:
        yield one.address


class Server:
    """A server that can be killed and started again on its port, with what it has on its disk."""

    def __init__(self, server: str, folder: Path, host: str = "127.0.0.1") -> None:
        program = shutil.which(_PROGRAMS[server], path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
        if program is None:
            pytest.skip(f"{_PROGRAMS[server]} is not installed (requirements/dev.txt)")
        port = free_port()
        self._server, self._folder = server, folder
        self._command = (
            [program, "-H", host, "-p", str(port)] if server == "moto" else _weed(program, host, port, folder)
        )
        self.address = f"http://{host}:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it has the bucket."""
        with (self._folder / f"{self._server}.out").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        soon(lambda: _has_bucket(self.address, self._server), within_s=120)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)


def _weed(program: str, host: str, port: int, folder: Path) -> list[str]:
    credentials = [{"accessKey": _KEY, "secretKey": _SECRET}]
    identity = {"name": "tester", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "weed").mkdir()
    parts = ("master.port", "volume.port", "filer.port", "master.port.grpc", "volume.port.grpc", "filer.port.grpc")
    ports = [f"-{part}={free_port()}" for part in (*parts, "s3.port.grpc")]
    return [
        *(program, "server", f"-ip={host}", f"-ip.bind={host}", "-filer", "-s3", f"-s3.port={port}", *ports),
        *(
            f"-s3.config={folder / 's3.json'}",
            f"-dir={folder / 'weed'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-volume.max=100",
            "-master.volumeSizeLimitMB=64",
        ),
    ]


def _has_bucket(address: str, server: str) -> bool:
    try:
        if server == "moto":
            urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"))
        keys: Any = {"access_key_id": _KEY, "secret_access_key": _SECRET, "region": "us-east-1"}
        quick: Any = {"max_retries": 0}
        store = S3Store(BUCKET, endpoint=address, client_options={"allow_http": True}, retry_config=quick, **keys)
        store.put("ready", b"yes")
    except (OSError, BaseError):
        return False
    return True
