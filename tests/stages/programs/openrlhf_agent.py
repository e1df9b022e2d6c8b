"""An agent as OpenRLHF's users write it: two turns, each pays the share of digits in what was said."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 2

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.step_idx += 1
        said = states["action_text"]
        done = self.step_idx >= self.max_steps
        reward = torch.tensor(sum(letter.isdigit() for letter in said) / max(len(said), 1))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else "\n\nHuman: more digits\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"dummy_scores": reward},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
