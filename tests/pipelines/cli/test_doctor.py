"""`rlhf doctor` says what is there and what is missing, and how to get it."""

import errno
import io
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipelines.cli import doctor


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 0.0)
    monkeypatch.setattr(doctor, "LEAST_DISK_GIB", 0.0)


def examine() -> tuple[int, str]:
    printed = io.StringIO()
    return doctor.examine(Console(file=printed, width=200)), printed.getvalue()


def test_what_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("pydantic", "no-such-package"))
    monkeypatch.setattr(doctor, "ENGINES", ("json", "no_such_engine"))
    code, said = examine()
    assert code == 1
    assert "bad no-such-package is not installed; make install\n" in said
    assert "bad import no_such_engine ModuleNotFoundError: No module named 'no_such_engine'; make clean-venv" in said
    assert "ok  import json\n" in said
    monkeypatch.setattr(doctor, "remedy", {"no-such-package": "pip install 'it[extra]'"}.get)
    assert "bad no-such-package is not installed; make install or pip install 'it[extra]'\n" in examine()[1]


def test_a_machine_that_lacks_nothing_is_fine(monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ("json",))
    code, said = examine()
    assert code == 0 and "bad" not in said


def test_builds_that_need_cuda_beside_a_torch_that_does_not_are_named(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}
    found = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in versions.items()]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(doctor, "ENGINES", ())
    _, said = examine()
    assert "bad torchvision beside the CPU build of torch needs CUDA; pip uninstall torchvision\n" in said


@pytest.fixture
def two_gpus(tmp_path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: H200\necho GPU 1: H200\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "ENGINES", ())


@pytest.mark.parametrize(
    ("version", "finding"),
    [
        ("2.13.0", "ok  torch 2.13.0 is a build for GPUs\n"),
        (
            "2.13.0+cpu",
            "bad torch 2.13.0+cpu is a build for CPUs, and this machine has 2 GPUs; make clean-venv install",
        ),
    ],
)
def test_a_build_for_cpus_is_named_on_a_machine_with_gpus(version, finding, two_gpus, monkeypatch):
    found = [SimpleNamespace(metadata={"Name": "torch"}, version=version)]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: found)
    _, said = examine()
    assert "2 NVIDIA GPUs" in said and finding in said and "NCCL would take TCP over " in said


def test_a_machine_with_gpus_and_without_torch_lacks_torch(two_gpus, monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", list)
    _, said = examine()
    assert "bad torch is missing, and this machine has 2 GPUs; make install or pip install" in said
    assert "is a build for" not in said


def port(root: Path, device: str, state: str, layer: str) -> None:
    """Make the files of a device with a port as the kernel has them, and those of the verbs libraries."""
    files = root / "sys/class/infiniband" / device / "ports/1"
    files.mkdir(parents=True)
    (files / "state").write_text(f"{state}\n")
    (files / "link_layer").write_text(f"{layer}\n")
    verbs = root / "sys/class/infiniband_verbs" / f"uverbs{device[-1]}"
    for folder in (verbs, root / "dev/infiniband", root / "etc/libibverbs.d"):
        folder.mkdir(parents=True, exist_ok=True)
    (verbs / "ibdev").write_text(f"{device}\n")
    (root / "dev/infiniband" / verbs.name).touch()
    (root / "etc/libibverbs.d/mlx5.driver").write_text("driver mlx5\n")


INFINITE, SMALL = resource.RLIM_INFINITY, 8 << 20
DEVICES = "mlx5_0 (InfiniBand), mlx5_1 (Ethernet)"


@pytest.mark.parametrize(
    ("libraries", "locked", "variables", "good", "text"),
    [
        ({"ibverbs"}, INFINITE, {}, True, f"NCCL would take {DEVICES}"),
        ({"ibverbs"}, INFINITE, {"NCCL_IB_HCA": "mlx5_1"}, True, f"NCCL would take {DEVICES}, NCCL_IB_HCA=mlx5_1"),
        ({"ibverbs"}, SMALL, {}, False, f"NCCL would take {DEVICES}, but may lock 8192 KiB of memory alone"),
        (set(), INFINITE, {}, False, f"NCCL would take TCP over eth0, not {DEVICES}: libibverbs.so.1 is missing"),
        (set(), SMALL, {"NCCL_IB_DISABLE": "1"}, True, f"TCP over eth0; {DEVICES} is disabled by NCCL_IB_DISABLE"),
        ({"nccl-net"}, SMALL, {}, True, "NCCL would take the network of its plugin nccl-net"),
    ],
)
def test_the_network_is_the_one_that_nccl_would_take(libraries, locked, variables, good, text, tmp_path, monkeypatch):
    port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    port(tmp_path, "mlx5_1", "4: ACTIVE", "Ethernet")
    port(tmp_path, "mlx5_2", "1: DOWN", "InfiniBand")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (locked, locked))
    monkeypatch.setattr(doctor, "may_lock_all", lambda: False)
    monkeypatch.setattr(doctor, "tcp_interfaces", lambda: ["eth0"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, said, remedy = doctor.nccl_network(tmp_path)
    assert found is good and text in said and bool(remedy) is not good


def refuse(path: Path, *_: object) -> int:
    raise PermissionError(errno.EACCES, "Permission denied", path)


@pytest.mark.parametrize(
    ("without", "text", "remedy"),
    [
        (
            "etc/libibverbs.d/mlx5.driver",
            f"not {DEVICES}: ROOT/etc/libibverbs.d names no provider",
            "ibverbs-providers",
        ),
        (
            "dev/infiniband/*",
            f"not {DEVICES}: ROOT/dev/infiniband/uverbs0 is missing, ROOT/dev",
            "modprobe ib_uverbs; ",
        ),
        (
            "sys/class/infiniband_verbs/*/ibdev",
            f"not {DEVICES}: the kernel offers no uverbs device",
            "modprobe ib_uverbs",
        ),
        ("", f"not {DEVICES}: ROOT/dev/infiniband/uverbs0 cannot be opened (Permission denied)", "group rdma"),
    ],
)
def test_what_keeps_nccl_from_infiniband_is_named_with_the_remedy(without, text, remedy, tmp_path, monkeypatch):
    port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    port(tmp_path, "mlx5_1", "4: ACTIVE", "Ethernet")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name == "ibverbs" else None)
    monkeypatch.setattr(doctor, "tcp_interfaces", lambda: ["eth0"])
    monkeypatch.setattr(doctor, "may_lock_all", lambda: True)
    assert doctor.nccl_network(tmp_path)[0]
    if without:
        for path in tmp_path.glob(without):
            path.unlink()
    else:  # root may open all files
        monkeypatch.setattr(doctor.os, "open", refuse)
    good, said, advice = doctor.nccl_network(tmp_path)
    assert not good and "NCCL would take TCP over eth0, " + text.replace("ROOT", str(tmp_path)) in said
    assert remedy in advice


def test_a_device_that_opens_is_taken_without_the_others(tmp_path, monkeypatch):
    port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    port(tmp_path, "mlx5_1", "4: ACTIVE", "InfiniBand")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name == "ibverbs" else None)
    good, said, _ = doctor.nccl_network(tmp_path)
    assert not good and said.startswith("NCCL would take mlx5_1 (InfiniBand), not mlx5_0 (InfiniBand): /")


def test_a_process_with_ipc_lock_locks_as_much_as_it_needs_whatever_the_limit(tmp_path, monkeypatch):
    port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name == "ibverbs" else None)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (SMALL, SMALL))
    monkeypatch.setattr(doctor, "may_lock_all", lambda: True)
    assert doctor.nccl_network(tmp_path) == (True, "NCCL would take mlx5_0 (InfiniBand)", "")


@pytest.mark.parametrize(("capabilities", "expected"), [("0000000000004000", True), ("00000000a80425fb", False)])
def test_the_capability_is_read_from_the_process(capabilities, expected, tmp_path):
    (tmp_path / "status").write_text(f"Name:\tpython\nCapPrm:\tffff\nCapEff:\t{capabilities}\n")
    assert doctor.may_lock_all(tmp_path / "status") is expected


def test_an_address_with_a_label_is_no_interface(monkeypatch):
    address = SimpleNamespace(family=socket.AF_INET)
    monkeypatch.setattr(doctor.psutil, "net_if_addrs", lambda: {"eth0": [address], "eth0:1": [address]})
    monkeypatch.setattr(doctor.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert doctor.tcp_interfaces() == ["eth0"]


@pytest.mark.parametrize(
    ("names", "taken"),
    [(["lo", "docker0", "eth0", "eth1"], ["eth0", "eth1"]), (["lo", "eth0", "ib0", "ib1"], ["ib0", "ib1"])],
)
def test_tcp_takes_what_is_no_bridge_and_ip_over_infiniband_first(names, taken, monkeypatch):
    address = SimpleNamespace(family=socket.AF_INET)
    monkeypatch.setattr(doctor.psutil, "net_if_addrs", lambda: {name: [address] for name in [*names, "down0"]})
    stats = {name: SimpleNamespace(isup=name != "down0") for name in [*names, "down0"]}
    monkeypatch.setattr(doctor.psutil, "net_if_stats", lambda: stats)
    assert doctor.tcp_interfaces() == taken


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ())
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 1e6)
    code, said = examine()
    assert code == 1 and "GiB memory free; the tiny profile needs 1000000 GiB" in said
