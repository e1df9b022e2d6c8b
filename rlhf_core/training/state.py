"""Save and restore the state of a training run: trained weights, optimizer moments and random states.

Each is copied in memory, and the copy is written while training continues; states that are offloaded to host memory are
written from there, while training waits. Files are written by `torch.save` and read
with `weights_only=True`, so that loading a file runs no code.

Determine the rank of this train worker and join the process group.

A launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without them there is a single process.
"""

import copy
import json
import os
import random
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.optim import Optimizer

from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.processes.identity import interface_towards, is_loopback
from rlhf_core.types import derive_seed

ENGINE_FILE = "engine.json"


def copy_tensors(value: Any, *, in_place: bool = False) -> Any:
    """Copy every tensor in nested dictionaries, lists and tuples of `value` to the CPU.

    With `in_place`, a tensor that is there already is not copied, unless it is a part of a buffer, all of which
    `torch.save` would write.
    """
    if isinstance(value, Tensor):
        whole = value.device.type == "cpu" and value.untyped_storage().nbytes() == value.nbytes
        return value.detach() if in_place and whole else value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        made = copy.copy(value)  # keeps the attributes that torch sets on a state_dict
        for name in made:
            made[name] = copy_tensors(made[name], in_place=in_place)
        return made
    if type(value) in (list, tuple):
        return type(value)(copy_tensors(item, in_place=in_place) for item in value)
    return copy.deepcopy(value)


def write_states(states: dict[Path, Any]) -> None:
    """Write every value to its file and release it. Passes on the OSError of a full disk."""
    while states:
        file, state = states.popitem()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            torch.save(state, stream)


def training_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copy the trained parameters and the optimizer's state.

    Frozen parameters (the base model of LoRA) are loaded from the model's folder.
    """
    state: dict[str, Any] = copy_tensors(
        {"parameters": trained_parameters(module), "optimizer": optimizer.state_dict()}
    )
    return state


def load_training_state(file: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Restore a saved `training_state`, bit for bit. Raises TrainingError if it belongs to another model."""
    state = load_state(file)
    own = trained_parameters(module)
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in state["parameters"].items()}:
        odd = sorted(set(own) ^ set(state["parameters"]))[:3]
        rule = f"its parameters are not those of this model (names that only one of them has: {odd})"
        raise TrainingError("checkpoint", str(file), rule, "resume with the model and the LoRA settings that wrote it")
    for name, parameter in own.items():
        parameter.copy_(state["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])
    keep_in_memory(optimizer)


def keep_in_memory(optimizer: Optimizer) -> None:
    """Copy the states of an optimizer, one by one, from the file that they are mapped from."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[name] = value.clone()


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name, without their graph. They share memory with the model."""
    return {name: parameter.data for name, parameter in module.named_parameters() if parameter.requires_grad}


def save_engine_settings(folder: Path, settings: Mapping[str, int]) -> None:
    """Write the settings that a checkpoint's layout depends on: the ZeRO stage and the number of workers."""
    (folder / ENGINE_FILE).write_text(json.dumps(dict(settings)), encoding="utf-8")


def engine_settings(folder: Path) -> dict[str, int]:
    """Load the settings of `save_engine_settings`, or the settings of the plain engine, which writes none."""
    file = folder / ENGINE_FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {"zero_stage": 0, "workers": 1}


def refuse_engine_settings(written: Mapping[str, int], settings: Mapping[str, int]) -> TrainingError:
    """The error for a checkpoint whose layout an engine with `settings` cannot read."""
    remedy = "resume with the settings of the checkpoint, or start the stage over with --force"
    return TrainingError("checkpoint", dict(written), f"this run has {dict(settings)}", remedy)


def random_state() -> dict[str, Any]:
    """Capture the state of the random generators of this process: Python, NumPy, torch and every GPU."""
    generator: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(generator["state"]["key"].astype("int64"))
    return {
        "python": random.getstate(),
        "numpy": generator | {"state": generator["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def random_file(folder: Path, rank: int) -> Path:
    """The file with the random state of `rank` in a checkpoint."""
    return folder / f"random_state_{rank:05d}.pt"


def resume_random_state(folder: Path, rank: int, *, seed: int) -> None:
    """Restore the random state of `rank`. A rank that the checkpoint does not have gets a new state from `seed`."""
    file = random_file(folder, rank)
    if rank < engine_settings(folder)["workers"] or file.is_file():
        load_random_state(file)
        return
    fresh = derive_seed(seed, "random state", rank)
    random.seed(fresh)
    numpy.random.seed(fresh % 2**32)
    torch.manual_seed(fresh)


def load_random_state(file: Path) -> None:
    """Restore a saved `random_state`. GPU generators are restored only if the number of GPUs is the same."""
    state = load_state(file)
    generator = state["numpy"]
    key = generator["state"]["key"].numpy().astype("uint32")
    random.setstate(state["python"])
    numpy.random.set_state(generator | {"state": generator["state"] | {"key": key}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def is_read_by(place: tuple[int, int], settings: Mapping[str, int], path: str) -> bool:
    """Whether the rank of `place` (rank, number of ranks) checks a file of a checkpoint: the rank that loads it.

    DeepSpeed numbers its files by the ranks that have other parts (`pp`), and by ranks of tensor parallelism (`mp`).
    The first rank checks files that all ranks load.

    >>> is_read_by((3, 4), {"tensor_parallel": 2}, "zero/state/zero_pp_rank_1_mp_rank_01_optim_states.pt")
    True
    >>> is_read_by((1, 2), {}, "training_state.pt"), is_read_by((1, 2), {}, "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    (False, True)
    """
    numbers = {kind: int(number) for kind, number in re.findall(r"(pp|mp)_rank_(\d+)", path)}
    rank, world = place
    return (numbers.get("pp", 0) * settings.get("tensor_parallel", 1) + numbers.get("mp", 0)) % world == rank


def load_state(file: Path) -> Any:
    """Load the tensors and values that `write_states` wrote to `file`; tensors stay in the file until they are used.

    Raises TrainingError if it is missing.
    """
    if not file.is_file():
        rule = "the checkpoint lacks this file"
        raise TrainingError("checkpoint", str(file), rule, "resume with as many workers as wrote it")
    return torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)


# ---------------------------------------------------------------- Determine the rank of this train worker and join the process group

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes, (0, 1) without a launcher.

    Raises ConfigError if only some of the launcher's variables are set, or if they contradict each other.
    """
    there = [name for name in LAUNCHER if name in os.environ]
    if not there:
        return 0, 1
    if len(there) < len(LAUNCHER):
        missing = sorted(set(LAUNCHER) - set(there))
        raise ConfigError("environment", there, f"{missing} must be set too", "set all four or none")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, here = os.environ["MASTER_ADDR"], int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here < world and is_loopback(host):  # a launcher put ranks on other machines
        rule = f"{here} of {world} ranks are on this machine, and the other ranks cannot reach this address"
        raise ConfigError("MASTER_ADDR", host, rule, "set it to an address of rank 0's machine that they can reach")
    return rank, world


def local_device() -> torch.device:
    """The GPU of this process, or the CPU if none is visible. LOCAL_RANK is not needed if one GPU is visible."""
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


LONGEST_WAIT = timedelta(days=1)
"""Limit for work of one rank: a call of a worker has its own, `runtime.worker_timeout_s`."""


def on_first_rank(work: Callable[[], None]) -> None:
    """Call `work` on rank 0 while all other ranks wait. NCCL would end them after ten minutes, so Gloo waits."""
    group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    if dist.get_rank() == 0:
        work()
    dist.barrier(group)
    dist.destroy_process_group(group)


def _listen_where_the_others_are(host: str) -> None:
    """Make Gloo listen on the interface towards rank 0 instead of the host name's interface.

    Gloo does not authenticate its peers. An interface chosen by the user is kept. NCCL, which requires a key, may use
    the fastest interface.
    """
    interface = interface_towards(host)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _meeting_point(rank: int, world: int) -> dist.Store | None:
    """Open the store through which the ranks find each other. Rank 0 opens it on MASTER_ADDR only.

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
        raise ConfigError("MASTER_ADDR", host, rule, "set it to an address of its machine, with a free port") from error
    return dist.TCPStore(
        host, port, world, is_master=True, timeout=default_pg_timeout, master_listen_fd=listener.detach()
    )


def largest(value: int) -> int:
    """Maximum of `value` over all processes of the group (a collective call)."""
    device = local_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())
