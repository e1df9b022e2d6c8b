"""An agent as OpenRLHF's users write it: the number has to be said, within as many tries as chance gives."""

import random

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.tries = 0
        self.allowed = random.randint(1, 2)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.tries += 1
        right = states["label"] in states["action_text"]
        done = right or self.tries > self.allowed
        reward = torch.tensor(1.0 if right else 0.0)
        assert states["observation_text"].startswith("<|user|>")
        print("a line on standard output")  # noqa: T201
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\n[DONE]\n" if done else "\n\nHuman: no, again\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": torch.tensor(self.tries), "note": "not a number"},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
