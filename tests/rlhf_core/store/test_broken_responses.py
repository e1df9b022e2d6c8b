"""One fault at each kind of request to a bucket. A proxy before the server breaks one connection, and later ones pass."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlhf_core.store import bucket, object_server
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import store_root
from tests.support.faulty_proxy import FaultyProxy, faulty
from tests.support.object_servers import environment, running
from tests.support.toy_stage import ToyConfig, run_toy, toy_spec

pytestmark = [pytest.mark.services, pytest.mark.slow]
LARGE = 17 << 20  # more than one part
NAMES = {"table": "/tables/", "object": "/objects/", "file": "/data/", "checkpoint": "/work/"}
REQUESTS = ["LIST", "GET table", "PUT table", "GET object", "PUT object", "GET file", "PUT file", "POST file", "PUT checkpoint"]  # fmt: skip
FAULTS = ("reset", "503", "500", "lost", "cut", "empty")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    with running("moto", tmp_path_factory.mktemp("moto")) as address:
        yield address


@pytest.fixture
def proxy(server, monkeypatch) -> Iterator[FaultyProxy]:
    with faulty(server) as one:
        for name, value in environment(one.address).items():
            monkeypatch.setenv(name, value)
        for module in (bucket, object_server):
            monkeypatch.setattr(module, "RETRY_S", 0.05)
        yield one


def is_of(request: str) -> Callable[[str], bool]:
    """Whether a request line is of this kind."""
    method, _, what = request.partition(" ")
    if method == "LIST":
        return lambda line: "list-type" in line
    return lambda line: line.startswith(method) and NAMES[what] in line and "list-type" not in line


def open_node(uri: str, cache: Path, patch: pytest.MonkeyPatch) -> ArtifactStore:
    patch.setenv("RLHF_CACHE", str(cache))
    return ArtifactStore(store_root(uri))


def run(store: ArtifactStore, number: int, *, trouble: str = "", bytes_out: int = 0) -> str:
    config = ToyConfig(kl_coef=number, trouble=trouble, bytes_out=bytes_out)
    ref, _ = run_toy(store, toy_spec(config))
    return (store.path(ref) / "total.txt").read_text()


@pytest.mark.parametrize("request_kind", REQUESTS)
def test_one_broken_response_ends_no_operation(proxy, request_kind, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    uri = f"s3://rlhf/{request_kind.replace(' ', '-')}"
    ada = open_node(uri, tmp_path / "ada", monkeypatch)
    run(ada, 0)
    is_read = request_kind.startswith(("LIST", "GET"))
    for number, fault in enumerate(FAULTS if is_read else FAULTS[:4], start=1):
        left = [fault]

        def choose(line: str, left: list[str] = left) -> str:
            return left.pop() if left and is_of(request_kind)(line) else ""

        proxy.choose = choose
        if is_read:
            fresh = open_node(uri, tmp_path / f"fresh {number}", monkeypatch)
            assert len(fresh.records()) == 1 and run(fresh, 0).startswith("21.0")  # 0 * (1 + 2 + 3) + 3 * seed
        else:
            trouble = "raise:end" if request_kind == "PUT checkpoint" else ""
            with pytest.raises(ValueError, match="the end") if trouble else nullcontext():
                run(ada, number, trouble=trouble, bytes_out=LARGE if request_kind == "POST file" else 0)
            assert float(run(ada, number).split()[0]) == 6 * number + 21
        proxy.choose = lambda line: ""
        assert left == [], f"{fault} did not strike"
