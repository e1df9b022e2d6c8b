"""A function `step` that returns a tuple, as the agents of OpenRLHF 0.8.0 to 0.8.2 are written."""

import torch

turns = 0


async def step(state, action, label):
    global turns
    turns += 1
    done = turns == 2
    return torch.tensor(turns / 4), state + action + (" Good." if done else " Once more: "), done, {"ignored": 1.0}
