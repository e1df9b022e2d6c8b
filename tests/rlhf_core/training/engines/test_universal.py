"""What is mended of DeepSpeed's loading; whole runs with other numbers of ranks are in test_deepspeed_engine.py."""

from __future__ import annotations

import torch

from rlhf_core.training.engines.deepspeed_engine import _own_groups_and_steps


def test_groups_keep_their_weight_decay_and_parameters_count_their_own_steps() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with _own_groups_and_steps(optimizer):  # inside, what DeepSpeed's stage 3 does
        shared = torch.tensor(3.0)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": shared,
                    "exp_avg": torch.zeros(2),
                    "exp_avg_sq": torch.zeros(2),
                }
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [float(optimizer.state[parameter]["step"]) for parameter in (first, second)] == [4.0, 4.0]
