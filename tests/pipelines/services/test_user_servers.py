from __future__ import annotations

import socket

import pytest

from pipelines.services.home import Home
from pipelines.services.running import Services
from pipelines.services.user_servers import user_prefect
from rlhf_core.tracking import owner


def test_the_address_that_up_printed_is_not_the_users_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as port_of_ours:
        port_of_ours.bind(("127.0.0.1", 0))
        port = port_of_ours.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            monkeypatch.setenv("PREFECT_API_URL", f"http://{host}:{port}/api")
            assert user_prefect(home) == f"http://{host}:{port}/api"
            Services(owner.tags(), port, 2, ready=True).write(home)
            assert user_prefect(home) == ""
            home.services.unlink()  # as `rlhf down` leaves it; the export stays in the shell
            port_of_ours.close()
            assert user_prefect(home) == ""
            (home.root / "prefect_address").unlink()
            assert user_prefect(home) == f"http://{host}:{port}/api"
    with socket.socket() as anothers:
        anothers.bind(("127.0.0.1", 0))
        anothers.listen()
        address = f"http://127.0.0.1:{anothers.getsockname()[1]}/api"
        (home.root / "prefect_address").write_text(address)
        monkeypatch.setenv("PREFECT_API_URL", address)
        assert user_prefect(home) == address, "somebody else has started a server there since"
