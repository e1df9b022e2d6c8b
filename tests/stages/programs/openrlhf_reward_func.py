"""A reward function as OpenRLHF's users write it: the share of digits in the response."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    rewards = []
    for query, prompt in zip(queries, prompts):
        response = query[len(prompt) :]
        rewards.append(sum(letter.isdigit() for letter in response) / max(len(response), 1))
    reward = torch.tensor(rewards, dtype=torch.float32)
    return {"rewards": reward, "scores": reward, "extra_logs": {"digits": reward}}
