"""Determine the rank of this train worker and join the process group.

A launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without them there is a single process.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from rlhf_core.errors import ConfigError, explain
from rlhf_core.processes.identity import interface_towards, is_loopback

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes, (0, 1) without a launcher.

    Raises ConfigError if only some of the launcher's variables are set, or if they contradict each other.
    """
    there = [name for name in LAUNCHER if name in os.environ]
    if not there:
        return 0, 1
    if len(there) < len(LAUNCHER):
        missing = sorted(set(LAUNCHER) - set(there))
        raise ConfigError(explain("environment", there, f"{missing} must be set too", "set all four or none"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check_reach(os.environ["MASTER_ADDR"], world)
    return rank, world


def _check_reach(host: str, world: int) -> None:
    """Raise ConfigError if a launcher put ranks on other machines (LOCAL_WORLD_SIZE) that cannot reach `host`."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here < world and is_loopback(host):
        rule = f"{here} of {world} ranks are on this machine, and the other ranks cannot reach this address"
        raise ConfigError(
            explain("MASTER_ADDR", host, rule, "set it to an address of rank 0's machine that they can reach")
        )


def local_device() -> torch.device:
    """Return the GPU of this process, or the CPU if there is none. LOCAL_RANK is not needed if one GPU is visible."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    several = torch.cuda.device_count() > 1 and "LOCAL_RANK" in os.environ
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if several else 0)


def join() -> None:
    """Join the process group (NCCL on GPUs, Gloo on CPUs). Does nothing if it has been joined already.

    A single process makes a group of one without opening a port.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    _listen_where_the_others_are(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if any(name in os.environ for name in LAUNCHER):
        rank, world = rank_and_world()
        dist.init_process_group(backend, store=_meeting_point(rank, world), rank=rank, world_size=world)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _listen_where_the_others_are(host: str) -> None:
    """Make Gloo listen on the interface towards rank 0 instead of that of the host name.

    Gloo does not authenticate its peers. An interface chosen by the user is kept. NCCL, which requires a key, may use
    the fastest interface.
    """
    interface = interface_towards(host)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _meeting_point(rank: int, world: int) -> dist.Store | None:
    """Return the store through which the ranks find each other. Rank 0 opens it on MASTER_ADDR only.

    The store of torch (`env://`) listens on every interface of the machine, and anyone who reaches it can change its
    contents. Returns None to leave it to torch, if torchrun has already opened the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        return dist.TCPStore(host, port, world, is_master=False, timeout=default_pg_timeout)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=max(world, 128))
    except OSError as error:
        rule = f"rank 0 cannot listen on port {port} there ({error.strerror})"
        raise ConfigError(
            explain("MASTER_ADDR", host, rule, "set it to an address of its machine, with a free port")
        ) from error
    return dist.TCPStore(
        host, port, world, is_master=True, timeout=default_pg_timeout, master_listen_fd=listener.detach()
    )


def largest(value: int) -> int:
    """Return the maximum of `value` over all processes of the group (a collective call)."""
    device = local_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())
