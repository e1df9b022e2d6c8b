"""An executor that is constructed with five arguments, as those of OpenRLHF 0.8.7 to 0.9.0 are written."""

import random

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0
        self.allowed = random.randint(1, 2)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.tries += 1
        right = states["label"] in states["action_text"]
        done = right or self.tries > self.allowed
        reward = torch.tensor(1.0 if right else 0.0)
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\n[DONE]\n" if done else "\n\nHuman: no, again\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": torch.tensor(self.tries)},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        if label == "silent":
            return
        if label != "own":
            await super().execute(prompt, label, sampling_params)
            return
        tokens = self.hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sampling_params.max_tokens = min(9, self.max_length - len(tokens))
        request = {"prompt_token_ids": tokens}
        async for output in self.llm_engine.generate(request, sampling_params, "request-1"):
            said = list(output.outputs[0].token_ids)
        await self.result_queue.put(
            {
                "prompt": prompt,
                "label": label,
                "observation_tokens": tokens + said,
                "reward": 0.25,
                "scores": 0.5,
                "extra_logs": {},
                "action_ranges": [(len(tokens), len(tokens) + len(said))],
                "rollout_log_probs": None,
            }
        )
