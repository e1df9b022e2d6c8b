import socket

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pipelines.services.running import Services
from pipelines.services.user_servers import tracking_uri, user_prefect
from rlhf_core.http.door import Door
from rlhf_core.tracking import mlflow_client
from tests.support.reward_servers import serving


def test_the_address_that_up_printed_is_not_the_users_own(home, monkeypatch):
    with socket.socket() as port_of_ours:
        port_of_ours.bind(("127.0.0.1", 0))
        port = port_of_ours.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            monkeypatch.setenv("PREFECT_API_URL", f"http://{host}:{port}/api")
            assert user_prefect(home) == f"http://{host}:{port}/api"
            Services(mlflow_client.owner_tags(), port, 2, ready=True).write(home)
            assert user_prefect(home) == ""
            home.services.unlink()  # as `rlhf down` leaves it; the export stays in the shell
            port_of_ours.close()
            assert user_prefect(home) == ""
            (home.root / "prefect_address").unlink()
            assert user_prefect(home) == f"http://{host}:{port}/api"


@pytest.mark.parametrize("of_rlhf", [True, False])
def test_a_server_that_was_started_where_ours_was_is_the_users_unless_it_is_one_of_another_state_folder(
    home, monkeypatch, of_rlhf
):
    answer = PlainTextResponse("well")
    with serving(Door(answer, authorization="Basic x", key="of another folder") if of_rlhf else answer) as url:
        (home.root / "prefect_address").write_text(f"{url}/api")
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        assert user_prefect(home) == ("" if of_rlhf else f"{url}/api")


def test_a_stranger_at_the_port_of_our_mlflow_is_asked_for_a_proof_and_sent_nothing(home, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    asked: list[tuple[str, str, bool]] = []

    async def stranger(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked.append(
            (request.method, request.url.path, "authorization" in request.headers or bool(await request.body()))
        )
        await PlainTextResponse("OK")(scope, receive, send)

    with serving(stranger) as url:
        Services(mlflow_client.owner_tags(), 1, int(url.rpartition(":")[2]), ready=True).write(home)
        assert tracking_uri(home) == home.mlflow_uri
    assert asked == [("GET", "/health", False)]
    with serving(Door(PlainTextResponse("OK"), open_to=lambda scope: True, key=home.prefect_auth_string)) as url:
        Services(mlflow_client.owner_tags(), 1, int(url.rpartition(":")[2]), ready=True).write(home)
        assert tracking_uri(home) == url
