"""What a checkpoint keeps of a process, and how ranks meet."""

import json
import os
import pickle
import random
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.training.adamw import adamw
from rlhf_core.training.state import (
    LAUNCHER,
    copy_tensors,
    engine_settings,
    load_random_state,
    load_training_state,
    random_state,
    rank_and_world,
    refuse_engine_settings,
    resume_random_state,
    save_engine_settings,
    trained_parameters,
    training_state,
    write_states,
)


def test_every_generator_of_the_process_goes_on_where_it_was(tmp_path):
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    numpy.random.standard_normal()  # leaves a cached second normal behind
    write_states({tmp_path / "random.pt": random_state()})
    expected = (random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    load_random_state(tmp_path / "random.pt")
    assert (random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == expected


def test_only_trained_parameters_are_saved():
    module = nn.Linear(2, 3)
    module.weight.requires_grad_(False)
    assert list(trained_parameters(module)) == ["bias"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    small, large = nn.Linear(2, 3), nn.Linear(2, 4)
    write_states({tmp_path / "state.pt": training_state(small, adamw(small, OptimizerConfig(), fused=False))})
    with pytest.raises(TrainingError, match="its parameters are not those of this model"):
        load_training_state(tmp_path / "state.pt", large, adamw(large, OptimizerConfig(), fused=False))


def test_a_missing_file_says_how_many_workers_to_resume_with(tmp_path):
    with pytest.raises(TrainingError, match="resume with as many workers as wrote it"):
        load_random_state(tmp_path / "random_state_00001.pt")


def test_engine_settings_come_back_and_the_refusal_names_both(tmp_path):
    assert engine_settings(tmp_path) == {"zero_stage": 0, "workers": 1}, "the plain engine writes none"
    save_engine_settings(tmp_path, {"zero_stage": 1, "workers": 2})
    assert engine_settings(tmp_path) == {"zero_stage": 1, "workers": 2}
    message = (
        "checkpoint = {'zero_stage': 1, 'workers': 2}: this run has {'zero_stage': 0, 'workers': 2}; "
        "resume with the settings of the checkpoint, or start the stage over with --force"
    )
    refusal = refuse_engine_settings(engine_settings(tmp_path), {"zero_stage": 0, "workers": 2})
    assert str(refusal) == message


def test_a_rank_that_the_checkpoint_does_not_know_starts_from_the_seed(tmp_path):
    save_engine_settings(tmp_path, {"zero_stage": 0, "workers": 1})
    drawn = []
    for rank in (1, 1, 2):
        torch.manual_seed(99)
        resume_random_state(tmp_path, rank, seed=17)
        drawn.append((random.random(), float(numpy.random.random()), float(torch.rand(1))))
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(TrainingError, match="the checkpoint lacks this file"):
        resume_random_state(tmp_path, 0, seed=17)


def test_a_copy_holds_what_was_there_when_it_was_taken():
    tensor = torch.arange(6.0)
    value = OrderedDict(state=[{"half": tensor[:3]}, (tensor, 5)], shape=torch.Size([2, 3]))
    taken = copy_tensors(value)
    tensor.zero_()
    assert type(taken) is OrderedDict and taken["shape"] == torch.Size([2, 3])
    assert taken["state"][0]["half"].tolist() == [0, 1, 2]
    assert taken["state"][1][0].tolist() == [0, 1, 2, 3, 4, 5] and taken["state"][1][1] == 5
    assert taken["state"][0]["half"].untyped_storage().nbytes() == 12, "three floats, not the buffer that they were in"


def test_what_is_in_host_memory_may_stay_where_it_is_but_for_parts_of_buffers(tmp_path):
    moments, step, buffer = torch.arange(4.0), torch.tensor(3.0), torch.arange(6.0)
    taken = copy_tensors({"state": {0: {"exp_avg": moments, "step": step}}, "part": buffer[2:4]}, in_place=True)
    assert taken["state"][0]["exp_avg"].data_ptr() == moments.data_ptr()
    assert taken["state"][0]["step"].data_ptr() == step.data_ptr()
    assert taken["part"].tolist() == [2, 3] and taken["part"].untyped_storage().nbytes() == 8
    write_states({tmp_path / "a.pt": taken})
    read = torch.load(tmp_path / "a.pt", weights_only=True)
    assert read["state"][0]["step"].shape == () and read["state"][0]["step"].item() == 3
    assert read["state"][0]["exp_avg"].tolist() == [0, 1, 2, 3]


def test_written_states_are_let_go_of_and_their_files_are_whole(tmp_path):
    states = {tmp_path / "deep" / "a.pt": {"x": torch.ones(2)}, tmp_path / "b.pt": 3}
    write_states(states)
    assert states == {}
    assert torch.load(tmp_path / "deep" / "a.pt", weights_only=True)["x"].tolist() == [1, 1]


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({"python": Path("x")}, tmp_path / "random.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_random_state(tmp_path / "random.pt")


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert rank_and_world() == (0, 1)


def test_a_launcher_says_rank_and_world(monkeypatch):
    for name, value in zip(LAUNCHER, ("3", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert rank_and_world() == (3, 4)


def test_half_a_launcher_is_refused(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"'MASTER_ADDR', 'MASTER_PORT', 'WORLD_SIZE'.* must be set too"):
        rank_and_world()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_is_refused_where_other_machines_have_ranks(monkeypatch, host):
    for name, value in zip(LAUNCHER, ("0", "4", host, "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=rf"^MASTER_ADDR = '{host}': 2 of 4 ranks are on this machine, and the other ranks"
    ):
        rank_and_world()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank_and_world() == (0, 4)


RANK = """
import json, sys
from tests.support.hostname import listening, reachable_address, rename
renamed = rename(reachable_address())
import torch, torch.distributed as dist
from rlhf_core.training.state import join
join()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
seen = listening()
dist.barrier()
print(json.dumps([renamed, total.item(), seen]))
"""
ROOT = Path(__file__).parents[3]


def group(ranks: int, *, program: str = RANK, **environment: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | place | {"RANK": str(rank), "PYTHONPATH": str(ROOT)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]


def test_the_ranks_meet_at_the_address_that_is_used_and_nobody_else_can_come():
    said = [process.communicate(timeout=120) for process in group(2)]
    assert all(out for out, _ in said), [error[-2000:] for _, error in said]
    (renamed, *seen), (_, *other) = (json.loads(out) for out, _ in said)
    assert seen == other == [3.0, ["127.0.0.1"]]
    if not renamed:
        pytest.skip("the machine's own name may lead to its loopback: nothing is shown of gloo")


WAIT = """
import time
from datetime import timedelta
import torch.distributed as dist
from rlhf_core.training.state import on_first_rank
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
done = []
on_first_rank(lambda: done.append(time.sleep(6)))
print(len(done))
"""


def test_ranks_wait_for_work_of_the_first_longer_than_for_each_other():
    """Converting a checkpoint takes longer than the ten minutes of a collective of NCCL: here 6 s, and 3."""
    said = [process.communicate(timeout=120) for process in group(2, program=WAIT)]
    assert [out.strip() for out, _ in said] == ["1", "0"], [error[-2000:] for _, error in said]


def test_an_address_of_another_machine_is_an_error_and_not_all_addresses():
    (process,) = group(1, MASTER_ADDR="192.0.2.1")  # TEST-NET-1 of RFC 5737: nobody has it
    assert "MASTER_ADDR = '192.0.2.1': rank 0 cannot listen on port" in process.communicate(timeout=120)[1]
