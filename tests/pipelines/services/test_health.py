from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pipelines.services.home import Home
from pipelines.services.running import ServiceError, answered, await_health, healthy, proven
from pipelines.services.sign_in import basic
from rlhf_core.http.door import PROOF, Door
from tests.support.reward_servers import serving


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(ServiceError, match=r"ended with status 3; read .*server\.log"):
        await_health("http://127.0.0.1:9/", "key", process, 5.0, tmp_path / "server.log")


def test_a_stranger_who_passes_our_questions_on_to_a_server_of_ours_proves_nothing() -> None:
    well = PlainTextResponse("well")
    with serving(Door(well, authorization="Basic x", open_to=lambda scope: True, key="key")) as ours:

        async def passing_on(scope: Scope, receive: Receive, send: Send) -> None:
            nonce = next(value.decode() for name, value in scope["headers"] if name == b"x-rlhf-nonce")
            await PlainTextResponse("well", headers={PROOF: answered(ours, nonce)[1]})(scope, receive, send)

        assert proven(ours, "key") and not proven(ours, "another")
        for stranger in (passing_on, well):
            with serving(stranger) as theirs:
                assert healthy(theirs) and not proven(theirs, "key")


def test_our_prefect_server_proves_that_it_has_the_auth_string(prefect_home: Home) -> None:
    url = f"{os.environ['PREFECT_API_URL']}/health"
    assert proven(url, prefect_home.prefect_auth_string) and not proven(url, basic("guess"))
