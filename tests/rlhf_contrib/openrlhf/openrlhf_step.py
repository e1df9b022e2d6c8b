"""A function `step` with its state in globals, as the agents of OpenRLHF 0.8.4 to 0.8.6 are written."""

import random

import torch

tries = 0
allowed = random.randint(1, 2)


async def step(observation, action, label, **kwargs):
    global tries
    tries += 1
    right = label in action
    done = right or tries > allowed
    reward = torch.tensor([1.0 if right else 0.0])
    assert kwargs["sampling_params"].max_tokens > 0
    said = observation + action
    if label == "rewrites":
        said = said.replace("number", "figure")
    return {
        "rewards": reward,
        "scores": reward,
        "next_observation": said + ("\n[DONE]\n" if done else "\n\nHuman: no, again\nAssistant: "),
        "done": done,
        "sampling_params": kwargs.get("sampling_params"),
        "extra_logs": {"tries": torch.tensor(tries)},
    }
