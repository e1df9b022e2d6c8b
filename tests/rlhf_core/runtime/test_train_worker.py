"""The worker as a plain object; on Ray it is tested by `test_ray_runtime` and `test_handles`."""

from typing import Any

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.lora import weights_digest
from rlhf_core.processes.identity import network
from rlhf_core.runtime.train_worker import MeetingPoint, TrainWorker
from rlhf_core.sequences import Sequences
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import TokenSample

SAMPLE = TokenSample((10, 11, 12), (0, 1, 1))


def test_one_worker_hosts_several_roles_until_they_are_released(policies):
    worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
    for lease, folder in zip(("policy-1", "reference-2"), policies, strict=True):
        assert set(worker.open(lease, ModelSpec(str(folder), "lm", None, 0), None)) == {"torch", "transformers"}
    tokens = Sequences.of([SAMPLE])
    policy, reference = (
        worker.logprobs(lease, tokens, temperature=1.0).tolist() for lease in ("policy-1", "reference-2")
    )
    assert policy != reference
    worker.release("policy-1")
    assert worker.logprobs("reference-2", tokens, temperature=1.0).tolist() == reference
    with pytest.raises(TrainingError, match=r"lease = 'policy-1': is not open"):
        worker.logprobs("policy-1", tokens, temperature=1.0)


def test_a_gpu_that_torch_does_not_see_is_an_error_before_anything_is_loaded(monkeypatch, tmp_path):
    worker = TrainWorker(2, 1, TrainerConfig(engine="torch"), gpus_per_worker=1)
    monkeypatch.setattr(worker, "gpus", lambda: ["0123456789abcdef:3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rule = r"gpus_per_train_worker = 1: Ray reserved GPU 01234567:3, but torch \S+ sees no CUDA device; install"
    with pytest.raises(ConfigError, match=rule):
        worker.open("policy-1", ModelSpec(str(tmp_path / "not there"), "lm", None, 0), None)


def test_a_worker_that_rests_keeps_its_models_in_host_memory_and_goes_on_with_the_same_numbers(policies):
    rows = [SAMPLE, TokenSample((10, 14, 15, 16), (0, 1, 1, 1))]
    objective = SftObjective(pack_to=None)
    histories = []
    for rests in (False, True):
        worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
        for lease, folder, optimizer in (
            ("policy-1", policies[0], OptimizerConfig()),
            ("reference-2", policies[1], None),
        ):
            worker.open(lease, ModelSpec(str(folder), "lm", None, 0), optimizer)
            for parameter in worker._trainer(lease)._engine.module.parameters():
                parameter.data = parameter.data.clone()  # not of a file that is mapped
        engine = worker._trainer("policy-1")._engine
        parameters = sum(one.numel() for one in engine.module.parameters())
        history: list[object] = []
        for _ in range(3):
            history.append(worker.forward_backward("policy-1", rows, objective, objective.denominators(rows)))
            history.append(worker.optim_step("policy-1", learning_rate=1e-3))
            if rests:
                assert worker.rest(offload=False) == 0
                # The policy's weights and two moments, the reference's weights, all in float32; and a step counter each.
                assert 16 * parameters <= worker.rest(offload=True) < 16.1 * parameters
                assert all(tensor.untyped_storage().nbytes() == 0 for tensor in engine.tensors())
                worker.wake()
            history.append(worker.logprobs("reference-2", Sequences.of(rows), temperature=1.0).tolist())
        histories.append(history)
    assert histories[0] == histories[1]
    worker.rest(offload=True)
    worker.release("policy-1")  # asleep
    worker.wake()
    assert worker.logprobs("reference-2", Sequences.of(rows), temperature=1.0).tolist() == histories[0][-1]


def test_memory_is_handed_back_at_release_and_whenever_a_worker_rests(monkeypatch, policies):
    worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
    worker.open("policy-1", ModelSpec(str(policies[0]), "lm", None, 0), None)
    handed_back: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: handed_back.append("cache"))
    worker.rest(offload=False)
    worker.release("policy-1")
    assert handed_back == ["cache"] * 2


def test_only_the_newest_staged_weights_can_be_sent(policies):
    worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
    worker.open("policy-1", ModelSpec(str(policies[0]), "lm", None, 0), None)
    first, second = worker.stage_weights("policy-1"), worker.stage_weights("policy-1")
    assert first is not None and second is not None
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == second[1]  # the same weights have the same digest
    with pytest.raises(TrainingError, match="weights = 1: is not the newest ticket, 2"):
        worker.send_weights(1, [], "nccl", 1)


class Sender:
    """What rank 0 opens to send; it notes the weights."""

    def __init__(self) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []

    def fits(self, weights: Any) -> bool:
        return True

    def send(self, weights: Any) -> None:
        pairs = weights.items() if isinstance(weights, dict) else weights
        self.sent.append({name: tensor.clone() for name, tensor in pairs})


def test_weights_are_sent_as_they_were_when_they_were_staged(policies, tmp_path):
    worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="constant")
    for lease in ("policy-1", "value_model-2"):
        worker.open(lease, ModelSpec(str(policies[0]), "lm", None, 0), optimizer)
    worker._sender = sender = Sender()

    def step(lease: str) -> None:
        objective = SftObjective(pack_to=None)
        worker.forward_backward(lease, [SAMPLE], objective, objective.denominators([SAMPLE]))
        worker.optim_step(lease, learning_rate=1e-2)

    step("policy-1")
    worker.save("policy-1", tmp_path / "saved")
    for before_sending in (
        lambda: None,
        lambda: step("value_model-2"),
        lambda: step("policy-1"),
        lambda: worker.load("policy-1", tmp_path / "saved"),
        lambda: worker.rest(offload=True),
        lambda: worker.release("policy-1"),
    ):
        staged = worker.stage_weights("policy-1")
        assert staged is not None
        before_sending()
        worker.send_weights(staged[0], [], "nccl", 1)
        assert weights_digest(sender.sent[-1]) == staged[1]
        worker.wake()
    assert len({weights_digest(sent) for sent in sender.sent}) == 2  # before and after the step of the policy


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_of_several_machines_do_not_wait_for_each_other_at_a_loopback_address(monkeypatch, tmp_path, host):
    worker = TrainWorker(2, 1, TrainerConfig(engine="torch"))
    monkeypatch.setattr("rlhf_core.runtime.hosted_models.HostedModels.warm", lambda *_: None)
    worker.join(1, MeetingPoint(host, 29500, "another machine"))
    model = ModelSpec(str(tmp_path / "not there"), "lm", None, 0)
    with pytest.raises(
        ConfigError, match=rf"^MASTER_ADDR = '{host}': rank 0 is on another machine than rank 1, .*; start Ray"
    ):
        worker.open("policy-1", model, None)


@pytest.mark.parametrize("place", [("127.0.0.1", network()), ("192.0.2.1", "another machine")])
def test_an_address_that_leads_to_rank_0_is_not_refused(monkeypatch, policies, place):
    worker = TrainWorker(1, 1, TrainerConfig(engine="torch"))
    monkeypatch.setattr("rlhf_core.runtime.hosted_models.HostedModels.warm", lambda *_: None)
    worker.join(0, MeetingPoint(place[0], 29500, place[1]))
    assert worker.open("policy-1", ModelSpec(str(policies[0]), "lm", None, 0), None)
