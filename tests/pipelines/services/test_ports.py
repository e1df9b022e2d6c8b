from __future__ import annotations

import socket

import pytest

from pipelines.services.health import ServiceError
from pipelines.services.ports import LAST_PORT, claim_port, is_claimed, is_free, release_port


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert claim_port(port) > port


def test_no_port_after_the_last_one_is_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", LAST_PORT))
        taken.listen()
        with pytest.raises(ServiceError, match=f"port = {LAST_PORT}: "):
            claim_port(LAST_PORT)


def test_a_port_is_given_once_although_nobody_listens_on_it_yet() -> None:
    first = claim_port(43210)
    assert is_free(first)
    assert claim_port(first) > first


def test_a_port_whose_server_has_ended_is_given_again() -> None:
    port = claim_port(43300)
    assert is_claimed(port)
    release_port(port)
    assert not is_claimed(port)
    assert claim_port(port) == port
